"""What the doctor finds, and how it shows it."""

from __future__ import annotations

import enum
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text


class Level(enum.IntEnum):
    """How bad it is."""

    GREEN = 0
    YELLOW = 1
    """Works, and is worth a look."""
    RED = 2
    """Will not work, or not as it should."""


_WORDS = {Level.GREEN: "ok", Level.YELLOW: "look", Level.RED: "FAULT"}
_STYLES = {Level.GREEN: "green", Level.YELLOW: "yellow", Level.RED: "bold red"}
PLAIN_WIDTH = 240


@dataclass(frozen=True, slots=True)
class Finding:
    """``node`` is an address; empty: all of them, or the cluster."""

    level: Level
    check: str
    what: str
    node: str = ""
    advice: str = ""
    """What to do; every RED one has it."""


def green(check: str, what: str, node: str = "") -> Finding:
    return Finding(Level.GREEN, check, what, node)


def yellow(check: str, what: str, advice: str, node: str = "") -> Finding:
    return Finding(Level.YELLOW, check, what, node, advice)


def red(check: str, what: str, advice: str, node: str = "") -> Finding:
    return Finding(Level.RED, check, what, node, advice)


def worst(findings: Iterable[Finding]) -> Level:
    return max((finding.level for finding in findings), default=Level.GREEN)


def show(findings: Sequence[Finding], console: Console) -> None:
    """A row for each finding, below it what to do; the words say what the colours do."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("level", "check", "node"):
        table.add_column(name, no_wrap=True)
    table.add_column("what", overflow="fold")
    for finding in findings:
        word = Text(_WORDS[finding.level], style=_STYLES[finding.level])
        advice = f"\n→ {finding.advice}" if finding.advice else ""
        table.add_row(word, finding.check, finding.node or "all", Text(finding.what + advice))
    console.print(table, Text(_sum(findings)), sep="\n\n")


def plain(findings: Sequence[Finding]) -> str:
    """What is shown where there is no terminal."""
    console = Console(width=PLAIN_WIDTH, color_system=None, file=io.StringIO())
    with console.capture() as captured:
        show(findings, console)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def _sum(findings: Sequence[Finding]) -> str:
    counts = {level: sum(finding.level is level for finding in findings) for level in Level}
    return f"{counts[Level.RED]} faults, {counts[Level.YELLOW]} to look at, {counts[Level.GREEN]} in order"
