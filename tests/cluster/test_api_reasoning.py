"""Reasoning is split off the answer, whoever opened it and in whatever pieces it comes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.cluster.api.answer.message import MessageDelta, PlainMessage
from octavo.cluster.api.chat.marks import Marks
from octavo.cluster.api.chat.reasoning import (
    MISTRAL,
    THINK,
    ReasoningTokens,
    Thinking,
    ThinkMarks,
    ThinkParser,
    thinking_after,
    thinking_within,
)


def split(*pieces: str, is_open: bool = False, show: bool = True, marks: ThinkMarks = THINK) -> tuple[str, str]:
    """Reasoning and content."""
    parser, total = ThinkParser(PlainMessage(), is_open=is_open, show=show, marks=marks), MessageDelta()
    for piece in pieces:
        total += parser.push(piece)
    total += parser.finish(is_cut=False)
    return total.reasoning, total.content


@pytest.mark.parametrize(
    ("text", "is_open", "expected"),
    [
        ("<think>\nHm.\n\nSo.\n</think>\n\n4", False, ("Hm.\n\nSo.", "4")),
        ("\n<think></think>4", False, ("", "4")),
        ("Hm.</think> 4 </think>", True, ("Hm.", "4 </think>")),
        ("4 <think>Hm.</think>", False, ("", "4 <think>Hm.</think>")),
        ("<thin", False, ("", "<thin")),
        ("<think>Hm. </thi", False, ("Hm. </thi", "")),
        (" \n", False, ("", " \n")),
        ("<think>Hm.\n", False, ("Hm.", "")),
        ("4</think>5", False, ("", "4</think>5")),
    ],
)
def test_where_reasoning_begins_and_ends(text: str, is_open: bool, expected: tuple[str, str]) -> None:
    for size in (1, 2, 5, len(text)):
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        assert split(*pieces, is_open=is_open) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[THINK]\nHm [/INST].\n[/THINK]\n4", ("Hm [/INST].", "4")),
        ("[THIN", ("", "[THIN")),
        ("<think>Hm.</think>4", ("", "<think>Hm.</think>4")),
        ("[THINK]Hm.</think>[/THI", ("Hm.</think>[/THI", "")),
    ],
)
def test_each_form_has_marks_of_its_own(text: str, expected: tuple[str, str]) -> None:
    for size in (1, 3, len(text)):
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        assert split(*pieces, marks=MISTRAL) == expected


PARTS = ["<think>", "</think>", "[THINK]", "[/THINK]", "<", "[", "/", "th", "a", " ", "\n", "<thi", "nk>", "[THI", "K]"]


@settings(max_examples=100)
@given(
    parts=st.lists(st.sampled_from(PARTS), max_size=9),
    is_open=st.booleans(),
    marks=st.sampled_from([THINK, MISTRAL]),
    data=st.data(),
)
def test_any_pieces_give_what_the_whole_does(
    parts: list[str], is_open: bool, marks: ThinkMarks, data: st.DataObject
) -> None:
    text = "".join(parts)
    borders = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=9)))
    pieces = [text[start:end] for start, end in zip([0, *borders], [*borders, len(text)], strict=True)]
    assert split(*pieces, is_open=is_open, marks=marks) == split(text, is_open=is_open, marks=marks)


def test_reasoning_is_dropped_where_it_is_not_wanted() -> None:
    assert split("<think>Hm.</think>4", show=False) == ("", "4")


def test_text_that_can_be_sent_is_not_held_back() -> None:
    parser = ThinkParser(PlainMessage(), is_open=True)
    assert parser.push("Hm, </").reasoning == "Hm,"
    assert parser.push("b").reasoning == " </b"


@pytest.mark.parametrize(
    ("tokens", "is_open", "expected"),
    [
        (["<think>", "Hm", ".", "</think>", "\n", "4"], False, 4),
        (["\n", "<", "think", ">Hm", "</th", "ink>4", "!"], False, 6),
        (["Hm", "", "</think>", "4"], True, 3),
        (["<|s|>", "<think>", "Hm"], False, 3),
        (["</think>", "4"], True, 1),
        (["4", "<think>"], False, 0),
        (["<", "thin"], False, 0),
    ],
)
def test_reasoning_tokens_end_with_the_one_that_ends_reasoning(tokens: list[str], is_open: bool, expected: int) -> None:
    count = ReasoningTokens(is_open=is_open, hidden=Marks(["<|s|>"]))
    for token in tokens:
        count.push(token)
    assert count.num_tokens == expected


def test_reasoning_tokens_are_counted_by_the_form_s_marks() -> None:
    count = ReasoningTokens(is_open=False, marks=MISTRAL)
    for token in ("[THINK]", "Hm", "</think>", "[/THINK]", "4"):
        count.push(token)
    assert count.num_tokens == 4


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("<|im_start|>assistant\n<think>\n", Thinking.OPEN),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", Thinking.OVER),
        ("<think> said the user<|im_start|>assistant\n", Thinking.POSSIBLE),
    ],
)
def test_how_a_prompt_ends_says_where_reasoning_stands(prompt: str, expected: Thinking) -> None:
    assert thinking_after(prompt) is expected
    assert thinking_after(in_mistral_s_form(prompt), MISTRAL) is expected


@pytest.mark.parametrize(
    ("message", "expected"),
    [("<think>\nHm", Thinking.OPEN), ("<think>Hm</think>\nSo", Thinking.OVER), ("So", Thinking.OVER)],
)
def test_how_a_continued_message_ends_does_too(message: str, expected: Thinking) -> None:
    assert thinking_within(message) is expected
    assert thinking_within(in_mistral_s_form(message), MISTRAL) is expected


def in_mistral_s_form(text: str) -> str:
    return text.replace(THINK.open, MISTRAL.open).replace(THINK.close, MISTRAL.close)
