"""TokenStream: the tokens of one request as one worker group gives them, without gaps and repeats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain

from ..worker.messages import SequenceUpdate

FIRST_PROMPT_POSITION = 1
"""Nothing comes before a prompt's first token, so that it has no log-probability."""


class GroupLost(Exception):
    """The worker group did not finish the request. ``is_dead``: it is of no use to anybody, as far as we know."""

    def __init__(self, *, is_dead: bool) -> None:
        super().__init__("the worker group was lost")
        self.is_dead = is_dead


class TokenStream:
    """The updates of one request from one group, in order, without repeats; ``positions`` are those it begins at."""

    def __init__(self, positions: dict[int, int]) -> None:
        self.loss: GroupLost | None = None
        """Set when the group is lost; no update comes after it."""
        self._waiting: list[SequenceUpdate] = []
        self._wake = nobody
        self._next_position = positions
        self._next_prompt_position = FIRST_PROMPT_POSITION

    def listen(self, wake: Callable[[], None]) -> None:
        """``wake`` is called whenever there is something to take, or the group is lost; at once if there is."""
        self._wake = wake
        if self._waiting or self.loss is not None:
            wake()

    def put(self, update: SequenceUpdate) -> bool:
        """Add an update, without what an earlier one brought. False when something before it is missing."""
        known = self._next_position.get(update.branch, 0)
        if update.position > known or (update.prompt_logprobs and update.prompt_position > self._next_prompt_position):
            return False
        fresh = _without_known(update, known, self._next_prompt_position)
        self._next_position[update.branch] = known + len(fresh.token_ids)
        self._next_prompt_position += len(fresh.prompt_logprobs)
        if fresh.token_ids or fresh.prompt_logprobs or fresh.finish_reason is not None:
            self._waiting.append(fresh)
            self._wake()
        return True

    def lose(self, loss: GroupLost) -> None:
        """No update will come any more."""
        self.loss = self.loss or loss
        self._wake()

    def take(self) -> Sequence[SequenceUpdate]:
        """What has come since the last call.

        What has gathered while the reader was busy, with a slow client say, comes as one update for each branch.
        """
        waiting, self._waiting = self._waiting, []
        return joined(waiting) if len(waiting) > 1 else waiting


def nobody() -> None:
    """Is woken where nobody listens."""


def joined(updates: Sequence[SequenceUpdate]) -> list[SequenceUpdate]:
    """One update for each branch, in the order of their first ones."""
    branches: dict[int, list[SequenceUpdate]] = {}
    for update in updates:
        branches.setdefault(update.branch, []).append(update)
    return [parts[0] if len(parts) == 1 else _join(parts) for parts in branches.values()]


def _join(parts: Sequence[SequenceUpdate]) -> SequenceUpdate:
    """What consecutive updates of one branch say together."""
    return replace(
        parts[-1],
        position=parts[0].position,
        token_ids=tuple(chain.from_iterable(part.token_ids for part in parts)),
        num_cached_tokens=next((part.num_cached_tokens for part in parts if part.num_cached_tokens is not None), None),
        logprobs=tuple(chain.from_iterable(part.logprobs for part in parts)),
        prompt_position=next((part.prompt_position for part in parts if part.prompt_logprobs), 0),
        prompt_logprobs=tuple(chain.from_iterable(part.prompt_logprobs for part in parts)),
    )


def _without_known(update: SequenceUpdate, position: int, prompt_position: int) -> SequenceUpdate:
    """What it says of output tokens from ``position`` on, and of prompt tokens from ``prompt_position`` on."""
    if update.position == position and not update.prompt_logprobs:
        return update
    num_known = position - update.position
    return replace(
        update,
        position=position,
        token_ids=update.token_ids[num_known:],
        logprobs=update.logprobs[num_known:],
        prompt_position=prompt_position,
        prompt_logprobs=update.prompt_logprobs[prompt_position - update.prompt_position :],
    )
