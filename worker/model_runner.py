"""ModelRunner: one rank's share of the model and of the KV cache; it executes step plans.

It keeps what a plan only changes in part: the block table of every slot of the persistent batch, and the last tokens
that were sampled. All arithmetic on the plan is NumPy on the host; the device gets one small copy a step, and is never
waited for: on a GPU ``execute`` returns when the step is launched.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..kernels.backend import Kernels
from ..kernels.kv_cache import KVPool, bytes_per_block
from .block_tables import BlockTables
from .collectives import Collectives
from .decode_graphs import DecodeGraphs, Recorder, named_tokens
from .host_copy import all_to_device, to_device
from .model.batch import Batch
from .model.check import unused_tensors
from .model.config import ModelConfig
from .model.partition import partition
from .model.products import Placement
from .model.transformer import Transformer
from .model.weights import Progress, load_weights
from .profiler import StepProfiler
from .prompt_reading import PromptReadings, read_prompts
from .spec import Quantization
from .step_plan import GraphKey, Int32Array, PlanKind, StepPlan, unpack_plan

if TYPE_CHECKING:
    from .layer_program import LayerProgram

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
        model: Transformer,
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
        self.kv_dtype = placement.dtype if kv_dtype is None else kv_dtype
        self._tables = BlockTables(limits.max_num_seqs, limits.max_blocks, limits.block_size, placement.device)
        self.graphs: DecodeGraphs | None = None
        self._sampled: dict[int, Tensor] = {}
        self._readings: PromptReadings | None = None

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
        quantization: Quantization | None = None,
        progress: Progress = lambda done, total: None,
    ) -> ModelRunner:
        """This rank's share of the model in ``model_dir``; ``kv_dtype`` None: K and V as activations are.
        ``quantization`` None: matrices as the checkpoint has them.

        Raises ConfigurationError for a model that is not known, cannot be divided over ``size`` ranks, or whose files
        do not fit its config.json.
        """
        if (rank, size) != (collectives.rank, collectives.size):
            raise ValueError(f"rank {rank} of {size}, but collectives of rank {collectives.rank} of {collectives.size}")
        config = ModelConfig.from_folder(model_dir)
        shares = partition(config, size)
        placement = Placement.on(device, dtype, quantization, config.packing)
        model = Transformer(config, shares, placement, collectives, kernels, max_model_len)
        load_weights(model.layers(), model_dir, kernels, may_be_unused=unused_tensors(config), progress=progress)
        limits = Limits(block_size, max_num_seqs, max_num_batched_tokens, max_model_len)
        return cls(model, config, limits, placement, kernels, len(shares[rank].kv_heads), kv_dtype)

    @property
    def kv_bytes_per_block(self) -> int:
        """K and V of one block in all layers, this rank's heads."""
        config, limits = self.config, self.limits
        return bytes_per_block(config.num_layers, self._num_kv_heads, limits.block_size, config.head_dim, self.kv_dtype)

    def allocate_kv(self, num_blocks: int) -> None:
        """The KV pool; replaces the one before."""
        self._forget_graphs()
        config, device = self.config, self.placement.device
        self.kv_pool = KVPool.allocate(
            config.num_layers,
            num_blocks,
            self._num_kv_heads,
            self.limits.block_size,
            config.head_dim,
            self.kv_dtype,
            device,
        )
        self._kv_layers = list(self.kv_pool.layers())
        self._layer_program = self._record_layers()

    def _record_layers(self) -> LayerProgram | None:
        team, limits = self._kernels.team, self.limits
        if team is None:
            return None
        from .layer_program import record_layers  # it imports numba, which GPUs do without

        return record_layers(
            self.model,
            self._kv_layers,
            team,
            max_tokens=max(limits.max_num_batched_tokens, limits.max_num_seqs),
            max_num_seqs=limits.max_num_seqs,
            max_blocks=limits.max_blocks,
        )

    def release_kv(self) -> None:
        """Give the KV cache's memory back; ``allocate_kv`` makes a new one."""
        self._forget_graphs()
        del self.kv_pool, self._kv_layers, self._layer_program

    def use_graphs(self, recorder: Recorder) -> None:
        """Let steps of decoding be played back, as far as their graphs are recorded; see ``capture``."""
        self.graphs = DecodeGraphs(
            self._logits_of_all,
            self._tables,
            recorder,
            self.placement.device,
            max_num_seqs=self.limits.max_num_seqs,
            max_model_len=self.limits.max_model_len,
        )

    def _forget_graphs(self) -> None:
        if self.graphs is not None:
            self.graphs.forget()

    def next_graph(self, *, idle: bool) -> GraphKey | None:
        """The graph that should be recorded next; ``idle``: also one that nothing has asked for yet."""
        return None if self.graphs is None else self.graphs.next_key(idle=idle)

    @torch.inference_mode()
    def capture(self, key: GraphKey, collectives: Collectives) -> None:
        """Record a graph, with all other ranks. Takes as long as some steps, the first of a kind that compiles longer;
        nothing of a sequence changes."""
        if self.graphs is not None:
            self.graphs.record(key, lambda agreed: collectives.minimum(int(agreed)) == 1)

    def remember(self, step: int, token_ids: Tensor) -> None:
        """Keep the ids ``[R]`` sampled in a step, for later plans that name "row i of that step"."""
        self._sampled[step] = token_ids.to(self.placement.device, torch.int32)
        for old in list(self._sampled)[:-_REMEMBERED_STEPS]:  # in the order of steps, whose numbers start again
            del self._sampled[old]

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> Tensor | None:
        """Run one STEP: table updates, block copies, forward pass.

        Gives the logits of ``plan.logit_indices``, float32 ``[R, vocabulary]``, on rank 0 and None on the others.
        Where the plan reads prompts, ``take_readings`` gives what it found.
        """
        self._tables.update(plan)
        if len(plan.copies):
            self._kernels.copy_blocks(self.kv_pool, to_device(plan.copies, self.placement.device))
        graphs = self.graphs
        key = None if graphs is None or plan.reads_prompts else graphs.find(plan)
        return self._compute(plan) if graphs is None or key is None else self._replay(graphs, key, plan)

    def _compute(self, plan: StepPlan) -> Tensor | None:
        """Kernel by kernel."""
        indices, places = _without_repeats(plan.logit_indices)
        batch, rows = self._batch(plan, indices)
        x, residual = self._hidden(batch)
        # Before the logits of the step: theirs and these need not be in memory at once.
        self._readings = read_prompts(plan, x, residual, self.model, self._kernels) if plan.reads_prompts else None
        logits = self.model.logits(x.index_select(0, rows), residual.index_select(0, rows))
        if logits is None or places is None:
            return logits
        return logits.index_select(0, to_device(places, logits.device))

    def take_readings(self) -> PromptReadings:
        """What the last step has read of prompts; kept no longer. RuntimeError when it was to read nothing."""
        readings, self._readings = self._readings, None
        if readings is None:
            raise RuntimeError("the last step read no prompt")
        return readings

    def _hidden(self, batch: Batch) -> tuple[Tensor, Tensor]:
        program = self._layer_program
        return self.model.hidden(batch, self._kv_layers) if program is None else program.run(batch)

    def _replay(self, graphs: DecodeGraphs, key: GraphKey, plan: StepPlan) -> Tensor | None:
        logits = graphs.replay(key, plan, self._named(plan))
        indices = plan.logit_indices
        if logits is None or np.array_equal(indices, np.arange(len(logits))):
            return logits
        return logits.index_select(0, to_device(indices, logits.device))

    def _logits_of_all(self, batch: Batch) -> Tensor | None:
        return self.model.logits(*self.model.hidden(batch, self._kv_layers))

    def _batch(self, plan: StepPlan, logit_indices: Int32Array) -> tuple[Batch, Tensor]:
        """The plan as tensors on the device, and the indices of the tokens whose logits are needed."""
        new, seq_lens = plan.num_new_tokens, plan.num_computed_tokens + plan.num_new_tokens
        starts = np.zeros(new.size + 1, np.int32)
        np.cumsum(new, out=starts[1:])
        positions = np.arange(starts[-1], dtype=np.int32) + np.repeat(plan.num_computed_tokens - starts[:-1], new)
        slot_mapping = self._tables.slot_mapping(np.repeat(plan.slots, new), positions)
        arrays = [plan.token_ids, positions, slot_mapping, seq_lens, starts, plan.slots, logit_indices]
        tokens, *rest, slots, rows = all_to_device(arrays, self.placement.device)
        sampled, max_seq_len = self._named(plan), int(seq_lens.max())
        batch = Batch(
            tokens if sampled is None else named_tokens(tokens, sampled),
            rest[0],
            rest[1],
            self._tables.rows(slots, max_seq_len),
            rest[2],
            rest[3],
            max_query_len=int(new.max()),
            max_seq_len=max_seq_len,
        )
        return batch, rows

    def _named(self, plan: StepPlan) -> Tensor | None:
        """The sampled tokens that the plan names by row."""
        return None if plan.tokens_from_step is None else self._sampled[plan.tokens_from_step]


