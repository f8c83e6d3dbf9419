"""Refusals that are nobody's fault change nothing for others; overload is said at once. Fail-over of streams (BUG-091)
is in tests/faults, the router's memory (BUG-093) with 200,000 prompts in tests/router."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2 as httpx
import pytest
from api_calls import COMPLETION, Answer, call, complete
from openai import OpenAI, RateLimitError
from serve_client import metric
from serve_process import OneModel, ServeProcess
from start_watch import Guarded

AT_ONCE = 200


def good_ones(server: Any, headers: dict[str, str] | None = None) -> list[Answer]:
    """Twenty, not more at once than are let wait."""
    body = {"prompt": "The capital of France is", "max_tokens": 2, "temperature": 0}
    with ThreadPoolExecutor(8) as threads:
        return list(threads.map(lambda _: call(server, COMPLETION, body, headers=headers), range(20)))


@pytest.mark.usefixtures("canary")
def test_case_bug_089_what_clients_do_wrong_is_no_failure_of_a_group(cluster: OneModel) -> None:
    """A hundred prompts longer than the context, fifty bodies that are no JSON; both groups serve on."""
    before = httpx.get(f"{cluster.url}/ready").json()
    with ThreadPoolExecutor(16) as threads:
        long = threads.map(lambda number: complete(cluster, [500 + number] * 2_049, max_tokens=1), range(100))
        broken = threads.map(lambda number: call(cluster, COMPLETION, b'{"prompt": %d' % number), range(50))
        assert {answer.status for answer in (*long, *broken)} == {400}
    answers = good_ones(cluster)
    assert {answer.status for answer in answers} == {200}
    groups = {answer.headers["x-octavo-group"] for answer in answers}
    assert groups <= {line.split('group="')[1].split('"')[0] for line in cluster.samples("octavo_num_requests_running")}
    assert httpx.get(f"{cluster.url}/ready").json() == before


def test_case_bug_095_overload_is_shed_at_once_and_passes(guarded: Guarded) -> None:
    """200 at once where four run and eight wait: these finish, the others get 429 before the first of them has. Right
    afterwards all is as before (BUG-089)."""
    server = guarded.server
    client = OpenAI(base_url=f"{server.url}/v1", api_key=guarded.key["authorization"][7:], max_retries=0, timeout=120)

    def ask(number: int) -> Any:
        try:
            fields: dict[str, Any] = {"max_tokens": 40, "extra_body": {"ignore_eos": True}}
            return client.completions.create(model=server.model, prompt=f"Tale {number}:", **fields)
        except RateLimitError as refused:
            return refused

    with ThreadPoolExecutor(AT_ONCE) as threads:
        answers = list(threads.map(ask, range(AT_ONCE)))
    served = [answer for answer in answers if not isinstance(answer, RateLimitError)]
    refused = [answer for answer in answers if isinstance(answer, RateLimitError)]
    assert len(served) >= 12
    assert {answer.usage.completion_tokens for answer in served} == {40}
    assert len(refused) >= AT_ONCE / 2
    for error in refused:
        assert int(error.response.headers["retry-after"]) >= 1
        assert (error.type, error.code) == ("rate_limit_error", "rate_limit_exceeded")
        assert "--router-max-queued-requests is 8" in str(error)
    assert {answer.status for answer in good_ones(server, guarded.key)} == {200}


def test_case_bug_093_the_index_holds_what_groups_hold(models: ServeProcess, short: OneModel) -> None:
    """Three hundred prompts that nobody repeats, at a group of 18 blocks, beside what other groups have."""
    before = metric(models, "octavo_router_index_entries")
    with ThreadPoolExecutor(8) as threads:
        prompts = [[1_000 + number, *range(600, 640)] for number in range(300)]
        answers = list(threads.map(lambda prompt: complete(short, prompt, max_tokens=1), prompts))
    assert {answer.status for answer in answers} == {200}
    assert metric(models, "octavo_router_index_entries") <= before + 18
    again = complete(short, prompts[-1], max_tokens=1)
    assert (again.usage or {})["prompt_tokens_details"]["cached_tokens"] >= 32
