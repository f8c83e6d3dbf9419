"""``octavo launch``: a cluster on several hosts, brought up over SSH.

    compare all hosts ─▶ prepare the model on all ─▶ head ─▶ the other nodes ─▶ deploy on the head
    nothing is started before all have been asked       └── recorded; taken down if anything fails ──┘

The command returns when the cluster serves; ``octavo stop`` takes it down.
"""

from __future__ import annotations

import datetime
import secrets
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

from ...worker.errors import ConfigurationError, OctavoError
from ..config import ServeConfig
from ..demands import demands_of, most_demanded
from ..phases import Phases, curl_line
from ..placement import GATEWAY_RESOURCE, Node, refusal
from .compare import Probed, describe, head_address, probe_hosts, problems
from .host import Host
from .orders import Agents
from .processes import ProcessId
from .shell import Shell
from .state import ClusterState, Member, StateFiles
from .stop import take_down

START_S = 150.0
"""For a Ray node to start, on a host that is busy."""

DEPLOY_MARGIN_S = 120.0
"""Beside ``--startup-timeout-s``, which begins when the deployments are handed over."""


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """What ``octavo launch`` is told beside the configuration."""

    hosts: tuple[Host, ...]
    name: str
    python: str | None
    """Of hosts that name none themselves. None: the same path as here."""
    ssh_command: str
    ray_port: int
    """0: a free one."""


def launch(options: LaunchOptions, config: ServeConfig, phases: Phases) -> ClusterState:
    """Bring the cluster up. Raises ConfigurationError for what the user can mend, OctavoError otherwise; then nothing
    of it is left."""
    shell = Shell(options.ssh_command)
    files = StateFiles(config.cache_dir)
    if files.load(options.name) is not None:
        raise ConfigurationError(f"--name: {options.name!r} was launched already; octavo stop {options.name} ends it")
    with phases.phase(f"asking {len(options.hosts)} host{'s' * (len(options.hosts) > 1)}"):
        probed = _compared(shell, options, config, phases.note)
    state = _new_state(options, config, probed)
    agents = Agents(shell, state.id, phases.note)
    head = head_address(probed[0])
    with phases.phase("preparing the model"):
        prepared = _prepare(agents, state, config)
    with _recorded(state, files, agents, phases) as record:
        with phases.phase("starting Ray"):
            started = _start_nodes(agents, record, head, prepared["config"])
        answer = _deploy(agents, record.state, prepared["config"], started)
        record.save(replace(record.state, url=_public(answer["url"], head), model_names=tuple(prepared["models"])))
    return record.state


def _compared(shell: Shell, options: LaunchOptions, config: ServeConfig, note: Callable[[str], None]) -> list[Probed]:
    """What all hosts have. Raises ConfigurationError when they cannot be one cluster; each reason is noted."""
    probed, away = probe_hosts(shell, options.hosts, options.python)
    reasons = away or [*problems(probed), *_unmet(config, probed)]
    for host in probed:
        note(describe(host))
    if len(reasons) == 1:
        raise ConfigurationError(reasons[0])
    if reasons:
        for reason in reasons:
            note(reason)
        raise ConfigurationError(f"HOST: {len(reasons)} things stand in the way (see above); nothing was started")
    return probed


def _unmet(config: ServeConfig, probed: Sequence[Probed]) -> Iterator[str]:
    """What the configuration asks of the hosts and they have not."""
    num_gpus = [host.num_gpus if host.host.num_gpus is None else host.host.num_gpus for host in probed]
    if config.device == "cuda" and not any(num_gpus):
        yield "--device: cuda, but no host has a GPU"
        return
    device: Literal["cpu", "cuda"] = "cuda" if any(num_gpus) and config.device != "cpu" else "cpu"
    nodes = [
        Node(str(host.host), {"CPU": host.host.num_cpus or host.num_cpus + 1, "GPU": gpus})
        for host, gpus in zip(probed, num_gpus, strict=True)
    ]
    if reason := refusal(demands_of(config, device), nodes) or refusal(most_demanded(config, device), nodes):
        yield reason


def _new_state(options: LaunchOptions, config: ServeConfig, probed: Sequence[Probed]) -> ClusterState:
    return ClusterState(
        name=options.name,
        id=secrets.token_hex(4),
        started=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        ssh_command=options.ssh_command,
        token=secrets.token_hex(32),
        app_name=config.app_name,
        num_routers=config.num_routers,
        shutdown_timeout_s=config.shutdown_timeout_s,
        members=tuple(Member(each.host, each.python, index) for index, each in enumerate(probed)),
        ray_port=options.ray_port,
    )


def said(config: ServeConfig) -> dict[str, Any]:
    """What was set: each host has defaults of its own, such as its cache folder. Keys travel as their digests."""
    return config.model_dump(mode="json", exclude_unset=True) | {"api_key": list(config.api_key)}


