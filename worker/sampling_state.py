"""SamplingState: what the next token of a branch depends on beside its logits.

Penalties count tokens, bad words look at the last ones, a grammar follows all of them. Steps are planned ahead: when
one is launched, the engine does not know the tokens of the one before it. The executor does, so that is where states
live: the engine makes them and hands them over with the first row, and from then on only the executor's thread touches
them. Rows of steps that were planned for a branch that has ended meanwhile do no harm.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .errors import InvalidRequest
from .messages import FinishReason, Request, SamplingParams
from .seen_tokens import SeenTokens
from .token_wishes import TokenWishes, needs_state


class Matcher(Protocol):
    """Where a branch's output stands in the grammar that it follows."""

    @property
    def is_over(self) -> bool:
        """The output is complete: only its end may follow."""
        ...

    @property
    def error(self) -> str | None:
        """Why it cannot go on, as a sentence for the user that begins with "the grammar"."""
        ...

    def fill_mask(self, row: NDArray[np.int32]) -> None:
        """Say which tokens may come next: bit t % 32 of word t // 32 of ``row`` [ceil(vocabulary / 32)] for token t.

        Every bit is written. Where the output may end, the request's stop tokens are among them, each of them."""
        ...

    def accept(self, token_id: int) -> None:
        """The output goes on with this token, which is no stop token."""
        ...

    def fork(self) -> Matcher:
        """Another one at the same place, which goes its own way."""
        ...


MatcherOf: TypeAlias = Callable[[str, tuple[int, ...]], Matcher]
"""(grammar, stop token ids) → a matcher at its beginning. Raises InvalidRequest for a grammar that it cannot follow."""


@dataclass(frozen=True, slots=True)
class RowEnd:
    """A row gives no token, and that ends its branch: because of what its request asks for."""

    reason: FinishReason
    """ERROR, or STOP where a grammar is complete and there is no stop token that could say so."""
    error: str | None = None
    param: str | None = None
    """The field of the request that ``error`` is about."""


