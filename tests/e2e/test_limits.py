"""What the operator and the request may bound: queue, time, output, context, memory. Nothing accepted is lost."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from openai import OpenAI
from serve_client import Choices, metric, wait_until_idle
from serve_process import ServeProcess, wait_until

AT_ONCE_S = 1.0
TEXT = "Once upon a time"
TEXT_TOKENS = 4

Limits = dict[str, int]


class StopAsking(Exception):
    """What a stream has to say is of no interest any more."""


class FullBatch:
    """Four endless choices: they take all places of the batch, so that what comes next waits.

    They run until all of their tokens are generated, or until the end of the ``with`` block.
    """

    def __init__(self, client: OpenAI, server: ServeProcess) -> None:
        self._server = server
        self._stream = client.completions.create(
            model=server.model,
            prompt=TEXT,
            n=4,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        self._is_running, self._is_over = threading.Event(), threading.Event()
        self._threads = ThreadPoolExecutor(1)
        self.choices = self._threads.submit(self._read)

    def __enter__(self) -> FullBatch:
        assert self._is_running.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._threads.shutdown()

    def _read(self) -> Choices | None:
        """None: closed before its end."""
        with contextlib.suppress(StopAsking), self._stream:
            return Choices.of_stream(self._stream, self._look)
        return None

    def _look(self, texts: dict[int, str]) -> None:
        if len(texts) == 4:
            self._is_running.set()
        if self._is_over.is_set():
            raise StopAsking

    def wait_for_queue(self, num_tokens: int) -> None:
        """Wait until prompts of so many tokens do."""
        wait_until(
            lambda: metric(self._server, "octavo_num_queued_prompt_tokens") == num_tokens,
            timeout_s=20,
            what=f"{num_tokens} tokens in the queue",
        )


@pytest.fixture
def full_batch(narrow: ServeProcess, narrow_client: OpenAI) -> Iterator[FullBatch]:
    wait_until_idle(narrow)
    with FullBatch(narrow_client, narrow) as batch:
        yield batch
    wait_until_idle(narrow)


def complete(client: OpenAI, server: ServeProcess, prompt: str | list[int] = TEXT, **fields: Any) -> Any:
    return client.completions.create(model=server.model, prompt=prompt, **{"max_tokens": 4, "temperature": 0} | fields)


def test_the_ledger_is_told_at_the_start(narrow: ServeProcess, limits: Limits) -> None:
    output = "".join(narrow.lines)
    for words in ("memory of rank 0", "memory of the machine", "weights", "left over", "--max-model-len 4,096"):
        assert words in output
    assert f"{limits['num_gpu_blocks_override']} blocks of 16 tokens" in output


# ---- the queue ----


def test_a_full_queue_says_so_at_once_and_what_was_accepted_is_finished(
    narrow: ServeProcess, narrow_client: OpenAI, full_batch: FullBatch, limits: Limits
) -> None:
    with ThreadPoolExecutor(2) as threads:
        accepted = [threads.submit(complete, narrow_client, narrow) for _ in range(limits["max_queued_requests"])]
        full_batch.wait_for_queue(2 * TEXT_TOKENS)
        for stream in (False, True):
            started = time.monotonic()
            with pytest.raises(openai.RateLimitError) as refused:
                complete(narrow_client, narrow, stream=stream)
            assert time.monotonic() - started < AT_ONCE_S
            assert int(refused.value.response.headers["retry-after"]) >= 1
            assert refused.value.code == "rate_limit_exceeded"
            assert "--max-queued-requests is 2" in str(refused.value)
        assert [answer.result(120).usage.completion_tokens for answer in accepted] == [4, 4]
    finished = full_batch.choices.result(120)
    assert finished is not None
    assert finished.reasons == ("length",) * 4
    assert finished.usage.completion_tokens == 4 * limits["max_output_tokens"]  # the default, as none was asked for
    assert metric(narrow, "octavo_requests_refused_total") >= 2


def test_a_queue_is_bounded_by_tokens_too(
    narrow: ServeProcess, narrow_client: OpenAI, full_batch: FullBatch, limits: Limits
) -> None:
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(complete, narrow_client, narrow, prompt=list(range(1_000, 1_100)))
        full_batch.wait_for_queue(100)
        with pytest.raises(openai.RateLimitError) as refused:
            complete(narrow_client, narrow, prompt=list(range(1_000, 1_000 + limits["max_queued_tokens"])))
        assert all(words in str(refused.value) for words in ("--max-queued-tokens is 600", "100 tokens", "has 600"))
        full_batch.__exit__()
        assert first.result(60).usage.completion_tokens == 4


def test_queue_timeout(narrow: ServeProcess, narrow_client: OpenAI, full_batch: FullBatch) -> None:
    """429 without a stream; in a stream that has begun, an event with the error."""
    for stream in (False, True):
        started = time.monotonic()
        with pytest.raises(openai.APIError) as ended:
            list(complete(narrow_client, narrow, stream=stream, extra_body={"queue_timeout": 0.5}))
        assert time.monotonic() - started > 0.5
        assert ended.value.code == "rate_limit_exceeded"
        assert "0.5 s" in ended.value.message
        assert isinstance(ended.value, openai.RateLimitError) is not stream
    assert not full_batch.choices.done()


# ---- time ----


@pytest.mark.parametrize("stream", [False, True])
def test_timeout_gives_the_output_so_far(
    narrow: ServeProcess, narrow_client: OpenAI, limits: Limits, stream: bool
) -> None:
    """The shortest timeout of which something comes, but not all."""
    everything = limits["max_output_tokens"]
    for timeout_s in (1.0, 3.0, 9.0, 27.0):
        fields = {"stream": stream, "max_tokens": everything, "n": 2, "temperature": 1.0, "seed": 3}
        extra = {"timeout": timeout_s, "ignore_eos": True}
        if stream:
            fields["stream_options"] = {"include_usage": True}
        with contextlib.suppress(openai.APIError):  # nothing had come: 408
            answer = complete(narrow_client, narrow, extra_body=extra, **fields)
            choices = Choices.of_stream(answer) if stream else Choices.of(answer)
            break
    assert choices.reasons == ("timeout", "timeout")
    assert all(choices.texts)
    assert 0 < choices.usage.completion_tokens < 2 * everything


def test_a_timeout_before_the_first_token_is_told(narrow: ServeProcess, narrow_client: OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as missed:
        complete(narrow_client, narrow, prompt=list(range(2_000, 5_000)), extra_body={"timeout": 0.001})
    assert missed.value.status_code == 408
    assert missed.value.param == "timeout"
    wait_until_idle(narrow)


# ---- length ----


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_more_output_than_the_operator_allows_is_refused_by_name(
    narrow: ServeProcess, narrow_client: OpenAI, field: str
) -> None:
    messages: Any = [{"role": "user", "content": TEXT}]
    with pytest.raises(openai.BadRequestError) as refused:
        narrow_client.chat.completions.create(model=narrow.model, messages=messages, **{field: 257})
    assert refused.value.param == field
    assert all(number in str(refused.value) for number in ("257", "256"))


def test_a_context_that_is_exceeded_is_told_with_both_numbers(narrow: ServeProcess, narrow_client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as exceeded:
        complete(narrow_client, narrow, prompt=[1_000] * 4_000, max_tokens=100)
    assert exceeded.value.code == "context_length_exceeded"
    assert exceeded.value.param == "prompt"
    assert all(number in str(exceeded.value) for number in ("4096 tokens", "4100 tokens", "4000", "100"))


@pytest.mark.parametrize("stream", [False, True])
def test_a_search_that_could_never_fit_the_pool_is_refused_by_name(
    narrow: ServeProcess, narrow_client: OpenAI, limits: Limits, stream: bool
) -> None:
    """Its prompt is shared, 239 blocks; 17 for the output of each beam."""
    fields = {"prompt": [1_000] * 3_830, "max_tokens": 256, "temperature": None}
    with pytest.raises(openai.APIError) as refused:
        list(complete(narrow_client, narrow, stream=stream, extra_body={"beam_width": 4}, **fields))
    assert refused.value.code == "context_length_exceeded"
    assert refused.value.param == "max_tokens"
    assert all(number in refused.value.message for number in ("307", str(limits["num_gpu_blocks_override"])))
    assert isinstance(refused.value, openai.BadRequestError) is not stream


def test_a_search_wider_than_the_batch_is_refused_by_name(narrow: ServeProcess, narrow_client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        complete(narrow_client, narrow, temperature=None, extra_body={"beam_width": 5})
    assert refused.value.param == "beam_width"
    assert "--max-num-seqs" in str(refused.value)
