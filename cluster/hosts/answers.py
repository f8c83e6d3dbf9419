"""The one line that a program on another host answers with: its stdout may hold what a login shell says, too."""

from __future__ import annotations

import json
from typing import Any

_MARK = "OCTAVO "
CONTINUED = "| "
"""Begins a line on stderr that goes with the one before."""


def answer_line(answer: dict[str, Any]) -> str:
    return _MARK + json.dumps(answer)


def answer_in(stdout: str) -> dict[str, Any] | None:
    """None: there is no answer."""
    lines = [line for line in stdout.splitlines() if line.startswith(_MARK)]
    return dict(json.loads(lines[-1].removeprefix(_MARK))) if lines else None
