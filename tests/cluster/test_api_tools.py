"""Tool calls in a model's text: all forms, streamed in any pieces, and what only looks like a call."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.cluster.api.answer.message import MessageDelta, MessageParser, PlainMessage
from octavo.cluster.api.chat.json_object import JsonObject, MalformedJson
from octavo.cluster.api.chat.marks import Marks, WithoutMarks
from octavo.cluster.api.chat.plan import ParserRecipe
from octavo.cluster.api.chat.reasoning import Thinking, ThinkParser
from octavo.cluster.api.chat.support import ToolForm
from octavo.cluster.api.chat.tool_parser import OfferedTools, ToolParser
from octavo.cluster.api.chat.tool_parsers import HermesParser, Llama3JsonParser, MistralParser

TOOLS = OfferedTools(frozenset({"add", "get_weather"}))
ARGUMENTS = '{"city": "São \\"Paulo\\" {x}\\u00e9 }]", "n": [1, {"a": {}}], "t":true, "y": -1.5e3}'
PIECES = [
    *("<tool_call>", "</tool_call>", '{"name": "add", "arguments": ', '{"name"', '"name"', ':"add"', '"arguments"'),
    *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "add", "<|python_tag|>", "<think>", "</think>", "<|im_end|>"),
    *("{", "}", "[", "]", '"', ",", ":", ";", "\\", "\n", " ", "1", "a", "é", "{}", '"parameters": {', "<", "</"),
]

Said = tuple[str, str, list[tuple[str, str]]]
"""Content, reasoning, and name and arguments of each call."""


def said(parser: MessageParser, *pieces: str, is_cut: bool = False) -> Said:
    """What was given in all; each call's first delta, and no other, has its id and name."""
    total = MessageDelta()
    for piece in pieces:
        total += parser.push(piece)
    total += parser.finish(is_cut=is_cut)
    calls: list[list[str]] = []
    for delta in total.tool_calls:
        assert (delta.index == len(calls)) == (delta.id is not None) == (delta.name is not None)
        if delta.name is not None:
            calls.append([delta.name, ""])
        calls[delta.index][1] += delta.arguments
    assert parser.has_tool_calls == bool(calls)
    return total.content, total.reasoning, [(name, arguments) for name, arguments in calls]


HERMES = [
    (f'<tool_call>\n{{"name": "add", "arguments": {ARGUMENTS}}}\n</tool_call>', "", [("add", ARGUMENTS)]),
    (f'I see.\n\n<tool_call>{{"arguments": {ARGUMENTS}, "name": "add"}}</tool_call>\n', "I see.", [("add", ARGUMENTS)]),
    (
        '<tool_call>{"name": "add", "arguments": {}}</tool_call> <tool_call>{"name": "get_weather"}</tool_call>\nDone.',
        "Done.",
        [("add", "{}"), ("get_weather", "{}")],
    ),
    ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("add", '{"a": 1}')]),
    ('<tool_call>{"name": "add", "arguments": {"a": "x\ny"}}</tool_call>', "", [("add", '{"a": "x\\ny"}')]),
    ('<tool_call>{"name": "add", "arguments": {"a": 1}\n</tool_call> ', "", [("add", '{"a": 1}')]),
    ('<tool_call>{"name": "add", "arguments": {"a": 1}}', "", [("add", '{"a": 1}')]),
    ('<tool_call>{oops}<tool_call>{"name": "add"}', "<tool_call>{oops}", [("add", "{}")]),
    ('<tool_call>{"name": "add", "arguments": {"a": "x', "", [("add", '{"a": "x')]),
    ('<tool_call>{"name": "add", "arguments": {"a": 01}}!', "01}}!", [("add", '{"a": ')]),
]
LLAMA = [
    (f' {{"name": "add", "parameters": {ARGUMENTS}}}', "", [("add", ARGUMENTS)]),
    (
        f'<|python_tag|>{{"name": "add", "parameters": {ARGUMENTS}}}; {{"name": "get_weather", "arguments": {{}}}}\n',
        "",
        [("add", ARGUMENTS), ("get_weather", "{}")],
    ),
    ('{"type": "function", "name": "add", "parameters": {}} Done.', "Done.", [("add", "{}")]),
]
MISTRAL = [
    (
        f'[TOOL_CALLS] [{{"name": "add", "arguments": {ARGUMENTS}}}, {{"name": "get_weather", "arguments": {{}}}}]',
        "",
        [("add", ARGUMENTS), ("get_weather", "{}")],
    ),
    (
        f"Ok [TOOL_CALLS]add[ARGS]{ARGUMENTS}[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{{}}",
        "Ok",
        [("add", ARGUMENTS), ("get_weather", "{}")],
    ),
    (f"[TOOL_CALLS]add{ARGUMENTS}", "", [("add", ARGUMENTS)]),
]
CALLS = [
    (parser, *case)
    for parser, cases in zip((HermesParser, Llama3JsonParser, MistralParser), (HERMES, LLAMA, MISTRAL), strict=True)
    for case in cases
]
NO_CALLS = [
    *[(HermesParser, text) for text in (
        "Plain. \n", "a <tool_c <tool_call> c", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "ad', '<tool_call>{"arguments": {"a": 1}}', '<tool_call>{"name": "add", "arguments": [1]}',
        '<tool_call>{"name": "add", "arguments": "[1]"}', '<tool_call>{"name": 1}', "</tool_call> ", "<tool_call>",
    )],
    *[(Llama3JsonParser, text) for text in (
        '{"name": "Bob", "age": 3} is an answer', '{"name": "add", "age": 3}', 'Hi {"name": "add", "parameters": {}}',
        '{"name": "add"}', "<|python_tag|> print(1)", "<|pyth", " \n{", "[1]",
    )],
    *[(MistralParser, text) for text in (
        "[TOOL_CALLS] [1]", "[TOOL_CALLS]unknown[ARGS]{}", "[TOOL_CALLS]" + "x" * 300 + "{", "[TOOL", "[TOOL_CALLS]add",
    )],
]  # fmt: skip