def _prepare(agents: Agents, state: ClusterState, config: ServeConfig) -> dict[str, Any]:
    """Let every host get the model, and the head judge everything; what it answers: the models' names, and the
    configuration as it has made it."""
    answers = agents.ask_all(
        state.members,
        "prepare",
        lambda member: {"config": said(config), "is_head": member.index == 0},
        config.startup_timeout_s,
    )
    return _all_of(answers)[0]


class Record:
    """The cluster's state, saved with every change."""

    def __init__(self, state: ClusterState, files: StateFiles) -> None:
        self.state = state
        self._files = files

    def save(self, state: ClusterState) -> None:
        self._files.save(state)
        self.state = state


@contextmanager
def _recorded(state: ClusterState, files: StateFiles, agents: Agents, phases: Phases) -> Iterator[Record]:
    """Whatever ends what is within early, Ctrl-C and SIGTERM too, what was started is ended."""
    files.create(state)
    record = Record(state, files)
    try:
        with _sigterm_raises():
            yield record
    except BaseException:
        with phases.phase("taking down what was started"):
            take_down(record.state, files, agents, phases.note, drains=False)
        raise


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    def on_signal(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _start_nodes(agents: Agents, record: Record, head: str, config: dict[str, Any]) -> dict[str, Any]:
    """The head, then all others at once; what the head's agent says. Each is recorded as soon as it is there."""

    def orders(member: Member) -> dict[str, Any]:
        host, state = member.host, record.state
        return {
            "id": state.id,
            "index": member.index,
            "token": state.token,
            "address": head if member.index == 0 else host.address,
            "head_address": head,
            "ray_port": state.ray_port,
            "num_cpus": host.num_cpus,
            "num_gpus": host.num_gpus,
            "interface": host.interface,
            "head_resources": {GATEWAY_RESOURCE: 1},
            "config": config,
        }

    started = agents.ask(record.state.head, "start", orders(record.state.head), START_S)
    record.save(replace(_with_node(record.state, record.state.head, started), ray_port=started["ray_port"]))
    others = record.state.members[1:]
    answers = agents.ask_all(others, "start", orders, START_S)
    for member, answer in zip(others, answers, strict=True):
        if isinstance(answer, dict):
            record.save(_with_node(record.state, member, answer))
    _all_of(answers)
    return started


def _with_node(state: ClusterState, member: Member, started: dict[str, Any]) -> ClusterState:
    processes = tuple(ProcessId(**fields) for fields in started["processes"])
    return state.with_member(replace(member, address=started["address"], processes=processes))


def _deploy(agents: Agents, state: ClusterState, config: dict[str, Any], started: dict[str, Any]) -> dict[str, Any]:
    orders = {
        "config": config,
        "front": started["front"],
        "environment": started["environment"],
        "token": state.token,
        "ray_address": state.ray_address,
        "address": state.head.address,
        "num_nodes": len(state.members),
    }
    return agents.ask(state.head, "deploy", orders, config["startup_timeout_s"] + DEPLOY_MARGIN_S)


def _all_of(answers: Sequence[dict[str, Any] | OctavoError]) -> list[dict[str, Any]]:
    """Raises the one thing that went wrong, or one error for all."""
    errors = [answer for answer in answers if isinstance(answer, OctavoError)]
    if not errors:
        return [answer for answer in answers if isinstance(answer, dict)]
    if len(errors) == 1:
        raise errors[0]
    kind = ConfigurationError if all(isinstance(error, ConfigurationError) for error in errors) else OctavoError
    raise kind("; ".join(map(str, errors)))


def farewell(state: ClusterState, config: ServeConfig) -> str:
    """What the user sees at the end: where it serves, how to try it, how to end it."""
    path = StateFiles(config.cache_dir).path(state.name)
    trial = curl_line(state.url, state.model_names[0])
    models = ", ".join(state.model_names)
    where = f"{models} at {state.url}/v1{_only_there(state, config.host)}"
    return f"{where}\n\n{trial}\n\noctavo stop {state.name} takes it down; recorded in {path}"


def _only_there(state: ClusterState, listens_on: str) -> str:
    """That the head alone can reach the API, where that is so."""
    if state.head.host.is_here or listens_on not in ("127.0.0.1", "localhost", "::1"):
        return ""
    return f", an address of {state.head.host} alone (--host 0.0.0.0 is for everybody who reaches it)"


def _public(url: str, address: str) -> str:
    """Where the API listens on all interfaces: the address that the other hosts know the head by."""
    host = f"[{address}]" if ":" in address else address
    return url.replace("//0.0.0.0:", f"//{host}:").replace("//[::]:", f"//{host}:")
