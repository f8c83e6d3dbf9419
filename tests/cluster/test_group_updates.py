"""An update of worker groups: which settings it may change, and which groups come up with it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from octavo.cluster import group_updates
from octavo.cluster.config import ServeConfig
from octavo.cluster.group_updates import announce, cards, current, publish
from octavo.cluster.operations_command import UPDATABLE
from octavo.cluster.plan import ServePlan
from octavo.worker.errors import ConfigurationError

APP, DEPLOYMENT = "app", "WorkerGroup-0"


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> dict[bytes, bytes]:
    """The cluster's key-value store."""
    values: dict[bytes, bytes] = {}
    monkeypatch.setattr(group_updates, "_internal_kv_get", values.get)
    monkeypatch.setattr(group_updates, "_internal_kv_put", values.__setitem__)
    monkeypatch.setattr(
        group_updates, "_internal_kv_list", lambda prefix: [key for key in values if key.startswith(prefix)]
    )
    return values


def plan(**settings: Any) -> ServePlan:
    config = ServeConfig.parse({"device": "cpu", **settings}).for_device("cpu")
    return ServePlan(config, device="cpu", model="/m", served_model_name="m", routing_key=b"k", num_ranks_on_machine=1)


def test_a_group_comes_up_as_it_was_deployed_until_there_is_an_update() -> None:
    deployed = plan()
    assert current(APP, DEPLOYMENT, deployed) == deployed
    publish(APP, DEPLOYMENT, deployed)
    (card,) = cards(APP)
    announce(APP, card, {"max_num_batched_tokens": "256", "model": "/other"})
    updated = current(APP, DEPLOYMENT, deployed)
    assert updated.config.max_num_batched_tokens == 256
    assert updated.model == "/other"
    assert updated.served_model_name == "m"


def test_later_updates_keep_what_earlier_ones_have_changed() -> None:
    deployed = plan()
    publish(APP, DEPLOYMENT, deployed)
    announce(APP, cards(APP)[0], {"max_num_batched_tokens": 256})
    announce(APP, cards(APP)[0], {"step_timeout_s": 30})
    config = current(APP, DEPLOYMENT, deployed).config
    assert (config.max_num_batched_tokens, config.step_timeout_s) == (256, 30.0)


def test_an_update_says_nothing_to_what_is_deployed_anew() -> None:
    publish(APP, DEPLOYMENT, plan())
    announce(APP, cards(APP)[0], {"max_num_batched_tokens": 256})
    anew = plan(max_num_seqs=32)
    assert current(APP, DEPLOYMENT, anew) == anew
    assert current(APP, "WorkerGroup-1", plan()) != current(APP, DEPLOYMENT, plan())


def test_what_cannot_be_is_refused_with_its_flag() -> None:
    publish(APP, DEPLOYMENT, plan())
    with pytest.raises(ConfigurationError, match="--max-num-batched-tokens"):
        cards(APP)[0].updated({"max_num_batched_tokens": "2"})


def test_everything_that_can_be_updated_is_a_setting() -> None:
    assert set(UPDATABLE) <= set(ServeConfig.model_fields)
    assert {field.name for field in dataclasses.fields(ServePlan)} >= {"config", "model"}