@pytest.mark.parametrize(("kind", "text", "content", "calls"), CALLS)
def test_calls_are_found_in_any_pieces(
    kind: type[ToolParser], text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    for size in (1, 2, 7, len(text)):
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        assert said(kind(TOOLS), *pieces) == (content, "", calls)


@pytest.mark.parametrize(("kind", "text"), NO_CALLS)
def test_what_only_looked_like_a_call_is_content_as_it_is(kind: type[ToolParser], text: str) -> None:
    for size in (1, 3, len(text)):
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        assert said(kind(TOOLS), *pieces) == (text, "", [])


FORMS: dict[type[ToolParser], ToolForm] = {
    HermesParser: "hermes",
    Llama3JsonParser: "llama3_json",
    MistralParser: "mistral",
}
ADD_CALLS: dict[type[ToolParser], str] = {
    HermesParser: '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
    Llama3JsonParser: '<|python_tag|>{"name": "add", "parameters": {"a": 1}}',
    MistralParser: '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]',
}


@pytest.mark.parametrize("kind", ADD_CALLS)
def test_of_a_call_that_is_cut_no_markup_is_content(kind: type[ToolParser]) -> None:
    """Wherever a limit cuts the second of two calls, all that is given of it is its name and its arguments so far."""
    first, second = ADD_CALLS[kind], ADD_CALLS[kind].removeprefix("<|python_tag|>")
    before, between = ("", "; ") if kind is Llama3JsonParser else ("Two calls.\n\n", "\n")
    for end in range(len(second) + 1):
        text = before + first + between + second[:end]
        for size in (1, 3, len(text)):
            pieces = [text[start : start + size] for start in range(0, len(text), size)]
            content, _, calls = said(kind(TOOLS), *pieces, is_cut=True)
            assert (content, calls[:1]) == (before.strip(), [("add", '{"a": 1}')])
            for name, arguments in calls[1:]:
                assert name == "add"
                assert '{"a": 1}'.startswith(arguments)


@pytest.mark.parametrize("kind", ADD_CALLS)
def test_of_a_first_call_that_is_cut_only_an_unfinished_mark_is_content(kind: type[ToolParser]) -> None:
    """It may be plain text, as ``a <`` is; and a text that ended by itself is shown as it is."""
    call = ADD_CALLS[kind]
    begun = call[: call.index('"add"')]
    for end in range(1, len(begun) + 1):
        content = "" if end >= len(kind.TAG) else begun[:end]
        assert said(kind(TOOLS), *begun[:end], is_cut=True) == (content, "", [])
        assert said(kind(TOOLS), *begun[:end]) == (begun[:end], "", [])
    assert said(Llama3JsonParser(TOOLS), '{"name": "Bob", ', is_cut=True) == ('{"name": "Bob", ', "", [])


@pytest.mark.parametrize("kind", ADD_CALLS)
def test_where_calls_are_forced_nothing_is_content(kind: type[ToolParser]) -> None:
    forced, call = OfferedTools(TOOLS.names, are_forced=True), ADD_CALLS[kind]
    for end in range(len(call) + 1):
        for is_cut in (True, False):
            made = ParserRecipe(tools=forced, thinking=Thinking.POSSIBLE, form=FORMS[kind])()
            assert said(made, *call[:end], is_cut=is_cut)[0] == ""
    assert said(kind(forced), *call) == ("", "", [("add", '{"a": 1}')])


@pytest.mark.parametrize("kind", [HermesParser, Llama3JsonParser, MistralParser])
@settings(max_examples=60)
@given(data=st.data())
def test_any_text_in_any_pieces_is_understood_as_the_whole(kind: type[ToolParser], data: st.DataObject) -> None:
    known = [case[1] for case in CALLS if case[0] is kind]
    parts = data.draw(st.lists(st.sampled_from(PIECES) | st.sampled_from(known), max_size=10))
    text = "".join(parts)
    tools = OfferedTools(TOOLS.names, data.draw(st.none() | st.just(1)))
    thinks = data.draw(st.booleans())

    def parser() -> MessageParser:
        inner = kind(tools)
        return ThinkParser(inner, is_open=False) if thinks else inner

    is_cut = data.draw(st.booleans())

    def pieces() -> list[str]:
        borders = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
        return [text[start:end] for start, end in zip([0, *borders], [*borders, len(text)], strict=True)]

    whole = said(parser(), text, is_cut=is_cut)
    assert said(parser(), *pieces(), is_cut=is_cut) == said(parser(), *text, is_cut=is_cut) == whole
    if not whole[1] and not whole[2] and not thinks and not is_cut:
        assert whole[0] == text
    for _, arguments in whole[2]:
        assert arguments.startswith("{")


def test_arguments_are_given_as_they_come() -> None:
    parser = HermesParser(TOOLS)
    first = parser.push('<tool_call>{"name": "add", "arguments": {"a"').tool_calls[0]
    assert (first.name, first.arguments) == ("add", '{"a"')
    assert [delta.arguments for delta in parser.push(': "x\\').tool_calls] == [': "x']
    assert [delta.arguments for delta in parser.push('n", "b": 12').tool_calls] == ['\\n", "b": ']


def test_case_bug_063_ids_are_as_the_model_s_template_wants_them() -> None:
    ids = {kind: kind.new_id() for kind in (HermesParser, Llama3JsonParser, MistralParser)}
    assert len(ids[MistralParser]) == 9
    assert ids[MistralParser].isalnum()
    assert ids[HermesParser].startswith("call_")
    assert len(ids[Llama3JsonParser]) == 29


def test_calls_beyond_the_limit_are_dropped() -> None:
    text = HERMES[2][0]
    assert said(HermesParser(OfferedTools(TOOLS.names, 1)), text) == ("Done.", "", [("add", "{}")])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=100)
