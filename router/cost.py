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
    preference    P / r, where others are preferred: those that the request names, or the one that served its session
                  last. P are all tokens of its prompt: one goes elsewhere when waiting costs more than all of it anew.

Without the imposed delay each request minimises its own, moves away from its prefix as soon as a queue is as long as
its prefill, and the work done twice then fills all queues.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

MAX_UTILISATION = 0.9
"""Beyond this, the mean delay of an endless queue says nothing about the next minutes."""

Floats = npt.NDArray[np.float64]


class Load(NamedTuple):
    """State of the candidate groups, each a float64 [num_groups]; numbers for one group alone."""

    reported_at_s: Floats
    backlog_tokens: Floats
    """Prompt tokens ahead at ``reported_at_s``; some of them have been computed since."""
    reserved_tokens: Floats
    """The same for those that are on their way there."""
    prefill_tokens_per_s: Floats
    num_sequences: Floats
    """Running, waiting or reserved."""
    max_num_seqs: Floats
    full_step_s: Floats
    """Time of a decode step with ``max_num_seqs`` sequences."""
    step_slope_s: Floats
    """Time that one sequence more adds to a step."""
    num_free_blocks: Floats
    block_size: Floats


class Demand(NamedTuple):
    """What a request asks of the candidate groups."""

    num_uncached_tokens: Floats
    """Of its prompt, in each of the groups."""
    num_output_tokens: float
    """Expected of one sequence, at most what the request allows."""
    num_sequences: int = 1
    num_prompt_tokens: float = 0.0
    is_preferred: npt.NDArray[np.bool_] | None = None
    """Which of the groups are; None: nobody has a preference."""


class Cost(NamedTuple):
    """Estimated seconds, by cause; each a float64 [num_groups], or a number."""

    wait_s: Floats
    prefill_s: Floats
    interference_s: Floats
    pressure_s: Floats
    imposed_s: Floats
    preference_s: Floats

    @property
    def total_s(self) -> Floats:
        wait_s, prefill_s, interference_s, pressure_s, imposed_s, preference_s = self
        return wait_s + prefill_s + interference_s + pressure_s + imposed_s + preference_s


def estimate_cost(load: Load, demand: Demand, utilisation: float, now: float) -> Cost:
    """The costs of all candidates; see the derivation above. ``utilisation`` is 0 or more."""
    uncached, output, added, num_prompt_tokens, is_preferred = demand
    (reported_at_s, backlog, reserved, rate, present, seats, full_step_s, slope_s, num_free, block_size) = load
    wait_s = reserved / rate + np.maximum(backlog / rate - (now - reported_at_s), 0.0)
    seats_s = (present + added - seats) * output * full_step_s / seats
    prefill_s = uncached / rate
    missing = np.maximum(uncached + added * output - num_free * block_size, 0.0)
    rho = min(utilisation, MAX_UTILISATION)
    return Cost(
        wait_s=np.maximum(wait_s, seats_s),
        prefill_s=prefill_s,
        interference_s=slope_s * (added * output) * present + prefill_s * np.minimum(present / seats, 1.0),
        pressure_s=missing / rate,
        imposed_s=prefill_s * (rho / (1.0 - rho)),
        preference_s=np.zeros_like(rate) if is_preferred is None else ~is_preferred * num_prompt_tokens / rate,
    )