class SamplingState:
    """State of one branch."""

    def __init__(
        self,
        wishes: TokenWishes,
        position: int,
        seen: SeenTokens | None,
        last_tokens: list[int],
        matcher: Matcher | None,
    ) -> None:
        self.wishes = wishes
        self.position = position
        """Output tokens that are in it; of no meaning where it does not need them."""
        self.seen = seen
        """What the penalties are about; None without them."""
        self.has_ended = False
        """Nothing more is drawn; rows that come all the same are not to be bent."""
        self._last_tokens = last_tokens
        self._matcher = matcher
        self._failure: RowEnd | None = None

    @classmethod
    def start(
        cls, sampling: SamplingParams, prompt_token_ids: tuple[int, ...], matcher: Matcher | None = None
    ) -> SamplingState:
        """Of a branch without output; ``matcher`` stands at its beginning."""
        wishes = TokenWishes(sampling)
        counted = prompt_token_ids if sampling.repetition_penalty != 1.0 else ()
        seen = SeenTokens(counted) if wishes.has_penalties else None
        last_tokens = list(prompt_token_ids[-wishes.look_back :]) if wishes.look_back else []
        return cls(wishes, 0, seen, last_tokens, matcher)

    def fork(self) -> SamplingState:
        """Of another branch with the same tokens so far."""
        seen = self.seen.fork() if self.seen is not None else None
        matcher = self._matcher.fork() if self._matcher is not None else None
        fork = SamplingState(self.wishes, self.position, seen, self._last_tokens.copy(), matcher)
        fork.has_ended, fork._failure = self.has_ended, self._failure
        return fork

    @property
    def needs_last_token(self) -> bool:
        """Whether a row depends on the token before it; else only on the request."""
        return self.seen is not None or bool(self.wishes.look_back) or self._matcher is not None

    def accept(self, position: int, token_id: int) -> None:
        """The output token at ``position``. Repeats are harmless, and so is what comes after the end.

        Raises RuntimeError when one before it is missing.
        """
        if self.has_ended or position < self.position:
            return
        if position > self.position:
            raise RuntimeError(f"token {position} came, but {self.position} is the next")
        self.position += 1
        if token_id in self.wishes.sampling.stop_token_ids:
            self.has_ended = True
            return
        if self.seen is not None:
            self.seen.add(token_id)
        if self.wishes.look_back:
            self._last_tokens = [*self._last_tokens, token_id][-self.wishes.look_back :]
        if self._matcher is not None and self._matcher.error is None:
            self._matcher.accept(token_id)

    def stop(self) -> None:
        """No token was drawn, or it is not known: nothing follows."""
        self.has_ended = True

    def fail(self, error: str) -> None:
        """The state has lost its way: its next row ends the branch."""
        self._failure = RowEnd(FinishReason.ERROR, error)

    def banned_token_ids(self) -> Collection[int]:
        """The last tokens of bad words that would be complete with them."""
        return self.wishes.banned_after(self._last_tokens)

    @property
    def has_mask(self) -> bool:
        """Whether ``fill_allowed`` says something."""
        return self._matcher is not None or self.wishes.sampling.allowed_token_ids is not None

    def end(self, position: int) -> RowEnd | None:
        """How the branch ends before output token ``position``, as far as can be said before a mask is made; None: it
        goes on. Raises RuntimeError when a token before it is missing."""
        if self._failure is not None:
            return self._failure
        if self.needs_last_token and position != self.position:
            raise RuntimeError(f"token {position} is to be drawn, and the state knows {self.position} before it")
        if self._matcher is None or self._matcher.error is None:
            return None
        return RowEnd(FinishReason.ERROR, self._matcher.error, "grammar")

    def fill_allowed(
        self, row: NDArray[np.int32], position: int, banned_token_ids: Collection[int], vocab_size: int
    ) -> RowEnd | None:
        """Bits of the tokens that can be drawn as output token ``position``, see ``Matcher.fill_mask``; without those
        of ``banned_token_ids``, each below ``vocab_size``. How the branch ends if none is left."""
        if self._matcher is not None:
            self._matcher.fill_mask(row)
            if self._matcher.error is not None:
                return RowEnd(FinishReason.ERROR, self._matcher.error, "grammar")
        self.wishes.restrict(row, vocab_size, replace=self._matcher is None)
        words = row.view(np.uint32)
        for token_id in banned_token_ids:
            words[token_id >> 5] &= ~np.uint32(1 << (token_id & 31))
        return None if words.any() else self._nothing_left(position)

    def _nothing_left(self, position: int) -> RowEnd:
        fields = self.wishes.restricting_fields(position)
        if self._matcher is not None and self._matcher.is_over and "min_tokens" not in fields:
            return RowEnd(FinishReason.STOP)
        said = f"{fields[0]} allows none" if len(fields) == 1 else f"{_listed(fields)} exclude each other"
        error = f"no token is left to draw as output token {position + 1}: {said}"
        return RowEnd(FinishReason.ERROR, error, fields[0])


def states_of(request: Request, matcher_of: MatcherOf | None) -> dict[int, SamplingState]:
    """A state for each branch, with the output that it has; none where nothing of a request needs any.

    A beam search has none: nothing is drawn in it. Raises InvalidRequest for a grammar that cannot be followed.
    """
    sampling = request.sampling
    if sampling.beam_width is not None or not needs_state(sampling):
        return {}
    first = SamplingState.start(sampling, request.prompt_token_ids, _matcher(sampling, matcher_of))
    states = [first, *(first.fork() for _ in request.branches[1:])]
    for state, branch in zip(states, request.branches, strict=True):
        for position, token_id in enumerate(branch.output_token_ids):
            state.accept(position, token_id)
    return {branch.index: state for state, branch in zip(states, request.branches, strict=True)}


def _matcher(sampling: SamplingParams, matcher_of: MatcherOf | None) -> Matcher | None:
    if sampling.grammar is None:
        return None
    if matcher_of is None:
        raise InvalidRequest("this engine follows no grammars", param="grammar")
    return matcher_of(sampling.grammar, sampling.stop_token_ids)


def _listed(fields: list[str]) -> str:
    return " and ".join([", ".join(fields[:-1]), fields[-1]])
