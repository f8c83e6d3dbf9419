"""Two models in one cluster, from a configuration file: each has groups of its own, and only they end with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest
import yaml
from openai import BadRequestError, NotFoundError, OpenAI
from serve_process import ServeProcess, wait_until
from tiny_text_model import save_tiny_text_model

QUESTION = "Count from one upwards."
RECOVERY_S = 90.0


@pytest.fixture(scope="module")
def server(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    """``long`` and ``short`` differ in their context, which tells them apart from outside."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    save_tiny_text_model(folder, tokens_of=model_dir)
    config = {
        "max_num_seqs": 4,
        "models": [
            {"model": str(folder), "served_model_name": "long"},
            {"model": str(folder), "served_model_name": "short", "max_model_len": 64},
        ],
    }
    file = tmp_path_factory.mktemp("config") / "octavo.yaml"
    file.write_text(yaml.safe_dump(config))
    server = ServeProcess("--config", str(file))
    yield server
    assert server.stop() == 0


@pytest.fixture(scope="module")
def client(server: ServeProcess) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)


def text(client: OpenAI, model: str) -> str:
    """Asked for whole and as a stream, which must say the same."""
    wanted = {"model": model, "prompt": QUESTION, "temperature": 0, "max_tokens": 24}
    whole = client.completions.create(**wanted, extra_body={"ignore_eos": True})
    parts = client.completions.create(**wanted, stream=True, extra_body={"ignore_eos": True})
    streamed = "".join(chunk.choices[0].text for chunk in parts if chunk.choices)
    assert (whole.model, streamed) == (model, whole.choices[0].text)
    return streamed


def test_both_are_listed_and_answer_by_their_own_settings(client: OpenAI, server: ServeProcess) -> None:
    assert [model.id for model in client.models.list()] == ["long", "short"]
    assert text(client, "long") == text(client, "short") != ""
    words = " one" * 100
    assert client.completions.create(model="long", prompt=words, max_tokens=1).usage is not None
    with pytest.raises(BadRequestError, match="64"):
        client.completions.create(model="short", prompt=words, max_tokens=1)
    with pytest.raises(NotFoundError, match="'long', 'short'"):
        client.completions.create(model="none", prompt=words, max_tokens=1)
    assert [embedding(client, model) for model in ("long", "short")] == [embedding(client, "long")] * 2


def embedding(client: OpenAI, model: str) -> list[float]:
    return client.embeddings.create(model=model, input=QUESTION).data[0].embedding


def test_the_end_of_one_models_group_does_not_disturb_the_other(client: OpenAI, server: ServeProcess) -> None:
    before = text(client, "long")
    workers = server.workers()
    assert len(workers) == 2
    workers[0].kill()
    wait_until(lambda: lost(server) != "", timeout_s=RECOVERY_S, what="a model without a worker group")
    other = {"long": "short", "short": "long"}[lost(server)]
    assert text(client, other) == before
    assert f" {other} " not in readiness(server)
    wait_until(lambda: readiness(server) == "2 worker groups ready", timeout_s=RECOVERY_S, what="both ready again")
    assert text(client, "long") == text(client, "short") == before
    assert workers[1].is_running()


def readiness(server: ServeProcess) -> str:
    return str(httpx.get(f"{server.url}/ready", timeout=10).json()["reason"])


def lost(server: ServeProcess) -> str:
    """The model that has no worker group; empty where there is none."""
    words = readiness(server).split()
    return words[4] if words[:4] == ["no", "worker", "group", "of"] else ""
