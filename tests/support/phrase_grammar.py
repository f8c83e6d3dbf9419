"""A grammar of one phrase, which a test can let lose its way."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class Phrase:
    """See ``Matcher``."""

    def __init__(
        self, phrase: tuple[int, ...], stop_token_ids: tuple[int, ...], *, lost_after: int = 99, broken_after: int = 99
    ) -> None:
        """``lost_after``: so many tokens it says that it cannot go on; ``broken_after``: it raises."""
        self.phrase, self.stop_token_ids = phrase, stop_token_ids
        self.lost_after, self.broken_after = lost_after, broken_after
        self.accepted: list[int] = []

    @property
    def is_over(self) -> bool:
        return len(self.accepted) == len(self.phrase)

    @property
    def error(self) -> str | None:
        return "the grammar is too hard" if len(self.accepted) >= self.lost_after else None

    def fill_mask(self, row: NDArray[np.int32]) -> None:
        if len(self.accepted) >= self.broken_after:
            raise ValueError("the matcher is broken")
        row[:] = 0
        for token in self.stop_token_ids if self.is_over else (self.phrase[len(self.accepted)],):
            row.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)

    def accept(self, token_id: int) -> None:
        if token_id != self.phrase[len(self.accepted)]:
            raise ValueError(f"token {token_id} was not allowed")
        self.accepted.append(token_id)

    def fork(self) -> Phrase:
        fork = Phrase(self.phrase, self.stop_token_ids, lost_after=self.lost_after, broken_after=self.broken_after)
        fork.accepted = self.accepted.copy()
        return fork
