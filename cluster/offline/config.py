"""The flags of LLM: those of ``octavo serve`` that mean something in one process."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ...worker.checkpoint.store import resolve_model
from ...worker.errors import ConfigurationError
from ...worker.spec import WorkerSpec
from ..config import ServeConfig
from ..config_paths import absolute_model
from ..config_sources import setting_values
from ..plan import ServePlan
from ..preflight import (
    check_chat_template,
    check_model,
    fit_context,
    note_defaults,
    read_chat_template,
)
from ..preflight_memory import check_memory

FLAGS = frozenset(
    {
        *("model", "device", "dtype", "quantization", "tensor_parallel_size"),
        *("max_model_len", "max_num_seqs", "max_num_batched_tokens", "max_output_tokens"),
        *("generation_config", "max_logprobs", "pooling"),
        *("chat_template", "trust_request_chat_template", "tool_call_parser", "reasoning_parser"),
        *("scheduling_policy", "priority_aging_s", "async_scheduling", "enforce_eager", "batch_invariant"),
        *("block_size", "enable_prefix_caching", "kv_cache_dtype", "kv_cache_memory_bytes"),
        *("gpu_memory_utilization", "num_gpu_blocks_override", "cache_dir"),
    }
)
"""All other fields of ServeConfig are about processes, clients or their queue."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LocalPlan:
    """What is to be brought up."""

    serve: ServePlan
    folder: Path
    """Of the model."""

    def worker_spec(self, group: str) -> WorkerSpec:
        return self.serve.worker_spec(group, time.time_ns(), ())


def plan_of(model: str | Path | None, flags: Mapping[str, Any]) -> LocalPlan:
    """Everything decided and the model fetched. Raises ConfigurationError for what cannot work."""
    config = parse_flags(model, flags)
    resolved = resolve_model(config.model, cache_dir=config.cache_dir, report=logger.info)
    device = _device(config)
    config = config.for_device(device)
    check_model(config, resolved.path)
    check_chat_template(config, resolved.path, logger.info)
    config = fit_context(config, resolved.path, logger.info)
    note_defaults(config, resolved.path, logger.info)
    check_memory(config, [resolved.path])
    serve = ServePlan(
        config=config,
        device=device,
        model=None if config.model is None else str(resolved.path),
        served_model_name=resolved.served_name,
        routing_key=secrets.token_bytes(32),
        num_ranks_on_machine=1,
        chat_template=read_chat_template(config),
    )
    return LocalPlan(serve, resolved.path)


def parse_flags(model: str | Path | None, flags: Mapping[str, Any]) -> ServeConfig:
    """Raises ConfigurationError that names flags, values and limits, also for an unknown ``OCTAVO_…``; those of
    settings are for commands."""
    setting_values()
    if others := sorted(flags.keys() & ServeConfig.model_fields.keys() - FLAGS):
        raise ConfigurationError("; ".join(f"{name}: a setting of octavo serve, not of LLM" for name in others))
    size = flags.get("tensor_parallel_size", 1)
    if size != 1 or isinstance(size, bool):
        raise ConfigurationError(
            f"tensor_parallel_size: must be 1 in one process, got {size!r}; octavo serve splits a model over several"
        )
    given = {} if model is None else {"model": absolute_model(str(model))}
    return ServeConfig.parse({**flags, **given, "replicas": 1})


def _device(config: ServeConfig) -> Literal["cpu", "cuda"]:
    import torch

    has_gpu = torch.cuda.is_available()
    if config.device == "cuda" and not has_gpu:
        raise ConfigurationError("device: cuda, but torch finds no GPU")
    if config.device == "auto":
        return "cuda" if has_gpu else "cpu"
    return config.device
