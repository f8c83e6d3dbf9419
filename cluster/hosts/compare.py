"""Whether hosts can be one cluster: asked all at once, before anything is started on any of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from ...worker.errors import ConfigurationError
from . import probe
from .answers import answer_in
from .host import Host
from .shell import Shell, explain

PROBE_S = 30.0
NEEDED = ("octavo", "ray", "torch")
EQUAL = ("system", "python", "octavo", "ray", "torch")
"""Ray refuses a node with another Python or Ray; ranks of one group must compute alike."""

SHM_BYTES = 128 * 2**20
"""Ray's object store as we start it, and some for NCCL."""

_DEFAULT_ROUTE = "192.0.2.1"
"""Of a network that is nobody's (RFC 5737): the way to everywhere else."""


@dataclass(frozen=True, slots=True)
class Probed:
    """What a host has; see ``probe.probe``."""

    host: Host
    python: str
    versions: Mapping[str, str | None]
    hostname: str
    has_address: bool
    sources: tuple[str, ...]
    """Its addresses on the way to the other hosts."""
    num_cpus: int
    num_gpus: int
    shm_bytes: int
    boot_id: str = ""

    @property
    def machine(self) -> tuple[str, str, str | None]:
        """The same for two names of one machine, unless each is given an address of its own."""
        return self.boot_id, self.hostname, self.host.address


def probe_hosts(shell: Shell, hosts: Sequence[Host], default_python: str | None) -> tuple[list[Probed], list[str]]:
    """What those hosts have that answer, and a line for each that does not."""
    answers = shell.on_all(lambda host: _probe(shell, host, hosts, default_python), hosts)
    found = [answer for answer in answers if isinstance(answer, Probed)]
    return found, [answer for answer in answers if isinstance(answer, str)]


def _probe(shell: Shell, host: Host, hosts: Sequence[Host], default_python: str | None) -> Probed | str:
    python = host.python or (None if host.is_here else default_python) or sys.executable
    towards = [*(other.address or other.name for other in hosts if other != host and other.name), _DEFAULT_ROUTE]
    program = f"ARGUMENTS = {(towards, host.address)!r}\n" + Path(probe.__file__).read_text().replace(
        "from __future__ import annotations\n", ""
    )
    outcome = shell.run(host, [python, "-P", "-"], stdin=program, timeout_s=PROBE_S)
    answer = answer_in(outcome.stdout)
    if outcome.code != 0 or answer is None:
        return f"{host}: {explain(host, python, outcome)}"
    return Probed(host=host, python=python, **(answer | {"sources": tuple(answer["sources"])}))


def problems(probed: Sequence[Probed]) -> Iterator[str]:
    """A line for everything that keeps these hosts from being one cluster. The first is the head."""
    here = metadata.version("octavo")
    head = probed[0]
    machines = {host.machine: host for host in reversed(probed)}
    for host in probed:
        if (first := machines[host.machine]) is not host:
            yield f"{host.host}: is the same machine as {first.host}; name it once"
        missing = [name for name in NEEDED if host.versions.get(name) is None]
        if missing:
            yield f"{host.host}: {host.python} has no {' and no '.join(missing)}; install octavo {here} there"
        elif host is head:
            yield from _against_us(head, here)
        else:
            yield from _against_head(host, head)
        yield from _of_itself(host)


def _against_us(head: Probed, here: str) -> Iterator[str]:
    there = head.versions["octavo"]
    if there != here:
        yield f"{head.host}: octavo {there} there, {here} here; install the same on both"


def _against_head(host: Probed, head: Probed) -> Iterator[str]:
    for name in EQUAL:
        theirs, wanted = host.versions.get(name), head.versions.get(name)
        if theirs != wanted and wanted is not None:
            advice = "use machines of one kind" if name == "system" else f"install {name} {wanted} there"
            yield f"{host.host}: {name} {theirs}, but {wanted} on {head.host}; {advice}"


def _of_itself(host: Probed) -> Iterator[str]:
    wanted = host.host
    if not host.has_address:
        yield f"{wanted}: address={wanted.address} is none of its addresses; it goes out by {', '.join(host.sources)}"
    if wanted.num_gpus is not None and wanted.num_gpus > host.num_gpus > 0:
        yield f"{wanted}: num_gpus={wanted.num_gpus}, but it has {host.num_gpus}; lower num_gpus"
    if host.shm_bytes < SHM_BYTES:
        yield (
            f"{wanted}: {host.shm_bytes // 2**20} MiB free in /dev/shm, {SHM_BYTES // 2**20} MiB are needed; in a"
            " container give it more (--shm-size)"
        )


def head_address(head: Probed) -> str:
    """Under which the other hosts reach the head. Raises ConfigurationError when none is known."""
    outward = [source for source in head.sources if not source.startswith("127.")]
    if not (candidates := [*([head.host.address] if head.host.address else []), *outward, *head.sources]):
        raise ConfigurationError(f"{head.host}: it has no route to any other host; say its address (address=)")
    return candidates[0]


def describe(probed: Probed) -> str:
    """For people: what a host brings in."""
    versions: dict[str, Any] = {name: probed.versions.get(name) for name in EQUAL[1:]}
    gpus = probed.num_gpus if probed.host.num_gpus is None else probed.host.num_gpus
    counts = f"{probed.host.num_cpus or probed.num_cpus} CPUs, {gpus} GPUs"
    return f"{probed.host}: {counts}; " + ", ".join(f"{name} {version}" for name, version in versions.items())
