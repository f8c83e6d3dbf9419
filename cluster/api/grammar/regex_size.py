"""How large a regular expression is, before anybody unrolls it."""

from __future__ import annotations

import re

from ....worker.errors import InvalidRequest

MAX_REGEX_CHARS = 4_096
MAX_UNROLLED = 5_000
"""Characters, classes and groups, repeated ones counted as often as they must or may be repeated: what an automaton's
size grows with. ``^.{1,4000}$`` is 4,000."""

_TOKEN = re.compile(
    r"\\(?:[pPxu]\{[^}]{0,64}\}|.)"
    r"|\[\^?+\]?+(?:\\.|\[:\w+:\]|[^\]\\])*+\]?"
    r"|\{(\d*+),?+(\d*+)\}"
    r"|\(\?<?[\w:!=-]*>?|.",
    re.DOTALL,
)
"""What it has looked at it takes, a class without its end too, which llguidance refuses: so its time is linear."""


def check_regex(pattern: str, param: str, at: str | None = None) -> None:
    """Raises InvalidRequest for one that is too long or too large; llguidance judges the rest. ``at``: its place."""
    at = at or param
    if len(pattern) > MAX_REGEX_CHARS:
        message = f"{at} is a regular expression of {len(pattern)} characters, at most {MAX_REGEX_CHARS} are allowed."
        raise InvalidRequest(message, param=param)
    size = unrolled_size(pattern)
    if size > MAX_UNROLLED:
        shown = str(size) if size < 10**12 else "more than 10^12"
        message = f"{at} repeats too much: unrolled it has {shown} elements, at most {MAX_UNROLLED} are allowed."
        raise InvalidRequest(message, param=param)


def unrolled_size(pattern: str) -> int:
    """Elements of the pattern with every counted repetition written out."""
    groups = [0]
    """Sizes so far of the open groups, the innermost last."""
    last = 0
    """Of the element that a repetition would be about; it is in its group's size already."""
    for token in _TOKEN.finditer(pattern):
        text = token[0]
        if text[0] == "(":
            groups.append(1)
        elif text == ")" and len(groups) > 1:
            last = groups.pop()
            groups[-1] += last
        elif token[1] is not None:
            times = max(int(token[1] or 0), int(token[2] or 0), 1)
            groups[-1] += last * (times - 1)
            last *= times
        elif text not in "|*+?^$":
            last = 1
            groups[-1] += 1
    return sum(groups)
