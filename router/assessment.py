"""An assessment: all groups of a model as one request sees them, before one is chosen."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..worker.messages import RouteQuery
from .cost import Cost, Demand, Floats, estimate_cost
from .group import Group
from .pool import Pool


@dataclass(frozen=True, slots=True, eq=False)
class Assessment:
    """All arrays are by row of the pool's load table: [num_groups]."""

    members: tuple[Group, ...]
    able: npt.NDArray[np.bool_]
    """Groups that the request may go to: not draining, excluded or left out by it."""
    has_room: npt.NDArray[np.bool_]
    """See ``Pool.has_room``."""
    num_sequences: Floats
    """There already: running, waiting or reserved."""
    knowledge: npt.NDArray[np.int64]
    cached_tokens: npt.NDArray[np.int64]
    """Of the prompt, confirmed or assumed."""
    utilisation: Floats
    cost: Cost
    total_s: Floats
    ttft_s: Floats
    """Estimated seconds from now to its first token."""
    is_measured: bool
    """Some group has measured how fast it is; else times only compare groups."""


def assess(
    pool: Pool, depths: npt.NDArray[np.int32], query: RouteQuery, preferred: npt.NDArray[np.bool_] | None, now: float
) -> Assessment:
    """``depths``: blocks of the prompt that each slot of the index holds, int32 [num_slots]. ``preferred``: bool
    [num_groups], groups that the request prefers."""
    table = pool.table
    load, num_tokens, num_sequences = pool.load(), query.num_prompt_tokens, query.num_branches
    cached = cached_tokens(depths[table.slots], load.block_size, num_tokens)
    num_output_tokens = min(float(query.max_tokens), pool.output_tokens.value)
    reused = cached * table.confidence
    demand = Demand(num_tokens - reused, reused, num_output_tokens, num_sequences, num_tokens, preferred)
    utilisation = pool.utilisations(now)
    cost = estimate_cost(load, demand, utilisation, pool.variability, now)
    return Assessment(
        pool.members,
        pool.able(query),
        pool.has_room(),
        load.num_sequences.copy(),
        table.knowledge,
        cached,
        utilisation,
        cost,
        cost.total_s,
        cost.wait_s + cost.prefill_s + load.full_step_s,
        pool.is_measured,
    )


def cached_tokens(depths: npt.NDArray[np.int32], block_size: Floats, num_prompt_tokens: int) -> npt.NDArray[np.int64]:
    """int64 [num_groups]: tokens of the prompt that a prefill can use, where groups hold its first ``depths`` blocks.

    At least the last prompt token is always computed, so the block that it ends cannot be used.
    """
    sizes = block_size.astype(np.int64)
    usable = max(num_prompt_tokens - 1, 0) // sizes
    return np.multiply(np.minimum(depths, usable), sizes)
