"""The rules by which other routers choose, written from their documentation for comparison, on our blocks' hashes.

Each sees what its original sees: SGLang's and Ray's learn what is cached where from their own decisions, Dynamo's from
the engines' events. Their counts of requests under way are kept up to date by the groups' reports.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence

from octavo.router.simulator.policies import Policy
from octavo.worker.messages import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    GroupReport,
    RouteDecision,
    RouteQuery,
)
from octavo.worker.routing_hash import unpack_hashes

CHARS_PER_TOKEN = 4
SGLANG_MOST_CHARS = 1 << 26
"""max_tree_size of the command line, which holds for each worker."""


class Prefixes:
    """Which groups hold a block, by the hash of the prefix that it ends."""

    def __init__(self, most_blocks: int | None = None) -> None:
        self.most_blocks = most_blocks
        """Of a group."""
        self._holders: dict[int, set[str]] = {}
        self._blocks: dict[str, OrderedDict[int, None]] = {}
        """Of each group, least recently used first."""

    def num_blocks(self, group: str) -> int:
        return len(self._blocks.get(group, ()))

    def add(self, group: str, hashes: Sequence[int]) -> None:
        """Those before are used later than those after, so that a prefix loses its end first."""
        blocks = self._blocks.setdefault(group, OrderedDict())
        for value in reversed(hashes):
            blocks[value] = None
            blocks.move_to_end(value)
            self._holders.setdefault(value, set()).add(group)
        while self.most_blocks is not None and len(blocks) > self.most_blocks:
            self.remove(group, [next(iter(blocks))])

    def remove(self, group: str, hashes: Iterable[int]) -> None:
        for value in hashes:
            if self._blocks[group].pop(value, 0) is None:
                self._holders[value].discard(group)
                if not self._holders[value]:
                    del self._holders[value]

    def clear(self, group: str) -> None:
        self.remove(group, list(self._blocks.get(group, ())))

    def deepest(self, hashes: Sequence[int], among: Iterable[str]) -> tuple[int, set[str]]:
        """How many blocks are held from the start on by any one group, and by whom."""
        depths = self.depths(hashes, among)
        most = max(depths.values(), default=0)
        return most, {group for group, depth in depths.items() if depth == most > 0}

    def depths(self, hashes: Sequence[int], among: Iterable[str]) -> dict[str, int]:
        """Group → blocks that it holds from the start on."""
        depths = dict.fromkeys(among, 0)
        left = set(depths)
        for depth, value in enumerate(hashes, 1):
            left &= self._holders.get(value, set())
            if not left:
                break
            for group in left:
                depths[group] = depth
        return depths


class PublishedRule(ABC):
    """What the rules have in common: the groups, their requests under way, and the answer."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.requests: dict[str, dict[str, RouteQuery]] = {}
        """Group → its requests that are not known to be finished."""
        self.block_size = 0
        self._generations: dict[str, int] = {}

    def report(self, report: GroupReport, now: float) -> bool:
        self.requests.setdefault(report.group, {})
        self.block_size, self._generations[report.group] = report.block_size, report.generation
        for entry in report.progress:
            if entry.finished:
                self.requests[report.group].pop(entry.request_id, None)
        return False

    def route(self, query: RouteQuery, now: float) -> RouteDecision:
        hashes = unpack_hashes(query.routing_hashes).tolist()
        group, num_blocks = self.choose(query, hashes)
        self.requests[group][query.request_id] = query
        generation, num_tokens = self._generations[group], num_blocks * self.block_size
        return RouteDecision(query.request_id, group, generation, num_tokens, "published")

    def turns(self, now: float) -> Sequence[RouteDecision]:
        return ()

    @abstractmethod
    def choose(self, query: RouteQuery, hashes: list[int]) -> tuple[str, int]:
        """A group, and how many blocks it is expected to hold."""

    def fewest(self, among: Iterable[str]) -> list[str]:
        """The groups with the fewest requests under way."""
        among = list(among)
        least = min(len(self.requests[group]) for group in among)
        return [group for group in among if len(self.requests[group]) == least]


class SglangCacheAware(PublishedRule):
    """Where most requests wait, the shortest queue; else the longest prefix if it is long enough, else that queue."""

    def __init__(self, rng: random.Random, *, cache_threshold: float, balance_abs: int, balance_rel: float) -> None:
        super().__init__(rng)
        self._cache_threshold = cache_threshold
        self._balance_abs = balance_abs
        self._balance_rel = balance_rel
        self._tree = Prefixes()

    def choose(self, query: RouteQuery, hashes: list[int]) -> tuple[str, int]:
        self._tree.most_blocks = SGLANG_MOST_CHARS // (CHARS_PER_TOKEN * self.block_size)
        loads = [len(requests) for requests in self.requests.values()]
        is_imbalanced = max(loads) - min(loads) > self._balance_abs and max(loads) > self._balance_rel * min(loads)
        depth, holders = self._tree.deepest(hashes, self.requests)
        is_known = bool(holders) and depth / len(hashes) > self._cache_threshold
        if is_known and not is_imbalanced:
            group = self.rng.choice(sorted(holders))  # the tree gives one of them, whichever
        else:
            group, depth = self.fewest(self.requests)[0], 0
        self._tree.add(group, hashes)
        return group, depth


