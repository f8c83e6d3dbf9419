"""ClusterPlan and, for each model, ServePlan: a ServeConfig with everything decided, as the application is told it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..worker.host_cpus import num_cpus
from ..worker.model.config import ModelConfig
from ..worker.spec import WorkerSpec
from .api.chat.prompts import ChatOptions
from .api.request.generation_defaults import GenerationDefaults
from .api.service import ServedModel
from .config import DEFAULT_PRIORITY_AGING_S, ServeConfig
from .model_settings import DEFAULT_GPU_MEMORY_UTILIZATION
from .placement import rank_resources

NAMESPACE = "octavo"
"""Ray namespace of the named actors."""


@dataclass(frozen=True, slots=True)
class ServePlan:
    """One served model and its worker groups."""

    config: ServeConfig
    """Of this model alone, decided for the device: no field that depends on it is None."""
    device: Literal["cpu", "cuda"]
    model: str | None
    """What a node turns into a model folder: a folder that all nodes have, a hub id, or None."""
    served_model_name: str
    routing_key: bytes
    """Secret of the routing hash; the same as long as the cluster lives."""
    num_ranks_on_machine: int
    """Ranks that share the cores and the memory of one machine."""
    chat_template: str | None = None
    """The text of --chat-template; None: the model's own."""

    @property
    def chat_options(self) -> ChatOptions:
        config = self.config
        return ChatOptions(config.trust_request_chat_template, config.tool_call_parser, config.reasoning_parser)

    @property
    def num_threads_per_rank(self) -> int:
        """CPU threads of a rank: the processors that this process may use, divided over the ranks on it."""
        return max(1, num_cpus() // self.num_ranks_on_machine)

    @property
    def rank_resources(self) -> dict[str, float]:
        """What one rank books of its node."""
        return rank_resources(self.device)

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
            log_format=config.log_format,
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
            step_timeout_s=config.step_timeout_s,
        )


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """One application: its models, its gateways and its routers."""

    config: ServeConfig
    """What is the same for all models, and each as it was given."""
    models: tuple[ServePlan, ...]
    routing_key: bytes
    """As each model's."""

    @property
    def num_groups(self) -> int:
        return sum(model.config.replicas or 1 for model in self.models)

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        return self.models[0].device


def group_deployment(index: int) -> str:
    """Name of the deployment of a model's worker groups, by the model's place in the configuration."""
    return f"WorkerGroup-{index}"


def served_model(plan: ServePlan, folder: Path) -> ServedModel:
    """What the API says of the model. Raises ConfigurationError for a folder that cannot be read."""
    limit = plan.config.max_model_len or ModelConfig.from_folder(folder).max_position_embeddings
    return ServedModel(
        plan.served_model_name,
        limit,
        int(time.time()),
        max_num_seqs=plan.config.max_num_seqs,
        max_output_tokens=plan.config.max_output_tokens,
        scheduling_policy=plan.config.scheduling_policy,
        max_logprobs=plan.config.max_logprobs,
        pooling=plan.config.pooling,
        defaults=GenerationDefaults.load(plan.config.generation_config, folder),
    )


def compile_cache(cache_dir: Path) -> Path:
    """Where compiled CPU kernels are kept."""
    return cache_dir / "numba"


def router_names(app_name: str, num_routers: int) -> tuple[str, ...]:
    """Names of the routers' actors, by the name that Serve knows the application by."""
    return tuple(f"{app_name}:router:{index}" for index in range(num_routers))
