"""ServePlan: a ServeConfig with everything decided, as the parts of the application are told it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..worker.spec import WorkerSpec
from .config import DEFAULT_GPU_MEMORY_UTILIZATION, DEFAULT_PRIORITY_AGING_S, ServeConfig

NAMESPACE = "octavo"
"""Ray namespace of the named actors."""


@dataclass(frozen=True, slots=True)
class ServePlan:
    """One application: one served model, its worker groups, its gateways and its routers."""

    config: ServeConfig
    """Decided for the device: no field that depends on it is None."""
    device: Literal["cpu", "cuda"]
    model: str | None
    """What a node turns into a model folder: a folder that all nodes have, a hub id, or None."""
    served_model_name: str
    routing_key: bytes
    """Secret of the routing hash; the same as long as the cluster lives."""
    num_ranks_on_machine: int
    """Ranks that share the cores and the memory of one machine."""

    @property
    def num_ranks(self) -> int:
        return (self.config.replicas or 1) * self.config.tensor_parallel_size

    @property
    def num_threads_per_rank(self) -> int:
        """CPU threads of a rank: the machine's cores, divided over the ranks on it."""
        return max(1, (os.cpu_count() or 1) // self.num_ranks_on_machine)

    @property
    def rank_resources(self) -> dict[str, float]:
        """What one rank books of its node."""
        return {"GPU": 1.0, "CPU": 1.0} if self.device == "cuda" else {"CPU": 1.0}

    def worker_spec(self, group: str, generation: int, routers: tuple[str, ...]) -> WorkerSpec:
        """What the workers of one incarnation of a group are told."""
        config = self.config
        budget = config.kv_cache_memory_bytes
        return WorkerSpec(
            model=self.model,
            served_model_name=self.served_model_name,
            group=group,
            generation=generation,
            tensor_parallel_size=config.tensor_parallel_size,
            device=self.device,
            dtype=config.dtype,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens or config.max_num_seqs,
            max_model_len=config.max_model_len,
            enable_prefix_caching=config.enable_prefix_caching,
            kv_cache_memory_bytes=None if budget is None else int(budget),
            gpu_memory_utilization=config.gpu_memory_utilization or DEFAULT_GPU_MEMORY_UTILIZATION,
            num_gpu_blocks_override=config.num_gpu_blocks_override,
            num_ranks_on_machine=self.num_ranks_on_machine,
            routing_key=self.routing_key,
            cache_dir=config.cache_dir,
            router_names=routers,
            ray_namespace=NAMESPACE,
            startup_timeout_s=config.startup_timeout_s,
            log_level=config.log_level,
            scheduling_policy=config.scheduling_policy,
            priority_aging_s=config.priority_aging_s or DEFAULT_PRIORITY_AGING_S,
            target_itl_s=None if config.target_itl_ms is None else config.target_itl_ms / 1000,
            max_output_tokens=config.max_output_tokens,
            max_queued_requests=config.max_queued_requests,
            max_queued_tokens=config.max_queued_tokens,
            async_scheduling=config.async_scheduling,
            enforce_eager=config.enforce_eager,
            batch_invariant=config.batch_invariant,
            quantization=config.quantization,
            kv_cache_dtype=config.kv_cache_dtype,
        )


def compile_cache(cache_dir: Path) -> Path:
    """Where compiled CPU kernels are kept."""
    return cache_dir / "numba"


def router_names(app_name: str, num_routers: int) -> tuple[str, ...]:
    """Names of the routers' actors, by the name that Serve knows the application by."""
    return tuple(f"{app_name}:router:{index}" for index in range(num_routers))
