"""Grammars that clients write: Lark as llguidance reads it, or GBNF (llama.cpp's and xgrammar's EBNF), told apart by
Lark's rule ``start:``, where GBNF has ``root ::=``.

What is refused beside what llguidance refuses: options of rules that would change how tokens are drawn, and whatever is
refused in a schema or a regular expression of its own.
"""

from __future__ import annotations

import json
import re

from llguidance.gbnf_to_lark import any_to_lark

from ...worker.errors import InvalidRequest
from .json_schema import check_schema
from .regex_size import MAX_UNROLLED, check_regex

MAX_GRAMMAR_CHARS = 2**16
MAX_NESTING = 50
"""Of brackets: GBNF is translated recursively."""
MAX_GBNF_RULES = 300
"""The time of the translation grows with more than their square."""

_PART = re.compile(
    r'"(?:\\.|[^"\\\n])*"'
    r"|//[^\n]*|#[^\n]*|<\[[^\]\n]*\]>"
    r"|/(?P<regex>(?:\\.|\[(?:\\.|[^\]\\\n])*\]|[^/\\\n\[])+)/"
    r"|\[[^\]\n]*?\b(?P<option>temperature|max_tokens|stop)\s*="
    r"|(?P<json>%json)\s*"
    r"|[{~,.]\s*(?P<count>\d+)"
)


def lark_of(grammar: str, param: str) -> str:
    """The grammar as Lark. Raises InvalidRequest."""
    if len(grammar) > MAX_GRAMMAR_CHARS:
        message = f"{param} has {len(grammar)} characters, at most {MAX_GRAMMAR_CHARS} are allowed."
        raise InvalidRequest(message, param=param)
    if _nesting(grammar) > MAX_NESTING:
        raise InvalidRequest(f"{param} nests brackets more than {MAX_NESTING} deep.", param=param)
    if grammar.count("::=") > MAX_GBNF_RULES:
        raise InvalidRequest(f"{param} has more than {MAX_GBNF_RULES} rules in GBNF.", param=param)
    try:
        lark = any_to_lark(grammar)
    except Exception as error:  # a translator's verdict, in exceptions of many types
        reason = f"{error}"[:300]
        raise InvalidRequest(
            f"{param} is no grammar in Lark (start: …) or GBNF (root ::= …): {reason}", param=param
        ) from error
    _check(lark, param)
    return lark


def _nesting(grammar: str) -> int:
    depth = deepest = 0
    for character in grammar:
        depth += (character == "(") - (character == ")")
        deepest = max(deepest, depth)
    return deepest


def _check(lark: str, param: str) -> None:
    place = 0
    while (part := _PART.search(lark, place)) is not None:
        place = part.end()
        if part["regex"] is not None:
            check_regex(part["regex"], param)
        elif part["option"] is not None:
            raise InvalidRequest(f"{param}: the option {part['option']} of a rule is not supported.", param=param)
        elif part["count"] is not None and (len(part["count"]) > 9 or int(part["count"]) > MAX_UNROLLED):
            raise InvalidRequest(f"{param} repeats something more than {MAX_UNROLLED} times.", param=param)
        elif part["json"] is not None:
            place = _check_json(lark, place, param)


def _check_json(lark: str, start: int, param: str) -> int:
    """Judge the schema that starts there; where it ends."""
    try:
        schema, end = json.JSONDecoder().raw_decode(lark, start)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{param}: what follows %json is no JSON: {error}"[:300], param=param) from error
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{param}: what follows %json must be an object.", param=param)
    check_schema({keyword: value for keyword, value in schema.items() if keyword != "x-guidance"}, param)
    return end
