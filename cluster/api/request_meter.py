"""RequestMeter: measures one prompt's request, from its arrival to the end of its last output.

What it finds is in the metrics as soon as it is known, and stays with the meter for the access log and for spans.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from ...worker.messages import FinishReason
from .metrics import GatewayMetrics, harmless
from .service import Generation, GenerationRequest, Route

MOST_KEPT_CHARS = 1000
"""Of an output, for the log, where that is asked for."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one worker group did of a request: the first that gave a token, or one that went on after another was
    lost."""

    group: str
    since_s: float
    """When it had been placed, or the last token of the group before had come."""
    phases: tuple[float, float]
    """Seconds in the group's queue, and from there to the first token here."""
    token_s: float
    """When that came."""
    num_tokens_before: int


class RequestMeter:
    """Nothing that goes wrong in a measurement is the request's concern: it is logged, and the number is missing.

    All times are ``time.perf_counter`` readings.
    """

    def __init__(self, metrics: GatewayMetrics, request: GenerationRequest, arrival: float) -> None:
        self.request = request
        self.arrival_s = arrival
        self.placed_s: float | None = None
        """When a worker group had taken it."""
        self.first_token_s: float | None = None
        self.ended_s: float | None = None
        self.parts: list[Part] = []
        """One for each worker group that gave tokens."""
        self.num_output_tokens = 0
        """Of all branches."""
        self.num_cached_tokens = 0
        self.reason: FinishReason | None = None
        self.kept_text: list[str] | None = None
        """The beginning of its first branch's text, where it is to be logged."""
        self._metrics = metrics
        self._generation: Generation | None = None
        self._expected_ttft_s = 0.0
        self._num_of: dict[int, int] = {}
        self._last: dict[int, float] = {}
        """How many tokens each branch had, and when it last had some."""
        self._prompt_counted = False
        metrics.in_flight.inc()

    @property
    def route(self) -> Route | None:
        """Where it is, or was at its end; None before a group had it."""
        return None if self._generation is None else self._generation.route

    def placed(self, generation: Generation) -> None:
        """A worker group has it."""
        self._generation = generation
        self.placed_s = time.perf_counter()
        self._expected_ttft_s = generation.route.expected_ttft_s

    @harmless
    def tokens(
        self, branch: int, count: int, num_cached_tokens: int | None, phases: tuple[float, float] | None = None
    ) -> None:
        """``count`` new tokens of a branch have come at once; they share the time since those before."""
        if num_cached_tokens is not None:
            self.num_cached_tokens += num_cached_tokens
            self._metrics.cached_tokens.inc(num_cached_tokens)
        if phases is not None:
            self._begin_part(phases)
        if count == 0:
            return
        now = time.perf_counter()
        if self.first_token_s is None:
            self._first_tokens(now)
        last, self._last[branch] = self._last.get(branch), now
        self._num_of[branch] = self._num_of.get(branch, 0) + count
        self.num_output_tokens += count
        self._metrics.tokens.add(count, None if last is None else (now - last) / count)

    def _begin_part(self, phases: tuple[float, float]) -> None:
        """A worker group gives its first token."""
        route, placed_s = self.route, self.placed_s or self.arrival_s
        since_s = max(self._last.values(), default=placed_s)
        group = "" if route is None else route.group
        self.parts.append(Part(group, since_s, phases, time.perf_counter(), self.num_output_tokens))

    def keep(self, text: str) -> None:
        """More text of the first branch; what is beyond the limit is dropped."""
        if self.kept_text is not None and sum(map(len, self.kept_text)) < MOST_KEPT_CHARS:
            self.kept_text.append(text[:MOST_KEPT_CHARS])

    def _first_tokens(self, now: float) -> None:
        self.first_token_s = now
        self._count_prompt()
        self._metrics.time_to_first_token.add(now - self.arrival_s)
        if self._expected_ttft_s > 0.0 and self.placed_s is not None:
            self._metrics.ttft_ratio.add((now - self.placed_s) / self._expected_ttft_s)

    def _count_prompt(self) -> None:
        if not self._prompt_counted:
            self._prompt_counted = True
            self._metrics.prompt_tokens.inc(len(self.request.prompt_token_ids))

    @harmless
    def end(self, reason: FinishReason) -> None:
        """The request is over; only the first call counts."""
        if self.reason is not None:
            return
        self.reason = reason
        self.ended_s = time.perf_counter()
        self._metrics.in_flight.dec()
        self._metrics.ended(reason)
        self._metrics.e2e_latency.add(self.ended_s - self.arrival_s)
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._count_prompt()
        if self._prompt_counted:
            self._tell_sizes()
        if self.parts:
            self._tell_phases(*self.parts[0].phases)

    def _tell_sizes(self) -> None:
        metrics, request = self._metrics, self.request
        num_prompt_tokens = len(request.prompt_token_ids)
        metrics.request_prompt_tokens.add(num_prompt_tokens)
        metrics.request_computed_tokens.add(num_prompt_tokens - self.num_cached_tokens)
        metrics.request_generation_tokens.add(self.num_output_tokens)
        metrics.request_longest_output.add(max(self._num_of.values(), default=0))
        metrics.request_n.add(request.num_branches)
        metrics.request_max_tokens.add(request.sampling.max_tokens)

    def _tell_phases(self, queue_s: float, prefill_s: float) -> None:
        decode_s = self.decode_s or 0.0
        route = self.route
        self._metrics.queue_time.add(queue_s + (0.0 if route is None else route.queued_s))
        self._metrics.prefill_time.add(prefill_s)
        self._metrics.decode_time.add(decode_s)
        self._metrics.inference_time.add(prefill_s + decode_s)
        longest = max(self._num_of.values(), default=0)
        if longest > 1:
            self._metrics.time_per_output_token.add(decode_s / (longest - 1))

    @property
    def ttft_s(self) -> float | None:
        """From arrival; None without a token."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def decode_s(self) -> float | None:
        """From the first token to the end."""
        if self.first_token_s is None or self.ended_s is None:
            return None
        return self.ended_s - self.first_token_s
