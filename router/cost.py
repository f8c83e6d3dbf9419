"""What sending a request to a group costs, in seconds, part by part.

The cost of a candidate is the delay of the request itself plus the delay that it causes to others, both as seconds of a
typical request, so that nothing has to be weighed against anything by hand. With

    u   prompt tokens that the group would have to compute,        r   its measured prefill rate, tokens/s
    q   prompt tokens ahead: reported, not yet done, and reserved, n   sequences there, those reserved included
    L   expected output tokens of a sequence,                      s(n), b   time of a decode step, and its slope in n
    k   sequences of the request (n, or the beams of a search),    rho the utilisation of the model's groups
    N   max_num_seqs,   F   free blocks,   B   block size,

the parts are

    wait          max(q / r, seats)    Prefill work is done in order. When n + k > N, seats must come free too: a full
                                       group finishes N sequences each L * s(N) seconds, so n + k - N of them take
                                       seats = (n + k - N) * L * s(N) / N. Both waits pass at the same time.
    prefill       u / r
    interference  b * n * k * L        its k sequences' L steps are each longer by b * n in company of n others;
                  + u / r * n / N      its prefill takes steps from those who decode: a stall of at most u / r for each,
                                       counted by how full the group is.
    pressure      missing * B / r      blocks it needs, (u + k * L) / B, beyond F take the place of someone's, who
                                       will have to compute those again.
    imposed       S * rho / (1 - rho)  with S = u / r, the work that it brings. Work S added to a queue drains only in
                                       the share 1 - rho of time that would be idle, so it is felt for S / (1 - rho), by
                                       arrivals at rate rho / E[S], and by S / 2 in the mean: a sum of delays of
                                       rho * S^2 / (2 * (1 - rho) * E[S]). For exponential S, where
                                       E[S^2] = 2 * E[S]^2, that is S * rho / (1 - rho) in the mean.

Without the last part each request minimises its own delay, moves away from its prefix as soon as a queue is as long as
its prefill, and the work done twice then fills all queues.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

MAX_UTILISATION = 0.9
"""Beyond this, the mean delay of an endless queue says nothing about the next minutes."""
NEAR_TIE_SHARE = 0.02
NEAR_TIE_S = 0.001
"""Costs closer than this, or than the share, are not told apart: the estimates are not better than that."""


class Load(NamedTuple):
    """State of a candidate group. Immutable, and good until its next report or reservation."""

    reported_at_s: float
    reported_backlog_s: float
    """Time that the prompt tokens ahead took to compute at ``reported_at_s``; it has passed in part since."""
    reserved_backlog_s: float
    """The same for those that are on their way there."""
    prefill_tokens_per_s: float
    num_sequences: int
    """Running, waiting or reserved."""
    max_num_seqs: int
    full_step_s: float
    """Time of a decode step with ``max_num_seqs`` sequences."""
    step_slope_s: float
    """Time that one sequence more adds to a step."""
    num_free_blocks: int
    block_size: int


class Demand(NamedTuple):
    """What a request asks of one candidate group."""

    num_uncached_tokens: float
    num_output_tokens: float
    """Expected of one sequence, at most what the request allows."""
    num_sequences: int = 1


class Cost(NamedTuple):
    """Estimated seconds, by cause. Immutable."""

    wait_s: float
    prefill_s: float
    interference_s: float
    pressure_s: float
    imposed_s: float

    @property
    def total_s(self) -> float:
        return sum(self)


def estimate_cost(load: Load, demand: Demand, utilisation: float, now: float) -> Cost:
    """The cost of one candidate; see the derivation above. ``utilisation`` is 0 or more."""
    uncached, output, added = demand
    (reported_at_s, backlog_s, reserved_s, rate, present, seats, full_step_s, slope_s, num_free, block_size) = load
    passed_s = now - reported_at_s
    wait_s = reserved_s + (backlog_s - passed_s if backlog_s > passed_s else 0.0)
    if present + added > seats:
        wait_s = max(wait_s, (present + added - seats) * output * full_step_s / seats)
    prefill_s = uncached / rate
    missing = uncached + added * output - num_free * block_size
    occupancy = present / seats if present < seats else 1.0
    rho = utilisation if utilisation < MAX_UTILISATION else MAX_UTILISATION
    return Cost(
        wait_s=wait_s,
        prefill_s=prefill_s,
        interference_s=slope_s * added * output * present + prefill_s * occupancy,
        pressure_s=missing / rate if missing > 0 else 0.0,
        imposed_s=prefill_s * rho / (1.0 - rho),
    )


def choose_cheapest(
    costs: Sequence[Cost], cached_tokens: Sequence[int], rng: random.Random, *, preferred: int | None = None
) -> int:
    """Position of the lowest cost; of near-ties the one with more of the prefix, of those ``preferred``, else any."""
    totals = [sum(cost) for cost in costs]
    lowest = min(totals)
    limit = lowest + max(NEAR_TIE_S, NEAR_TIE_SHARE * lowest)
    near = [position for position, total in enumerate(totals) if total <= limit]
    most = max(cached_tokens[position] for position in near)
    best = [position for position in near if cached_tokens[position] == most]
    if preferred in best:
        return preferred
    return best[0] if len(best) == 1 else rng.choice(best)