@given(
    value=st.dictionaries(st.text(max_size=4), JSON, max_size=3),
    ascii=st.booleans(),
    at=st.integers(0, 200),
    change=st.sampled_from(["", '"', "\\", "{", "}", "]", ",", ":", "1", "-", ".", "u", " "]),
)
def test_objects_are_checked_as_json_checks_them(value: dict[str, Any], ascii: bool, at: int, change: str) -> None:
    text = json.dumps(value, ensure_ascii=ascii)
    at = 1 + at % max(1, len(text) - 1)
    text = text[:at] + change + text[at + (at % 2) :]
    read, rest = JsonObject(), text
    try:
        while rest and not read.is_over:
            rest = read.push(rest)
        is_object = read.is_over and not rest.strip()
    except MalformedJson:
        is_object = False
    assert is_object == _is_object(text)
    if is_object:
        spans = {key: read.text[member.start : member.end] for key, member in read.members.items()}
        pairs: list[tuple[str, Any]] = json.loads(text, object_pairs_hook=list)
        assert {key: json.loads(span, object_pairs_hook=list) for key, span in spans.items()} == dict(reversed(pairs))


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def test_nesting_is_bounded() -> None:
    text = '<tool_call>{"name": "add", "arguments": ' + '{"a":' * 200
    assert said(HermesParser(TOOLS), text) == ('{"a":' * 73, "", [("add", '{"a":' * 127)])


def test_special_tokens_that_are_shown_for_a_parser_are_left_out_of_the_rest() -> None:
    recipe = ParserRecipe("mistral", TOOLS, hidden=Marks({"</s>", "<s>", "[INST]"}))
    made = pickle.loads(pickle.dumps(recipe))()
    assert said(made, "He<", "s>llo[IN", "ST] [TOOL_CALLS]add[ARGS]{}</s", ">") == ("Hello", "", [("add", "{}")])
    assert said(WithoutMarks(Marks({"<|a|>"}), PlainMessage()), "x<|a", "|b") == ("x<|a|b", "", [])


def test_reasoning_comes_before_calls() -> None:
    made = ParserRecipe("hermes", TOOLS, Thinking.OPEN)()
    text = f"Hm, <tool_call> is a tag.\n</think>\n\n{HERMES[0][0]}"
    assert said(made, *text) == ("", "Hm, <tool_call> is a tag.", [("add", ARGUMENTS)])
