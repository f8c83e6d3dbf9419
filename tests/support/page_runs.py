"""What a page reads of a pool: one letter for each page."""

from __future__ import annotations

import re


def expand(runs: str) -> str:
    """``2f1c`` → ``ffc``."""
    found = re.findall(r"(\d+)([a-z])", runs)
    assert "".join(length + letter for length, letter in found) == runs
    return "".join(letter * int(length) for length, letter in found)
