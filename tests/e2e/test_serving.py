"""A real cluster, the real model, the official client."""

from __future__ import annotations

import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2 as httpx
import openai
import pytest
from openai import OpenAI
from serve_process import ServeProcess, wait_until

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def ask(client: OpenAI, model: str, **fields: Any) -> Any:
    fields = {"messages": QUESTION, "temperature": 0, "max_tokens": 32} | fields
    return client.chat.completions.create(model=model, **fields)


def test_the_capital_of_france_streamed_and_not(client: OpenAI, cluster: ServeProcess) -> None:
    whole = ask(client, cluster.model)
    text = whole.choices[0].message.content
    assert "Paris" in text
    assert whole.choices[0].finish_reason == "stop"
    chunks = list(ask(client, cluster.model, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


def test_completions_take_text_and_token_ids(client: OpenAI, cluster: ServeProcess) -> None:
    by_text = client.completions.create(model=cluster.model, prompt="Once upon a time", max_tokens=16, temperature=0)
    assert by_text.usage.completion_tokens == 16
    ids = [6403, 6299, 253, 655]
    by_ids = client.completions.create(model=cluster.model, prompt=ids, max_tokens=16, temperature=0)
    assert by_ids.usage.prompt_tokens == len(ids)


def test_a_seed_repeats_a_sampled_answer(client: OpenAI, cluster: ServeProcess) -> None:
    def sampled(seed: int) -> str:
        answer = ask(client, cluster.model, temperature=1.0, top_p=0.9, seed=seed, max_tokens=24)
        return str(answer.choices[0].message.content)

    assert sampled(1) == sampled(1)
    assert len({sampled(seed) for seed in range(4)}) > 1


def test_stop_strings_end_the_text_before_them(client: OpenAI, cluster: ServeProcess) -> None:
    answer = ask(client, cluster.model, stop=["Paris"])
    assert "Paris" not in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"


def test_headers_name_the_group_and_what_it_is_expected_to_hold(cluster: ServeProcess) -> None:
    body = {"model": cluster.model, "messages": QUESTION, "max_tokens": 4, "temperature": 0}
    answer = httpx.post(
        f"{cluster.url}/v1/chat/completions", json=body, headers={"x-request-id": "my-own-id"}, timeout=60
    )
    assert answer.headers["x-octavo-group"].startswith("group-")
    assert int(answer.headers["x-octavo-cached-tokens"]) >= 0
    assert answer.headers["x-request-id"] == "my-own-id"


def test_what_people_look_at(client: OpenAI, cluster: ServeProcess) -> None:
    assert [model.id for model in client.models.list()] == [cluster.model]
    assert httpx.get(f"{cluster.url}/health").status_code == 200
    assert httpx.get(f"{cluster.url}/ready").status_code == 200
    ask(client, cluster.model, max_tokens=4)
    wait_until(
        lambda: all(name in httpx.get(f"{cluster.url}/metrics").text for name in METRICS),
        timeout_s=10,
        what=f"metrics of gateway, router and groups: {METRICS}",
    )


METRICS = (
    "octavo_time_to_first_token_seconds_bucket",
    "octavo_num_requests_running",
    "octavo_kv_cache_usage_perc",
    "octavo_prefix_cache_hits_total",
    "octavo_router_decisions_total",
)


def test_many_at_once(client: OpenAI, cluster: ServeProcess) -> None:
    alone = ask(client, cluster.model).choices[0].message.content
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda _: ask(client, cluster.model), range(16)))
    assert {answer.choices[0].message.content for answer in answers} == {alone}


