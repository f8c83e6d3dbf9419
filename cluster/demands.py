"""What a configuration's worker groups ask of a cluster."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from .config import ServeConfig
from .placement import SMALL, Demand, rank_resources


def demands_of(config: ServeConfig, device: Literal["cpu", "cuda"]) -> list[Demand]:
    """Of each model's worker groups. Raises ConfigurationError as ``ServeConfig.for_device``."""
    return [model_demand(model.for_device(device), device) for model in config.each_model()]


def most_demanded(config: ServeConfig, device: Literal["cpu", "cuda"]) -> list[Demand]:
    """As ``demands_of``, with all the groups that --max-replicas may add."""
    models = [model.for_device(device) for model in config.each_model()]
    return [
        replace(model_demand(model, device), num_groups=model.most_replicas, flag="--max-replicas")
        if model.max_replicas
        else model_demand(model, device)
        for model in models
    ]


def model_demand(config: ServeConfig, device: Literal["cpu", "cuda"]) -> Demand:
    """Of one model, decided for the device."""
    rank = rank_resources(device) if config.fake_engine is None else {"CPU": SMALL}
    return Demand(config.replicas or 1, config.tensor_parallel_size, rank, config.placement)
