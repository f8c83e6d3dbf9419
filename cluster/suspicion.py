"""Suspicion: which requests worker groups die of, and which were only beside one.

When a group dies, everything that it ran may be the cause, and goes on elsewhere. What loses two groups in a row is a
suspect: from then on it is alone among its kind in a group, and the third death is its own. Who gets on has not caused
anything: a step that kills does so again when it is repeated.
"""

from __future__ import annotations

from dataclasses import dataclass

SUSPECT_AFTER = 2
MOST_IN_A_ROW = 3
"""A request that so many groups die of is not given to another."""

PROOF_TOKENS = 8
"""Who has got so many tokens further has passed the step at which its group was lost."""

MOST_IN_ALL = 8
"""Nor one that loses so many, however far it gets with each: it may kill slowly."""


@dataclass(slots=True)
class Suspicion:
    """Of one request."""

    num_in_row: int = 0
    """Groups that were lost without it having got on in between."""
    num_lost: int = 0
    stood_at: int = 0
    """How many tokens it had when the last one was lost."""

    def group_lost(self, num_tokens: int) -> None:
        """The group that ran it died; it had ``num_tokens`` of output by then."""
        self.num_in_row = 1 if self.is_disproved(num_tokens) else self.num_in_row + 1
        self.num_lost += 1
        self.stood_at = num_tokens

    def is_disproved(self, num_tokens: int) -> bool:
        return num_tokens >= self.stood_at + PROOF_TOKENS

    @property
    def is_suspect(self) -> bool:
        return self.num_in_row >= SUSPECT_AFTER

    @property
    def is_proved(self) -> bool:
        return self.num_in_row >= MOST_IN_A_ROW or self.num_lost >= MOST_IN_ALL


class Trials:
    """Where a gateway's suspects are: at most one in a worker group, so that a death tells which of them it was."""

    def __init__(self) -> None:
        self._suspects: dict[int, str] = {}
        """Generation of the group → request id."""

    @property
    def groups(self) -> tuple[int, ...]:
        """Generations of those that have a suspect."""
        return tuple(self._suspects)

    def begin(self, request_id: str, generation: int) -> None:
        self._suspects[generation] = request_id

    def end(self, request_id: str) -> None:
        """It has left the group, or is no suspect any more; harmless for one that never was."""
        for generation in [each for each, suspect in self._suspects.items() if suspect == request_id]:
            del self._suspects[generation]
