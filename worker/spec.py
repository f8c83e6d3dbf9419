"""WorkerSpec: what a worker group and its workers are told when they are created."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """Settings of one worker group, decided and judged by the cluster's configuration."""

    model: str | None
    """Folder, hub id, GGUF file, or None for the embedded model."""
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
    router_name: str
    """Name of the router's actor."""
    ray_namespace: str
    startup_timeout_s: float
    log_level: str = "info"
