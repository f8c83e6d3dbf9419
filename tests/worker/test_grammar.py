"""A matcher allows exactly the tokens that go on with the grammar, and the end where the text is complete."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from octavo.worker import grammar as module
from octavo.worker.errors import InvalidRequest
from octavo.worker.grammar import GrammarCompiler, GrammarMatcher, Prototype

VOCAB_SIZE, STOP, OTHER_STOP = 49152, 2, 7


@pytest.fixture(scope="module")
def compiler(model_dir: Path) -> GrammarCompiler:
    return GrammarCompiler.of_model(model_dir, VOCAB_SIZE)


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_dir / "tokenizer.json"))


def allowed(matcher: GrammarMatcher, vocab_size: int = VOCAB_SIZE) -> set[int]:
    row = np.full((vocab_size + 31) // 32, -1, dtype=np.int32)
    matcher.fill_mask(row)
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


def accept(matcher: GrammarMatcher, tokenizer: Tokenizer, text: str) -> None:
    for token_id in tokenizer.encode(text, add_special_tokens=False).ids:
        matcher.accept(token_id)


def regex(pattern: str) -> str:
    return f"start: /{pattern}/\n"


@pytest.mark.parametrize(
    ("begun", "goes_on"),
    [("", r"k|ke|key|keys|keys?=[0-9]{0,3}"), ("key=1", r"[0-9]{1,2}"), ("key=123", r"(?!)")],
)
def test_every_token_that_goes_on_is_allowed_and_no_other(
    compiler: GrammarCompiler, tokenizer: Tokenizer, begun: str, goes_on: str
) -> None:
    matcher = compiler.matcher(regex(r"keys?=[0-9]{1,3}"), (STOP,))
    accept(matcher, tokenizer, begun)
    texts = {token_id: tokenizer.decode([token_id]) for token_id in range(VOCAB_SIZE)}
    expected = {i for i, text in texts.items() if re.fullmatch(goes_on, text)}
    assert allowed(matcher) - {STOP} == expected
    assert (STOP in allowed(matcher)) == (begun != "")


def test_a_complete_text_leaves_the_stop_tokens_and_nothing_else(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    matcher = compiler.matcher(regex("yes"), (STOP, OTHER_STOP))
    assert not matcher.is_over
    assert not allowed(matcher) & {STOP, OTHER_STOP}
    accept(matcher, tokenizer, "yes")
    assert matcher.is_over
    assert allowed(matcher) == {STOP, OTHER_STOP}


def test_a_stop_token_that_is_text_stops_only_a_complete_text(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    (line_break,) = tokenizer.encode("\n", add_special_tokens=False).ids
    matcher = compiler.matcher(regex(r"(a\n?)+b"), (line_break,))
    accept(matcher, tokenizer, "a")
    assert line_break not in allowed(matcher)
    accept(matcher, tokenizer, "b")
    assert allowed(matcher) == {line_break}


def test_ids_without_a_token_are_never_allowed(model_dir: Path) -> None:
    rows = VOCAB_SIZE + 100
    matcher = GrammarCompiler.of_model(model_dir, rows).matcher(regex(r"(.|\n)*"), (STOP, rows + 5))
    assert max(allowed(matcher, rows)) < VOCAB_SIZE


def test_forks_go_their_own_ways(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    first = compiler.matcher(regex("a(b|c)"), (STOP,))
    accept(first, tokenizer, "a")
    second = first.fork()
    accept(first, tokenizer, "b")
    assert first.is_over
    assert not second.is_over
    accept(second, tokenizer, "c")
    assert (first.error, second.error) == (None, None)


def test_a_token_that_does_not_fit_is_told_and_harms_no_other(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher = compiler.matcher(regex("a+"), (STOP,))
    accept(matcher, tokenizer, "x")
    assert (matcher.error or "").startswith("the grammar cannot be followed any further")
    assert not matcher.is_over
    assert compiler.matcher(regex("a+"), (STOP,)).error is None


@pytest.mark.parametrize(
    "grammar",
    [
        "",
        "no grammar",
        "start: (",
        regex("("),
        '{"grammars": []}',
        '{"grammars": [{"json_schema": {"type": "nonsense"}}]}',
        "start: a\na: a\n",
        "start: /(a{1000}){1000}/\n",
        "start: A\nA: B{1000}\nB: C{1000}\nC: /x/{1000}\n",
        "start: R0\n" + "".join(f"R{i}: R{i + 1} R{i + 1}\n" for i in range(40)) + "R40: /x/\n",
    ],
    ids=range(10),
)
def test_what_cannot_be_followed_is_refused_each_time(compiler: GrammarCompiler, grammar: str) -> None:
    for _ in range(2):
        with pytest.raises(InvalidRequest, match=r"^the grammar cannot be followed: .") as refusal:
            compiler.matcher(grammar, ())
        assert refusal.value.param == "grammar"
        assert compiler.known(grammar) == Prototype(None, str(refusal.value))


def test_what_is_too_large_is_refused_and_takes_no_place(compiler: GrammarCompiler) -> None:
    known, large = regex("small"), "x" * (module.MAX_GRAMMAR_BYTES + 1)
    compiler.prepare(known)
    for _ in range(5):
        with pytest.raises(InvalidRequest, match="at most"):
            compiler.matcher(large, ())
    assert compiler.known(large) is None
    assert compiler.known(known) is not None


def test_a_folder_without_a_tokenizer_refuses_grammars(tmp_path: Path) -> None:
    compiler = GrammarCompiler.of_model(tmp_path, 100)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="this model's tokenizer cannot be used"):
            compiler.matcher(regex("a"), ())
    assert "tokenizer" in str(compiler.prepare(regex("a")).failure)


class PanicException(BaseException):
    """As Rust's panics come to Python."""


