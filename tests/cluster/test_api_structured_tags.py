"""Grammars of JSON between fixed texts: once or again and again, alone or after free text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from octavo.cluster.api.grammar.tagged_json import SpecialToken, TaggedJson, grammar_of_tagged_json
from octavo.worker.grammar import GrammarCompiler

VOCAB_SIZE, STOP, MARK = 49152, 2, 5
PLACE = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
NUMBER = {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}
TAGS = [
    TaggedJson('<call>{"name": "go", "arguments": ', PLACE, "}</call>"),
    TaggedJson('<call>{"name": "add", "arguments": ', NUMBER, "}</call>"),
]
GO = '<call>{"name": "go", "arguments": {"place": "é \\"x\\""}}</call>'
ADD = '<call>{"name": "add", "arguments": {"number": 12}}</call>'
WRONG = '<call>{"name": "add", "arguments": {"place": "x"}}</call>'
UNKNOWN = '<call>{"name": "other", "arguments": {}}</call>'

Text = str | list[str | int]
"""Also as parts, of which numbers are special tokens."""
Follows = Callable[[str, Text], bool]


@pytest.fixture(scope="module")
def follows(model_dir: Path) -> Follows:
    """Whether a text is a complete output of a grammar."""
    compiler = GrammarCompiler.of_model(model_dir, VOCAB_SIZE)
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))

    def tokens(part: str | int) -> list[int]:
        return [part] if isinstance(part, int) else tokenizer.encode(part, add_special_tokens=False).ids

    def judge(grammar: str, text: Text) -> bool:
        matcher = compiler.matcher(grammar, (STOP,))
        for token_id in (token for part in ([text] if isinstance(text, str) else text) for token in tokens(part)):
            if matcher.error is None:
                matcher.accept(token_id)
        row = np.zeros(VOCAB_SIZE // 32, dtype=np.int32)
        matcher.fill_mask(row)
        return matcher.error is None and bool(row[0] >> STOP & 1)

    return judge


@pytest.mark.parametrize("at_least_one", [False, True])
@pytest.mark.parametrize("at_most_one", [False, True])
def test_calls_may_be_none_one_or_several(follows: Follows, at_least_one: bool, at_most_one: bool) -> None:
    grammar = grammar_of_tagged_json(TAGS, at_least_one=at_least_one, at_most_one=at_most_one, separator="\n")
    assert follows(grammar, GO)
    assert follows(grammar, ADD)
    assert follows(grammar, "") != at_least_one
    assert follows(grammar, f"{GO}\n{ADD}\n{GO}") != at_most_one
    assert not any(follows(grammar, text) for text in (WRONG, UNKNOWN, f"{GO}{ADD}", f"{GO}\n", GO[:-1], f"x{GO}"))


def test_what_stands_around_all_calls_is_said_once(follows: Follows) -> None:
    tags = [TaggedJson("", PLACE), TaggedJson("", NUMBER)]
    around = {"begin": (SpecialToken(MARK), "["), "end": ("]",), "separator": ", "}
    grammar = grammar_of_tagged_json(tags, at_least_one=True, at_most_one=False, **around)  # type: ignore[arg-type]
    assert follows(grammar, [MARK, '[{"place": "x"}]'])
    assert follows(grammar, [MARK, '[{"place": "x"}, {"number": 1}]'])
    assert not follows(grammar, '[{"place": "x"}]')
    assert not follows(grammar, [MARK, '[{"place": "x"}'])
    assert not follows(grammar, [MARK, "[]"])


@pytest.mark.parametrize("at_least_one", [False, True])
def test_text_before_calls_ends_where_they_begin(follows: Follows, at_least_one: bool) -> None:
    grammar = grammar_of_tagged_json(TAGS, at_least_one=at_least_one, at_most_one=False, text_before=True)
    assert follows(grammar, f"I go.\n{GO}")
    assert follows(grammar, f"{ADD}{GO}")
    assert follows(grammar, "a < b, <cal, that is all") != at_least_one
    assert not any(follows(grammar, f"I go. {text}") for text in (WRONG, UNKNOWN, GO[:-1], f"{GO} done"))


@pytest.mark.parametrize("at_least_one", [False, True])
def test_a_special_token_ends_the_text_before(follows: Follows, at_least_one: bool) -> None:
    tags = [TaggedJson("", PLACE)]
    grammar = grammar_of_tagged_json(
        tags, at_least_one=at_least_one, at_most_one=True, begin=(SpecialToken(MARK),), text_before=True
    )
    assert follows(grammar, ["I go.", MARK, '{"place": "x"}'])
    assert follows(grammar, [MARK, '{"place": "x"}'])
    assert follows(grammar, "I stay.") != at_least_one
    assert not follows(grammar, ["I go.", MARK])


def test_what_is_said_word_for_word_may_be_any_text(follows: Follows) -> None:
    text = "\"'\\/\n\r\t\x00\x7f<[5]>|é☃\U0001f600"
    grammar = grammar_of_tagged_json([TaggedJson(text, NUMBER, text)], at_least_one=True, at_most_one=True)
    assert follows(grammar, f'{text}{{"number":1}}{text}')


def test_what_makes_no_sense_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one tag"):
        grammar_of_tagged_json([], at_least_one=True, at_most_one=True)
    tags = [TaggedJson("a", PLACE), TaggedJson("b", PLACE)]
    with pytest.raises(ValueError, match="tells where it ends"):
        grammar_of_tagged_json(tags, at_least_one=True, at_most_one=True, text_before=True)
