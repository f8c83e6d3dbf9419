"""Logs of every process of the cluster: one line for each event, as text or as JSON.

A call gives fields beside its message as ``logger.info("…", extra={"fields": {"request_id": …}})``. In JSON they are
keys of the line; as text they follow the message. What the process is (its role, group, rank) is on every line.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping
from typing import IO, Any, Literal

LogFormat = Literal["text", "json"]

_OWN = "octavo-logs"
"""Name of the handler that ``configure_logs`` has set, so that it replaces its own and nobody else's."""


def configure_logs(
    level: str, form: LogFormat, who: Mapping[str, Any], *, logger: str = "", stream: IO[str] | None = None
) -> None:
    """What is logged at ``level`` and above below ``logger``, by default everywhere, goes to ``stream`` (stderr).

    ``who`` says what this process is, such as ``{"role": "worker", "group": "group-1", "rank": 0}``.
    """
    target = logging.getLogger(logger)
    for handler in [handler for handler in target.handlers if handler.name == _OWN]:
        target.removeHandler(handler)
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.name = _OWN
    handler.setFormatter(JsonLines(who) if form == "json" else TextLines(who))
    target.addHandler(handler)
    target.setLevel(level.upper())
    if logger:
        target.propagate = False


def fields_of(record: logging.LogRecord) -> Mapping[str, Any]:
    """What a call gave beside its message, without what it does not know."""
    fields: Mapping[str, Any] = getattr(record, "fields", {})
    return {name: value for name, value in fields.items() if value is not None}


class JsonLines(logging.Formatter):
    """A JSON object on one line, its time in UTC."""

    def __init__(self, who: Mapping[str, Any]) -> None:
        super().__init__()
        self._who = dict(who)

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _utc(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._who,
            **fields_of(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class TextLines(logging.Formatter):
    """``time LEVEL logger [who] message name=value …``; a traceback follows on lines of its own."""

    def __init__(self, who: Mapping[str, Any]) -> None:
        super().__init__()
        self._who = "/".join(str(value) for value in who.values())

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {name}={_shown(value)}" for name, value in fields_of(record).items())
        line = f"{_utc(record.created)} {record.levelname} {record.name} [{self._who}] {record.getMessage()}{fields}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _utc(seconds: float) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds % 1 * 1000):03d}Z"


def _shown(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return json.dumps(text, ensure_ascii=False) if not text or any(c.isspace() or c in '"=' for c in text) else text
