"""A WorkerSpec of a small group without a cluster around it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from octavo.worker.spec import WorkerSpec


def worker_spec(model: str | None, cache_dir: Path, **changes: Any) -> WorkerSpec:
    fields: dict[str, Any] = {
        "model": model,
        "served_model_name": "model",
        "group": "tests",
        "generation": 1,
        "tensor_parallel_size": 1,
        "device": "cpu",
        "dtype": "float32",
        "block_size": 16,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 96,
        "enable_prefix_caching": True,
        "kv_cache_memory_bytes": None,
        "gpu_memory_utilization": 0.9,
        "num_gpu_blocks_override": 64,
        "num_ranks_on_machine": 1,
        "routing_key": bytes(16),
        "cache_dir": cache_dir,
        "router_names": (),
        "ray_namespace": "none",
        "startup_timeout_s": 60.0,
    }
    return WorkerSpec(**fields | changes)
