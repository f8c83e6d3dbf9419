"""Weighted fair service between the tenants that wait at one priority.

It is counted in tokens as in virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI
2024), and divided by the tenant's weight. Next is the tenant whose counter would be the lowest after its next query:
the finish tag of self-clocked fair queueing (Golestani, "A Self-Clocked Fair Queueing Scheme for Broadband
Applications", INFOCOM 1994). The tag of the query served last is the level's virtual time, to which whoever begins to
wait is lifted. Two tenants that both wait all the time have then been served, per unit of weight, equally within the
work of one query of each (and of the outputs that are not finished, which are counted when they are). In the order of
counters alone, as in the paper, endless newcomers could keep out whoever was served once.
"""

from __future__ import annotations

from ..worker.messages import RouteQuery
from .tenants import Account

PREFILL_WEIGHT = 1
DECODE_WEIGHT = 2
"""Service of a token, as in the groups' ``fair`` policy."""

_SWEEP_SHARES = 64


def prefill_cost(query: RouteQuery, account: Account) -> float:
    """Service of a query when it is taken, per unit of its tenant's weight."""
    return PREFILL_WEIGHT * max(1, query.num_prompt_tokens) / account.limits.weight


class Share:
    """A tenant at one level."""

    __slots__ = ("num_waiting", "served")

    def __init__(self, served: float) -> None:
        self.served = served
        """Virtual counter: service divided by weight."""
        self.num_waiting = 0


class Level:
    """The fair shares of one priority; exists while somebody waits there."""

    __slots__ = ("_next_sweep", "num_waiting", "shares", "total_weight", "value", "virtual_time")

    def __init__(self, value: int) -> None:
        self.value = value
        self.virtual_time = 0.0
        self.num_waiting = 0
        self.total_weight = 0.0
        """Of the tenants that wait here."""
        self.shares: dict[str | None, Share] = {}
        self._next_sweep = _SWEEP_SHARES

    def join(self, account: Account) -> Share:
        """One more of the tenant waits. Who begins to wait has saved up nothing."""
        share = self._share(account.tenant)
        if share.num_waiting == 0:
            share.served = max(share.served, self.virtual_time)
            self.total_weight += account.limits.weight
        share.num_waiting += 1
        self.num_waiting += 1
        return share

    def leave(self, share: Share, account: Account) -> None:
        share.num_waiting -= 1
        self.num_waiting -= 1
        if share.num_waiting == 0:
            self.total_weight -= account.limits.weight

    def serve(self, share: Share, cost: float) -> None:
        """One of those that wait is served. Who was passed over, since nothing could be had, has saved up nothing."""
        self.virtual_time = share.served = max(share.served + cost, self.virtual_time)

    def serve_at_once(self, account: Account, cost: float) -> None:
        """The tenant is served without having waited."""
        share = self._share(account.tenant)
        if share.num_waiting == 0:
            share.served = max(share.served, self.virtual_time)
        self.serve(share, cost)

    def charge(self, account: Account, cost: float) -> None:
        """Service that is known later: output."""
        self._share(account.tenant).served += cost

    def num_ahead(self, account: Account) -> float:
        """Queries of this level that are served until one more of the tenant has been, itself included.

        At most all that wait; and while the tenant gets its share, its own ones divided by that share.
        """
        share, weight = self.shares.get(account.tenant), account.limits.weight
        num_own = share.num_waiting if share else 0
        total_weight = self.total_weight + (0.0 if num_own else weight)
        return min(self.num_waiting + 1, (num_own + 1) * total_weight / weight)

    def _share(self, tenant: str | None) -> Share:
        share = self.shares.get(tenant)
        if share is None:
            if len(self.shares) >= self._next_sweep:
                self._sweep()
            share = self.shares[tenant] = Share(self.virtual_time)
        return share

    def _sweep(self) -> None:
        """Forget whom ``join`` would lift anyway."""
        kept = {name: share for name, share in self.shares.items() if share.num_waiting or self._is_ahead(share)}
        self.shares = kept
        self._next_sweep = max(_SWEEP_SHARES, 2 * len(kept))

    def _is_ahead(self, share: Share) -> bool:
        return share.served > self.virtual_time
