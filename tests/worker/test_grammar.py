"""A matcher allows exactly the tokens that go on with the grammar, and the end where the text is complete."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from octavo.worker import grammar as module
from octavo.worker.errors import InvalidRequest
from octavo.worker.grammar import GrammarCompiler, GrammarMatcher

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
        "x" * (module.MAX_GRAMMAR_BYTES + 1),
    ],
    ids=range(11),
)
def test_what_cannot_be_followed_is_refused_each_time(compiler: GrammarCompiler, grammar: str) -> None:
    for _ in range(2):
        with pytest.raises(InvalidRequest, match=r"^the grammar cannot be followed: .") as refusal:
            compiler.prepare(grammar)
        assert refusal.value.param == "grammar"
        assert compiler.is_known(grammar)


def test_a_folder_without_a_tokenizer_refuses_grammars(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="this model's tokenizer cannot be used"):
        GrammarCompiler.of_model(tmp_path, 100).prepare(regex("a"))


def test_the_least_recent_grammars_are_forgotten(compiler: GrammarCompiler) -> None:
    patterns = [regex(f"n{number}") for number in range(module.MAX_CACHED_GRAMMARS + 1)]
    for grammar in patterns[:-1]:
        compiler.prepare(grammar)
    compiler.matcher(patterns[0], (STOP,))
    compiler.prepare(patterns[-1])
    assert [compiler.is_known(grammar) for grammar in (*patterns[:2], patterns[-1])] == [True, False, True]


def test_large_grammars_count_by_their_size(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CACHED_BYTES", 10_000)
    large = [f"start: /x{number}/ //{'-' * 6_000}\n" for number in range(2)]
    for grammar in large:
        compiler.prepare(grammar)
    assert [compiler.is_known(grammar) for grammar in large] == [False, True]
