"""ReportBook: what a worker group has to tell the router, kept until the router has it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from .engine import Engine
from .messages import GroupReport, KVEvents, RequestProgress

_MOST_EVENT_MESSAGES = 4_096
"""Kept for a router that does not answer. Beyond it a snapshot takes their place."""

_MOST_PROGRESS = 16_384
"""Requests kept for a router that does not answer. Beyond it the oldest are dropped: the router has given them up."""


@dataclass(frozen=True, slots=True)
class GroupIdentity:
    """What does not change over the life of a worker group."""

    model: str
    group: str
    generation: int
    block_size: int
    num_blocks: int
    max_num_seqs: int


class ReportBook:
    """``metrics_of(engine)`` gives the group's metrics in Prometheus text format."""

    def __init__(self, identity: GroupIdentity, metrics_of: Callable[[Engine], str]) -> None:
        self.draining = False
        self._identity = identity
        self._metrics_of = metrics_of
        self._progress: dict[str, RequestProgress] = {}
        self._events: list[KVEvents] = []
        self._num_event_messages = 0
        self._latest: GroupReport = _empty_report(identity)
        self._metrics = ""
        self.metrics_due = True
        """Set once in a while: the next ``collect`` renders the metrics anew."""

    def collect(self, engine: Engine) -> None:
        """Note what the last step changed. Called in the engine's thread."""
        self._note_progress(engine.drain_progress())
        if events := engine.scheduler.drain_events():
            self._events.append(KVEvents(self._identity.generation, self._next_number(), events))
        if len(self._events) > _MOST_EVENT_MESSAGES:
            self._events = [self._snapshot(engine)]
        if self.metrics_due:
            self.metrics_due = False
            self._metrics = self._metrics_of(engine)
        self._latest = self._load(engine)

    def add_snapshot(self, engine: Engine) -> None:
        """Everything that the group holds and does, for a router that has missed something. In the engine's thread."""
        self.collect(engine)
        self._events = [self._snapshot(engine)]
        self._progress = {entry.request_id: entry for entry in engine.live_progress()} | self._progress

    def take(self) -> GroupReport:
        """Everything not yet acknowledged."""
        return replace(
            self._latest,
            draining=self.draining,
            progress=tuple(self._progress.values()),
            events=tuple(self._events),
            metrics=self._metrics,
        )

    @property
    def has_news(self) -> bool:
        """Something besides the passing of time."""
        return bool(self._progress or self._events)

    def acknowledged(self, report: GroupReport) -> None:
        """The router has ``report``: forget what it held."""
        for entry in report.progress:
            if self._progress.get(entry.request_id) == entry:
                del self._progress[entry.request_id]
        if self._metrics == report.metrics:
            self._metrics = ""
        known = {id(message) for message in report.events}
        self._events = [message for message in self._events if id(message) not in known]

    def _note_progress(self, entries: Iterable[RequestProgress]) -> None:
        self._progress.update((entry.request_id, entry) for entry in entries)
        while len(self._progress) > _MOST_PROGRESS:
            del self._progress[next(iter(self._progress))]

    def _snapshot(self, engine: Engine) -> KVEvents:
        """Carries the number of the last message; the first of all messages if there was none."""
        number = self._num_event_messages - 1 if self._num_event_messages else self._next_number()
        return KVEvents(self._identity.generation, number, engine.scheduler.cache.snapshot(), is_snapshot=True)

    def _next_number(self) -> int:
        self._num_event_messages += 1
        return self._num_event_messages - 1

    def _load(self, engine: Engine) -> GroupReport:
        scheduler = engine.scheduler
        return replace(
            self._latest,
            num_free_blocks=scheduler.num_coming_blocks,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_uncomputed_prompt_tokens=scheduler.num_uncomputed_prompt_tokens,
            prefill_tokens_per_s=engine.speed.prefill_tokens_per_s,
            decode_step_s=engine.speed.decode_step_s,
        )


def _empty_report(identity: GroupIdentity) -> GroupReport:
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
    )
