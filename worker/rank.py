"""Rank: one worker's device, shard and KV blocks. No Ray here.

A rank comes up in one call of ``load``, which all ranks of a group make at the same time: they meet, read their slices
of the weights, run the worst step that can come, and agree on the number of KV blocks, so that what fails fails now.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from ..kernels.backend import Kernels, select_kernels
from ..kernels.cpu_threads import warm_up
from .checkpoint.name import name_of_weights
from .checkpoint.store import resolve_model
from .collectives import Collectives, Rendezvous, SingleProcess, TorchDistributed
from .decode_graphs import CudaRecorder
from .errors import ConfigurationError
from .executor import Executor
from .grammar import GrammarCompiler
from .ledger import Ledger
from .memory import KV_DTYPES, KvBudget, allocate_pool, run_worst_case_step, size_kv_cache
from .model.config import ModelConfig
from .model.device_limits import Device, check_device
from .model.dtype import choose_dtype, speed_of_half
from .model.partition import partition
from .model.products import weight_forms
from .model_runner import ModelRunner, follow
from .modesty import be_modest
from .profile_desk import PROFILES
from .profiler import StepProfiler
from .self_test import run_self_test
from .spec import WorkerSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedRank:
    """A rank that is ready to compute."""

    runner: ModelRunner
    collectives: Collectives
    kernels: Kernels
    num_blocks: int
    max_model_len: int
    ledger: Ledger
    grammars: GrammarCompiler
    profiler: StepProfiler | None = None
    gpu_uuid: str | None = None
    """None on a CPU."""
    weights: str = ""
    """See ``name_of_weights``."""


def load(spec: WorkerSpec, meeting: Rendezvous, report: Callable[[str], None] = logger.info) -> LoadedRank:
    """Bring up rank ``meeting.rank``. Raises ConfigurationError in one sentence for what cannot work."""
    model_dir = resolve_model(spec.model, cache_dir=spec.cache_dir, report=report).path
    config = ModelConfig.from_folder(model_dir)
    device = _device(spec.device)
    check_device(Device.of(device.type), config, dtype=spec.dtype, quantization=spec.quantization)
    kernels = select_kernels(device, batch_invariant=spec.batch_invariant)
    collectives: Collectives = TorchDistributed(meeting, device) if meeting.size > 1 else SingleProcess()
    if device.type == "cpu":  # not the threads of collectives, which stay
        be_modest()
    dtype = _dtype(spec, config, device, kernels, collectives, report)
    weights = name_of_weights(model_dir, (spec.dtype, spec.quantization, spec.kv_cache_dtype))
    max_model_len = context_length(spec, config)
    started = time.monotonic()
    runner = ModelRunner.load(
        model_dir,
        rank=meeting.rank,
        size=meeting.size,
        device=device,
        dtype=dtype,
        collectives=collectives,
        block_size=spec.block_size,
        max_num_seqs=spec.max_num_seqs,
        max_num_batched_tokens=spec.max_num_batched_tokens,
        max_model_len=max_model_len,
        kernels=kernels,
        kv_dtype=KV_DTYPES[spec.kv_cache_dtype],
        quantization=spec.quantization,
    )
    report(f"rank {meeting.rank}: weights loaded in {time.monotonic() - started:.1f} s")
    if device.type == "cuda" and not spec.enforce_eager:
        runner.use_graphs(CudaRecorder(device))
    if device.type == "cpu":
        share = partition(config, meeting.size)[meeting.rank]
        warm_up(
            kernels,
            num_query_heads=len(share.query_heads),
            num_kv_heads=len(share.kv_heads),
            head_dim=config.head_dim,
            vocab_size=config.vocab_size,
            weight_forms=weight_forms(runner.placement),
            kv_dtype=runner.kv_dtype,
        )
    started = time.monotonic()
    ledger = _allocate_kv(runner, collectives, kv_budget(spec))
    report(f"rank {meeting.rank}: KV sized and allocated in {time.monotonic() - started:.1f} s\n{ledger.table()}")
    run_self_test(runner, collectives, is_embedded=spec.model is None)
    grammars = GrammarCompiler.of_model(model_dir, config.vocab_size)
    profiler = StepProfiler(spec.cache_dir / PROFILES, spec.group, meeting.rank, device)
    gpu_uuid = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None
    return LoadedRank(
        runner,
        collectives,
        kernels,
        ledger.num_blocks,
        max_model_len,
        ledger,
        grammars,
        profiler,
        gpu_uuid,
        weights,
    )


def _dtype(
    spec: WorkerSpec,
    config: ModelConfig,
    device: torch.device,
    kernels: Kernels,
    collectives: Collectives,
    report: Callable[[str], None],
) -> torch.dtype:
    """All ranks choose the same: half precision is as fast as float32 when it is on the slowest of them."""

    def speed(dtype: torch.dtype) -> float:
        return collectives.minimum(round(100 * speed_of_half(dtype, config, kernels))) / 100

    needs_single = spec.quantization is not None or spec.batch_invariant
    return choose_dtype(spec.dtype, config, device, None if needs_single else speed, report)


def _allocate_kv(runner: ModelRunner, collectives: Collectives, budget: KvBudget) -> Ledger:
    """The KV pool, equally large on all ranks."""
    ledger = size_kv_cache(runner, budget)
    ledger = ledger.agreed(collectives.minimum(ledger.num_blocks))
    allocate_pool(runner, ledger.num_blocks)
    if runner.placement.device.type == "cuda":  # beside the whole pool: there memory has a wall and fragments
        run_worst_case_step(runner)
    return ledger


def _device(name: str) -> torch.device:
    """Ray shows a worker its own GPU alone, as number 0."""
    if name == "cuda":
        torch.cuda.set_device(0)
        return torch.device("cuda", 0)
    return torch.device(name)


def context_length(spec: WorkerSpec, config: ModelConfig) -> int:
    """Tokens of a sequence. Raises ConfigurationError when more are asked for than the model was made for."""
    limit, wanted = config.longest_context, spec.max_model_len
    if wanted is not None and wanted > limit:
        raise ConfigurationError(f"--max-model-len: the model's context is {limit} tokens, got {wanted}")
    return config.max_position_embeddings if wanted is None else wanted


def kv_budget(spec: WorkerSpec) -> KvBudget:
    """What the settings say about the memory for KV blocks."""
    return KvBudget(
        kv_cache_memory_bytes=spec.kv_cache_memory_bytes,
        gpu_memory_utilization=spec.gpu_memory_utilization,
        num_blocks_override=spec.num_gpu_blocks_override,
        num_ranks_on_machine=spec.num_ranks_on_machine,
    )


def executor_of(loaded: LoadedRank) -> Executor:
    on_gpu = loaded.runner.placement.device.type == "cuda"
    return Executor(loaded.runner, loaded.collectives, loaded.kernels, overlaps=on_gpu, profiler=loaded.profiler)


def run_follower(loaded: LoadedRank, heard: Callable[[], None]) -> None:
    """Ranks 1 …: carry out the leader's plans until it shuts down. Raises RuntimeError when it is gone."""
    follow(loaded.runner, loaded.collectives, heard=heard, profiler=loaded.profiler)


def load_alone(model_dir: Path, spec: WorkerSpec) -> LoadedRank:
    """One rank in this process, without Ray: for tests, benchmarks and GPU scripts."""
    return load(spec, Rendezvous("127.0.0.1", 0, 0, 1))
