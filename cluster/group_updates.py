"""What an update has changed about the worker groups of a model: kept in the cluster's key-value store, where every
group looks when it comes up. So a group that is replaced later, for whatever reason, comes up as updated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

import orjson
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_list, _internal_kv_put

from .config import ServeConfig
from .plan import NAMESPACE, ServePlan


@dataclass(frozen=True, slots=True)
class GroupsCard:
    """What the worker groups of one model are, for whoever operates the cluster."""

    deployment: str
    """Serve's name."""
    served_model_name: str
    config: dict[str, Any]
    """As they were deployed, without updates."""
    values: dict[str, Any]
    """What updates have changed since."""

    @property
    def base(self) -> str:
        """Names the deployed configuration; an update of another one says nothing."""
        return sha256(orjson.dumps(self.config, option=orjson.OPT_SORT_KEYS)).hexdigest()

    def updated(self, values: Mapping[str, Any]) -> ServeConfig:
        """The configuration with ``values`` beside earlier updates. Raises ConfigurationError."""
        return ServeConfig.parse(self.config | self.values | dict(values))


def publish(app_name: str, deployment: str, plan: ServePlan) -> None:
    """By a group that comes up; ``plan`` as it was deployed."""
    card = {"model": plan.served_model_name, "config": plan.config.model_dump(mode="json")}
    _internal_kv_put(_key(app_name, "groups", deployment), orjson.dumps(card))


def cards(app_name: str) -> list[GroupsCard]:
    """Of every model that has had a group up."""
    prefix = _key(app_name, "groups", "")
    names = sorted(key.removeprefix(prefix).decode() for key in _internal_kv_list(prefix))
    return [_card(app_name, name) for name in names]


def announce(app_name: str, card: GroupsCard, values: Mapping[str, Any]) -> None:
    """From now on groups of this deployment come up with ``values``, beside those of earlier updates."""
    update = {"base": card.base, "values": card.values | dict(values)}
    _internal_kv_put(_key(app_name, "update", card.deployment), orjson.dumps(update))


def current(app_name: str, deployment: str, plan: ServePlan) -> ServePlan:
    """``plan`` with what updates have changed since it was deployed."""
    config = plan.config.model_dump(mode="json")
    card = GroupsCard(deployment, plan.served_model_name, config, {})
    values = _values(app_name, deployment, card.base)
    if not values:
        return plan
    return replace(plan, config=card.updated(values), model=values.get("model", plan.model))


def _card(app_name: str, deployment: str) -> GroupsCard:
    told = orjson.loads(_internal_kv_get(_key(app_name, "groups", deployment)))
    card = GroupsCard(deployment, told["model"], told["config"], {})
    return replace(card, values=_values(app_name, deployment, card.base))


def _values(app_name: str, deployment: str, base: str) -> dict[str, Any]:
    packed = _internal_kv_get(_key(app_name, "update", deployment))
    update = {} if packed is None else orjson.loads(packed)
    return dict(update["values"]) if update.get("base") == base else {}


def _key(app_name: str, kind: str, deployment: str) -> bytes:
    return f"{NAMESPACE}:{app_name}:{kind}:{deployment}".encode()
