"""What a simulated cluster did: noted token by token, summed up in the end."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...worker.messages import SequenceUpdate
from .group import SimulatedGroup
from .traces import Trace, TraceRequest

_LEAST_S = 1e-9
_NUM_BUCKETS = 4_096
"""Up to 5e8 s."""
_BUCKET = math.log(1.01)
_FIRST_BUCKET = round(math.log(_LEAST_S) / _BUCKET)
_MOST_NOTED = 65_536


class Times(NamedTuple):
    """Seconds."""

    mean: float
    p50: float
    p90: float
    p99: float


class QuantileHistogram:
    """Of times, in buckets 1 % wide; the mean is exact. For what there are millions of."""

    def __init__(self) -> None:
        self._counts = np.zeros(_NUM_BUCKETS, np.int64)
        self._sum = 0.0
        self._noted: list[float] = []
        self._noted_counts: list[int] = []
        """What is not in the buckets yet."""

    def add(self, time_s: float, count: int = 1) -> None:
        self._noted.append(time_s)
        self._noted_counts.append(count)
        if len(self._noted) >= _MOST_NOTED:
            self._sort()

    def times(self) -> Times:
        """All NaN while nothing was added."""
        self._sort()
        num = int(self._counts.sum())
        mean = self._sum / num if num else math.nan
        return Times(mean, *[self._quantile(share * num) if num else math.nan for share in (0.5, 0.9, 0.99)])

    def buckets(self) -> tuple[tuple[float, int], ...]:
        """(time, how many), by time, of all that are not empty."""
        self._sort()
        (used,) = np.nonzero(self._counts)
        return tuple([(_time_of(bucket), int(self._counts[bucket])) for bucket in used.tolist()])

    def _quantile(self, number: float) -> float:
        return _time_of(int(np.searchsorted(np.cumsum(self._counts), number)))

    def _sort(self) -> None:
        times_s, counts = np.array(self._noted, np.float64), np.array(self._noted_counts, np.int64)
        self._noted, self._noted_counts = [], []
        buckets = np.rint(np.log(np.maximum(times_s, _LEAST_S)) / _BUCKET).astype(np.int64) - _FIRST_BUCKET
        np.add.at(self._counts, np.minimum(buckets, _NUM_BUCKETS - 1), counts)
        self._sum += float(times_s @ counts)


def _time_of(bucket: int) -> float:
    return math.exp((bucket + _FIRST_BUCKET) * _BUCKET)


@dataclass(slots=True)
class Outcome:
    """Of one request. Times are on the virtual clock."""

    group: str | None = None
    """None while it is not routed, and if nobody could take it."""
    first_token_s: float = math.nan
    last_token_s: float = math.nan
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    is_finished: bool = False

    @property
    def mean_gap_s(self) -> float:
        """Mean time between two of its tokens; 0.0 where there is one."""
        return (self.last_token_s - self.first_token_s) / max(1, self.num_output_tokens - 1)


@dataclass(frozen=True, slots=True)
class Result:
    """One policy on one trace. ``outcomes`` are in the order of the trace's requests."""

    block_hit_rate: float
    """Blocks of the trace that were found in a prefix cache, of all."""
    token_hit_rate: float
    """The same in prompt tokens."""
    time_to_first_token: Times
    """From the arrival at the gateway."""
    inter_token: Times
    """Between two tokens of a request, over all pairs of all requests."""
    imbalance: float
    """Prompt tokens computed by the group that computed most, by the mean over groups."""
    utilisation: float
    """Share of all groups' time in which a step ran."""
    duration_s: float
    """Until the last token."""
    num_preemptions: int
    num_moved: int
    """Requests that went on elsewhere after their group was lost; counted each time."""
    num_steps: int
    gaps: tuple[tuple[float, int], ...]
    """Of ``inter_token``: (seconds, how many), by time."""
    outcomes: tuple[Outcome, ...]
    arrivals_s: tuple[float, ...]

    @property
    def num_refused(self) -> int:
        return sum(outcome.group is None for outcome in self.outcomes)

    def first_token_times_s(self) -> npt.NDArray[np.float64]:
        """float64 [number of requests]: from the arrival to the first token; NaN where there is none."""
        first_s = np.array([outcome.first_token_s for outcome in self.outcomes], np.float64)
        return np.subtract(first_s, np.array(self.arrivals_s, np.float64), dtype=np.float64)

    def goodput(self, slo_ttft_s: float, slo_itl_s: float) -> float:
        """Share of requests whose first token came in time and whose further ones did in their mean."""
        good = [
            outcome.first_token_s - arrival_s <= slo_ttft_s and outcome.mean_gap_s <= slo_itl_s
            for outcome, arrival_s in zip(self.outcomes, self.arrivals_s, strict=True)
        ]
        return sum(good) / len(good)

    def figures(self, slo_ttft_s: float, slo_itl_s: float) -> dict[str, Any]:
        """Plain values for JSON."""
        goodput = self.goodput(slo_ttft_s, slo_itl_s)
        return {
            "num_requests": len(self.outcomes),
            "num_refused": self.num_refused,
            "block_hit_rate": self.block_hit_rate,
            "token_hit_rate": self.token_hit_rate,
            "ttft_s": self.time_to_first_token._asdict(),
            "itl_s": self.inter_token._asdict(),
            "goodput": goodput,
            "goodput_per_s": goodput * len(self.outcomes) / self.duration_s,
            "imbalance": self.imbalance,
            "utilisation": self.utilisation,
            "duration_s": self.duration_s,
            "num_preemptions": self.num_preemptions,
            "num_moved": self.num_moved,
            "num_steps": self.num_steps,
        }


