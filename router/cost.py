"""What sending a request to a group costs, in seconds, part by part.

The cost of a candidate is the delay of the request itself plus the delay that it causes to others, both as seconds of a
typical request, so that nothing has to be weighed against anything by hand. With

    u   prompt tokens that the group would have to compute,        c   those before them, which it holds
    a   time of a prompt token, b' what it takes longer for each   r   its rate with the usual context, tokens/s
        token before it, both measured by the group
    q   prompt tokens ahead: reported, not yet done, and reserved, n   sequences there, those reserved included
    L   expected output tokens of a sequence,                      s(n), b   time of a decode step, and its slope in n
    k   sequences of the request (n, or the beams of a search),    rho share of the group's time that its prefill takes
    N   max_num_seqs,   F   free blocks,   B   block size,

the parts are

    wait          max(q / r, seats)    Prefill work is done in order. When n + k > N, seats must come free too: a full
                                       group finishes N sequences each L * s(N) seconds, so n + k - N of them take
                                       seats = (n + k - N) * L * s(N) / N. Both waits pass at the same time.
    prefill       S = u * (a + b' * (c + u / 2)). Attention reads all that is before a token. A mean rate of the last
                                       steps would say more of their prompts than of the group: it varies sevenfold.
    interference  (S + b * k * L)      What it takes of the steps of the n others, its prefill and what its k sequences
                  * n / N              add to L steps each: so much later each of the n is. Counted by seat, n of N.
    pressure      missing * B / r      blocks it needs, (u + k * L) / B, beyond F take the place of someone's, who
                                       will have to compute those again.
    imposed       S * V * rho          V = E[S^2] / (2 * E[S]^2), measured: 1/2 when all requests bring equal work, 1
                  / (1 - rho)^2        when it is exponential. Work S that joins a queue with W ahead delays by S all
                                       who come before it is next empty, (W + S / 2) / (1 - rho) in the mean, which is
                                       lambda * S * (W + S / 2) / (1 - rho) in all. With lambda = rho / E[S], the mean
                                       W = lambda * E[S^2] / (2 * (1 - rho)) of Pollaczek-Khinchine, and S / 2 by its
                                       mean over work, E[S^2] / (2 * E[S]), that is S * V * rho / (1 - rho)^2.
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
"""Beyond this, the mean delay of an endless queue says nothing about the next minutes. When the busiest group is, all
are taken to be less busy in the same proportion, so that they stay told apart."""

Floats = npt.NDArray[np.float64]


class Load(NamedTuple):
    """State of the candidate groups, each a float64 [num_groups]; numbers for one group alone."""

    reported_at_s: Floats
    backlog_tokens: Floats
    """Prompt tokens ahead at ``reported_at_s``; some of them have been computed since."""
    reserved_tokens: Floats
    """The same for those that are on their way there."""
    prefill_tokens_per_s: Floats
    """With as many tokens before each as is usual."""
    prefill_token_s: Floats
    """Time of a prompt token with nothing before it."""
    prefill_context_s: Floats
    """Time that it takes longer for each token before it."""
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
    num_reused_tokens: Floats
    """Before those."""
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


def wait_s(load: Load, now: float) -> Floats:
    """Seconds until each of the groups has computed the prompts that are ahead."""
    rate = load.prefill_tokens_per_s
    return load.reserved_tokens / rate + np.maximum(load.backlog_tokens / rate - (now - load.reported_at_s), 0.0)


def prefill_s(load: Load, num_uncached_tokens: Floats | float, num_reused_tokens: Floats | float) -> Floats:
    """Seconds that each of the groups takes to compute so many tokens behind so many others."""
    return num_uncached_tokens * (
        load.prefill_token_s + load.prefill_context_s * (num_reused_tokens + num_uncached_tokens / 2)
    )


def estimate_cost(load: Load, demand: Demand, utilisation: Floats | float, variability: float, now: float) -> Cost:
    """The costs of all candidates; see the derivation above.

    ``utilisation``: rho of each, 0 or more; ``variability``: V.
    """
    uncached, reused, output, added, num_prompt_tokens, is_preferred = demand
    (_, _, _, rate, _, _, present, seats, full_step_s, slope_s, num_free, block_size) = load
    seats_s = (present + added - seats) * output * full_step_s / seats
    work_s = prefill_s(load, uncached, reused)
    missing = np.maximum(uncached + added * output - num_free * block_size, 0.0)
    rho = utilisation * min(1.0, MAX_UTILISATION / max(float(np.max(utilisation)), MAX_UTILISATION))
    return Cost(
        wait_s=np.maximum(wait_s(load, now), seats_s),
        prefill_s=work_s,
        interference_s=(work_s + slope_s * (added * output)) * np.minimum(present / seats, 1.0),
        pressure_s=missing / rate,
        imposed_s=work_s * (variability * rho / (1.0 - rho) ** 2),
        preference_s=np.zeros_like(rate) if is_preferred is None else ~is_preferred * num_prompt_tokens / rate,
    )
