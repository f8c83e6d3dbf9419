"""The groups that serve one model, and what is learned from all of them together."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from ..worker.messages import GroupReport, RouteQuery
from .cost import Floats, Load, prefill_s
from .group import WORK_HORIZON_S, Group
from .load_table import LoadTable, Priors
from .rates import DecayedRate, DecodeModel, Mean

UTILISATION_HORIZON_S = 30.0
FIRST_PRIORS = Priors(prefill_token_s=1 / 5_000, step_s=0.02, step_slope_s=0.02 * DecodeModel.PRIOR_SHARE)
PRIOR_OUTPUT_TOKENS = 128.0
PRIOR_UNCACHED_TOKENS = 128.0
_WORK_MEMORY = 1_000.0
"""Requests whose work is remembered, for its mean and its spread."""
_HARDLY = 1e-9
"""Weight of a prior that the first observation does away with."""
REPORT_DELAY_S = 0.1
"""A place that becomes free is known, and filled again, within this time."""
_MAX_FENCES = 4096


class Pool:
    """The live groups of a model by name, each in its newest generation."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.groups: dict[str, Group] = {}
        self.table = LoadTable()
        self.members: tuple[Group, ...] = ()
        """By their rows in the table. A new tuple whenever a group comes or goes."""
        self.slots = 0
        """Mask of the slots that they have in the prefix index."""
        self._has_changed = False
        self.output_tokens = Mean(PRIOR_OUTPUT_TOKENS)
        """Of a sequence."""
        self.uncached_tokens = Mean(PRIOR_UNCACHED_TOKENS)
        """Of a request's prompt."""
        self.prefill_context = Mean(0.0)
        """Tokens before a token of prefill, by requests."""
        self._mean_work_s = Mean(0.0, prior_weight=_HARDLY, memory=_WORK_MEMORY)
        self._mean_squared_work = Mean(0.0, prior_weight=_HARDLY, memory=_WORK_MEMORY)
        self._work = DecayedRate(UTILISATION_HORIZON_S)
        self._load: tuple[int, Load] | None = None
        self._room: tuple[int, npt.NDArray[np.bool_]] | None = None
        """Both of a version of the table."""
        self._newest: dict[str, int] = {}

    def is_void(self, report: GroupReport) -> bool:
        """Whether a later generation of the same group has been seen."""
        return report.generation < self._newest.get(report.group, report.generation)

    def admit(self, report: GroupReport, create: Callable[[], Group]) -> Group:
        """The group that reports, made by ``create`` if this generation is new. Older ones must be gone by now."""
        self._newest.pop(report.group, None)
        self._newest[report.group] = report.generation
        if len(self._newest) > _MAX_FENCES:
            del self._newest[next(iter(self._newest))]
        group = self.groups.get(report.group)
        if group is None:
            group = self.groups[report.group] = create()
            group.row = self.table.add(group.load_row())
            self.slots |= 1 << group.slot
            self.members = (*self.members, group)
            self._has_changed = True
        return group

    def note_load(self, group: Group) -> None:
        """Something has changed about the group that decisions depend on."""
        self._has_changed |= self.table.is_draining(group.row) != group.report.draining
        before = self.table.slot(group.row)
        if before != group.slot:
            self.slots ^= 1 << before | 1 << group.slot
        self.table.write(group.row, group.load_row())

    @property
    def is_measured(self) -> bool:
        """Whether any group has measured how fast it computes prompts."""
        return self.table.is_measured

    def take_changes(self) -> bool:
        """Whether groups have come, gone, or begun or ceased to drain since the last call."""
        has_changed, self._has_changed = self._has_changed, False
        return has_changed

    def load(self) -> Load:
        """Of all groups, good until one changes."""
        if self._load is None or self._load[0] != self.table.version:
            load = self.table.load(FIRST_PRIORS, self.prefill_context.value)
            self._load = (self.table.version, load)
        return self._load[1]

    def has_room(self) -> npt.NDArray[np.bool_]:
        """bool [num_groups]: groups with a place and blocks for another request; what finds none waits where it can
        still go elsewhere.

        A full group ends N sequences each L * s(N) seconds. As many as end within ``REPORT_DELAY_S``, until a place
        that came free is known and filled, may be there beyond its places, one at least, so that it never idles. The
        blocks of a mean request must be free. A group without work has room for anything. Prompts ahead do not count:
        held back here until those of some group take less than L * s(N), requests of Mooncake's trace at 65 % load
        waited an eighth longer, since those with little to compute then wait behind others.
        """
        if self._room is None or self._room[0] != self.table.version:
            self._room = (self.table.version, self._find_room())
        return self._room[1]

    def _find_room(self) -> npt.NDArray[np.bool_]:
        load, num_output_tokens = self.load(), self.output_tokens.value
        residence_s = np.maximum(num_output_tokens * load.full_step_s, REPORT_DELAY_S)
        ahead = np.ceil(load.max_num_seqs * REPORT_DELAY_S / residence_s)
        has_seat = load.num_sequences < load.max_num_seqs + ahead
        has_blocks = load.num_free_blocks * load.block_size >= self.uncached_tokens.value + num_output_tokens
        room: npt.NDArray[np.bool_] = (has_seat & has_blocks) | (load.num_sequences == 0)
        return room

    def drain_per_s(self) -> float:
        """Requests that all groups would finish in a second with all places taken; 0.0 until that is measured.

        Where steps have been measured and prefill has not, prompts are too short to make a difference.
        """
        if not self.table.has_steps:
            return 0.0
        load = self.load()
        decoded = load.max_num_seqs / (self.output_tokens.value * load.full_step_s)
        if not self.is_measured:
            return float(decoded.sum())
        computed = load.prefill_tokens_per_s / max(1.0, self.uncached_tokens.value)
        return float(np.minimum(decoded, computed).sum())

    def able(self, query: RouteQuery) -> npt.NDArray[np.bool_]:
        """bool [num_groups]: groups that the request may go to."""
        able = self.table.takes_requests
        if query.allowed_groups:
            able &= self.rows_of(query.allowed_groups)
        if query.excluded_groups:
            able &= ~self.rows_of(query.excluded_groups)
        if query.excluded_generations:
            able &= np.array([group.generation not in query.excluded_generations for group in self.members], np.bool_)
        return able

    def rows_of(self, names: tuple[str, ...]) -> npt.NDArray[np.bool_]:
        """bool [num_groups]: the groups of these names."""
        rows = np.zeros(len(self.members), np.bool_)
        rows[[self.groups[name].row for name in names if name in self.groups]] = True
        return rows

    def silent(self, now: float, timeout_s: float) -> Iterator[Group]:
        """Groups whose last report is too old."""
        return (group for group in self.groups.values() if now - group.reported_at_s >= timeout_s)

    def remove(self, group: Group) -> None:
        """The group is gone; the last one takes its row."""
        del self.groups[group.name]
        self.slots &= ~(1 << self.table.slot(group.row))
        self.table.remove(group.row)
        members = list(self.members)
        last = members.pop()
        if last is not group:
            last.row = group.row
            members[group.row] = last
        self.members = tuple(members)
        self._has_changed = True

    @property
    def imbalance(self) -> float:
        """Prefill work given lately to the group that was given most, by the mean over groups; 1.0 without work."""
        newest = max((group.prefill_work.at_s for group in self.members), default=0.0)
        work = [group.prefill_work.per_s(newest) for group in self.members]
        return max(work) * len(work) / sum(work) if any(work) else 1.0

    def give_work(self, group: Group, num_uncached_tokens: float, num_reused_tokens: float, now: float) -> None:
        """``group`` is to compute so many tokens of a prompt behind so many others."""
        work_s = float(prefill_s(self.load(), num_uncached_tokens, num_reused_tokens)[group.row])
        self._work.add(work_s, now)
        group.prefill_work.add(work_s, now)
        self._mean_work_s.add(work_s)
        self._mean_squared_work.add(work_s * work_s)
        self.uncached_tokens.add(num_uncached_tokens)
        self.prefill_context.add(num_reused_tokens + num_uncached_tokens / 2)

    @property
    def variability(self) -> float:
        """E[S^2] / (2 * E[S]^2) of the prefill work S of a request."""
        mean = self._mean_work_s.value
        return self._mean_squared_work.value / (2 * mean * mean) if mean > 0 else 1.0

    def utilisations(self, now: float) -> Floats:
        """float64 [num_groups]: prefill work that arrived lately, as a share of the time that passed; may exceed 1.

        All groups' work of ``UTILISATION_HORIZON_S``, dealt out as that of ``WORK_HORIZON_S`` was: it follows the load
        at once, and evens out in the end what each group was given.
        """
        given_s = self.table.work_s(WORK_HORIZON_S, now)
        total_s = float(given_s.sum())
        return given_s * (self._work.per_s(now) / total_s) if total_s > 0 else np.zeros(len(given_s))

    @property
    def latest_utilisation(self) -> float:
        """When a group was last given work."""
        return self._work.latest_per_s() / max(1, len(self.groups))

    def check(self) -> None:
        """Raise AssertionError unless the table says what the groups say."""
        if sorted(map(id, self.members)) != sorted(map(id, self.groups.values())):
            raise AssertionError("members and groups differ")
        if self.slots != sum([1 << group.slot for group in self.members]):
            raise AssertionError("the mask of slots is not that of the groups")
        for number, group in enumerate(self.members):
            if group.row != number or not self.table.holds(number, group.load_row()):
                raise AssertionError(f"the load of group {group.name} is not what the table says")