class Results:
    """Takes notes while a simulation runs. Request ids are positions in the trace."""

    def __init__(
        self, trace: Trace, groups: Sequence[str], kv_block_size: int, on_finished: Callable[[], None]
    ) -> None:
        self.num_left = len(trace.requests)
        """Requests that have not ended."""
        self._trace = trace
        self._groups = groups
        self._kv_block_size = kv_block_size
        self._on_finished = on_finished
        self._num_moved = 0
        self._gaps = QuantileHistogram()
        self._outcomes = [Outcome() for _ in trace.requests]

    def note_routed(self, number: int, group: str) -> None:
        self._outcomes[number].group = group

    def note_moved(self, number: int) -> None:
        """Its group was lost; another one goes on with it."""
        self._num_moved += 1

    def num_output_tokens(self, number: int) -> int:
        """That the request has had so far."""
        return self._outcomes[number].num_output_tokens

    def note_refused(self, number: int) -> None:
        self._end(self._outcomes[number])

    def note_update(self, update: SequenceUpdate, now: float) -> None:
        """A token, or an end, or both."""
        outcome = self._outcomes[int(update.request_id)]
        if update.token_ids:
            if outcome.num_output_tokens == 0:
                outcome.first_token_s = now
            else:
                self._gaps.add(now - outcome.last_token_s)
            outcome.last_token_s = now
            outcome.num_output_tokens += 1
        if update.finish_reason is not None:
            outcome.num_cached_tokens = update.num_cached_tokens or 0
            self._end(outcome)

    def note_coasted(self, request_ids: Iterable[str], times_s: Sequence[float]) -> None:
        """Each of the requests got a token at each of the times."""
        outcomes = [self._outcomes[int(request_id)] for request_id in request_ids]
        for outcome in outcomes:
            self._gaps.add(times_s[0] - outcome.last_token_s)
            outcome.last_token_s = times_s[-1]
            outcome.num_output_tokens += len(times_s)
        for before_s, time_s in itertools.pairwise(times_s):
            self._gaps.add(time_s - before_s, len(outcomes))

    def summary(self, groups: Iterable[SimulatedGroup], duration_s: float) -> Result:
        """When all requests have ended."""
        groups = list(groups)
        group_time_s = max(1, len(self._groups)) * duration_s
        requests, outcomes = self._trace.requests, self._outcomes
        firsts = [o.first_token_s - r.arrival_s for r, o in zip(requests, outcomes, strict=True) if o.group is not None]
        hits = [self._num_hit_blocks(r, o.num_cached_tokens) for r, o in zip(requests, outcomes, strict=True)]
        return Result(
            block_hit_rate=sum(hits) / sum(self._num_blocks(request) for request in requests),
            token_hit_rate=sum(o.num_cached_tokens for o in outcomes) / sum(r.num_prompt_tokens for r in requests),
            time_to_first_token=_times(firsts),
            inter_token=self._gaps.times(),
            imbalance=_imbalance(self._computed()),
            utilisation=sum(group.busy_s for group in groups) / group_time_s,
            duration_s=duration_s,
            num_preemptions=sum(group.engine.scheduler.counters.num_preemptions for group in groups),
            num_moved=self._num_moved,
            num_steps=sum(group.engine.counters.num_steps for group in groups),
            gaps=self._gaps.buckets(),
            outcomes=tuple(outcomes),
            arrivals_s=tuple(request.arrival_s for request in requests),
        )

    def _end(self, outcome: Outcome) -> None:
        outcome.is_finished = True
        self.num_left -= 1
        self._on_finished()

    def _num_blocks(self, request: TraceRequest) -> int:
        return max(len(request.block_ids), -(-request.num_prompt_tokens // self._trace.block_size))

    def _num_hit_blocks(self, request: TraceRequest, num_cached_tokens: int) -> int:
        """A block of the trace is found when all of it is; the last one, if it is found as far as full KV blocks go."""
        size, last_starts_at = self._trace.block_size, self._trace.block_size * (self._num_blocks(request) - 1)
        is_whole = request.num_prompt_tokens - num_cached_tokens < self._kv_block_size
        if is_whole and num_cached_tokens > last_starts_at:
            return self._num_blocks(request)
        return num_cached_tokens // size

    def _computed(self) -> Mapping[str, int]:
        """Prompt tokens that each group had to compute."""
        tokens = dict.fromkeys(self._groups, 0)
        for request, outcome in zip(self._trace.requests, self._outcomes, strict=True):
            if outcome.group is not None:
                tokens[outcome.group] += request.num_prompt_tokens - outcome.num_cached_tokens
        return tokens


def _times(values: Sequence[float]) -> Times:
    if not values:
        return Times(math.nan, math.nan, math.nan, math.nan)
    return Times(statistics.fmean(values), *np.quantile(values, (0.5, 0.9, 0.99)).tolist())


def _imbalance(tokens: Mapping[str, int]) -> float:
    mean = statistics.fmean(tokens.values())
    return max(tokens.values()) / mean if mean else math.nan
