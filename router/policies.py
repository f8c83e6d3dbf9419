"""Policies: which of the groups that could take a request gets it.

``cost`` is what the router is for. The others are rules that people know, to compare it with; they see what is known of
load, and nothing of what is cached.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable
from typing import Literal, Protocol, get_args

import numpy as np
import numpy.typing as npt

from ..worker.messages import RouteQuery
from ..worker.routing_hash import mix_array, unpack_hashes
from .assessment import Assessment

PolicyName = Literal["cost", "round_robin", "least_loaded", "power_of_two", "consistent_hash"]
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)

NEAR_TIE_SHARE = 0.05
NEAR_TIE_S = 0.001
"""Costs closer than this, or than the share, are not told apart: the estimates are not better than that."""
LOAD_FACTOR = 1.25
"""No group gets more than this share of the mean load by consistent hashing."""
HASHED_TOKENS = 256
"""Requests without a session are hashed by so many tokens of their prompts at the most."""

Rows = npt.NDArray[np.intp]


class Policy(Protocol):
    def choose(self, query: RouteQuery, seen: Assessment, rows: Rows) -> int:
        """One of ``rows``, of which there is at least one."""
        ...


class LowestCost:
    """The lowest cost; of near-ties the one with most of the prefix, of those the one that was given the least work
    lately, of those any."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, query: RouteQuery, seen: Assessment, rows: Rows) -> int:
        totals_s = seen.total_s[rows]
        lowest_s = float(totals_s.min())
        near = rows[totals_s <= lowest_s + max(NEAR_TIE_S, NEAR_TIE_SHARE * lowest_s)]
        if near.size > 1:
            cached = seen.cached_tokens[near]
            near = near[cached == cached.max()]
            given = seen.utilisation[near]
            near = near[given == given.min()]
        return _any_of(near, self._rng)


class RoundRobin:
    """The group whose last turn is longest ago."""

    def __init__(self, rng: random.Random) -> None:
        self._turns: dict[tuple[str, str], int] = {}
        self._num_turns = 0

    def choose(self, query: RouteQuery, seen: Assessment, rows: Rows) -> int:
        names = [(query.model, seen.members[row].name) for row in rows]
        turn = min(range(len(names)), key=lambda place: (self._turns.get(names[place], -1), names[place]))
        self._num_turns += 1
        self._turns.pop(names[turn], None)
        self._turns[names[turn]] = self._num_turns
        if len(self._turns) > 2 * len(seen.members) + 1_024:
            del self._turns[next(iter(self._turns))]
        return int(rows[turn])


class LeastLoaded:
    """The group with the fewest sequences; of several, any."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, query: RouteQuery, seen: Assessment, rows: Rows) -> int:
        present = seen.num_sequences[rows]
        return _any_of(rows[present == present.min()], self._rng)


class PowerOfTwo:
    """Of two groups drawn at random the one with fewer sequences (Mitzenmacher, "The power of two choices in
    randomized load balancing", IEEE TPDS 12(10), 2001)."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, query: RouteQuery, seen: Assessment, rows: Rows) -> int:
        drawn = self._rng.sample(range(len(rows)), min(2, len(rows)))
        return int(min([rows[place] for place in drawn], key=lambda row: seen.num_sequences[row]))


class ConsistentHash:
    """The group of the session, or of the prompt's beginning, by rendezvous hashing (Thaler and Ravishankar, IEEE/ACM
    Transactions on Networking 6(1), 1998), with bounded loads (Mirrokni, Thorup and Zadimoghaddam, SODA 2018): one that
    has more than ``LOAD_FACTOR`` times the mean is passed over."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._hashed: tuple[object, npt.NDArray[np.uint64]] = (None, np.empty(0, np.uint64))

    def choose(self, query: RouteQuery, seen: Assessment, rows: Rows) -> int:
        weights = mix_array(self._names(seen)[rows] ^ np.uint64(self._key(query, seen)))
        present = seen.num_sequences[rows] + query.num_branches
        bound = math.ceil(LOAD_FACTOR * (float(present.sum()) - query.num_branches * (len(rows) - 1)) / len(rows))
        within = present <= max(bound, float(present.min()))
        return int(rows[within][weights[within].argmax()])

    def _names(self, seen: Assessment) -> npt.NDArray[np.uint64]:
        if self._hashed[0] is not seen.members:
            names = np.array([_hash_text(group.name) for group in seen.members], np.uint64)
            self._hashed = (seen.members, names)
        return self._hashed[1]

    def _key(self, query: RouteQuery, seen: Assessment) -> int:
        if query.session_id is not None:
            return _hash_text(query.session_id)
        hashes = unpack_hashes(query.routing_hashes)
        if not len(hashes):
            return self._rng.getrandbits(64)
        num_blocks = max(1, HASHED_TOKENS // seen.members[0].report.block_size)
        return int(hashes[min(len(hashes), num_blocks) - 1])


_POLICIES: dict[PolicyName, Callable[[random.Random], Policy]] = {
    "cost": LowestCost,
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "power_of_two": PowerOfTwo,
    "consistent_hash": ConsistentHash,
}


def make_policy(name: PolicyName, rng: random.Random) -> Policy:
    return _POLICIES[name](rng)


def _any_of(rows: Rows, rng: random.Random) -> int:
    return int(rows[0] if rows.size == 1 else rows[rng.randrange(rows.size)])


def _hash_text(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
