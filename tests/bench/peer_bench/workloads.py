"""What is asked of each server, and the figures that come of it. Output lengths are forced; lengths are in tokens.

W1       one stream at a time, 64 in, 128 out: tokens/s after the first, TTFT; medians of three
W2       16 clients × 3 requests, 128 in, 128 out: output tokens/s of all, 99th percentile of the gaps of a stream
W3       16 clients × 3 requests, 1,024 shared + 32 of their own in, 64 out: output tokens/s of all, mean TTFT;
         cold: nobody has seen the prefix before; warm: the same prefix again
W4       one prompt of 4,096, 1 out: prompt tokens/s to the first token
greedy   five questions: outputs that equal transformers' in float32; near-ties are not excused
"""

from __future__ import annotations

import statistics
from collections.abc import Awaitable, Callable

from .client import Answer, Client
from .prompts import Prompt, Prompts

NUM_CLIENTS, NUM_REQUESTS, NUM_SINGLE, NUM_QUESTIONS, QUESTION_TOKENS = 16, 3, 3, 5, 48
LONG_PROMPT = 4_096

Figures = dict[str, float]
"""By metric. A workload adds to them as it goes, so that what it has finished is kept when it is broken off."""
Workload = Callable[[Client, Prompts, Figures], Awaitable[None]]


async def warm_up(client: Client, prompts: Prompts, figures: Figures) -> None:
    """Each size of batch and a prompt of several steps once, so that nothing is measured that happens once."""
    await client.complete_all(_queues(prompts, 1, 128), 16)
    await client.complete(prompts.words(1_024), 2)


async def single_stream(client: Client, prompts: Prompts, figures: Figures) -> None:
    answers = [await client.complete(prompts.words(64), 128) for _ in range(NUM_SINGLE)]
    figures["W1 tokens/s"] = statistics.median(decode_rate(answer) for answer in answers)
    figures["W1 TTFT s"] = statistics.median(answer.ttft_s for answer in answers)


async def many_streams(client: Client, prompts: Prompts, figures: Figures) -> None:
    answers = await client.complete_all(_queues(prompts, NUM_REQUESTS, 128), 128)
    figures["W2 tokens/s"] = throughput(answers)
    figures["W2 p99 gap ms"] = 1_000 * percentile([gap for answer in answers for gap in answer.gaps_s], 99)


async def shared_prefix(client: Client, prompts: Prompts, figures: Figures) -> None:
    prefix = prompts.words(1_024)
    for state in ("cold", "warm"):
        answers = await client.complete_all(_queues(prompts, NUM_REQUESTS, 32, prefix), 64)
        figures[f"W3 {state} tokens/s"] = throughput(answers)
        figures[f"W3 {state} TTFT s"] = statistics.mean(answer.ttft_s for answer in answers)


async def long_prompt(client: Client, prompts: Prompts, figures: Figures) -> None:
    answer = await client.complete(prompts.words(LONG_PROMPT), 1)
    figures["W4 tokens/s"] = LONG_PROMPT / answer.ttft_s


def greedy(asked: list[Prompt], expected: list[str]) -> Workload:
    """``expected``: what transformers answers to what is asked."""

    async def run(client: Client, prompts: Prompts, figures: Figures) -> None:
        answers = [await client.complete(prompt, QUESTION_TOKENS, to_length=False) for prompt in asked]
        equal = [answer.text == text for answer, text in zip(answers, expected, strict=True)]
        figures["greedy equal"] = float(sum(equal))

    return run


WORKLOADS: dict[str, Workload] = {
    "W1": single_stream,
    "W2": many_streams,
    "W4": long_prompt,
    # The one that can take longest comes last: what is broken off would lie in the way of others.
    "W3": shared_prefix,
}


def _queues(prompts: Prompts, count: int, num_tokens: int, after: Prompt | None = None) -> list[list[Prompt]]:
    return [[prompts.words(num_tokens, after=after) for _ in range(count)] for _ in range(NUM_CLIENTS)]


def decode_rate(answer: Answer) -> float:
    """Tokens per second from the first to the last. The first piece of text may hold more than one token: rarely."""
    return (answer.num_tokens - 1) / (answer.arrivals[-1] - answer.arrivals[0])


def throughput(answers: list[Answer]) -> float:
    """Output tokens per second, from the first request sent to the last token."""
    seconds = max(answer.arrivals[-1] for answer in answers) - min(answer.sent for answer in answers)
    return sum(answer.num_tokens for answer in answers) / seconds


def percentile(values: list[float], percent: int) -> float:
    """Linear between the two values that lie next to it."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]
