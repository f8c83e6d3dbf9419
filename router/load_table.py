"""LoadTable: the load of all groups of a model in columns, so that one decision is a few operations on arrays.

A row is a group's; its number changes when another group is removed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .cost import Load

UNMEASURED = 0.0
"""Instead of a rate or a time."""


class Row(NamedTuple):
    """One group. All are float64 in the table: whole numbers up to 2^53 are exact."""

    reported_at_s: float
    backlog_tokens: float
    reserved_tokens: float
    prefill_tokens_per_s: float
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
    """Position of its state in ``KnowledgeState``."""


_RATE, _FULL_STEP, _SLOPE, _CONFIDENCE, _SLOT, _DRAINING, _KNOWLEDGE = (
    Row._fields.index(name)
    for name in (
        *("prefill_tokens_per_s", "full_step_s", "step_slope_s"),
        *("confidence", "slot", "draining", "knowledge"),
    )
)
_NUM_LOADS = len(Load._fields)


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

    def slot(self, number: int) -> int:
        """The slot of one row."""
        return int(self._values[_SLOT, number])

    def remove(self, number: int) -> None:
        """The last row takes the place of the removed one."""
        self.num_rows -= 1
        self.version += 1
        self._values[:, number] = self._values[:, self.num_rows]

    def load(self, first_rate: float, first_step_s: float, slope_share: float) -> Load:
        """All rows. Groups that have not measured themselves are taken to be as their peers are in the mean, or, where
        none has, as the arguments say; the slope of a step is then its share ``slope_share``."""
        values = self._values[:_NUM_LOADS, : self.num_rows]
        rates, steps_s = values[_RATE], values[_FULL_STEP]
        if not rates.all() or not steps_s.all():
            values = values.copy()
            step_s = _mean_of_measured(steps_s, first_step_s)
            values[_SLOPE, steps_s == UNMEASURED] = step_s * slope_share
            values[_FULL_STEP, steps_s == UNMEASURED] = step_s
            values[_RATE, rates == UNMEASURED] = _mean_of_measured(rates, first_rate)
        return Load(*values)

    @property
    def is_measured(self) -> bool:
        """Whether any group has measured how fast it computes prompts."""
        return bool(self._values[_RATE, : self.num_rows].any())

    @property
    def confidence(self) -> npt.NDArray[np.float64]:
        return self._values[_CONFIDENCE, : self.num_rows]

    @property
    def slots(self) -> npt.NDArray[np.int64]:
        """int64 [num_rows]."""
        return self._values[_SLOT, : self.num_rows].astype(np.int64)

    @property
    def knowledge(self) -> npt.NDArray[np.int64]:
        """int64 [num_rows]: positions in ``KnowledgeState``."""
        return self._values[_KNOWLEDGE, : self.num_rows].astype(np.int64)

    @property
    def takes_requests(self) -> npt.NDArray[np.bool_]:
        """bool [num_rows]: those that are not draining."""
        return np.equal(self._values[_DRAINING, : self.num_rows], 0.0)


def _mean_of_measured(values: npt.NDArray[np.float64], otherwise: float) -> float:
    num_measured = np.count_nonzero(values)
    return float(values.sum()) / num_measured if num_measured else otherwise
