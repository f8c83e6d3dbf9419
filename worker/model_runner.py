"""ModelRunner: one rank's share of the model and of the KV cache; it executes step plans.

It keeps what a plan only changes in part: the block table of every slot of the persistent batch, and the last tokens
that were sampled. All arithmetic on the plan is NumPy on the host; the device gets one small copy a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..kernels.backend import Kernels
from ..kernels.kv_cache import KVPool, bytes_per_block
from .collectives import Collectives
from .model.check import unused_tensors
from .model.config import ModelConfig
from .model.layers import Placement
from .model.llama import Batch, Llama
from .model.partition import partition
from .model.weights import Progress, load_weights
from .step_plan import Int32Array, PlanKind, StepPlan, unpack_plan

_REMEMBERED_STEPS = 2


@dataclass(frozen=True, slots=True)
class Limits:
    """What a step may ask for at most."""

    block_size: int
    """Tokens of a KV block."""
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    """Tokens of a sequence, prompt and output."""

    @property
    def max_blocks(self) -> int:
        """Blocks of the longest sequence."""
        return -(-self.max_model_len // self.block_size)


class ModelRunner:
    """Executes step plans on one device. ``load`` makes one; ``allocate_kv`` before the first plan."""

    def __init__(
        self,
        model: Llama,
        config: ModelConfig,
        limits: Limits,
        placement: Placement,
        kernels: Kernels,
        num_kv_heads: int,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.model = model
        self.config = config
        self.limits = limits
        self.placement = placement
        self._kernels = kernels
        self._num_kv_heads = num_kv_heads
        self._kv_dtype = placement.dtype if kv_dtype is None else kv_dtype
        self._tables = np.zeros((limits.max_num_seqs, limits.max_blocks), np.int32)
        self._sampled: dict[int, Tensor] = {}

    @classmethod
    @torch.inference_mode()
    def load(
        cls,
        model_dir: Path,
        *,
        rank: int,
        size: int,
        device: torch.device,
        dtype: torch.dtype,
        collectives: Collectives,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        kernels: Kernels,
        kv_dtype: torch.dtype | None = None,
        progress: Progress = lambda done, total: None,
    ) -> ModelRunner:
        """This rank's share of the model in ``model_dir``; ``kv_dtype`` None: K and V as activations are.

        Raises ConfigurationError for a model that is not known, cannot be divided over ``size`` ranks, or whose files
        do not fit its config.json.
        """
        if (rank, size) != (collectives.rank, collectives.size):
            raise ValueError(f"rank {rank} of {size}, but collectives of rank {collectives.rank} of {collectives.size}")
        config = ModelConfig.from_folder(model_dir)
        shares = partition(config, size)
        placement = Placement.on(device, dtype)
        model = Llama(config, shares, placement, collectives, kernels, max_model_len)
        load_weights(model.layers(), model_dir, kernels, may_be_unused=unused_tensors(config), progress=progress)
        limits = Limits(block_size, max_num_seqs, max_num_batched_tokens, max_model_len)
        return cls(model, config, limits, placement, kernels, len(shares[rank].kv_heads), kv_dtype)

    @property
    def kv_bytes_per_block(self) -> int:
        """K and V of one block in all layers, this rank's heads."""
        config, limits = self.config, self.limits
        return bytes_per_block(
            config.num_layers, self._num_kv_heads, limits.block_size, config.head_dim, self._kv_dtype
        )

    def allocate_kv(self, num_blocks: int) -> None:
        """The KV pool; replaces the one before."""
        config, device = self.config, self.placement.device
        self.kv_pool = KVPool.allocate(
            config.num_layers,
            num_blocks,
            self._num_kv_heads,
            self.limits.block_size,
            config.head_dim,
            self._kv_dtype,
            device,
        )
        self._kv_layers = list(self.kv_pool.layers())

    def release_kv(self) -> None:
        """Give the KV cache's memory back; ``allocate_kv`` makes a new one."""
        del self.kv_pool, self._kv_layers

    def remember(self, step: int, token_ids: Tensor) -> None:
        """Keep the ids ``[R]`` sampled in a step, for later plans that name "row i of that step"."""
        self._sampled[step] = token_ids.to(self.placement.device, torch.int32)
        for old in list(self._sampled)[:-_REMEMBERED_STEPS]:  # in the order of steps, whose numbers start again
            del self._sampled[old]

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> Tensor | None:
        """Run one STEP: table updates, block copies, forward pass.

        Gives the logits of ``plan.logit_indices``, float32 ``[R, vocabulary]``, on rank 0 and None on the others.
        """
        self._update_tables(plan)
        if len(plan.copies):
            self._kernels.copy_blocks(self.kv_pool, torch.from_numpy(plan.copies))
        indices, places = _without_repeats(plan.logit_indices)
        batch, rows = self._batch(plan, indices)
        x, residual = self.model.hidden(batch, self._kv_layers)
        logits = self.model.logits(x.index_select(0, rows), residual.index_select(0, rows))
        if logits is None or places is None:
            return logits
        return logits.index_select(0, torch.from_numpy(places).to(logits.device))

    def _update_tables(self, plan: StepPlan) -> None:
        begin = 0
        for slot, first, count in plan.table_updates.tolist():
            self._tables[slot, first : first + count] = plan.table_blocks[begin : begin + count]
            begin += count

    def _batch(self, plan: StepPlan, logit_indices: Int32Array) -> tuple[Batch, Tensor]:
        """The plan as tensors on the device, and the indices of the tokens whose logits are needed."""
        new, seq_lens = plan.num_new_tokens, plan.num_computed_tokens + plan.num_new_tokens
        starts = np.zeros(new.size + 1, np.int32)
        np.cumsum(new, out=starts[1:])
        positions = np.arange(starts[-1], dtype=np.int32) + np.repeat(plan.num_computed_tokens - starts[:-1], new)
        max_seq_len = int(seq_lens.max())
        width = -(-max_seq_len // self.limits.block_size)
        tables = self._tables[plan.slots, :width]
        slots = self._slot_mapping(np.repeat(plan.slots, new), positions)
        tokens, *rest, rows, table = self._upload(
            plan.token_ids, positions, slots, seq_lens, starts, logit_indices, tables.reshape(-1)
        )
        batch = Batch(
            self._known(tokens, plan.tokens_from_step),
            rest[0],
            rest[1],
            table.view(tables.shape),
            rest[2],
            rest[3],
            max_query_len=int(new.max()),
            max_seq_len=max_seq_len,
        )
        return batch, rows

    def _slot_mapping(self, slot_of_token: Int32Array, positions: Int32Array) -> Int32Array:
        block_size = self.limits.block_size
        blocks = self._tables[slot_of_token, positions // block_size]
        return blocks * block_size + positions % block_size

    def _upload(self, *arrays: Int32Array) -> list[Tensor]:
        """The arrays on the device: on CPUs the memory as it is, else by one copy from pinned memory."""
        if self.placement.device.type == "cpu":
            return [torch.from_numpy(array) for array in arrays]
        packed = torch.from_numpy(np.concatenate(arrays)).pin_memory()
        sizes = [array.size for array in arrays]
        return list(torch.split(packed.to(self.placement.device, non_blocking=True), sizes))

    def _known(self, token_ids: Tensor, from_step: int | None) -> Tensor:
        """``-1 - i`` becomes the token that row i of step ``from_step`` sampled."""
        if from_step is None:
            return token_ids
        sampled = self._sampled[from_step].index_select(0, (-1 - token_ids).clamp_(min=0))
        return torch.where(token_ids < 0, sampled, token_ids)


def _without_repeats(indices: Int32Array) -> tuple[Int32Array, NDArray[np.intp] | None]:
    """The indices, each once, and where each was; None when none is repeated.

    Branches of one prompt draw from the same token's logits: n of them must not cost n products with the vocabulary.
    """
    once, places = np.unique(indices, return_inverse=True)
    return (indices, None) if once.size == indices.size else (once, places)


def follow(runner: ModelRunner, collectives: Collectives, *, heard: Callable[[], None] = lambda: None) -> None:
    """The loop of ranks above 0: execute what the leader broadcasts, until it says SHUTDOWN.

    ``heard`` is called for each plan, heartbeats too. A leader that is gone raises RuntimeError.
    """
    while True:
        plan = unpack_plan(collectives.broadcast_plan(None))
        heard()
        if plan.kind is PlanKind.SHUTDOWN:
            return
        if plan.kind is PlanKind.STEP:
            runner.execute(plan)
            if plan.share_sampled and plan.logit_indices.size:
                ids = collectives.share_sampled(None, plan.logit_indices.size, runner.placement.device)
                runner.remember(plan.step, ids)
