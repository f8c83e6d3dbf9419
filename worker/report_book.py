"""ReportBook: what a worker group has to tell the routers, kept until each of them has it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from .engine import Engine
from .messages import GroupReport
from .report_reader import EventLog, ReportReader
from .snapshot_parts import SnapshotParts


@dataclass(frozen=True, slots=True)
class GroupIdentity:
    """What does not change over the life of a worker group."""

    model: str
    group: str
    generation: int
    block_size: int
    num_blocks: int
    max_num_seqs: int
    weights: str = ""
    """See ``GroupReport``."""


class _Load(NamedTuple):
    """What changes with every step, by the names it has in a GroupReport."""

    num_free_blocks: int
    num_running: int
    num_waiting: int
    num_uncomputed_prompt_tokens: int
    prefill_tokens_per_s: float
    decode_step_s: float
    prefill_context: float
    prefill_context_s: float


class ReportBook:
    """``metrics_of(engine)`` gives the group's metrics in Prometheus text format; ``routers`` are the names of those
    that are told. Time is in seconds of any steady clock.
    """

    def __init__(self, identity: GroupIdentity, metrics_of: Callable[[Engine], str], routers: Iterable[str]) -> None:
        self.draining = False
        self._metrics_of = metrics_of
        self._log = EventLog(identity.generation)
        self._readers = {router: ReportReader(self._log) for router in routers}
        self._blank = _blank_report(identity)
        self._load = _Load(identity.num_blocks, 0, 0, 0, 0.0, 0.0, 0.0, 0.0)
        self.metrics_due = True
        """Set once in a while: the next ``collect`` renders the metrics anew."""

    def collect(self, engine: Engine, now: float) -> None:
        """Note what the last step changed. Called in the engine's thread."""
        progress = engine.drain_progress()
        if events := engine.scheduler.drain_events():
            self._log.add(events, now)
        for reader in self._readers.values():
            reader.note(progress, now)
        if self.metrics_due:
            self.metrics_due = False
            metrics = self._metrics_of(engine)
            for reader in self._readers.values():
                reader.metrics = metrics
        self._load = _load_of(engine)

    def add_snapshot(self, engine: Engine, parts: SnapshotParts, router: str, now: float) -> None:
        """What the group holds, which is in ``parts``, and does, for a router that has missed something. In the
        engine's thread. It carries the number of the last message; the first of all messages if there was none."""
        self.collect(engine, now)
        if self._log.next_number == 0:
            self._log.add((), now)
        self._readers[router].start_over(parts, engine.live_progress(), now)

    def take(self, router: str, now: float) -> GroupReport:
        """What the router has not acknowledged, as much of it as one report may carry."""
        reader = self._readers[router]
        return replace(
            self._blank,
            **self._load._asdict(),
            draining=self.draining,
            progress=reader.progress(),
            events=reader.events(),
            metrics=reader.metrics,
            oldest_news_age_s=reader.oldest_news_age_s(now),
        )

    def has_news(self, router: str) -> bool:
        """Something besides the passing of time."""
        return self._readers[router].has_news

    def has_urgent_news(self, router: str) -> bool:
        """News that is more than the blocks which running requests have filled."""
        return self._readers[router].has_urgent_news

    def acknowledged(self, router: str, report: GroupReport) -> bool:
        """The router has ``report``: forget what it held. True: it has missed so much that it needs a snapshot."""
        reader = self._readers[router]
        reader.acknowledged(report)
        self._log.forget(min(each.position for each in self._readers.values()))
        return reader.is_behind


def _load_of(engine: Engine) -> _Load:
    scheduler, speed = engine.scheduler, engine.speed
    return _Load(
        num_free_blocks=scheduler.num_coming_blocks,
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting,
        num_uncomputed_prompt_tokens=scheduler.num_uncomputed_prompt_tokens + engine.num_prefill_tokens_under_way,
        prefill_tokens_per_s=speed.prefill_tokens_per_s,
        decode_step_s=speed.decode_step_s,
        prefill_context=speed.prefill_context,
        prefill_context_s=speed.prefill_context_s,
    )


def _blank_report(identity: GroupIdentity) -> GroupReport:
    return GroupReport(
        model=identity.model,
        group=identity.group,
        generation=identity.generation,
        block_size=identity.block_size,
        num_blocks=identity.num_blocks,
        num_free_blocks=identity.num_blocks,
        max_num_seqs=identity.max_num_seqs,
        num_running=0,
        num_waiting=0,
        num_uncomputed_prompt_tokens=0,
        prefill_tokens_per_s=0.0,
        decode_step_s=0.0,
        draining=False,
        progress=(),
        weights=identity.weights,
    )
