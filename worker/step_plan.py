"""StepPlan: what one engine step does, and its form on the wire between the leader and its ranks.

The wire form is one int32 buffer::

    [magic | kind | length | step | tokens_from_step | flags | num_seqs | num_tokens | num_table_updates |
     num_table_blocks | num_copies | num_logits | graph_rows | graph_seq_len | num_scored | num_pooled]
    seqs…  tokens…  tables…  copies…  logits…  scored…  pooled…

``length`` counts the whole buffer in int32. Ranks keep one block table for each *slot* (a row of the persistent
batch), so that a plan carries only what changed since the last one.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Int32Array: TypeAlias = NDArray[np.int32]

MAGIC = 0x0C7A0003
"""Identifies a plan; the low 16 bits are the version of the format."""

HEADER_LENGTH = 16
_NO_STEP = -1
_NO_GRAPH = 0


class PlanKind(enum.IntEnum):
    STEP = 1
    HEARTBEAT = 2
    SHUTDOWN = 3
    CAPTURE = 4
    PROFILE = 5


@dataclass(frozen=True, slots=True, order=True)
class GraphKey:
    """Which steps of decoding a captured graph serves."""

    num_rows: int
    """Sequences at the most; fewer are padded."""
    max_seq_len: int
    """Tokens of its longest sequence at the most, the new one among them."""


def _empty() -> Int32Array:
    return np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. All arrays are int32; S sequences, T tokens, U table updates, C copies, R rows of logits, P and Q runs
    of tokens that are scored and pooled."""

    kind: PlanKind
    step: int = 0
    """Its number; of a PROFILE, how many steps are recorded, 0 to end it."""
    slots: Int32Array = field(default_factory=_empty)
    """[S] row of the persistent batch of each sequence in this step."""
    num_new_tokens: Int32Array = field(default_factory=_empty)
    """[S] tokens of the sequence computed in this step; they follow each other in ``token_ids``."""
    num_computed_tokens: Int32Array = field(default_factory=_empty)
    """[S] tokens of the sequence whose K and V are in the cache before this step."""
    token_ids: Int32Array = field(default_factory=_empty)
    """[T] input tokens. ``-1 - i`` stands for the token that row i of step ``tokens_from_step`` sampled."""
    tokens_from_step: int | None = None
    """Of a PROFILE: its number."""
    table_updates: Int32Array = field(default_factory=lambda: np.empty((0, 3), np.int32))
    """[U, 3] (slot, first logical block, count): this part of the slot's block table is overwritten."""
    table_blocks: Int32Array = field(default_factory=_empty)
    """The physical block ids of all updates, one after the other."""
    copies: Int32Array = field(default_factory=lambda: np.empty((0, 2), np.int32))
    """[C, 2] (source block, destination block), copied in all layers before the forward pass."""
    logit_indices: Int32Array = field(default_factory=_empty)
    """[R] indices into the T tokens whose logits are needed."""
    scored: Int32Array = field(default_factory=lambda: np.empty((0, 4), np.int32))
    """[P, 4] (first, count, k, last target): how likely the successors of these of the T tokens were is wanted, and the
    ``k`` likeliest in the place of each. Each is followed by the next one of the run, the last by ``last target``."""
    pooled: Int32Array = field(default_factory=lambda: np.empty((0, 2), np.int32))
    """[Q, 2] (first, count): the sum of the last hidden states of these of the T tokens is wanted."""
    share_sampled: bool = False
    """Rank 0 broadcasts the sampled tokens, because a later plan may refer to them."""
    graph: GraphKey | None = None
    """Of a CAPTURE: the graph that all ranks record now."""

    @property
    def reads_prompts(self) -> bool:
        """More of a prompt is wanted than what is drawn after it; see ``prompt_reading.py``."""
        return bool(len(self.scored) or len(self.pooled))


def pack_plan(plan: StepPlan) -> Int32Array:
    """The plan as one int32 buffer, header first."""
    header = np.zeros(HEADER_LENGTH, np.int32)
    parts = [
        header,
        plan.slots,
        plan.num_new_tokens,
        plan.num_computed_tokens,
        plan.token_ids,
        plan.table_updates.ravel(),
        plan.table_blocks,
        plan.copies.ravel(),
        plan.logit_indices,
        plan.scored.ravel(),
        plan.pooled.ravel(),
    ]
    header[:] = (
        MAGIC,
        plan.kind,
        sum(part.size for part in parts),
        plan.step,
        _NO_STEP if plan.tokens_from_step is None else plan.tokens_from_step,
        int(plan.share_sampled),
        plan.slots.size,
        plan.token_ids.size,
        len(plan.table_updates),
        plan.table_blocks.size,
        len(plan.copies),
        plan.logit_indices.size,
        _NO_GRAPH if plan.graph is None else plan.graph.num_rows,
        _NO_GRAPH if plan.graph is None else plan.graph.max_seq_len,
        len(plan.scored),
        len(plan.pooled),
    )
    return np.concatenate(parts)


def plan_length(header: Int32Array) -> int:
    """Length in int32 of the plan that begins with ``header``. Raises ValueError when it is no plan."""
    if header.size < HEADER_LENGTH:
        raise ValueError(f"a step plan has at least {HEADER_LENGTH} numbers, got {header.size}")
    if int(header[0]) != MAGIC:
        raise ValueError(f"not a step plan of this version: magic {int(header[0]):#x}, expected {MAGIC:#x}")
    return int(header[2])


def unpack_plan(buffer: Int32Array) -> StepPlan:
    """The plan that ``buffer`` begins with; its arrays are views. Raises ValueError when it is no whole plan."""
    length = plan_length(buffer)
    _, kind, _, step, from_step, share, *counts = map(int, buffer[:HEADER_LENGTH])
    seqs, tokens, updates, blocks, copies, logits, graph_rows, graph_seq_len, scored, pooled = counts
    sizes = [seqs, seqs, seqs, tokens, 3 * updates, blocks, 2 * copies, logits, 4 * scored, 2 * pooled]
    if min(sizes) < 0 or HEADER_LENGTH + sum(sizes) != length or length > buffer.size:
        raise ValueError(
            f"not a whole step plan: its parts are {sizes}, its length {length}, got {buffer.size} numbers"
        )
    parts = np.split(buffer[HEADER_LENGTH : HEADER_LENGTH + sum(sizes)], np.cumsum(sizes)[:-1])
    return StepPlan(
        kind=PlanKind(kind),
        step=step,
        slots=parts[0],
        num_new_tokens=parts[1],
        num_computed_tokens=parts[2],
        token_ids=parts[3],
        tokens_from_step=None if from_step == _NO_STEP else from_step,
        table_updates=parts[4].reshape(-1, 3),
        table_blocks=parts[5],
        copies=parts[6].reshape(-1, 2),
        logit_indices=parts[7],
        scored=parts[8].reshape(-1, 4),
        pooled=parts[9].reshape(-1, 2),
        share_sampled=bool(share),
        graph=None if graph_rows == _NO_GRAPH else GraphKey(graph_rows, graph_seq_len),
    )