class RayPrefixAffinity(PublishedRule):
    """The shortest queue among those that hold the longest prefix, or, if that is short, among the smallest trees.

    ``imbalanced_threshold``: with a larger difference of queues, the shorter of two at random.
    """

    def __init__(self, rng: random.Random, *, match_rate: float = 0.1, imbalanced_threshold: float) -> None:
        super().__init__(rng)
        self._match_rate = match_rate
        self._imbalanced_threshold = imbalanced_threshold
        self._tree = Prefixes()

    def choose(self, query: RouteQuery, hashes: list[int]) -> tuple[str, int]:
        among, depth = self._candidates(hashes)
        group = self.rng.choice(self.fewest(among))
        self._tree.add(group, hashes)
        return group, depth

    def _candidates(self, hashes: list[int]) -> tuple[Iterable[str], int]:
        groups = sorted(self.requests)
        loads = [len(self.requests[group]) for group in groups]
        if max(loads) - min(loads) > self._imbalanced_threshold:
            return self.rng.sample(groups, min(2, len(groups))), 0
        depth, holders = self._tree.deepest(hashes, groups)
        if hashes and depth / len(hashes) >= self._match_rate:
            return sorted(holders), depth
        smallest = min(map(self._tree.num_blocks, groups))
        return [group for group in groups if self._tree.num_blocks(group) == smallest], 0


class DynamoCost(PublishedRule):
    """The lowest of prefill blocks to compute, those under way included, and blocks held by requests under way."""

    def __init__(self, rng: random.Random, *, overlap_credit: float = 1.0) -> None:
        super().__init__(rng)
        self._overlap_credit = overlap_credit
        self._cached = Prefixes()
        self._prefill_blocks: dict[str, dict[str, int]] = {}
        """Group → request whose prefill is under way → blocks that it computes."""
        self._active: dict[str, Counter[int]] = {}
        """Group → blocks of the prompts of its requests → how many."""
        self._hashes: dict[str, list[int]] = {}

    def report(self, report: GroupReport, now: float) -> bool:
        prefilling = self._prefill_blocks.setdefault(report.group, {})
        self._active.setdefault(report.group, Counter())
        for entry in report.progress:
            if entry.prefilled or entry.finished:
                prefilling.pop(entry.request_id, None)
            if entry.finished and entry.request_id in self._hashes:
                self._release(report.group, self._hashes.pop(entry.request_id))
        for message in report.events:
            for event in message.events:
                self._apply(report.group, event)
        return super().report(report, now)

    def choose(self, query: RouteQuery, hashes: list[int]) -> tuple[str, int]:
        depths = self._cached.depths(hashes, self.requests)
        costs = {group: self._cost(group, hashes, depth) for group, depth in depths.items()}
        lowest = min(costs.values())
        group = self.rng.choice([group for group, cost in costs.items() if cost == lowest])
        self._prefill_blocks[group][query.request_id] = len(hashes) - depths[group]
        self._active[group].update(hashes)
        self._hashes[query.request_id] = hashes
        return group, depths[group]

    def _cost(self, group: str, hashes: list[int], depth: int) -> float:
        active = self._active[group]
        prefill = sum(self._prefill_blocks[group].values()) + len(hashes) - self._overlap_credit * depth
        return max(prefill, 0.0) + len(active) + sum(value not in active for value in hashes)

    def _release(self, group: str, hashes: list[int]) -> None:
        active = self._active[group]
        for value in hashes:
            active[value] -= 1
            if not active[value]:
                del active[value]

    def _apply(self, group: str, event: BlocksStored | BlocksRemoved | BlocksCleared) -> None:
        if isinstance(event, BlocksStored):
            self._cached.add(group, unpack_hashes(event.hashes).tolist())
        elif isinstance(event, BlocksRemoved):
            self._cached.remove(group, unpack_hashes(event.hashes).tolist())
        else:
            self._cached.clear(group)


RULES: dict[str, Callable[[random.Random], Policy]] = {
    "sglang": lambda rng: SglangCacheAware(rng, cache_threshold=0.3, balance_abs=64, balance_rel=1.5),
    "sglang-struct": lambda rng: SglangCacheAware(rng, cache_threshold=0.5, balance_abs=32, balance_rel=1.1),
    "ray": lambda rng: RayPrefixAffinity(rng, imbalanced_threshold=float("inf")),
    "ray-10": lambda rng: RayPrefixAffinity(rng, imbalanced_threshold=10.0),
    "dynamo": lambda rng: DynamoCost(rng),
}
"""By name, with their defaults: SGLang's of the command line and of the struct, Ray's of today and before."""
