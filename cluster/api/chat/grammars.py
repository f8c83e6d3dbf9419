"""Grammars of whole answers: calls in a model's form, an answer in the form that was asked for, reasoning before them.

Parts are put together as named grammars of one llguidance document, which Lark speaks of as ``@name``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ..grammar.tagged_json import SpecialToken, TaggedJson, grammar_of_tagged_json
from .reasoning import THINK, Thinking, ThinkMarks
from .support import ToolForm
from .tool_parsers import MistralParser

_GAP = "gap: /\\n{0,2}/\n"
_NONE: Mapping[str, int] = MappingProxyType({})
_OTHER_THAN_JSON = "OTHER: /[^{ \\t\\r\\n](.|\\n)*/\n"


@dataclass(frozen=True, slots=True)
class CallableTool:
    name: str
    schema: dict[str, Any]
    """Of its arguments; ``check_schema`` has judged it."""


def calls_in(
    form: ToolForm,
    tools: Sequence[CallableTool],
    special_tokens: Mapping[str, int],
    *,
    at_most_one: bool,
    text_before: bool = False,
) -> str:
    """At least one call; with ``text_before`` any text may come first, or be all there is.

    ``special_tokens``: ids of those of Mistral's marks that are tokens which text cannot spell.
    """
    if form == "mistral" and MistralParser.ARGS in special_tokens:
        return _named_calls(tools, special_tokens, at_most_one=at_most_one, text_before=text_before)
    match form:
        case "hermes":
            tags = [_tag(tool, '\n{"name": %s, "arguments": ', "}\n</tool_call>") for tool in tools]
            around: dict[str, Any] = {"begin": ("<tool_call>",), "separator": "\n<tool_call>"}
        case "llama3_json":
            tags = [_tag(tool, '{"name": %s, "parameters": ', "}") for tool in tools]
            around = {"separator": "; "}
        case "mistral":
            tags = [_tag(tool, '{"name": %s, "arguments": ', "}") for tool in tools]
            mark = _literal(MistralParser.TAG, special_tokens)
            around = {"begin": (mark, "["), "separator": ", ", "end": ("]",)}
    if form == "llama3_json" and text_before:
        # Calls are all of the text there, or none of it is.
        calls = grammar_of_tagged_json(tags, at_least_one=True, at_most_one=at_most_one, **around)
        return combined(f'start: @calls | OTHER | ""\n{_OTHER_THAN_JSON}', calls=calls)
    return grammar_of_tagged_json(
        tags, at_least_one=not text_before, at_most_one=at_most_one, text_before=text_before, **around
    )


def either(first: str, second: str) -> str:
    """An output that follows one of the grammars."""
    return combined("start: @calls | @answer\n", calls=first, answer=second)


def after_reasoning(
    grammar: str, thinking: Thinking, marks: ThinkMarks = THINK, special_tokens: Mapping[str, int] = _NONE
) -> str:
    """The output follows ``grammar`` from where its reasoning is over.

    ``special_tokens``: ids of those of ``marks`` that are tokens which text cannot spell.
    """
    if thinking is Thinking.OVER:
        return grammar
    thought = f"{_thought(marks.close, special_tokens)}{_GAP}"
    if thinking is Thinking.OPEN:
        return combined(f"start: thought gap @spoken\n{thought}", spoken=grammar)
    return combined(f"start: ({_said(marks.open, special_tokens)} thought gap)? @spoken\n{thought}", spoken=grammar)


def combined(lark: str, **parts: str) -> str:
    """``lark`` with the grammars that it names. Names must be different in all that is put together."""
    grammars: list[dict[str, Any]] = [{"lark_grammar": lark}]
    for name, part in parts.items():
        first, *others = json.loads(part)["grammars"] if part.startswith("{") else [{"lark_grammar": part}]
        grammars += [{**first, "name": name}, *others]
    return json.dumps({"grammars": grammars})


def _named_calls(
    tools: Sequence[CallableTool], special_tokens: Mapping[str, int], *, at_most_one: bool, text_before: bool
) -> str:
    """``[TOOL_CALLS]name[ARGS]{…}``, again and again."""
    mark = _said(MistralParser.TAG, special_tokens)
    arguments = SpecialToken(special_tokens[MistralParser.ARGS])
    named = {
        f"tool_{index}": grammar_of_tagged_json(
            [TaggedJson("", tool.schema)], at_least_one=True, at_most_one=True, begin=(tool.name, arguments)
        )
        for index, tool in enumerate(tools)
    }
    calls = "call" if at_most_one else "call+"
    start = f"TEXT? {calls} | TEXT?\nTEXT: /(.|\\n)+/" if text_before else calls
    return combined(f"start: {start}\ncall: {mark} ({' | '.join(f'@{name}' for name in named)})\n", **named)


def _thought(close: str, special_tokens: Mapping[str, int]) -> str:
    """The rule of what is thought, with the mark that ends it: text cannot spell one that is a special token."""
    if close in special_tokens:
        return f"thought: THOUGHT? {_said(close, special_tokens)}\nTHOUGHT: /(.|\\n)+/\n"
    return f"thought[lazy]: /(.|\\n)*/ {_said(close, special_tokens)}\n"


def _said(mark: str, special_tokens: Mapping[str, int]) -> str:
    return f"<[{special_tokens[mark]}]>" if mark in special_tokens else json.dumps(mark)


def _tag(tool: CallableTool, prefix: str, suffix: str) -> TaggedJson:
    return TaggedJson(prefix % json.dumps(tool.name), tool.schema, suffix)


def _literal(mark: str, special_tokens: Mapping[str, int]) -> str | SpecialToken:
    return SpecialToken(special_tokens[mark]) if mark in special_tokens else mark