def _without_repeats(indices: Int32Array) -> tuple[Int32Array, Int32Array | None]:
    """The indices, each once, and where each was; None when none is repeated.

    Branches of one prompt draw from the same token's logits: n of them must not cost n products with the vocabulary.
    """
    once, places = np.unique(indices, return_inverse=True)
    return (indices, None) if once.size == indices.size else (once, places.astype(np.int32))


def follow(
    runner: ModelRunner,
    collectives: Collectives,
    *,
    heard: Callable[[], None] = lambda: None,
    profiler: StepProfiler | None = None,
) -> None:
    """The loop of ranks above 0: execute what the leader broadcasts, until it says SHUTDOWN.

    ``heard`` is called for each plan, heartbeats too. A leader that is gone raises RuntimeError.
    """
    while True:
        plan = unpack_plan(collectives.broadcast_plan(None))
        heard()
        if plan.kind is PlanKind.SHUTDOWN:
            return
        if plan.kind is PlanKind.PROFILE and profiler is not None:
            profiler.begin(plan.tokens_from_step or 0, plan.step)
        if plan.kind is PlanKind.STEP:
            with nullcontext() if profiler is None else profiler.step(plan.step):
                runner.execute(plan)
            if plan.share_sampled and plan.logit_indices.size:
                ids = collectives.share_sampled(None, plan.logit_indices.size, runner.placement.device)
                runner.remember(plan.step, ids)
        if plan.kind is PlanKind.CAPTURE and plan.graph is not None:
            runner.capture(plan.graph, collectives)
