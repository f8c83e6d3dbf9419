"""What an operator does to a running cluster: draining a worker group, changing how many there are, updating them.

Nothing here loses a request. A group that is drained gets nothing new; its streams finish, or go on at another group
when the time for that is over. Gateways and routers stay as they are.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve._private.common import DeploymentID
from ray.serve.context import _get_global_client

from ..worker.checkpoint.store import resolve_model
from ..worker.errors import ConfigurationError, OctavoError
from ..worker.messages import GroupEntry, Registry
from ..worker.model.config import ModelConfig
from ..worker.wire import unpack
from . import group_updates
from .config import ServeConfig
from .group_updates import GroupsCard
from .plan import NAMESPACE, router_names

ANSWER_S = 15.0
POLL_S = 0.3
STOP_S = 30.0
"""What a drained group takes to leave the cluster, at the most."""

MOST_ROUTERS = 4


class OperationFailed(OctavoError):
    """The cluster did not become what was asked for; the message says how far it came."""


@dataclass(frozen=True, slots=True)
class Group:
    """A worker group that serves, or drains."""

    entry: GroupEntry
    leader: Any
    """Its actor's handle."""


@contextlib.contextmanager
def cluster(address: str, app_name: str, note: Callable[[str], None]) -> Iterator[Operator]:
    """The application on the Ray at ``address``, which was joined. Raises ConfigurationError when there is none."""
    try:
        names = _deployments(app_name)
        if not names:
            raise ConfigurationError(f"--app-name: no application {app_name!r} is served at {address}")
        yield Operator(app_name, note)
    finally:
        ray.shutdown()


def _deployments(app_name: str) -> set[str]:
    if _get_global_client(raise_if_no_controller_running=False) is None:
        return set()
    application = serve.status().applications.get(app_name)
    return set() if application is None else set(application.deployments)


def _check_weights(card: GroupsCard, config: ServeConfig, note: Callable[[str], None]) -> None:
    """Raises ConfigurationError for a model that gateways could not serve, which keep their tokenizer and limits."""
    deployed = ServeConfig.parse(card.config)
    old, new = (resolve_model(each.model, cache_dir=each.cache_dir, report=note).path for each in (deployed, config))
    if _digest(old / "tokenizer.json") != _digest(new / "tokenizer.json"):
        raise ConfigurationError("--model: its tokenizer.json is not that of the model that is served; deploy it anew")
    limits = [ModelConfig.from_folder(folder).max_position_embeddings for folder in (old, new)]
    if limits[1] < (deployed.max_model_len or limits[0]):
        raise ConfigurationError(
            f"--model: its context is {limits[1]} tokens, less than the {deployed.max_model_len or limits[0]} served"
        )


def _digest(file: Path) -> str:
    return sha256(file.read_bytes()).hexdigest() if file.is_file() else ""


