"""Several outputs for one prompt: one request to the cluster, a choice for each of its branches."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx2
import openai
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from one_model import one_model

from octavo.cluster.api.http.app import build_app
from octavo.cluster.api.service import ServedModel, TokenDelta
from octavo.cluster.api.text.processor import TextProcessor
from octavo.worker.messages import FinishReason

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
PATHS = pytest.mark.parametrize("path", [CHAT, COMPLETION])


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"prompt": "The quick brown fox"}
    return {"model": "smollm2", **prompt, **fields}


async def stream(client: httpx2.AsyncClient, path: str, body: dict[str, Any]) -> list[Any]:
    """The chunks of a stream that ends as it should."""
    answer = await client.post(path, json={**body, "stream": True})
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [orjson.loads(line) for line in lines]


def text_of_choice(choice: dict[str, Any]) -> str:
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def whole_choices(answer: dict[str, Any]) -> list[tuple[str, str]]:
    """Text and finish reason of each choice; their numbers are checked."""
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(answer["choices"])))
    return [(text_of_choice(choice), choice["finish_reason"]) for choice in answer["choices"]]


def streamed_choices(chunks: list[Any], num_choices: int) -> list[tuple[str, str]]:
    """The same, put together from a stream; each choice ends once and has nothing after its end."""
    texts, reasons = [""] * num_choices, [""] * num_choices
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        index = choice["index"]
        assert not reasons[index], "something came after the finish reason"
        texts[index] += choice["text"] if "text" in choice else choice["delta"].get("content", "")
        reasons[index] = choice["finish_reason"] or ""
    return list(zip(texts, reasons, strict=True))


@PATHS
async def test_n_choices_are_one_request(client: httpx2.AsyncClient, service: Any, path: str) -> None:
    answer = (await client.post(path, json=body_of(path, n=3, seed=7))).json()
    assert len(whole_choices(answer)) == 3
    (request,) = service.requests
    assert (request.num_branches, request.sampling.seed) == (3, 7)


async def test_the_official_client_asks_for_several_choices(address: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none") as client:
        answer = await client.completions.create(model="smollm2", prompt="The quick brown fox", n=3, best_of=3)
        assert [choice.text for choice in answer.choices] == ["The quick brown fox"] * 3
        chat = await client.chat.completions.create(
            model="smollm2", messages=[{"role": "user", "content": "hi"}], n=2, stream=True
        )
        roles = [c.index async for chunk in chat for c in chunk.choices if c.delta.role == "assistant"]
    assert sorted(roles) == [0, 1]


async def test_choices_are_numbered_by_prompt_then_branch(client: httpx2.AsyncClient, service: Any) -> None:
    body = body_of(COMPLETION, n=2) | {"prompt": ["one", "two words"]}
    answer = (await client.post(COMPLETION, json=body)).json()
    assert [text for text, _ in whole_choices(answer)] == ["one", "one", "two words", "two words"]
    assert streamed_choices(await stream(client, COMPLETION, body), 4) == whole_choices(answer)
    assert [request.num_branches for request in service.requests] == [2] * 4


async def test_a_prompt_counts_once_and_every_output_counts(client: httpx2.AsyncClient) -> None:
    one = (await client.post(COMPLETION, json=body_of(COMPLETION))).json()["usage"]
    body = body_of(COMPLETION, n=3, stream_options={"include_usage": True})
    three = (await client.post(COMPLETION, json=body_of(COMPLETION, n=3))).json()["usage"]
    assert three["prompt_tokens"] == one["prompt_tokens"]
    assert three["completion_tokens"] == 3 * one["completion_tokens"]
    assert three["prompt_tokens_details"]["cached_tokens"] == one["prompt_tokens_details"]["cached_tokens"] == 16
    assert (await stream(client, COMPLETION, body))[-1]["usage"] == three


async def test_a_stop_string_ends_its_own_branch(client: httpx2.AsyncClient, service: Any, text: TextProcessor) -> None:
    """What the engine still gives of it is dropped; the others go on to their own ends."""
    ids = [text._backend.encode(answer).ids for answer in ("one stop two", "one go two")]
    service.script = lambda _: [
        *[TokenDelta((token_id,), branch=0) for token_id in ids[0]],
        *[TokenDelta((token_id,), branch=1) for token_id in ids[1]],
        TokenDelta((), FinishReason.ABORT, branch=0),
        TokenDelta((), FinishReason.LENGTH, branch=1),
    ]
    answer = (await client.post(COMPLETION, json=body_of(COMPLETION, n=2, stop=" stop"))).json()
    assert whole_choices(answer) == [("one", "stop"), ("one go two", "length")]
    assert (service.generations[0].ended, service.generations[0].num_aborts) == ([0], 0)


async def test_case_bug_078_a_client_that_leaves_ends_all_branches(address: str, service: Any) -> None:
    """One branch has ended early, by a stop string; the connection closes after two chunks."""
    service.script = lambda _: [TokenDelta((500,), FinishReason.STOP, branch=0), TokenDelta((500,), branch=1)]
    body = body_of(COMPLETION, n=4, stream=True)
    async with httpx2.AsyncClient() as http:
        async with http.stream("POST", f"{address}{COMPLETION}", json=body) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            await anext(lines)
        await asyncio.wait_for(service.generations[0].aborted.wait(), 5)
    assert service.generations[0].num_aborts == 1


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.ABORT])
async def test_when_one_branch_fails_the_request_does(
    client: httpx2.AsyncClient, service: Any, reason: FinishReason
) -> None:
    service.script = lambda _: [TokenDelta((500,), branch=0), TokenDelta((), reason, error="out of luck", branch=1)]
    answer = await client.post(COMPLETION, json=body_of(COMPLETION, n=2))
    assert answer.json()["error"]["message"] == "out of luck"
    assert service.generations[0].num_aborts == 1


async def test_a_timeout_gives_what_there_is_of_each_branch(client: httpx2.AsyncClient, service: Any) -> None:
    service.script = lambda _: [
        TokenDelta((500,), branch=1),
        TokenDelta((), FinishReason.TIMEOUT, branch=0),
        TokenDelta((), FinishReason.TIMEOUT, branch=1),
    ]
    choices = (await client.post(COMPLETION, json=body_of(COMPLETION, n=2))).json()["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["timeout", "timeout"]
    assert [bool(choice["text"]) for choice in choices] == [False, True]


async def test_case_bug_108_a_request_of_several_branches_counts_once(client: httpx2.AsyncClient) -> None:
    usage = (await client.post(COMPLETION, json=body_of(COMPLETION, n=3))).json()["usage"]
    lines = (await client.get("/metrics")).text.splitlines()
    values = {line.split("{")[0]: float(line.split()[-1]) for line in lines if line and line[0] != "#"}
    assert values["octavo_request_success_total"] == 1
    assert values["octavo_time_to_first_token_seconds_count"] == 1
    assert values["octavo_e2e_request_latency_seconds_count"] == 1
    assert values["octavo_prompt_tokens_total"] == usage["prompt_tokens"]
    assert values["octavo_prompt_cached_tokens_total"] == 16
    assert values["octavo_generation_tokens_total"] == usage["completion_tokens"]
    assert values["octavo_inter_token_latency_seconds_count"] == usage["completion_tokens"] - 3
    assert values["octavo_gateway_requests_in_flight"] == 0


@pytest.mark.parametrize(
    ("fields", "param", "numbers"),
    [
        ({"n": 0}, "n", "0"),
        ({"n": 129}, "n", "128"),
        ({"n": 17, "prompt": ["a"] * 64}, "n", "1088 1024"),
        ({"n": 2, "best_of": 3}, "best_of", "3 2"),
        ({"best_of": 2}, "best_of", "2 1"),
        ({"n": 2, "best_of": 1}, "best_of", "1 2"),
    ],
)
async def test_impossible_numbers_of_choices(
    client: httpx2.AsyncClient, service: Any, fields: dict[str, Any], param: str, numbers: str
) -> None:
    error = (await client.post(COMPLETION, json=body_of(COMPLETION) | fields)).json()["error"]
    assert error["param"] == param
    assert all(number in error["message"] for number in numbers.split())
    assert not service.requests


@pytest.mark.parametrize(("n", "num_prompts"), [(128, 8), (16, 64), (128, 1)])
async def test_as_many_choices_as_are_allowed(client: httpx2.AsyncClient, n: int, num_prompts: int) -> None:
    body = body_of(COMPLETION, n=n, max_tokens=1) | {"prompt": ["a"] * num_prompts}
    answer = await client.post(COMPLETION, json=body)
    assert len(answer.json()["choices"]) == n * num_prompts


pieces = st.lists(st.tuples(st.integers(0, 3), st.text("ab ü👩안\n", max_size=4), st.integers(1, 3)), max_size=25)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pieces, st.lists(st.text("ab ü👩", min_size=1, max_size=3), max_size=2), st.permutations(range(4)))
def test_streamed_and_whole_choices_are_equal(
    text: TextProcessor,
    info: ServedModel,
    service: Any,
    pieces: Sequence[tuple[int, str, int]],
    stops: list[str],
    ends: Sequence[int],
) -> None:
    """Deltas of four branches in any order and size; the branches end in any order."""
    script: list[TokenDelta] = []
    for branch, piece, size in pieces:
        token_ids = text._backend.encode(piece).ids
        parts = [token_ids[start : start + size] for start in range(0, len(token_ids), size)]
        script += [TokenDelta(tuple(part), branch=branch) for part in parts]
    script += [TokenDelta((), FinishReason.LENGTH, branch=branch) for branch in ends]
    service.script = lambda _: script
    body = body_of(CHAT, n=4, stop=stops)

    async def both() -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
        transport = httpx2.ASGITransport(build_app(service, one_model(text, info)))
        async with httpx2.AsyncClient(transport=transport, base_url="http://octavo") as client:
            whole = whole_choices((await client.post(CHAT, json=body)).json())
            return whole, streamed_choices(await stream(client, CHAT, body), 4)

    whole, streamed = asyncio.run(both())
    assert streamed == whole
    for index, (answer, _) in enumerate(whole):
        said = "".join(piece for branch, piece, _ in pieces if branch == index)
        assert said.startswith(answer)
        assert not any(stop in answer for stop in stops)
