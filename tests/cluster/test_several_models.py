"""Several models behind one gateway: each request goes by its own model's template, limits, metrics and groups."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from scripted_cluster import HASHER, ScriptedLeader, ScriptedRouter

from octavo.cluster.api.http.app import build_app
from octavo.cluster.api.model_metrics import ModelsMetrics
from octavo.cluster.api.request.judged import RequestJudge
from octavo.cluster.api.request.judges import Judges
from octavo.cluster.api.service import ServedModel
from octavo.cluster.api.text.processor import TextProcessor
from octavo.cluster.data_plane import ClusterService
from octavo.worker.errors import ModelNotFound

MESSAGES = [{"role": "user", "content": "Hello there"}]


@pytest.fixture(scope="module")
def curt(model_dir: Path) -> Iterator[TextProcessor]:
    """The same tokenizer with another chat template."""
    text = TextProcessor.load(model_dir, chat_template="{{ messages[0].content }}")
    yield text
    text.close()


@pytest.fixture
def judges(text: TextProcessor, curt: TextProcessor, info: ServedModel) -> Judges:
    large = dataclasses.replace(info, name="team/large")
    small = dataclasses.replace(info, name="small", max_model_len=24, max_logprobs=2)
    return Judges([RequestJudge(text, large), RequestJudge(curt, small)])


@pytest.fixture
async def client(service: Any, judges: Judges) -> AsyncIterator[httpx2.AsyncClient]:
    transport = httpx2.ASGITransport(build_app(service, judges))
    async with httpx2.AsyncClient(transport=transport, base_url="http://octavo") as http:
        yield http


async def chat(client: httpx2.AsyncClient, model: str, **fields: Any) -> httpx2.Response:
    return await client.post("/v1/chat/completions", json={"model": model, "messages": MESSAGES, **fields})


async def test_all_are_listed_and_each_is_found(client: httpx2.AsyncClient) -> None:
    cards = (await client.get("/v1/models")).json()["data"]
    assert [(card["id"], card["max_model_len"]) for card in cards] == [("team/large", 256), ("small", 24)]
    assert (await client.get("/v1/models/team/large")).json() == cards[0]
    assert (await client.get("/v1/models/small")).json() == cards[1]


async def test_a_request_goes_by_its_models_template_and_name(client: httpx2.AsyncClient, service: Any) -> None:
    answers = [await chat(client, name, max_tokens=4) for name in ("team/large", "small")]
    assert [answer.json()["model"] for answer in answers] == ["team/large", "small"]
    large, small = service.requests
    assert (large.model, small.model) == ("team/large", "small")
    assert len(small.prompt_token_ids) == 2 < len(large.prompt_token_ids)


async def test_limits_are_those_of_the_model(client: httpx2.AsyncClient) -> None:
    for fields in ({"max_tokens": 30}, {"logprobs": True, "top_logprobs": 3}):
        assert (await chat(client, "team/large", **fields)).status_code == 200
        assert (await chat(client, "small", **fields)).status_code == 400


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/embeddings", {"input": "x"}),
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [5]}),
    ],
)
async def test_an_unknown_name_is_answered_with_those_that_there_are(
    client: httpx2.AsyncClient, path: str, content: dict[str, Any]
) -> None:
    answer = await client.post(path, json={"model": "none", **content})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (404, "model_not_found")
    assert error["message"] == "The model 'none' does not exist; this server has 'team/large', 'small'."


async def test_where_the_model_may_be_left_out_it_must_be_said(client: httpx2.AsyncClient) -> None:
    """/tokenize, /detokenize and /tokenizer_info."""
    said = await client.post("/tokenize", json={"model": "small", "messages": MESSAGES})
    assert said.json()["count"] == 2
    left_out = [
        await client.post("/tokenize", json={"prompt": "x"}),
        await client.post("/detokenize", json={"tokens": [5]}),
        await client.get("/tokenizer_info"),
    ]
    for answer in left_out:
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "model")
        assert error["message"] == "model must be given: this server has 'team/large', 'small'."
    info = (await client.get("/tokenizer_info", params={"model": "small"})).json()
    assert info["chat_template"] == "{{ messages[0].content }}"


async def test_metrics_tell_the_models_apart(client: httpx2.AsyncClient) -> None:
    await chat(client, "small", max_tokens=2)
    await chat(client, "none")
    await chat(client, "small", max_tokens=-1)
    await chat(client, "small", max_tokens=10_000)
    lines = (await client.get("/metrics")).text.splitlines()
    gateway = 'gateway="alone"'
    path = 'path="/v1/chat/completions"'
    assert f'octavo_generation_tokens_total{{{gateway},model_name="small"}} 2.0' in _sorted(lines)
    assert f'octavo_generation_tokens_total{{{gateway},model_name="team/large"}} 0.0' in _sorted(lines)
    assert f'octavo_http_requests_total{{{gateway},model_name="small",{path},status="200"}} 1.0' in _sorted(lines)
    assert f'octavo_http_requests_total{{{gateway},model_name="small",{path},status="400"}} 2.0' in _sorted(lines)
    assert f'octavo_http_requests_total{{{gateway},model_name="",{path},status="404"}} 1.0' in _sorted(lines)


def _sorted(lines: list[str]) -> list[str]:
    """With the labels in the order of their names."""
    found = []
    for line in lines:
        name, brace, rest = line.partition("{")
        labels, _, value = rest.rpartition("}")
        found.append(f"{name}{{{','.join(sorted(labels.split(',')))}}}{value}" if brace else line)
    return found


def test_many_names_are_not_all_listed(judges: Judges, text: TextProcessor, info: ServedModel) -> None:
    many = Judges([RequestJudge(text, dataclasses.replace(info, name=f"m{number}")) for number in range(30)])
    with pytest.raises(ModelNotFound, match=r"'m19' and 10 more\.$"):
        many.named("none")
    many.close()


async def test_ready_is_when_every_model_has_a_group() -> None:
    router: Any = ScriptedRouter({"a": ScriptedLeader(), "b": ScriptedLeader()})
    service = ClusterService("g", router, HASHER, ModelsMetrics(["m", "other", "third"], "g"))
    state = await service.readiness()
    assert (state.ready, state.reason) == (False, "no worker group of other, third is ready")
