"""What ``octavo launch`` has started, so that ``octavo stop`` ends that and nothing else: a file for each cluster.

It is written before anything is started, and again with each process that is there; it holds the cluster's token, so
only its owner may read it.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from ...worker.errors import ConfigurationError
from .host import Host
from .processes import ProcessId

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")


@dataclass(frozen=True, slots=True)
class Member:
    """A host of the cluster and the Ray node on it."""

    host: Host
    python: str
    index: int
    """0: the head."""
    address: str = ""
    """Of the Ray node."""
    processes: tuple[ProcessId, ...] = ()
    """The keeper first. Empty when the start was interrupted: then the keeper is looked for by the cluster's id."""


@dataclass(frozen=True, slots=True)
class ClusterState:
    """One launched cluster."""

    name: str
    id: str
    """Random: on the command lines of its keepers."""
    started: str
    """When, for people."""
    ssh_command: str
    token: str
    app_name: str
    num_routers: int
    shutdown_timeout_s: float
    members: tuple[Member, ...]
    ray_port: int = 0
    url: str = ""
    """Empty until it served."""
    model_names: tuple[str, ...] = ()
    """As requests name them."""

    @property
    def head(self) -> Member:
        return self.members[0]

    @property
    def ray_address(self) -> str:
        host = f"[{self.head.address}]" if ":" in self.head.address else self.head.address
        return f"{host}:{self.ray_port}"

    def with_member(self, member: Member) -> ClusterState:
        """``member`` in the place of the one with its index."""
        return replace(self, members=tuple(member if each.index == member.index else each for each in self.members))


_ADAPTER = TypeAdapter(ClusterState)


class StateFiles:
    """The files of the clusters that were launched with this cache folder."""

    def __init__(self, cache_dir: Path) -> None:
        self._folder = cache_dir / "clusters"

    def path(self, name: str) -> Path:
        """Raises ConfigurationError for a name that cannot be one."""
        if _NAME.fullmatch(name) is None:
            raise ConfigurationError(
                f"--name: must be up to 63 letters, digits, dots, dashes and underscores, got {name!r}"
            )
        return self._folder / f"{name}.json"

    def names(self) -> list[str]:
        return sorted(path.stem for path in self._folder.glob("*.json"))

    def create(self, state: ClusterState) -> None:
        """Raises ConfigurationError when there is one of its name already; of two at once, one gets it."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            with open(self.path(state.name), "xb", opener=_private) as file:
                file.write(_ADAPTER.dump_json(state, indent=1))
        except FileExistsError:
            raise ConfigurationError(
                f"--name: a cluster {state.name!r} was launched already; end it (octavo stop {state.name}) or give this"
                " one another name"
            ) from None

    def save(self, state: ClusterState) -> None:
        """In one piece: whoever reads finds the old or the new one."""
        path = self.path(state.name)
        part = path.with_suffix(".part")
        with open(part, "wb", opener=_private) as file:
            file.write(_ADAPTER.dump_json(state, indent=1))
        part.replace(path)

    def load(self, name: str) -> ClusterState | None:
        """None: there is no such cluster. Raises ConfigurationError for a file that is not one of ours."""
        try:
            return _ADAPTER.validate_json(self.path(name).read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValidationError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigurationError(f"{self.path(name)} cannot be read: {reason}; remove it by hand") from error

    def forget(self, name: str) -> None:
        self.path(name).unlink(missing_ok=True)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
