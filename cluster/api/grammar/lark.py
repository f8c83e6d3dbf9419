"""Grammars that clients write: Lark as llguidance reads it, or GBNF (llama.cpp's and xgrammar's EBNF), told apart by
Lark's rule ``start:``, where GBNF has ``root ::=``.

What is refused beside what llguidance refuses: options of rules that would change how tokens are drawn, and whatever is
refused in a schema or a regular expression of its own.
"""

from __future__ import annotations

import json
import re

from llguidance.gbnf_to_lark import gbnf_to_lark

from ....worker.errors import InvalidRequest
from .json_schema import check_schema
from .regex_size import MAX_UNROLLED, check_regex

MAX_GRAMMAR_CHARS = 2**16
MAX_NESTING = 50
"""Of brackets: GBNF is translated recursively."""
MAX_GBNF_CHARS = 2**14
"""The translation takes up to 10 µs a character; Lark is only looked through, at a tenth of that."""
MAX_GBNF_RULES = 200
"""The time of the translation grows with more than their square."""
MAX_JSON_PARTS = 100
"""Schemas within a grammar."""

_LARK = re.compile(r"^[^\S\n]*+(?:%llguidance\b|start\s*:)", re.MULTILINE)

_PART = re.compile(
    r'"(?:\\.|[^"\\\n])*+"?'
    r"|//[^\n]*|#[^\n]*|<[^<>\s]*+>?"
    r"|/(?P<regex>(?:\\.|[^/\\])++)/?"
    r"|\b(?P<option>temperature|max_tokens|stop)\s*="
    r"|(?P<json>%json)\s*"
    r"|[{~,.]\s*(?P<count>\d+)"
)
"""llguidance's own tokens. One without its end, which llguidance refuses, reaches as far as was looked for it: so the
search takes linear time."""


def lark_of(grammar: str, param: str) -> str:
    """The grammar as Lark. Raises InvalidRequest."""
    if len(grammar) > MAX_GRAMMAR_CHARS:
        message = f"{param} has {len(grammar)} characters, at most {MAX_GRAMMAR_CHARS} are allowed."
        raise InvalidRequest(message, param=param)
    if _nesting(grammar) > MAX_NESTING:
        raise InvalidRequest(f"{param} nests brackets more than {MAX_NESTING} deep.", param=param)
    lark = grammar if _LARK.search(grammar) else _translated(grammar, param)
    _check(lark, param)
    return lark


def _translated(grammar: str, param: str) -> str:
    """From GBNF."""
    num_rules = grammar.count("::=")
    if num_rules > MAX_GBNF_RULES or len(grammar) > MAX_GBNF_CHARS:
        message = f"{param} is taken for GBNF, for want of a rule start:, and has {num_rules} rules of {len(grammar)} "
        limits = f"characters together; at most {MAX_GBNF_RULES} of {MAX_GBNF_CHARS} are allowed."
        raise InvalidRequest(message + limits, param=param)
    try:
        return gbnf_to_lark(grammar)
    except Exception as error:  # a translator's verdict, in exceptions of many types
        reason = f"{error}"[:300]
        raise InvalidRequest(
            f"{param} is no grammar in Lark (start: …) or GBNF (root ::= …): {reason}", param=param
        ) from error


def _nesting(grammar: str) -> int:
    depth = deepest = 0
    for character in grammar:
        depth += (character == "(") - (character == ")")
        deepest = max(deepest, depth)
    return deepest


def _check(lark: str, param: str) -> None:
    place = num_json_parts = 0
    while (part := _PART.search(lark, place)) is not None:
        place = part.end()
        if part["regex"] is not None:
            check_regex(part["regex"], param)
        elif part["option"] is not None:
            raise InvalidRequest(f"{param}: the option {part['option']} of a rule is not supported.", param=param)
        elif part["count"] is not None and (len(part["count"]) > 9 or int(part["count"]) > MAX_UNROLLED):
            raise InvalidRequest(f"{param} repeats something more than {MAX_UNROLLED} times.", param=param)
        elif part["json"] is not None:
            num_json_parts += 1
            if num_json_parts > MAX_JSON_PARTS:
                raise InvalidRequest(f"{param} has more than {MAX_JSON_PARTS} schemas (%json).", param=param)
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
