"""Grammars: what an output must follow, token by token; llguidance does the work.

A grammar travels as text, in llguidance's serialised form (JSON, or Lark text). Gateways compile it before anything is
routed, so that a bad one is a 400; leaders compile it again, in a thread, before the engine hears of the request. Both
with the limits below, which bound all of the work: what would take longer fails, and does not go on in the background.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeAlias
from weakref import WeakValueDictionary

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from .errors import InvalidRequest

MAX_CACHED_GRAMMARS = 64
MAX_CACHED_BYTES = 4 * 2**20
"""Of grammars' texts; their automata take up to a hundred times that."""
MAX_GRAMMAR_BYTES = 2**20

_TRIAL_TOKENS = 8
"""So many tokens a grammar is followed before it is taken for good: most that cannot be followed fail at the first."""
_MAX_REASON_CHARS = 300
_UNINFORMATIVE = "<non-verbose/>"
_NOT_FOLLOWED = "the grammar cannot be followed"

TokenizerOf: TypeAlias = Callable[[], LLTokenizer]


def parser_limits() -> LLParserLimits:
    """The work that a grammar may cause. The worst that was found (llguidance 1.9.1, SmolLM2's 49,152 tokens, seconds
    of one Xeon core): 0.5 for the automata and 0.9 for the first mask, both of grammars that are then refused; 0.1 for
    any later mask.

    Below the defaults where a hostile grammar took seconds. ``precompute_large_lexemes`` stays on: without it some
    repetitions (``a{1000000}``) are unrolled without any bound.
    """
    return LLParserLimits(
        initial_lexer_fuel=300_000,
        max_items_in_row=1_000,
        step_lexer_fuel=100_000,
        step_max_items=30_000,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        precompute_large_lexemes=True,
        verbose_errors=False,
    )


class GrammarMatcher:
    """Where one output stands in its grammar; see ``sampling_state.Matcher``."""

    def __init__(self, matcher: LLMatcher, eos_token_ids: tuple[int, ...], stop_token_ids: tuple[int, ...]) -> None:
        self._matcher = matcher
        self._eos_token_ids = eos_token_ids
        """llguidance's word for "may end here"."""
        self._stop_token_ids = stop_token_ids
        self._failure: str | None = None
        """What llguidance raised: it is not asked again."""

    @property
    def is_over(self) -> bool:
        return self.error is None and bool(self._matcher.is_stopped())

    @property
    def error(self) -> str | None:
        if self._failure is None and not self._matcher.is_error():
            return None
        return f"the grammar cannot be followed any further: {_reason(self._failure or self._matcher.get_error())}"

    def fill_mask(self, row: NDArray[np.int32]) -> None:
        """A stop token can be drawn where the output may end and nowhere else, though it were text that fits."""
        if not self._call(lambda: self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)):
            row[:] = 0
            return
        words = row.view(np.uint32)
        may_end = _take_out(words, self._eos_token_ids)
        _take_out(words, self._stop_token_ids)
        if may_end:
            for token_id in self._stop_token_ids:
                words[token_id >> 5] |= np.uint32(1 << (token_id & 31))

    def accept(self, token_id: int) -> None:
        self._call(lambda: self._matcher.consume_token(token_id))

    def fork(self) -> GrammarMatcher:
        copies: list[LLMatcher] = []
        self._call(lambda: copies.append(self._matcher.deep_copy()))
        fork = GrammarMatcher(copies[0] if copies else self._matcher, self._eos_token_ids, self._stop_token_ids)
        fork._failure = self._failure
        return fork

    def _call(self, call: Callable[[], object]) -> bool:
        """Whether llguidance has done it. What it raises is this output's end, and no other's."""
        if self._failure is not None:
            return False
        try:
            call()
        except BaseException as error:
            if not _is_verdict(error):
                raise
            self._failure = f"{error}"
        return self._failure is None


def _take_out(words: NDArray[np.uint32], token_ids: Iterable[int]) -> bool:
    """Clear these tokens' bits; whether one was set."""
    found = False
    for token_id in token_ids:
        bit = np.uint32(1 << (token_id & 31))
        found |= bool(words[token_id >> 5] & bit)
        words[token_id >> 5] &= ~bit
    return found


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Prototype:
    """A compiled grammar: a matcher at its beginning, or why there is none."""

    matcher: LLMatcher | None
    failure: str | None = None
    """A sentence."""