class Raising:
    """A matcher of llguidance's in which everything fails."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def is_error(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        def fail(*_: object) -> None:
            raise self.error

        return fail


@pytest.mark.parametrize("error", [RuntimeError("it broke"), PanicException("it broke")], ids=type)
@pytest.mark.parametrize("use", ["accept", "fill_mask", "fork"])
def test_whatever_llguidance_raises_ends_one_output(use: str, error: BaseException) -> None:
    matcher = GrammarMatcher(Raising(error), (), (STOP,))  # type: ignore[arg-type]
    row = np.full(4, -1, dtype=np.int32)
    if use == "accept":
        matcher.accept(1)
    elif use == "fork":
        matcher = matcher.fork()
    matcher.fill_mask(row)
    assert not row.any()
    assert matcher.error == "the grammar cannot be followed any further: it broke"
    assert not matcher.is_over


@pytest.mark.parametrize("error", [RuntimeError("it broke"), PanicException("it broke")], ids=type)
def test_whatever_llguidance_raises_refuses_the_grammar(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(module, "LLMatcher", fail)
    with pytest.raises(InvalidRequest, match=r"^the grammar cannot be followed: it broke$"):
        compiler.matcher(regex(f"new{type(error)}"), ())


def test_the_least_recent_grammars_are_forgotten(compiler: GrammarCompiler) -> None:
    patterns = [regex(f"n{number}") for number in range(module.MAX_CACHED_GRAMMARS + 1)]
    for grammar in patterns[:-1]:
        compiler.prepare(grammar)
    compiler.matcher(patterns[0], (STOP,))
    compiler.prepare(patterns[-1])
    assert [compiler.known(grammar) is not None for grammar in (*patterns[:2], patterns[-1])] == [True, False, True]


def test_large_grammars_count_by_their_size(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CACHED_BYTES", 10_000)
    large = [f"start: /x{number}/ //{'-' * 6_000}\n" for number in range(2)]
    for grammar in large:
        compiler.prepare(grammar)
    assert [compiler.known(grammar) is not None for grammar in large] == [False, True]


def test_what_somebody_holds_stays_known(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    held = compiler.prepare(regex("held"))
    monkeypatch.setattr(module, "MAX_CACHED_GRAMMARS", 1)
    compiler.prepare(regex("another"))
    assert compiler.prepare(regex("held")) is held
    del held
    assert compiler.known(regex("held")) is None
