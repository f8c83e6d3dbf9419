"""What a branch's next token depends on: kept token by token, forked with its branch, blind to what
comes after its end."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from phrase_grammar import Phrase

from octavo.worker.messages import SamplingParams
from octavo.worker.sampling_state import RowEnd, SamplingState
from octavo.worker.seen_tokens import SeenTokens
from octavo.worker.token_wishes import needs_state

VOCABULARY = 70
PROMPT = (4, 2, 4, 9)

tokens = st.lists(st.integers(0, 12), max_size=60)


def state(*output: int, prompt: tuple[int, ...] = PROMPT, **sampling: Any) -> SamplingState:
    started = SamplingState.start(SamplingParams(max_tokens=9, seed=0, **sampling), prompt)
    for position, token in enumerate(output):
        started.accept(position, token)
    return started


def counts(seen: SeenTokens | None) -> dict[int, int]:
    assert seen is not None
    assert len(set(seen.tokens.tolist())) == len(seen.tokens) == len(seen.counts)
    return dict(zip(seen.tokens.tolist(), seen.counts.tolist(), strict=True))


# ---- tokens that were seen ----


@given(tokens, tokens, tokens)
def test_tokens_of_prompt_and_output_are_counted_and_forks_count_for_themselves(
    prompt: list[int], output: list[int], rest: list[int]
) -> None:
    seen = SeenTokens(prompt)
    for token in output:
        seen.add(token)
    fork = seen.fork()
    for token in rest:
        fork.add(token)
    assert counts(seen) == dict.fromkeys(prompt, 0) | Counter(output)
    assert counts(fork) == dict.fromkeys(prompt, 0) | Counter(output + rest)


def test_the_prompt_counts_for_the_repetition_penalty_alone() -> None:
    assert counts(state(9, 1, 9, repetition_penalty=1.1).seen) == {4: 0, 2: 0, 9: 2, 1: 1}
    assert counts(state(9, 1, 9, presence_penalty=1.0).seen) == {9: 2, 1: 1}
    assert state(9, 1, 9, logit_bias=((3, 1.0),)).seen is None


# ---- positions ----


def test_repeats_and_tokens_after_the_end_change_nothing() -> None:
    kept = state(1, 5, presence_penalty=1.0, stop_token_ids=(7,))
    kept.accept(1, 6)
    kept.accept(2, 7)
    kept.accept(3, 8)
    assert counts(kept.seen) == {1: 1, 5: 1}
    assert kept.has_ended


def test_a_gap_is_noticed() -> None:
    with pytest.raises(RuntimeError, match="token 3 came, but 2 is the next"):
        state(1, 5, presence_penalty=1.0).accept(3, 1)


def test_only_what_looks_at_tokens_needs_the_last_one() -> None:
    assert not any(
        state(**wish).needs_last_token
        for wish in ({"logit_bias": ((1, 1.0),)}, {"allowed_token_ids": (1,)}, {"bad_words": ((1,), (2,))})
    )
    assert all(
        state(**wish).needs_last_token
        for wish in ({"bad_words": ((1, 2),)}, {"frequency_penalty": 0.1}, {"repetition_penalty": 1.1})
    )


def test_a_request_without_such_wishes_needs_no_state() -> None:
    plain = {"temperature": 0.5, "top_k": 4, "top_p": 0.9, "min_p": 0.1, "min_tokens": 2, "num_logprobs": 3}
    assert not needs_state(SamplingParams(max_tokens=9, seed=0, **plain))  # type: ignore[arg-type]


# ---- bad words ----


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple), min_size=1, max_size=8),
    st.lists(st.integers(0, 3), min_size=1, max_size=6),
    st.lists(st.integers(0, 3), max_size=6),
)
def test_the_last_token_of_a_bad_word_is_banned_after_the_ones_before_it(
    words: list[tuple[int, ...]], prompt: list[int], output: list[int]
) -> None:
    text = prompt + output
    expected = {word[-1] for word in words if len(word) == 1 or text[-len(word) + 1 :] == list(word[:-1])}
    assert set(state(*output, prompt=tuple(prompt), bad_words=tuple(words)).banned_token_ids()) == expected


# ---- grammars ----


def allowed(kept: SamplingState, position: int = 0, banned: tuple[int, ...] = ()) -> set[int] | RowEnd:
    row = np.full(-(-VOCABULARY // 32), -1, np.int32)
    end = kept.end(position) or kept.fill_allowed(row, position, banned, VOCABULARY)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist()) if end is None else end


def test_allowed_tokens_are_bits_of_a_mask() -> None:
    assert allowed(state(allowed_token_ids=(0, 31, 32, 69, 70, -1))) == {0, 31, 32, 69}
    assert allowed(state(allowed_token_ids=(0, 31, 63)), banned=(31, 5)) == {0, 63}


def test_a_grammar_and_allowed_tokens_hold_together() -> None:
    sampling = SamplingParams(max_tokens=9, seed=0, allowed_token_ids=(31, 40), grammar="phrase")
    kept = SamplingState.start(sampling, PROMPT, Phrase((31, 50), ()))
    assert allowed(kept) == {31}
    fork = kept.fork()
    kept.accept(0, 31)
    end = allowed(kept, position=1)
    assert isinstance(end, RowEnd)
    assert end.error == "no token is left to draw as output token 2: allowed_token_ids and grammar exclude each other"
    assert allowed(fork) == {31}
