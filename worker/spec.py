"""WorkerSpec: what a worker group and its workers are told when they are created."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .logs import LogFormat

SchedulingPolicy = Literal["fcfs", "priority", "shortest", "fair"]

Quantization = Literal["int8", "fp8"]
"""What the matrices of a checkpoint are rounded to when they are loaded."""

KvCacheDtype = Literal["auto", "fp8_e4m3", "int8"]
"""The dtype of K and V in the cache; auto: that of the activations."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """Settings of one worker group, decided and judged by the cluster's configuration."""

    model: str | None
    """Folder, hub id, GGUF file, name of a packaged model, or None for the embedded one."""
    served_model_name: str
    group: str
    """Name of the group, unique in the application."""
    generation: int
    """Start of this incarnation, ns since the epoch."""
    tensor_parallel_size: int
    device: str
    """``cpu`` or ``cuda``."""
    dtype: str
    """``auto``, ``float32``, ``bfloat16`` or ``float16``."""
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int | None
    """None: the model's own limit."""
    enable_prefix_caching: bool
    kv_cache_memory_bytes: int | None
    gpu_memory_utilization: float
    num_gpu_blocks_override: int | None
    num_ranks_on_machine: int
    """Ranks, of all groups, that share one machine's memory and cores; divides the CPU's KV budget."""
    routing_key: bytes
    """Secret of the routing hash."""
    cache_dir: Path
    router_names: tuple[str, ...]
    """Names of the routers' actors."""
    ray_namespace: str
    startup_timeout_s: float
    log_level: str = "info"
    log_format: LogFormat = "text"
    scheduling_policy: SchedulingPolicy = "priority"
    """Who is served first: ``fcfs``, ``priority``, ``shortest`` or ``fair``."""
    priority_aging_s: float = 60.0
    """Seconds of waiting that outweigh one unit of priority."""
    target_itl_s: float | None = None
    """Time that running streams shall wait for a token at the most. None: no limit."""
    max_output_tokens: int | None = None
    """Output of a branch at the most. None: what the context leaves."""
    max_queued_requests: int | None = None
    """Requests that may wait in the group. None: any number."""
    max_queued_tokens: int | None = None
    """Tokens of prompts that may wait in the group. None: any number."""
    async_scheduling: bool = True
    """Plan the next step while one runs."""
    enforce_eager: bool = False
    """Record no graphs of decoding on GPUs."""
    batch_invariant: bool = False
    """Kernels whose result for a row does not depend on the other rows; on CPUs no half precision."""
    quantization: Quantization | None = None
    """None: matrices as the checkpoint has them."""
    kv_cache_dtype: KvCacheDtype = "auto"
    step_timeout_s: float | None = None
    """Time after which a step does not end any more. None: from what steps take."""