class Operator:
    """For one application; this process must have joined its Ray. ``note`` tells people how it goes."""

    def __init__(self, app_name: str, note: Callable[[str], None]) -> None:
        self._app_name = app_name
        self._note = note

    def groups(self) -> dict[str, Group]:
        """By name. Raises OperationFailed when no router answers."""
        for name in router_names(self._app_name, MOST_ROUTERS):
            with contextlib.suppress(RayError, ValueError):
                packed, leaders = ray.get(ray.get_actor(name, NAMESPACE).registry.remote(), timeout=ANSWER_S)
                entries = unpack(packed, Registry).entries
                return {entry.group: Group(entry, leader) for entry, leader in zip(entries, leaders, strict=True)}
        raise OperationFailed("no router answers; which worker groups there are is not known")

    def drain(self, name: str, limit_s: float) -> None:
        """Give the group nothing new, let its streams finish, end it; Serve then starts another one in its place.

        What has not finished after ``limit_s`` goes on at another group. Raises ConfigurationError for a group that is
        not there.
        """
        groups = self.groups()
        group = groups.get(name)
        if group is None:
            raise ConfigurationError(f"GROUP: there is no worker group {name}; there are {', '.join(sorted(groups))}")
        self._note(f"{name}: draining, for up to {limit_s:g} s")
        try:
            drained = ray.get(group.leader.retire.remote(limit_s), timeout=limit_s + STOP_S)
            self._note(f"{name}: " + ("all requests have finished" if drained else "the rest goes on elsewhere"))
        except RayError as error:  # its own end may come before its answer
            self._note(f"{name}: it has ended: {type(error).__name__}")
        self._wait(lambda: name not in self.groups(), STOP_S, f"{name} to leave")

    def remove(self, name: str, limit_s: float) -> None:
        """As ``drain``, and nothing comes in its place."""
        groups = self.groups()
        model = groups[name].entry.model if name in groups else ""
        num_left = sum(group.entry.model == model for group in groups.values()) - 1
        if name in groups and num_left < 1:
            raise ConfigurationError(f"GROUP: {name} is the only worker group of {model}; a model needs one")
        self.drain(name, limit_s)
        self._set_target(self._card(model), num_left)  # what has begun to come up in its place is stopped first
        self._note(f"{name}: removed, {num_left} left")

    def scale(self, model: str | None, count: int, timeout_s: float) -> None:
        """``count`` worker groups of the model. Those that are too many are drained."""
        card = self._card(model)
        self._set_target(card, count)
        self._note(f"{card.served_model_name}: worker groups wanted: {count}, serving: {self._num_serving(card)}")
        self._wait(lambda: self._num_serving(card) == count, timeout_s, f"{count} worker groups")

    def update(
        self, model: str | None, values: Mapping[str, Any], *, surge: bool, limit_s: float, timeout_s: float
    ) -> None:
        """Replace every group of the model, one after the other, by one with ``values`` changed; without any, by one
        that reads its weights and its code anew.

        ``surge``: one more comes up first, so that there are never fewer than before. The last group with the old
        weights gets ``timeout_s`` for its streams, which can go on nowhere else. Raises ConfigurationError.
        """
        card = self._card(model)
        old = sorted(name for name, group in self.groups().items() if group.entry.model == card.served_model_name)
        if len(old) < 2 and not surge:
            raise ConfigurationError("--surge is needed where a model has one worker group: nothing would serve it")
        config = card.updated(values)
        if "model" in values:
            _check_weights(card, config, self._note)
        group_updates.announce(self._app_name, card, values)
        if surge:
            self.scale(card.served_model_name, len(old) + 1, timeout_s)
        count = len(old) + surge
        for number, name in enumerate(old, start=1):
            self.drain(name, limit_s if self._is_replaceable(name) else max(limit_s, timeout_s))
            if surge and number == len(old):
                self._set_target(card, len(old))
                count = len(old)
            self._wait(lambda count=count: self._num_serving(card) >= count, timeout_s, f"{count} worker groups")  # type: ignore[misc]
            self._note(f"{number} of {len(old)} worker groups replaced")

    def _is_replaceable(self, name: str) -> bool:
        """Whether other groups compute with the weights that this one has."""
        entries = {entry.group: entry for entry in (group.entry for group in self.groups().values())}
        others = [entry for entry in entries.values() if entry.group != name and not entry.draining]
        return name not in entries or any(entry.weights == entries[name].weights for entry in others)

    def _card(self, model: str | None) -> GroupsCard:
        cards = group_updates.cards(self._app_name)
        names = [card.served_model_name for card in cards]
        if not names:
            raise ConfigurationError(
                "no worker group that can be replaced has come up; those of --fake-engine are as they were started"
            )
        found = [card for card in cards if model in (None, card.served_model_name)]
        if len(found) != 1:
            raise ConfigurationError(f"--served-model-name: say which model: {', '.join(names)}")
        return found[0]

    def _num_serving(self, card: GroupsCard) -> int:
        entries = [group.entry for group in self.groups().values()]
        return sum(entry.model == card.served_model_name and not entry.draining for entry in entries)

    def _set_target(self, card: GroupsCard, count: int) -> None:
        controller = _get_global_client()._controller
        deployment = DeploymentID(name=card.deployment, app_name=self._app_name)
        try:
            ray.get(controller.update_deployment_replicas.remote(deployment, count), timeout=ANSWER_S)
        except RayTaskError as error:
            raise ConfigurationError(
                f"the number of worker groups cannot be set ({error.cause}): with --max-replicas it follows load, and"
                " an application of a Serve config file needs external_scaler_enabled: true"
            ) from error

    def _wait(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        end = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > end:
                raise OperationFailed(f"waited {timeout_s:g} s in vain for {what}")
            time.sleep(POLL_S)
