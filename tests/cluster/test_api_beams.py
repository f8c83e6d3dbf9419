"""Beam search in requests: what asks for it, what it becomes, and what does not go with it."""

from __future__ import annotations

from typing import Any

import httpx2
import orjson
import pytest

from octavo.cluster.api.service import TokenDelta
from octavo.worker.messages import FinishReason

COMPLETION = "/v1/completions"
PROMPT = {"model": "smollm2", "prompt": "The quick brown fox", "max_tokens": 8}


@pytest.mark.parametrize(
    ("fields", "width", "num_branches"),
    [
        ({"use_beam_search": True}, 1, 1),
        ({"use_beam_search": True, "n": 4}, 4, 4),
        ({"beam_width": 4}, 4, 1),
        ({"beam_width": 4, "use_beam_search": True, "n": 2}, 4, 2),
        ({"beam_width": 32, "n": 32}, 32, 32),
        ({"use_beam_search": False, "n": 2}, None, 2),
        ({"n": 2}, None, 2),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", COMPLETION])
async def test_the_width_and_the_number_of_outputs(
    client: httpx2.AsyncClient, service: Any, path: str, fields: dict[str, Any], width: int | None, num_branches: int
) -> None:
    prompt = PROMPT if path == COMPLETION else {"model": "smollm2", "messages": [{"role": "user", "content": "hi"}]}
    answer = await client.post(path, json={**prompt, **fields})
    assert len(answer.json()["choices"]) == num_branches
    (request,) = service.requests
    assert (request.sampling.beam_width, request.num_branches) == (width, num_branches)


async def test_what_the_search_is_told(client: httpx2.AsyncClient, service: Any) -> None:
    await client.post(COMPLETION, json={**PROMPT, "beam_width": 3})
    fields = {"length_penalty": -0.5, "early_stopping": True, "temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0}
    await client.post(COMPLETION, json={**PROMPT, "beam_width": 3, **fields, "stop_token_ids": [7], "stop": []})
    first, second = (request.sampling for request in service.requests)
    assert (first.length_penalty, first.early_stopping) == (1.0, False)
    assert (second.length_penalty, second.early_stopping) == (-0.5, True)
    assert 7 in second.stop_token_ids


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"beam_width": 0}, "beam_width", "0"),
        ({"beam_width": 65}, "beam_width", "64 65"),
        ({"beam_width": 33}, "beam_width", "33 32 --max-num-seqs"),
        ({"use_beam_search": True, "n": 33}, "n", "33 32 --max-num-seqs"),
        ({"use_beam_search": True, "n": 65}, "n", "65 64"),
        ({"beam_width": 2, "n": 3}, "n", "3 2"),
        ({"beam_width": 2, "use_beam_search": False}, "beam_width", "2 use_beam_search"),
        ({"length_penalty": 0.5}, "length_penalty", "0.5 beam_width"),
        ({"early_stopping": True}, "early_stopping", "true beam_width"),
        ({"beam_width": 2, "length_penalty": 11}, "length_penalty", "10 11"),
        ({"beam_width": 2, "length_penalty": -10.5}, "length_penalty", "-10"),
        ({"beam_width": 2, "early_stopping": "never"}, "early_stopping", ""),
        ({"beam_width": 2, "temperature": 0.7}, "temperature", "0.7"),
        ({"beam_width": 2, "top_p": 0.9}, "top_p", "0.9"),
        ({"beam_width": 2, "top_k": 5}, "top_k", "5"),
        ({"beam_width": 2, "min_p": 0.1}, "min_p", ""),
        ({"beam_width": 2, "seed": 1}, "seed", "1"),
        ({"beam_width": 2, "stop": ["a", "b"]}, "stop", "2 stop_token_ids"),
    ],
)
async def test_what_does_not_go_together_is_refused_with_names_and_numbers(
    client: httpx2.AsyncClient, service: Any, fields: dict[str, Any], param: str, words: str
) -> None:
    answer = await client.post(COMPLETION, json={**PROMPT, **fields})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert all(word in error["message"] for word in words.split()), error["message"]
    assert not service.requests


@pytest.mark.parametrize("penalty", ["NaN", "Infinity", "1e999"])
async def test_a_penalty_that_is_no_number(client: httpx2.AsyncClient, penalty: str) -> None:
    content = orjson.dumps({**PROMPT, "beam_width": 2})[:-1] + f',"length_penalty":{penalty}}}'.encode()
    answer = await client.post(COMPLETION, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400


async def test_outputs_that_arrive_whole_are_streamed_best_first(client: httpx2.AsyncClient, service: Any) -> None:
    service.script = lambda _: [
        TokenDelta((500, 501, 2), FinishReason.STOP, 16, branch=0),
        TokenDelta((502, 503), FinishReason.LENGTH, branch=1),
    ]
    body = {**PROMPT, "beam_width": 4, "n": 2}
    whole = (await client.post(COMPLETION, json=body)).json()
    assert [choice["finish_reason"] for choice in whole["choices"]] == ["stop", "length"]
    assert (whole["usage"]["completion_tokens"], whole["usage"]["prompt_tokens"]) == (5, 4)
    answer = await client.post(COMPLETION, json={**body, "stream": True})
    chunks = [orjson.loads(line[6:]) for line in answer.text.split("\n\n") if line and line != "data: [DONE]"]
    parts = [choice for chunk in chunks for choice in chunk["choices"]]
    assert [(part["index"], part["finish_reason"]) for part in parts] == [
        (0, None),
        (0, "stop"),
        (1, None),
        (1, "length"),
    ]
    assert [part["text"] for part in parts if part["text"]] == [choice["text"] for choice in whole["choices"]]
