"""A simulated worker group: the production engine with its scheduler, pool and prefix cache, and its report book.

Only the device is made up: a step takes the time that the cost model gives it, and every token is a given one. As on a
GPU, the next step is planned when the one under way ends.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from ...worker.messages import GroupReport, Request, SequenceUpdate
from ...worker.report_book import GroupIdentity, ReportBook
from ...worker.routing_hash import RoutingHasher
from ...worker.sampling_row import SamplingRow, StepResult
from ...worker.scheduler import Scheduler, SchedulerLimits
from ...worker.snapshot_parts import snapshot_parts
from ...worker.speed import SpeedMeter
from ...worker.step_plan import StepPlan
from ...worker.token_budget import FixedBudget, LatencyBudget, TokenBudget
from .coasting import CoastingEngine
from .prompts import own_token
from .step_times import StepTimes, shape_of

_ROUTER = "router"

_MOST_COASTED = 1_024
"""Steps that are looked ahead at once."""


@dataclass(frozen=True, slots=True)
class GroupConfig:
    """The same for all groups."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    step_times: StepTimes
    target_itl_s: float | None = None
    """None: prompts have what decodes leave of ``max_num_batched_tokens``."""
    coasts: bool = True
    """Skip over steps in which nothing but decoding happens. The result is the same."""


class _Device:
    """Carries out steps by saying what they give, at once; how long they take is told apart."""

    def __init__(self, step_times: StepTimes) -> None:
        self._step_times = step_times
        self.step_s = 0.0
        """Of the last step launched."""

    def launch(self, plan: StepPlan, rows: list[SamplingRow]) -> Future[StepResult]:
        self.step_s = self._step_times.step_s(shape_of(plan))
        result: Future[StepResult] = Future()
        result.set_result(StepResult([own_token(row.seed) for row in rows]))
        return result


