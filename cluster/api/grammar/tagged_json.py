"""Grammars of tool calls: JSON texts between fixed texts, and perhaps free text before them.

``grammar_of_tagged_json`` is what knows a model's form of tool calls asks for; ``StructuredOutputs.check`` then
compiles the result, as it does every grammar. Lark as llguidance reads it:
https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from .schema_grammar import spaced


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """A token that text cannot spell, like Mistral's [TOOL_CALLS]."""

    token_id: int


Literal: TypeAlias = tuple[str | SpecialToken, ...]
"""What is said word for word."""


@dataclass(frozen=True, slots=True)
class TaggedJson:
    """``prefix``, then JSON that follows ``schema`` (which ``check_schema`` has judged), then ``suffix``."""

    prefix: str
    schema: dict[str, Any]
    suffix: str = ""


def grammar_of_tagged_json(
    tags: Sequence[TaggedJson],
    *,
    at_least_one: bool,
    at_most_one: bool,
    separator: str = "",
    begin: Literal = (),
    end: Literal = (),
    text_before: bool = False,
) -> str:
    """Any of ``tags``, again and again with ``separator`` between them unless ``at_most_one``; unless ``at_least_one``
    there may be none at all. ``begin`` and ``end`` are said once around all of them, and not where there is none.

    With ``text_before`` any text may come first. It ends where ``begin`` appears in it, or without one the text that
    all prefixes begin with: a tag must follow then. ValueError when there is neither, and without tags.
    """
    if not tags:
        raise ValueError("a grammar of tagged JSON needs at least one tag")
    rules = ["TEXT: /(.|\\n)*/"] if text_before else []
    if text_before and not begin:
        common, tags = _common_beginning(tags)
        begin, separator = (common,), separator + common
    opening = _lark(begin)
    if text_before:
        opening, head = _after_text(begin)
        rules.append(head)
    calls = "tag" if at_most_one else f"tag ({_lark((separator,))} tag)*"
    rules.append(f"calls: {opening} {calls} {_lark(end)}")
    nothing = "" if at_least_one else (" | TEXT" if text_before else ' | ""')
    rules.append(f"start: calls{nothing}")
    rules.append("tag: " + " | ".join(f"tag_{index}" for index in range(len(tags))))
    rules += [_rule(index, tag) for index, tag in enumerate(tags)]
    return "\n".join(rules) + "\n"


def _common_beginning(tags: Sequence[TaggedJson]) -> tuple[str, list[TaggedJson]]:
    """The text that all prefixes begin with, and the tags without it."""
    prefixes = [tag.prefix for tag in tags]
    first, last = min(prefixes), max(prefixes)
    length = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    if length == 0:
        raise ValueError("text before the tags needs something that tells where it ends")
    return first[:length], [replace(tag, prefix=tag.prefix[length:]) for tag in tags]


def _after_text(begin: Literal) -> tuple[str, str]:
    """How ``begin`` is said after free text, and the rule that this takes."""
    first, rest = begin[0], _lark(begin[1:])
    if isinstance(first, SpecialToken):
        return f"head {rest}", f"head: TEXT? {_lark((first,))}"
    return f"head {rest}", f"head[lazy]: TEXT {_lark((first,))}"


def _rule(index: int, tag: TaggedJson) -> str:
    schema = json.dumps(spaced(tag.schema))
    return f"tag_{index}: {_lark((tag.prefix,))} %json {schema} {_lark((tag.suffix,))}"


def _lark(literal: Literal) -> str:
    """JSON's strings are Lark's, as long as they are ASCII."""
    parts = (f"<[{part.token_id}]>" if isinstance(part, SpecialToken) else json.dumps(part) for part in literal if part)
    return " ".join(parts) or '""'
