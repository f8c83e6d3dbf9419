"""Gives orders to the agents on the hosts of a cluster (``agent.py``), one host or all of them at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...worker.errors import ConfigurationError, OctavoError
from .answers import CONTINUED, answer_in
from .shell import Shell, explain
from .state import Member

AGENT = "octavo.cluster.hosts.agent"


class HostAway(OctavoError):
    """A host could not be asked; what is there is not known."""


class Agents:
    """``note`` gets what agents say while they work."""

    def __init__(self, shell: Shell, cluster_id: str, note: Callable[[str], None]) -> None:
        self._shell = shell
        self._cluster_id = cluster_id
        self._note = note

    def ask(self, member: Member, command: str, orders: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """The agent's answer. Raises ConfigurationError or OctavoError with what it says, HostAway if it says
        nothing; all begin with the host."""
        host = member.host
        outcome = self._shell.run(
            host,
            [member.python, "-P", "-m", AGENT, command, f"{self._cluster_id}-{member.index}"],
            stdin=json.dumps(orders),
            timeout_s=timeout_s,
            on_line=lambda line: self._say(member, line),
        )
        answer = answer_in(outcome.stdout)
        if answer is None:
            raise HostAway(f"{host}: {explain(host, member.python, outcome)}")
        if "error" in answer:
            kind = ConfigurationError if answer["is_mendable"] else OctavoError
            raise kind(f"{host}: {answer['error']}")
        return answer

    def ask_all(
        self, members: Sequence[Member], command: str, orders: Callable[[Member], Mapping[str, Any]], timeout_s: float
    ) -> list[dict[str, Any] | OctavoError]:
        """All at once; for each member its answer, or what went wrong."""

        def one(member: Member) -> dict[str, Any] | OctavoError:
            try:
                return self.ask(member, command, orders(member), timeout_s)
            except OctavoError as error:
                return error

        return self._shell.on_all(one, members)

    def _say(self, member: Member, line: str) -> None:
        for mark, before in (("octavo: ", f"{member.host}: "), (CONTINUED, "  ")):
            if line.startswith(mark):
                self._note(before + line.removeprefix(mark))