class SimulatedGroup:
    """Time is given with each call, and does not go back.

    ``on_update(update, now)`` is told of every token; those of steps that were skipped come together, by
    ``on_coasted(request ids, times of their tokens)``.
    """

    def __init__(
        self,
        name: str,
        generation: int,
        config: GroupConfig,
        hasher: RoutingHasher,
        on_update: Callable[[SequenceUpdate, float], None],
        on_coasted: Callable[[list[str], list[float]], None],
    ) -> None:
        self.name = name
        self.generation = generation
        self.busy_s = 0.0
        """Time of all steps launched."""
        self.num_coasted = 0
        """Steps that were skipped."""
        self.wakes_at_s: float | None = None
        """When ``wake`` is due: the step under way is over, or has been since coasting began. None: idle."""
        self._now = 0.0
        self._config = config
        self._device = _Device(config.step_times)
        self._on_coasted = on_coasted
        self._ends_s: list[float] = []
        """Ends of steps at which there is nothing to do but what can be skipped."""
        limits = SchedulerLimits(
            config.num_blocks,
            config.block_size,
            config.max_num_seqs,
            config.max_num_batched_tokens,
            max_model_len=config.num_blocks * config.block_size,
            plans_ahead=True,
        )
        speed = SpeedMeter()
        self.engine = CoastingEngine(
            Scheduler(limits, hasher, budget=_budget(config, speed)),
            self._device,
            clock=lambda: self._now,
            emit=lambda _, update: on_update(update, self._now),
            speed=speed,
            hasher=hasher,
        )
        identity = GroupIdentity("", name, generation, config.block_size, config.num_blocks, config.max_num_seqs)
        self._book = ReportBook(identity, metrics_of=lambda _: "", routers=(_ROUTER,))
        self._has_changed = True
        """Since the book was told."""

    # ---- computing ----

    def submit(self, request: Request, now: float) -> None:
        """A request arrives, between two steps or in the middle of one."""
        self._catch_up(now)
        self._now = now
        self.engine.submit(request)
        self._has_changed = True
        if self._ends_s:  # what coasts ends with the step under way
            self.wakes_at_s = self._ends_s[0]
            self._ends_s = []
        elif self.wakes_at_s is None:
            self.wakes_at_s = now

    def wake(self) -> None:
        """It is ``wakes_at_s``: take in what is over, and launch the next step."""
        now = self.wakes_at_s
        if now is None:
            raise RuntimeError(f"{self.name} is idle")
        self._catch_up(now)
        self._now = now
        self.engine.step()
        self._has_changed = True
        if self.engine.in_flight is None:
            self.wakes_at_s = now if self.engine.scheduler.has_work else None
            return
        self.busy_s += self._device.step_s
        self.wakes_at_s = now + self._device.step_s
        if self._config.coasts:
            self._look_ahead(self.wakes_at_s)

    def end(self, now: float) -> list[str]:
        """The group dies; the ids of the requests that are under way there."""
        self._catch_up(now)
        self._ends_s, self.wakes_at_s = [], None
        return [progress.request_id for progress in self.engine.live_progress()]

    def _catch_up(self, now: float) -> bool:
        """Do what was skipped up to ``now``; whether there was anything."""
        num_over = bisect_right(self._ends_s, now)
        if num_over:
            over, self._ends_s = self._ends_s[:num_over], self._ends_s[num_over:]
            self.engine.coast(over)
            self._now = over[-1]  # the engine's clock is read for reports too: when did the step under way begin
            self.num_coasted += num_over
            following_s = self._ends_s[0] if self._ends_s else self.wakes_at_s
            self.busy_s += (following_s or over[-1]) - over[0]
            self._on_coasted([sequence.request.request_id for sequence in self.engine.scheduler.running], over)
        return num_over > 0

    def _look_ahead(self, end_s: float) -> None:
        """The step under way ends at ``end_s``: find out until when steps can be skipped."""
        num_plain = min(self.engine.num_plain_steps(), _MOST_COASTED)
        if num_plain < 1:
            return
        running = self.engine.scheduler.running
        num_kv_tokens = sum([sequence.num_computed_tokens for sequence in running]) + len(running)
        steps_s = self._config.step_times.decode_steps_s(len(running), num_kv_tokens, num_plain)
        ends_s = [end_s]
        for step_s in steps_s.tolist():
            ends_s.append(ends_s[-1] + step_s)
        self.wakes_at_s = ends_s.pop()
        self._ends_s = ends_s

    # ---- reporting ----

    def take_report(self, now: float) -> GroupReport:
        """Everything that the router has not acknowledged."""
        self._bring_up_to_date(now)
        return self._book.take(_ROUTER, now)

    def report_arrived(self, report: GroupReport, *, wants_snapshot: bool, now: float) -> None:
        has_missed = self._book.acknowledged(_ROUTER, report)
        if wants_snapshot or has_missed:
            self._bring_up_to_date(now)
            parts = snapshot_parts(self.engine.scheduler.cache.snapshot())
            self._book.add_snapshot(self.engine, parts, _ROUTER, now)

    def _bring_up_to_date(self, now: float) -> None:
        """Once for each report: what the book would be told after each step adds up to the same."""
        if self._catch_up(now) or self._has_changed:
            self._has_changed = False
            self._book.collect(self.engine, now)

    def has_news_at_s(self, now: float) -> float | None:
        """When there is something to report besides the load: by now, or later while steps are skipped; None: not known
        before the next ``wake``."""
        if self._has_changed:
            self._bring_up_to_date(now)
        if self._book.has_news(_ROUTER):
            return now
        number = self.engine.num_steps_without_blocks() if self._ends_s else 0
        return self._ends_s[number] if number < len(self._ends_s) else None

    @property
    def has_urgent_news(self) -> bool:
        """By now, something to report besides the load and the blocks that running requests have filled."""
        return self._book.has_urgent_news(_ROUTER)


def _budget(config: GroupConfig, speed: SpeedMeter) -> TokenBudget:
    most = config.max_num_batched_tokens
    if config.target_itl_s is None:
        return FixedBudget(most)
    return LatencyBudget(most, config.target_itl_s, speed, least=config.block_size)
