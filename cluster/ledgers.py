"""The memory ledgers of all ranks, on their way from the worker groups to whoever waits for the cluster.

They lie in the cluster's key-value store from before a group reports itself to the router until it is stopped. That of
a group that crashed stays, about 1 KB, and is passed over, as the router does not know the group.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import orjson
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

from .plan import NAMESPACE

ALIKE = 0.9
"""Ranks of different groups are alike when the one with fewer KV blocks has this part of the other's: on CPUs the
memory available changes while groups come up."""


@dataclass(frozen=True, slots=True)
class RankLedger:
    """What one rank says of its memory."""

    rank: int
    num_blocks: int
    table: str
    """For people; begins with a line that names the device."""


def publish(app_name: str, group: str, loaded: Iterable[dict[str, Any]]) -> None:
    """``loaded``: what each rank of the group gave when it was up (``Worker.load``)."""
    ledgers = [RankLedger(rank["rank"], rank["num_blocks"], rank["ledger"]) for rank in loaded]
    _internal_kv_put(_key(app_name, group), orjson.dumps(ledgers))


def withdraw(app_name: str, group: str) -> None:
    """The group is stopped."""
    _internal_kv_del(_key(app_name, group))


def published(app_name: str, groups: Collection[str]) -> list[RankLedger]:
    """Those of all ranks of ``groups``."""
    stored = [_internal_kv_get(_key(app_name, group)) for group in sorted(groups)]
    return [RankLedger(**fields) for packed in stored if packed is not None for fields in orjson.loads(packed)]


def accounts(ledgers: Iterable[RankLedger]) -> list[str]:
    """A text for each kind of rank: the one with the fewest blocks speaks for those of other groups that are alike."""
    kinds: list[list[RankLedger]] = []
    for ledger in sorted(ledgers, key=lambda each: (each.rank, _device(each), each.num_blocks)):
        if kinds and _are_alike(kinds[-1][0], ledger):
            kinds[-1].append(ledger)
        else:
            kinds.append([ledger])
    return [_account(kind) for kind in kinds]


def _are_alike(smaller: RankLedger, larger: RankLedger) -> bool:
    is_same = (smaller.rank, _device(smaller)) == (larger.rank, _device(larger))
    return is_same and smaller.num_blocks >= ALIKE * larger.num_blocks


def _account(kind: list[RankLedger]) -> str:
    least, most = kind[0], kind[-1]
    times = f" × {len(kind)}" if len(kind) > 1 else ""
    span = (
        f" (the least; the others have up to {most.num_blocks:,} blocks)" if most.num_blocks > least.num_blocks else ""
    )
    return f"memory of rank {least.rank}{times}{span}\n{least.table}"


def _device(ledger: RankLedger) -> str:
    return ledger.table.partition("\n")[0]


def _key(app_name: str, group: str) -> bytes:
    return f"{NAMESPACE}:{app_name}:ledgers:{group}".encode()
