"""What the router knows of one worker group: its last report, and what was promised to it since.

A reservation counts as load from the decision until the group says that it has received the request, which is from then
on part of the numbers that it reports. So load needs no memory: after a restart of the router the first report tells
all of it. The reservation itself stays until the prefill is reported, to compare what was expected with what was found.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..worker.messages import GroupReport, RouteQuery
from .knowledge import STATES, GroupKnowledge
from .load_table import UNMEASURED, Row
from .rates import DecayedRate, DecodeModel, Mean

if TYPE_CHECKING:
    from .decision import Decision

WORK_HORIZON_S = 300.0
"""Time over which groups are compared for the prefill work that they were given."""
_SPEED_MEMORY = 300.0
"""Reports whose measurements count."""
_LEAST_CONSTANT_SHARE = 0.1
"""Of a prompt token's time at least so much does not depend on what is before it."""


@dataclass(slots=True)
class Reservation:
    """A request on its way to the group, or waiting there to be computed."""

    query: RouteQuery
    made_at_s: float
    decision: Decision | None
    """None: another router has made it."""
    expected_cached_tokens: int
    confirmed_cached_tokens: int
    """Those of the expected cached tokens that were confirmed when the decision was made."""
    num_uncached_tokens: int
    num_new_blocks: int
    num_stored_before: int
    num_removed_before: int
    received: bool = False

    @property
    def num_sequences(self) -> int:
        return self.query.num_branches


class Group:
    """One generation of a worker group. ``row`` is its place in the pool's load table."""

    def __init__(self, report: GroupReport, knowledge: GroupKnowledge, now: float) -> None:
        self.row = -1
        self.report = report
        self.reported_at_s = now
        self.knowledge = knowledge
        self.decode = DecodeModel()
        self._token_s = Mean(0.0, prior_weight=0.0, memory=_SPEED_MEMORY)
        self._context_s = Mean(0.0, prior_weight=0.0, memory=_SPEED_MEMORY)
        """Of a prompt token, and of what it takes longer for each token before it. Each report measures a few steps; a
        group is as fast as all of them say, and groups that are alike look alike."""
        self.reservations: dict[str, Reservation] = {}
        self.decoding: dict[str, int] = {}
        """Requests of several sequences that are prefilled and not finished → how many."""
        self.prefill_work = DecayedRate(WORK_HORIZON_S)
        """Seconds of prefill that it was given."""
        # Of the reservations that the reports do not include yet.
        self._num_reserved_sequences = 0
        self._reserved_tokens = 0
        self._reserved_blocks = 0

    @property
    def name(self) -> str:
        return self.report.group

    @property
    def generation(self) -> int:
        return self.report.generation

    @property
    def slot(self) -> int:
        return self.knowledge.slot

    def update(self, report: GroupReport, now: float) -> None:
        """A new report: it replaces the last one, and teaches how long steps take."""
        self.report = report
        self.reported_at_s = now
        if report.prefill_tokens_per_s > 0:
            self._note_speed(report)
        if report.decode_step_s > 0 and report.num_running > 0:
            self.decode.add(report.num_running, report.decode_step_s)

    def reserve(self, request_id: str, reservation: Reservation) -> None:
        self.release(request_id)
        self.reservations[request_id] = reservation
        self._count(reservation, 1)

    def received(self, request_id: str) -> None:
        """The group's reports include the request from now on."""
        reservation = self.reservations.get(request_id)
        if reservation is not None and not reservation.received:
            self._count(reservation, -1)
            reservation.received = True

    def release(self, request_id: str) -> Reservation | None:
        """Forget the reservation; None if there is none (any more)."""
        self.received(request_id)
        return self.reservations.pop(request_id, None)

    def note_prefilled(self, request_id: str, reservation: Reservation) -> None:
        """Remember until its end of how many sequences the request is."""
        if reservation.num_sequences > 1:
            self.decoding[request_id] = reservation.num_sequences

    def forget_sequences(self, request_id: str) -> int:
        """The request has finished; of how many sequences it was, as far as is known."""
        reservation = self.reservations.get(request_id)
        return self.decoding.pop(request_id, 1 if reservation is None else reservation.num_sequences)

    def overdue(self, now: float, timeout_s: float, received_timeout_s: float) -> list[str]:
        """Requests that should have been received, or be computed, by now."""
        return [
            request_id
            for request_id, reservation in self.reservations.items()
            if now - reservation.made_at_s >= (received_timeout_s if reservation.received else timeout_s)
        ]

    def load_row(self) -> Row:
        """The group's load: the last report, and the reservations that it does not include yet."""
        report, decode, knowledge = self.report, self.decode, self.knowledge
        return Row(
            reported_at_s=self.reported_at_s,
            backlog_tokens=report.num_uncomputed_prompt_tokens,
            reserved_tokens=self._reserved_tokens,
            prefill_token_s=self._token_s.value if self._token_s.is_measured else UNMEASURED,
            prefill_context_s=self._context_s.value if self._context_s.is_measured else 0.0,
            num_sequences=report.num_running + report.num_waiting + self._num_reserved_sequences,
            max_num_seqs=max(1, report.max_num_seqs),
            full_step_s=decode.step_s(report.max_num_seqs) if decode.is_measured else UNMEASURED,
            step_slope_s=decode.slope_s if decode.is_measured else UNMEASURED,
            num_free_blocks=max(0, report.num_free_blocks - self._reserved_blocks),
            block_size=report.block_size,
            confidence=knowledge.confidence,
            slot=knowledge.slot,
            draining=report.draining,
            knowledge=STATES.index(knowledge.state),
            work_s=self.prefill_work.sum,
            worked_at_s=self.prefill_work.at_s,
        )

    def check(self) -> None:
        """Raise AssertionError unless the reserved load is the sum of the reservations not yet received."""
        open_ones = [reservation for reservation in self.reservations.values() if not reservation.received]
        sequences = sum(reservation.num_sequences for reservation in open_ones)
        tokens = sum(reservation.num_uncached_tokens for reservation in open_ones)
        blocks = sum(reservation.num_new_blocks for reservation in open_ones)
        if (self._num_reserved_sequences, self._reserved_tokens, self._reserved_blocks) != (sequences, tokens, blocks):
            raise AssertionError(f"group {self.name}: reserved load is not the sum of its reservations")

    def _note_speed(self, report: GroupReport) -> None:
        """Of the mean time of a prompt token, a part is for the tokens before it."""
        mean_s = 1.0 / report.prefill_tokens_per_s
        token_s = mean_s - report.prefill_context_s * report.prefill_context
        self._token_s.add(max(_LEAST_CONSTANT_SHARE * mean_s, token_s))
        self._context_s.add(report.prefill_context_s)

    def _count(self, reservation: Reservation, sign: int) -> None:
        self._num_reserved_sequences += sign * reservation.num_sequences
        self._reserved_tokens += sign * reservation.num_uncached_tokens
        self._reserved_blocks += sign * reservation.num_new_blocks
