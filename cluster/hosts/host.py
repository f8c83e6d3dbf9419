"""The hosts of a cluster, as words of a command line or lines of a file: ``user@host:port``, and what is particular."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ...worker.errors import ConfigurationError

_HOST = re.compile(
    r"(?:(?P<user>[A-Za-z0-9_][\w.-]*)@)?(?P<name>[A-Za-z0-9][\w.-]*|\[[0-9A-Fa-f:.]+\])(?::(?P<port>\d+))?"
)
_COUNTS = ("num_cpus", "num_gpus")


@dataclass(frozen=True, slots=True)
class Host:
    """One machine. None: as the machine says by itself."""

    name: str
    """What the SSH program connects to; empty: this machine, without SSH."""
    user: str | None = None
    port: int | None = None
    python: str | None = None
    """Its Python, in whose environment Octavo is installed. None: the same path as here."""
    address: str | None = None
    """The IP address under which the other hosts reach it. None: by the route to the head."""
    interface: str | None = None
    """The network interface of collectives. None: the one that has the address."""
    num_cpus: int | None = None
    num_gpus: int | None = None

    @property
    def is_here(self) -> bool:
        return not self.name

    def __str__(self) -> str:
        return self.name or "this machine"


SETTINGS = tuple(field.name for field in fields(Host))[3:]
"""What a line of a hosts file may say after the host."""


def read_hosts(words: Sequence[str], file: Path | None, *, head_here: bool) -> tuple[Host, ...]:
    """All hosts, the head first. Raises ConfigurationError that names the word, or the file's line."""
    if words and file is not None:
        raise ConfigurationError("--hosts: give hosts either by name or in a file, not both")
    given = [parse_host(word, "HOST") for word in words] if file is None else _read_file(file)
    hosts = (Host(""), *given) if head_here else tuple(given)
    if not hosts:
        raise ConfigurationError("HOST: name at least one host, or a file of hosts (--hosts), or use --head-here")
    _refuse_twins(hosts)
    return hosts


def parse_host(words: str, where: str) -> Host:
    """``user@host:port key=value …``. Raises ConfigurationError that begins with ``where``."""
    name, *settings = words.split() or [""]
    match = _HOST.fullmatch(name)
    if match is None:
        raise ConfigurationError(f"{where}: must be of the form user@host:port, got {name[:80]!r}")
    port = None if match["port"] is None else int(match["port"])
    if port is not None and not 1 <= port <= 65535:
        raise ConfigurationError(f"{where}: the port must be between 1 and 65535, got {port}")
    host = Host(match["name"].strip("[]"), match["user"], port)
    for setting in settings:
        host = _with_setting(host, setting, where)
    return host


def _with_setting(host: Host, setting: str, where: str) -> Host:
    key, equals, value = setting.partition("=")
    if key not in SETTINGS or not equals or not value:
        raise ConfigurationError(f"{where}: {setting!r} is no setting; those of a host are {'=, '.join(SETTINGS)}=")
    if key in _COUNTS and not value.isdecimal():
        raise ConfigurationError(f"{where}: {key} must be a whole number, got {value!r}")
    change: dict[str, Any] = {key: int(value) if key in _COUNTS else value}
    return replace(host, **change)


def _read_file(file: Path) -> list[Host]:
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--hosts: {file} cannot be read: {error}") from error
    return [
        parse_host(words, f"--hosts: {file}:{number}")
        for number, line in enumerate(lines, 1)
        if (words := line.partition("#")[0].strip())
    ]


def _refuse_twins(hosts: Iterable[Host]) -> None:
    """One Ray node for each host: two on one machine would book the same GPUs twice."""
    seen: set[tuple[str, int | None, str | None]] = set()
    for host in hosts:
        key = (host.name, host.port, host.address)
        if key in seen:
            raise ConfigurationError(f"HOST: {host} is named twice")
        seen.add(key)
