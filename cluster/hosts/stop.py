"""``octavo stop``: takes down what ``octavo launch`` has started and recorded, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from ...worker.errors import OctavoError
from .orders import Agents, HostAway
from .state import ClusterState, Member, StateFiles

STOP_S = 90.0
"""For a host to end its node: longer than its agent takes at the worst."""

TAKE_DOWN_S = 150.0
"""For the head to delete the application when its requests have ended."""


def take_down(
    state: ClusterState, files: StateFiles, agents: Agents, note: Callable[[str], None], *, drains: bool
) -> list[str]:
    """Drain the application, end the nodes, the head's last, and forget the cluster; a line for each host that could
    not be asked. As long as there is one, the cluster is remembered, with what is left of it."""
    if drains and state.url:
        _drain(state, agents, note)
    left: list[tuple[Member, OctavoError]] = []
    for members in (state.members[1:], state.members[:1]):
        left += _end_nodes(members, state, agents, note)
    if left:
        files.save(replace(state, members=tuple(member for member, _ in left), url=""))
    else:
        files.forget(state.name)
    return [str(error) for _, error in left]


def _drain(state: ClusterState, agents: Agents, note: Callable[[str], None]) -> None:
    note("draining: requests under way are finished first")
    orders = {
        "token": state.token,
        "ray_address": state.ray_address,
        "address": state.head.address,
        "app_name": state.app_name,
        "num_routers": state.num_routers,
        "shutdown_timeout_s": state.shutdown_timeout_s,
    }
    try:
        agents.ask(state.head, "drain", orders, state.shutdown_timeout_s + TAKE_DOWN_S)
    except OctavoError as error:
        note(f"not drained: {error}")


def _end_nodes(
    members: Sequence[Member], state: ClusterState, agents: Agents, note: Callable[[str], None]
) -> list[tuple[Member, OctavoError]]:
    """Of those of ``members`` that could not be asked, with the reason."""

    def orders(member: Member) -> dict[str, Any]:
        return {
            "id": state.id,
            "index": member.index,
            "processes": [asdict(process) for process in member.processes],
        }

    answers = agents.ask_all(members, "stop", orders, STOP_S)
    left = []
    for member, answer in zip(members, answers, strict=True):
        if isinstance(answer, OctavoError):
            left.append((member, answer))
            note(f"{answer}{' (it may still run there)' if isinstance(answer, HostAway) else ''}")
        else:
            note(f"{member.host}: ended {_counted(answer['ended'])}")
    return left


def _counted(names: Sequence[str]) -> str:
    """``raylet (12), gcs_server (13) and 4 more``; what ended by itself before is not among them."""
    shown = ", ".join(names[:4])
    return f"{shown} and {len(names) - 4} more" if len(names) > 4 else shown or "nothing, it was not running"
