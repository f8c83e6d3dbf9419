"""LoadTable: the load of all groups of a model in columns, so that one decision is a few operations on arrays.

A row is a group's; its number changes when another group is removed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .cost import Floats, Load

UNMEASURED = 0.0
"""Instead of a rate or a time."""


class Priors(NamedTuple):
    """What is taken for granted before any group has measured anything: all look alike, so only ratios count."""

    prefill_token_s: float
    step_s: float
    step_slope_s: float


class Row(NamedTuple):
    """One group. All are float64 in the table: whole numbers up to 2^53 are exact."""

    reported_at_s: float
    backlog_tokens: float
    reserved_tokens: float
    prefill_token_s: float
    prefill_context_s: float
    num_sequences: float
    max_num_seqs: float
    full_step_s: float
    step_slope_s: float
    num_free_blocks: float
    block_size: float
    confidence: float
    """How much of what is thought to be cached there is taken to be."""
    slot: float
    """In the prefix index."""
    draining: float
    """1 or 0."""
    knowledge: float
    """Position of its state in ``STATES``."""
    work_s: float
    """Seconds of prefill that it was given, fading with ``WORK_HORIZON_S`` from ``worked_at_s`` on."""
    worked_at_s: float


_COLUMNS = {name: number for number, name in enumerate(Row._fields)}


class LoadTable:
    """Columns are read as float64 [num_rows]; they are good until the table is changed."""

    def __init__(self) -> None:
        self.num_rows = 0
        self.version = 0
        """Counts the changes."""
        self._values = np.zeros((len(Row._fields), 8))

    def add(self, row: Row) -> int:
        """The number of the new row, which is the last."""
        if self.num_rows == self._values.shape[1]:
            self._values = np.concatenate((self._values, np.zeros_like(self._values)), axis=1)
        self.num_rows += 1
        self.write(self.num_rows - 1, row)
        return self.num_rows - 1

    def write(self, number: int, row: Row) -> None:
        self._values[:, number] = row
        self.version += 1

    def holds(self, number: int, row: Row) -> bool:
        return bool(np.array_equal(self._values[:, number], np.array(row, float)))

    def is_draining(self, number: int) -> bool:
        """One row."""
        return bool(self._values[_COLUMNS["draining"], number])

    def slot(self, number: int) -> int:
        """The slot of one row."""
        return int(self._values[_COLUMNS["slot"], number])

    def remove(self, number: int) -> None:
        """The last row takes the place of the removed one."""
        self.num_rows -= 1
        self.version += 1
        self._values[:, number] = self._values[:, self.num_rows]

    def load(self, first: Priors, context: float) -> Load:
        """All rows. Groups that have not measured themselves are taken to be as their peers are in the mean, or, where
        none has, as ``first`` says. ``context``: tokens before one of prefill, as is usual."""
        token_s, full_step_s = self._column("prefill_token_s"), self._column("full_step_s")
        context_s, slope_s = self._column("prefill_context_s"), self._column("step_slope_s")
        if not token_s.all():
            context_s = np.where(token_s == UNMEASURED, _mean_of_measured(context_s, 0.0, token_s), context_s)
            token_s = _filled(token_s, first.prefill_token_s)
        if not full_step_s.all():
            slope_s = np.where(
                full_step_s == UNMEASURED, _mean_of_measured(slope_s, first.step_slope_s, full_step_s), slope_s
            )
            full_step_s = _filled(full_step_s, first.step_s)
        return Load(
            reported_at_s=self._column("reported_at_s"),
            backlog_tokens=self._column("backlog_tokens"),
            reserved_tokens=self._column("reserved_tokens"),
            prefill_tokens_per_s=1.0 / (token_s + context_s * context),
            prefill_token_s=token_s,
            prefill_context_s=context_s,
            num_sequences=self._column("num_sequences"),
            max_num_seqs=self._column("max_num_seqs"),
            full_step_s=full_step_s,
            step_slope_s=slope_s,
            num_free_blocks=self._column("num_free_blocks"),
            block_size=self._column("block_size"),
        )

    def work_s(self, horizon_s: float, now: float) -> Floats:
        """float64 [num_rows]: seconds of prefill that the groups were given lately."""
        age_s = np.maximum(now - self._column("worked_at_s"), 0.0)
        return self._column("work_s") * np.exp(age_s / -horizon_s)

    @property
    def is_measured(self) -> bool:
        """Whether any group has measured how fast it computes prompts."""
        return bool(self._column("prefill_token_s").any())

    @property
    def has_steps(self) -> bool:
        """Whether any group has measured how long a step takes."""
        return bool(self._column("full_step_s").any())

    @property
    def confidence(self) -> Floats:
        return self._column("confidence")

    @property
    def slots(self) -> npt.NDArray[np.int64]:
        """int64 [num_rows]."""
        return self._column("slot").astype(np.int64)

    @property
    def knowledge(self) -> npt.NDArray[np.int64]:
        """int64 [num_rows]: positions in ``STATES``."""
        return self._column("knowledge").astype(np.int64)

    @property
    def takes_requests(self) -> npt.NDArray[np.bool_]:
        """bool [num_rows]: those that are not draining."""
        return np.equal(self._column("draining"), 0.0)

    def _column(self, name: str) -> Floats:
        return self._values[_COLUMNS[name], : self.num_rows]


def _filled(values: Floats, otherwise: float) -> Floats:
    return np.where(values == UNMEASURED, _mean_of_measured(values, otherwise, values), values)


def _mean_of_measured(values: Floats, otherwise: float, measured: Floats) -> float:
    """Of ``values`` where ``measured`` is; all others are 0."""
    num_measured = np.count_nonzero(measured)
    return float(values.sum()) / num_measured if num_measured else otherwise
