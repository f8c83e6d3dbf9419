"""What a stream says: the same text as a whole answer, nothing that is taken back, and one clear end."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2 as httpx
import pytest
from api_calls import COMPLETION, Answer, Choice, chat, complete
from serve_process import OneModel, wait_until

pytestmark = pytest.mark.usefixtures("canary")

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 32}


def usages(answer: Answer) -> list[Any]:
    return [chunk["usage"] for chunk in answer.chunks if chunk.get("usage") is not None]


def test_case_bug_023_usage(cluster: OneModel) -> None:
    """Once, in a chunk of its own before [DONE], and only where it was asked for."""
    whole = chat(cluster, "Say hello", **GREEDY)
    asked = chat(cluster, "Say hello", stream=True, **GREEDY)
    last = asked.chunks[-1]
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], (whole.usage or {})["completion_tokens"])
    assert usages(asked) == [last["usage"]]
    assert asked.is_done
    for options in (None, {"include_usage": False}):
        unasked = chat(cluster, "Say hello", stream=True, stream_options=options, **GREEDY)
        assert usages(unasked) == []
        assert all(chunk["choices"] for chunk in unasked.chunks)
        assert unasked.text == whole.text
    refused = chat(cluster, "Say hello", stream_options={"include_usage": True}, **GREEDY)
    assert (refused.status, (refused.error or {})["param"]) == (400, "stream_options")


def test_case_bug_023_usage_of_each_chunk(cluster: OneModel) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    answer = chat(cluster, "Say hello", stream=True, stream_options=options, **GREEDY)
    counts = [each["completion_tokens"] for each in usages(answer)]
    assert len(counts) == len(answer.chunks)
    assert counts == sorted(counts)
    assert answer.usage is not None
    assert counts[-1] == answer.usage["completion_tokens"]


BYTES_OF_EMOJI = "안녕 🇰🇷👩‍👩‍👧 ok 안녕 🇰🇷👩‍👩‍👧 ok 안녕"
MIXED = "שלום 世界 👩‍👩‍👧‍👦 é e\u0301 नमस्ते 🏳️‍🌈 " * 20


def tokenize(cluster: OneModel, text: str) -> list[int]:
    answer = httpx.post(f"{cluster.url}/tokenize", json={"model": cluster.model, "prompt": text}).json()
    return list(answer["tokens"])


def detokenize(cluster: OneModel, token_ids: list[int]) -> str:
    answer = httpx.post(f"{cluster.url}/detokenize", json={"model": cluster.model, "tokens": token_ids}).json()
    return str(answer["prompt"])


def test_case_bug_025_characters_of_several_tokens(cluster: OneModel) -> None:
    token_ids = tokenize(cluster, BYTES_OF_EMOJI)
    fields = GREEDY | {"max_tokens": 64, "logit_bias": {str(i): 20 for i in set(token_ids)}, "return_token_ids": True}
    whole = complete(cluster, BYTES_OF_EMOJI, **fields)
    streamed = complete(cluster, BYTES_OF_EMOJI, stream=True, **fields)
    assert streamed.text == whole.text
    output = [i for chunk in streamed.chunks for choice in chunk["choices"] for i in choice.get("token_ids") or []]
    assert len(output) == 64
    decoded = detokenize(cluster, token_ids + output)
    assert decoded == BYTES_OF_EMOJI + whole.text
    assert whole.text.count("\ufffd") == decoded.count("\ufffd")


def test_case_bug_025_an_echo_of_all_kinds_of_characters(cluster: OneModel, stream: bool) -> None:
    answer = complete(cluster, MIXED, echo=True, max_tokens=1, temperature=0, stream=stream)
    assert answer.text.startswith(MIXED)


WORDS = ["the", " ", "e", "ing", ".", "\n", "a b", "1", "<|im_end|>", ", "]
WORDS += ["世", "界 ", "é", "e\u0301", "👩\u200d👩\u200d👧", "🇰🇷", "नम"]


def random_fields(randomness: random.Random) -> dict[str, Any]:
    """A request whose output is the same each time: greedy, or by a seed."""
    fields: dict[str, Any] = {"max_tokens": randomness.randint(1, 12), "ignore_eos": randomness.random() < 0.5}
    fields |= (
        {"temperature": 0} if randomness.random() < 0.3 else {"temperature": 1.5, "seed": randomness.randrange(99)}
    )
    some: dict[str, Any] = {
        "stop": randomness.sample(WORDS, randomness.randint(1, 4)),
        "include_stop_str_in_output": True,
        "n": 2,
        "min_tokens": 1,
        "echo": True,
        "logprobs": 2,
        "skip_special_tokens": False,
        "stop_token_ids": randomness.sample(range(3, 600), 40),
        "logit_bias": {str(token_id): 8 for token_id in randomness.sample(range(128, 400), 60)},
    }
    return fields | {name: value for name, value in some.items() if randomness.random() < 0.3}


def told(choice: Choice) -> tuple[Any, ...]:
    """What a choice says, without numbers."""
    entries = [(token, sorted(top or ()), offset) for token, _, top, offset in choice.logprobs]
    return choice.text, choice.finish_reason, choice.num_finish_reasons, entries


def logprobs(answer: Answer) -> list[float]:
    """Of all tokens; that of a prompt's first one is null."""
    return [value or 0.0 for choice in answer.choices for _, value, *_ in choice.logprobs]


