"""Counters that add up, for a known mix of requests."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import httpx2 as httpx
from api_calls import COMPLETION, Answer, call, complete
from serve_process import OneModel, wait_until

LINE = re.compile(r"^(?P<name>\w+)\{(?P<labels>.*)\} (?P<value>\S+)$")


def totals(server: OneModel, name: str, label: str | None = None) -> dict[str, float]:
    """A metric, summed over all but one label."""
    sums: dict[str, float] = {}
    for line in server.samples(name):
        if match := LINE.match(line):
            found = re.search(rf'{label}="([^"]*)"', match["labels"]) if label else None
            key = found[1] if found else ""
            sums[key] = sums.get(key, 0.0) + float(match["value"])
    return sums


def leave_after_events(server: OneModel, number: int) -> None:
    body = {"model": server.model, "prompt": f"Go on {number}", "max_tokens": 240, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}{COMPLETION}", json=body, timeout=60) as response:
        lines = response.iter_lines()
        for _ in range(4):
            next(lines)


def test_case_bug_108_a_known_mix(short: OneModel) -> None:
    """10 that stop, 5 cut by length, 7 left in their middle, 4 refused, 2 of three choices; some wait for a place."""
    server = short
    before = totals(server, "octavo_request_success_total", "finished_reason")
    names = ("octavo_prompt_tokens_total", "octavo_generation_tokens_total", "octavo_time_to_first_token_seconds_count")
    counters = {name: sum(totals(server, name).values()) for name in names}

    def run(number: int) -> Answer:
        if number < 10:
            return complete(server, f"Stop {number}", max_tokens=16, allowed_token_ids=[2])
        if number < 15:
            return complete(server, f"Length {number}", max_tokens=5, ignore_eos=True)
        if number < 17:
            return complete(server, f"Three {number}", n=3, max_tokens=4, ignore_eos=True)
        return call(server, COMPLETION, {"prompt": "a", "temperature": 9})

    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(run, range(21)))
        list(threads.map(lambda number: leave_after_events(server, number), range(7)))
    assert [answer.status for answer in answers[17:]] == [400] * 4
    served = answers[:17]
    gauges = ("octavo_num_requests_running", "octavo_num_requests_waiting", "octavo_gateway_requests_in_flight")
    wait_until(lambda: all(server.gauge(name) == 0 for name in gauges), timeout_s=15, what="nothing under way")

    def grown(reason: str) -> float:
        now = totals(server, "octavo_request_success_total", "finished_reason")
        return now.get(reason, 0.0) - before.get(reason, 0.0)

    wait_until(lambda: grown("abort") == 7, timeout_s=15, what="seven that were left")
    reasons = [answer.choices[0].finish_reason for answer in served]
    assert (grown("stop"), grown("length")) == (reasons.count("stop"), reasons.count("length"))
    after = {name: sum(totals(server, name).values()) for name in names}
    prompt_tokens = sum((answer.usage or {})["prompt_tokens"] for answer in served)
    output_tokens = sum((answer.usage or {})["completion_tokens"] for answer in served)
    aborted_prompts = 7 * (complete(server, "Go on 1", max_tokens=1).usage or {})["prompt_tokens"]
    assert after[names[0]] - counters[names[0]] == prompt_tokens + aborted_prompts
    assert after[names[1]] - counters[names[1]] >= output_tokens + 7
    assert after[names[2]] - counters[names[2]] == 17 + 7
