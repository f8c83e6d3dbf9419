"""``--fake-engine``: the whole cluster around a hundred worker groups that compute nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator

import httpx2 as httpx
import pytest
from openai import OpenAI
from raylets import Raylets, raylets
from serve_client import wait_until_idle
from serve_process import ServeProcess, wait_until

NUM_GROUPS = 100
FLAGS = ("--fake-engine", "h100-8b", "--replicas", str(NUM_GROUPS))
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Raylets]:
    with raylets() as nodes:
        yield nodes


@pytest.fixture(scope="module")
def server(nodes: Raylets) -> Iterator[ServeProcess]:
    server = ServeProcess("--address", nodes.address, *FLAGS, environment=nodes.environment)
    yield server
    server.stop()


def octavo(nodes: Raylets, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "octavo.cluster", *words, "--address", nodes.address]
    return subprocess.run(command, env=nodes.environment, capture_output=True, text=True, timeout=120, check=False)


def groups(server: ServeProcess) -> set[str]:
    text = httpx.get(f"{server.url}/metrics", timeout=30).text
    return set(re.findall(r'octavo_num_requests_running\{group="([^"]+)"', text))


def test_chats_are_answered_and_a_prompt_goes_where_it_was(server: ServeProcess) -> None:
    assert len(groups(server)) == NUM_GROUPS
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)
    answers = [
        client.chat.completions.with_raw_response.create(
            model=server.model, messages=QUESTION, max_tokens=9, n=2, logprobs=True, seed=5
        )
        for _ in range(3)
    ]
    parsed = [answer.parse() for answer in answers]
    assert all(len((choice.message.content or "").split()) == 9 for each in parsed for choice in each.choices)
    assert len({each.choices[0].message.content for each in parsed}) == 1
    assert len({answer.headers["x-octavo-group"] for answer in answers}) == 1
    assert parsed[1].usage.prompt_tokens_details.cached_tokens > 0  # type: ignore[union-attr]
    wait_until_idle(server)


def test_a_drained_group_comes_up_again_under_its_name(server: ServeProcess, nodes: Raylets) -> None:
    name = sorted(groups(server))[0]
    done = octavo(nodes, "drain", name)
    assert f"{name}: all requests have finished" in done.stderr, done.stderr
    wait_until(lambda: len(groups(server)) == NUM_GROUPS, timeout_s=30, what="all groups")


def test_their_number_is_fixed_and_said_to_be(server: ServeProcess, nodes: Raylets) -> None:
    done = octavo(nodes, "scale", "3")
    assert done.returncode == 2
    assert "those of --fake-engine are as they were started" in done.stderr
    assert len(groups(server)) == NUM_GROUPS
