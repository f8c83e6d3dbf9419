"""An engine with random weights in the shapes of a model: nothing is read from a disk."""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from octavo.kernels.backend import Kernels
from octavo.worker.collectives import SingleProcess
from octavo.worker.decode_graphs import CudaRecorder, Recorder
from octavo.worker.engine import Engine
from octavo.worker.executor import Executor
from octavo.worker.messages import SequenceUpdate
from octavo.worker.model.config import ModelConfig
from octavo.worker.model.partition import partition
from octavo.worker.model.products import Placement
from octavo.worker.model.transformer import Transformer
from octavo.worker.model_runner import Limits, ModelRunner
from octavo.worker.policies import make_queue
from octavo.worker.routing_hash import RoutingHasher
from octavo.worker.scheduler import Scheduler, SchedulerLimits
from octavo.worker.step_plan import GraphKey
from octavo.worker.token_budget import FixedBudget

Emit = Callable[[str, SequenceUpdate], None]


@dataclass(frozen=True)
class Shape:
    """The numbers of a config.json."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool

    def config(self) -> ModelConfig:
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        values |= {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 131072, "dtype": "bfloat16"}
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(values))
            return ModelConfig.from_folder(Path(folder))

    @property
    def num_step_weights(self) -> int:
        """Elements of the matrices that every step reads, the output's among them."""
        attention = (2 * self.num_attention_heads + 2 * self.num_key_value_heads) * self.head_dim
        layer = self.hidden_size * (attention + 3 * self.intermediate_size)
        return self.num_hidden_layers * layer + self.vocab_size * self.hidden_size

    @property
    def num_kv_per_token(self) -> int:
        """Elements of K and V of a token, all layers."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim


QWEN3_0_6B = Shape(1024, 3072, 28, 16, 8, 128, 151936, tie_word_embeddings=True)
"""Without the norms of its queries and keys."""
LLAMA_3_1_8B = Shape(4096, 14336, 32, 32, 8, 128, 128256, tie_word_embeddings=False)
SMALL = Shape(256, 512, 3, 8, 2, 64, 2048, tie_word_embeddings=False)
TINY = Shape(64, 96, 2, 4, 2, 16, 256, tie_word_embeddings=True)


@dataclass(frozen=True)
class RandomRank:
    """One rank, alone in its group."""

    shape: Shape
    runner: ModelRunner
    kernels: Kernels
    num_blocks: int

    @classmethod
    @torch.inference_mode()
    def make(
        cls, shape: Shape, device: torch.device, dtype: torch.dtype, kernels: Kernels, limits: Limits, num_blocks: int
    ) -> RandomRank:
        torch.manual_seed(0)
        config = shape.config()
        (share,) = shares = partition(config, 1)
        placement = Placement.on(device, dtype)
        model = Transformer(config, shares, placement, SingleProcess(), kernels, limits.max_model_len)
        for layer in model.layers():
            for part in layer.parts():
                if len(part.shape) == 1:
                    part.target.fill_(1.0)
                else:  # so that what goes in comes out about as large
                    part.target.normal_(0.0, 1 / math.sqrt(part.shape[1]))
            layer.prepare(kernels)
        runner = ModelRunner(model, config, limits, placement, kernels, len(share.kv_heads))
        runner.allocate_kv(num_blocks)
        return cls(shape, runner, kernels, num_blocks)

    def use_graphs(self, recorder: Recorder | None) -> None:
        """None: without."""
        self.runner.graphs = None
        if recorder is not None:
            self.runner.use_graphs(recorder)

    def record(self, num_rows: int, seq_len: int) -> float:
        """Record the graph for so many sequences up to this length; the seconds it took. RuntimeError if it failed."""
        graphs = self.runner.graphs
        assert graphs is not None
        size = next(size for size in graphs.sizes if size >= num_rows)
        context = next(context for context in graphs.contexts if context >= seq_len)
        begin, key = time.perf_counter(), GraphKey(size, context)
        self.runner.capture(key, SingleProcess())
        if not graphs.holds(key):
            raise RuntimeError(f"{key} could not be recorded")
        return time.perf_counter() - begin

    def executor(self) -> Executor:
        overlaps = self.runner.placement.device.type == "cuda"
        return Executor(self.runner, SingleProcess(), self.kernels, overlaps=overlaps)

    def engine(self, executor: Executor, emit: Emit, *, plans_ahead: bool = True, caches: bool = False) -> Engine:
        """A new engine, with an empty cache."""
        limits = self.runner.limits
        scheduler = Scheduler(
            SchedulerLimits(
                num_blocks=self.num_blocks,
                block_size=limits.block_size,
                max_num_seqs=limits.max_num_seqs,
                max_num_batched_tokens=limits.max_num_batched_tokens,
                max_model_len=limits.max_model_len,
                enable_prefix_caching=caches,
                plans_ahead=plans_ahead,
            ),
            RoutingHasher(bytes(16), limits.block_size),
            queue=make_queue("priority", aging_s=60.0),
            budget=FixedBudget(limits.max_num_batched_tokens),
        )
        return Engine(scheduler, executor, clock=time.perf_counter, emit=emit)


def recorder_for(device: torch.device) -> Recorder:
    """CUDA graphs; on a CPU what stands for them in tests."""
    if device.type == "cuda":
        return CudaRecorder(device)
    from again import Again

    return Again()
