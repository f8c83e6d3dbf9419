"""At the end of the context, and where the KV pool is smaller than it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from api_calls import complete
from serve_process import OneModel

CONTEXT = 256
"""Of the short cluster."""


def ids(count: int) -> list[int]:
    return [500 + number % 400 for number in range(count)]


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens", "num_output"),
    [
        (CONTEXT - 2, 1, 1),
        (CONTEXT - 2, 2, 2),
        (CONTEXT - 2, None, 2),
        (CONTEXT - 1, 1, 1),
        (CONTEXT - 1, 2, None),
        (CONTEXT - 1, None, 1),
        (CONTEXT, 1, None),
        (CONTEXT, None, None),
        (CONTEXT + 1, 1, None),
        (CONTEXT + 1, None, None),
    ],
)
def test_case_bug_081_the_last_tokens(
    short: OneModel, stream: bool, num_prompt_tokens: int, max_tokens: int | None, num_output: int | None
) -> None:
    fields = {"max_tokens": max_tokens, "ignore_eos": True, "stream": stream}
    answer = complete(short, ids(num_prompt_tokens), **fields)
    if num_output is None:
        assert (answer.status, (answer.error or {})["code"]) == (400, "context_length_exceeded")
        return
    assert ((answer.usage or {})["completion_tokens"], answer.finish_reason) == (num_output, "length")


@pytest.mark.parametrize("num_prompt_tokens", [CONTEXT - 1, CONTEXT, CONTEXT + 1])
def test_case_bug_081_scoring(short: OneModel, stream: bool, num_prompt_tokens: int) -> None:
    answer = complete(short, ids(num_prompt_tokens), max_tokens=0, echo=True, logprobs=1, stream=stream)
    if num_prompt_tokens > CONTEXT:
        assert answer.status == 400
        return
    assert answer.status == 200, answer
    assert len(answer.choices[0].logprobs) == num_prompt_tokens


def test_case_bug_083_more_than_the_pool_holds(base: OneModel, stream: bool) -> None:
    """The context of 8,192 is lowered to what 64 blocks hold, and said so."""
    assert any("1,024 tokens" in line for line in base.lines)
    fields: dict[str, Any] = {"ignore_eos": True, "stream": stream}
    assert complete(base, ids(1500), max_tokens=4, **fields).status == 400
    assert complete(base, ids(900), max_tokens=900, **fields).status == 400
    assert complete(base, ids(10), max_tokens=4, **fields).status == 200
    with ThreadPoolExecutor(2) as threads:
        both = threads.map(lambda number: complete(base, [number, *ids(900)], max_tokens=120, **fields), (3, 4))
        assert [(each.usage or {})["completion_tokens"] for each in both] == [120, 120]