def test_streamed_and_whole_answers_are_equal(cluster: OneModel) -> None:
    """200 random requests; among the texts are all kinds of characters, halves of them, and stops across tokens."""
    randomness = random.Random(5)
    prompts = [" ".join(randomness.choices(WORDS, k=randomness.randint(1, 8))) for _ in range(200)]
    asked = [(prompt, random_fields(randomness)) for prompt in prompts]

    def run(number: int) -> tuple[Answer, Answer]:
        prompt, fields = asked[number]
        return complete(cluster, prompt, **fields), complete(cluster, prompt, stream=True, **fields)

    with ThreadPoolExecutor(16) as threads:
        for (prompt, fields), (whole, streamed) in zip(asked, threads.map(run, range(200)), strict=True):
            assert (whole.status, streamed.is_done) == (200, True), (prompt, fields)
            assert list(map(told, streamed.choices)) == list(map(told, whole.choices)), (prompt, fields)
            assert logprobs(streamed) == pytest.approx(logprobs(whole), abs=1e-3)  # a part may come from the cache
            counts = [(answer.usage or {})["completion_tokens"] for answer in (whole, streamed)]
            assert counts[0] == counts[1], (prompt, fields)


def test_case_bug_027_stop_strings_that_begin_within_tokens(cluster: OneModel) -> None:
    prompt = "The quick brown"
    full = complete(cluster, prompt, **GREEDY).text
    stops = [
        [full[3:15]],
        [full[:4]],
        [full[20:30]],
        [full[6:8], full[6:9]],
        [full[25:30], full[10:14]],
        ["😀", full[12:20]],
    ]
    for each in stops:
        ends = [full.index(stop) for stop in each if stop in full]
        expected = full[: min(ends)]
        for stream in (False, True):
            answer = complete(cluster, prompt, stop=each, stream=stream, **GREEDY)
            assert (answer.text, answer.finish_reason) == (expected, "stop"), each


def test_case_bug_029_special_stop_tokens(cluster: OneModel, stream: bool) -> None:
    question, fields = "What is two plus two? Answer in one short sentence.", GREEDY | {"max_tokens": 64}
    natural = chat(cluster, question, stream=stream, **fields)
    assert natural.finish_reason == "stop"
    assert "<|im_end|>" not in natural.text
    for more in (
        {"stop_token_ids": [2]},
        {"stop": ["<|im_end|>"]},
        {"stop_token_ids": [2], "include_stop_str_in_output": True},
    ):
        answer = chat(cluster, question, stream=stream, **fields, **more)
        assert (answer.text, answer.finish_reason) == (natural.text, "stop"), more


@pytest.mark.parametrize("fields", [{}, {"n": 4}, {"prompt": ["Once", "Twice"]}], ids=["one", "n", "batch"])
def test_case_bug_031_clients_that_leave(cluster: OneModel, fields: dict[str, Any], stream: bool) -> None:
    """Through the proxy and both gateways; some after a few events, some at once."""
    body = {"model": cluster.model, "prompt": "Once", "max_tokens": 1000, "ignore_eos": True, "stream": stream}
    body |= fields
    randomness = random.Random(7)

    def leave(num_events: int) -> None:
        url = f"{cluster.url}{COMPLETION}"
        if not stream:
            with pytest.raises(httpx.TimeoutException):
                httpx.post(url, json=body, timeout=0.2)
            return
        with httpx.stream("POST", url, json=body, timeout=60) as response:
            lines = response.iter_lines()
            for _ in range(num_events):
                next(lines)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(leave, [randomness.randrange(6) for _ in range(16)]))
    names = ("octavo_num_requests_running", "octavo_num_requests_waiting", "octavo_kv_cache_usage_perc")
    wait_until(lambda: all(cluster.gauge(name) == 0 for name in names), timeout_s=15, what="nothing under way")

    def has_settled() -> bool:
        """A group tells its metrics once a second: what it said last may be from before its last request came."""
        before = cluster.gauge("octavo_engine_generation_tokens_total")
        time.sleep(2.5)
        return cluster.gauge("octavo_engine_generation_tokens_total") == before

    wait_until(has_settled, timeout_s=10, what="no more tokens; 1,000 of a request that went on would take longer")


def test_case_bug_035_every_stream_ends_once(cluster: OneModel) -> None:
    endings: list[dict[str, Any]] = [
        {"max_tokens": 1},
        {"max_tokens": 6},
        {"max_tokens": 24, "stop": ["e"]},
        {"max_tokens": 24, "stop": [" "]},
        {"max_tokens": 3, "n": 3, "temperature": 1},
        {"max_tokens": 8, "stop_token_ids": list(range(3, 40))},
    ]

    def run(number: int) -> Answer:
        return complete(cluster, f"Number {number}", stream=True, **endings[number % len(endings)])

    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(run, range(160)))
    for answer in answers:
        assert answer.is_done
        assert answer.error is None
        assert [choice.num_finish_reasons for choice in answer.choices] == [1] * len(answer.choices)


def test_case_bug_035_a_connection_serves_the_next_stream(cluster: OneModel) -> None:
    with httpx.Client(base_url=cluster.url, timeout=60) as http:
        for number in range(5):
            body = {"model": cluster.model, "prompt": f"Again {number}", "max_tokens": 3, "stream": True}
            text = http.post(COMPLETION, json=body).text
            assert text.endswith("data: [DONE]\n\n")