class GrammarCompiler:
    """Makes matchers for one model; keeps the most recent grammars, and those whose prototype somebody holds. Any
    number of threads may use it.

    ``tokenizer_of`` is called when the first grammar comes.
    """

    def __init__(self, tokenizer_of: TokenizerOf, vocab_size: int) -> None:
        self._tokenizer_of = tokenizer_of
        self._vocab_size = vocab_size
        self._tokenizer: LLTokenizer | InvalidRequest | None = None
        self._loading = threading.Lock()
        self._lock = threading.Lock()
        self._cache: OrderedDict[str, Prototype] = OrderedDict()
        self._cached_bytes = 0
        self._held: WeakValueDictionary[str, Prototype] = WeakValueDictionary()

    @classmethod
    def of_model(cls, model_dir: Path, vocab_size: int) -> Self:
        """``vocab_size``: rows of the embedding. Ids that tokenizer.json does not know are never allowed."""
        path = model_dir / "tokenizer.json"
        return cls(lambda: _load_tokenizer(path, vocab_size), vocab_size)

    def load(self) -> None:
        """Read the tokenizer, once. llguidance holds the GIL for it, about half a second; all else it does without.

        Raises InvalidRequest for a tokenizer that grammars cannot use.
        """
        self._loaded()

    def known(self, grammar: str) -> Prototype | None:
        """None: it has to be compiled. While the caller holds what it gets, the grammar stays known."""
        with self._lock:
            found = self._cache.get(grammar)
            if found is None:
                return self._held.get(grammar)
            self._cache.move_to_end(grammar)
            return found

    def prepare(self, grammar: str) -> Prototype:
        """Compiled, so that ``matcher`` takes microseconds; a grammar that cannot be followed says so. For a thread."""
        if (prototype := self.known(grammar)) is not None:
            return prototype
        num_bytes = len(grammar.encode(errors="replace"))
        if num_bytes > MAX_GRAMMAR_BYTES:  # not kept: others would have to go for it
            reason = f"it has {num_bytes} bytes, at most {MAX_GRAMMAR_BYTES} are allowed"
            return Prototype(None, str(_refusal(reason)))
        return self._keep(grammar, self._compile(grammar))

    def matcher(self, grammar: str, stop_token_ids: tuple[int, ...]) -> GrammarMatcher:
        """At its beginning; a ``MatcherOf``. Raises InvalidRequest for a grammar that cannot be followed."""
        stops = tuple(token_id for token_id in stop_token_ids if token_id < self._vocab_size)
        prototype = self.prepare(grammar)
        if prototype.matcher is None:
            raise InvalidRequest(f"{prototype.failure}", param="grammar")
        with _as_refusal():
            return GrammarMatcher(prototype.matcher.deep_copy(), tuple(self._loaded().eos_tokens), stops)

    def _compile(self, grammar: str) -> Prototype:
        try:
            return Prototype(self._followed(grammar))
        except InvalidRequest as error:
            return Prototype(None, str(error))

    def _followed(self, grammar: str) -> LLMatcher:
        tokenizer = self._loaded()
        with _as_refusal():
            matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())
            if failure := matcher.get_error() or self._try(matcher.deep_copy()):
                raise _refusal(failure)
            return matcher

    def _try(self, matcher: LLMatcher) -> str:
        """Follow it for a few tokens; the reason why that fails, or nothing."""
        row = np.zeros((self._vocab_size + 31) // 32, dtype=np.int32)
        for _ in range(_TRIAL_TOKENS):
            matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            if matcher.is_error() or matcher.is_stopped():
                break
            token_id, may_end = self._lowest(row.view(np.uint32))
            if token_id is None:
                return "" if may_end else "no token of this model can begin what it describes"
            if not matcher.consume_token(token_id):
                break
        return str(matcher.get_error())

    def _lowest(self, words: NDArray[np.uint32]) -> tuple[int | None, bool]:
        """The lowest token of text in a mask, and whether the end is in it."""
        may_end = _take_out(words, self._loaded().eos_tokens)
        if not words.any():
            return None, may_end
        index = int(np.flatnonzero(words)[0])
        word = int(words[index])
        return 32 * index + (word & -word).bit_length() - 1, may_end

    def _loaded(self) -> LLTokenizer:
        with self._loading:
            if self._tokenizer is None:
                try:
                    self._tokenizer = self._tokenizer_of()
                except InvalidRequest as error:
                    self._tokenizer = error
            if isinstance(self._tokenizer, InvalidRequest):
                raise InvalidRequest(str(self._tokenizer), param=self._tokenizer.param)
            return self._tokenizer

    def _keep(self, grammar: str, prototype: Prototype) -> Prototype:
        """The one that is kept, which is another if two threads have compiled it."""
        with self._lock:
            kept = self._cache.get(grammar) or self._held.get(grammar)
            if kept is not None:
                return kept
            self._held[grammar] = self._cache[grammar] = prototype
            self._cached_bytes += len(grammar)
            while len(self._cache) > MAX_CACHED_GRAMMARS or self._cached_bytes > MAX_CACHED_BYTES:
                self._cached_bytes -= len(self._cache.popitem(last=False)[0])
        return prototype


def _load_tokenizer(path: Path, vocab_size: int) -> LLTokenizer:
    with _as_refusal("this model's tokenizer cannot be used with grammars"):
        return LLTokenizer(str(path), n_vocab=vocab_size)


@contextlib.contextmanager
def _as_refusal(what: str = _NOT_FOLLOWED) -> Iterator[None]:
    """Whatever llguidance raises becomes an InvalidRequest."""
    try:
        yield
    except InvalidRequest:
        raise
    except BaseException as error:
        if not _is_verdict(error):
            raise
        raise _refusal(f"{error}", what) from error


def _is_verdict(error: BaseException) -> bool:
    """A panic of Rust's, which is no Exception, stays within the call."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _refusal(reason: str, what: str = _NOT_FOLLOWED) -> InvalidRequest:
    return InvalidRequest(f"{what}: {_reason(reason)}", param="grammar")


def _reason(text: str) -> str:
    """llguidance's words, short: without its own traces."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip() and line.strip() != _UNINFORMATIVE]
    reason = "\n".join(lines) or "no reason was given"
    return reason if len(reason) <= _MAX_REASON_CHARS else reason[:_MAX_REASON_CHARS] + "…"