def test_chats_that_share_a_system_prompt_stay_where_its_blocks_are(client: OpenAI, cluster: ServeProcess) -> None:
    """24 chats one after the other, 1,000 shared tokens, two groups."""
    system = {"role": "system", "content": "You are a clerk of the harbour. " + "The tide table says so. " * 165}
    groups, cached, first_token_s = [], [], []
    for number in range(24):
        question = {"role": "user", "content": f"Ship number {number} asks for a berth."}
        started = time.monotonic()
        with client.chat.completions.with_streaming_response.create(
            model=cluster.model,
            messages=[system, question],
            max_tokens=4,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        ) as response:
            groups.append(response.headers["x-octavo-group"])
            stream = response.parse()
            for chunk in stream:
                if chunk.choices and chunk.choices[0].delta.content and len(first_token_s) == number:
                    first_token_s.append(time.monotonic() - started)
                if chunk.usage:
                    assert chunk.usage.prompt_tokens > 1_000
                    cached.append(chunk.usage.prompt_tokens_details.cached_tokens)
    assert len(set(groups)) == 1, groups
    assert cached[0] < 100
    assert min(cached[1:]) > 900, cached
    print(f"TTFT cold {first_token_s[0]:.3f} s, warm median {statistics.median(first_token_s[1:]):.3f} s")


def test_a_client_that_goes_away_frees_its_blocks(cluster: ServeProcess) -> None:
    body = {
        "model": cluster.model,
        "messages": QUESTION,
        "max_tokens": 4000,
        "ignore_eos": True,
        "stream": True,
        "temperature": 0,
    }
    with httpx.stream("POST", f"{cluster.url}/v1/chat/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()  # the connection ends with them
        next(lines)
        wait_until(lambda: cluster.gauge("octavo_num_requests_running") > 0, timeout_s=10, what="a running request")
    wait_until(lambda: cluster.gauge("octavo_num_requests_running") == 0, timeout_s=10, what="nothing running")
    wait_until(lambda: cluster.gauge("octavo_kv_cache_usage_perc") == 0, timeout_s=10, what="no block held")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"logit_bias": {"AI": -100}}, "logit_bias"),
        ({"made_up": 1}, "made_up"),
        ({"messages": []}, "messages"),
    ],
)
def test_a_bad_field_is_named_and_the_next_request_is_answered(
    client: OpenAI, cluster: ServeProcess, fields: dict[str, Any], param: str
) -> None:
    extra = {name: fields.pop(name) for name in ("made_up",) if name in fields}
    with pytest.raises(openai.BadRequestError) as error:
        ask(client, cluster.model, extra_body=extra, **fields)
    assert error.value.param == param
    assert "Paris" in ask(client, cluster.model).choices[0].message.content


def test_too_long_a_prompt_and_an_unknown_model(client: OpenAI, cluster: ServeProcess) -> None:
    with pytest.raises(openai.BadRequestError) as too_long:
        ask(client, cluster.model, messages=[{"role": "user", "content": "word " * 9_000}])
    assert too_long.value.code == "context_length_exceeded"
    assert "8192" in str(too_long.value)
    with pytest.raises(openai.NotFoundError) as unknown:
        ask(client, "gpt-9")
    assert unknown.value.code == "model_not_found"


def test_both_gateways_give_the_same_metrics(client: OpenAI, cluster: ServeProcess) -> None:
    """Both answer on one port; what one has counted the other tells too."""

    def looks() -> set[float]:
        """Each look may be at another gateway."""
        return {cluster.gauge("octavo_generation_tokens_total") for _ in range(6)}

    wait_until(lambda: len(looks()) == 1, timeout_s=15, what="gateways that agree on what was before")
    (before,) = looks()
    for _ in range(4):
        ask(client, cluster.model, max_tokens=2)
    wait_until(
        lambda: looks() == {before + 8.0}, timeout_s=15, what="8 more generated tokens in the metrics of both gateways"
    )


@pytest.mark.parametrize("stop_token_ids", [[], [49151]])
def test_min_tokens_bans_stop_tokens_and_harms_nobody(
    client: OpenAI, cluster: ServeProcess, stop_token_ids: list[int]
) -> None:
    extra = {"min_tokens": 12, "stop_token_ids": stop_token_ids}
    answer = ask(client, cluster.model, extra_body=extra, max_tokens=16)
    assert answer.usage.completion_tokens >= 12
    assert "Paris" in ask(client, cluster.model).choices[0].message.content
