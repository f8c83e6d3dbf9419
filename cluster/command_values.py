"""Values on the command line, and files that a command is to write."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import click

from ..worker.errors import ConfigurationError


class Number(click.FloatRange):
    """Neither infinite nor NaN."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


ABOVE_0 = Number(min=0.0, min_open=True)
SHARE = Number(min=0.0, max=1.0)
COUNT = click.IntRange(min=1)
FILE = click.Path(path_type=Path)


def require_writable(flag: str, path: Path | None) -> None:
    """Before the work whose outcome it is to hold. Raises ConfigurationError that names ``flag``."""
    if path is None:
        return
    is_new = not path.exists()
    try:
        with path.open("ab"):
            pass
        if is_new:
            path.unlink()
    except OSError as error:
        raise ConfigurationError(f"{flag}: {path}: {error.strerror or error}") from error
