"""What all worker groups need of this machine's memory, before any process is started."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from ..worker.errors import ConfigurationError
from ..worker.host_memory import host_memory
from ..worker.ledger import gib
from ..worker.model.config import ModelConfig
from ..worker.model.partition import partition
from .config import ServeConfig

_PROCESS_BYTES = 400 * 2**20
"""A rank's process without weights and KV blocks, measured with torch 2.13."""

_CPU_KV_ITEMSIZE = 4
"""On CPUs KV is float32, whatever the weights are, unless it is quantised."""

_SCALE_BYTES = 4
"""Of a token and head of quantised KV, beside a byte for each number."""


def check_memory(config: ServeConfig, folders: Sequence[Path]) -> None:
    """Raises ConfigurationError when this machine's memory cannot hold all worker groups on its CPUs. ``folders``: of
    each model."""
    if device_of(config) != "cpu":
        return
    needs = [
        _need_of(index, model.for_device("cpu"), folder)
        for index, (model, folder) in enumerate(zip(config.each_model(), folders, strict=True))
        if model.fake_engine is None
    ]
    available, total = host_memory().available, sum(need.num_bytes for need in needs)
    if total > available:
        raise ConfigurationError(_too_large(needs, total, available))
    for need in needs:
        with config.errors_of_model(need.place):
            _check_pools(need.config, need.folder, available - total)
    _check_all_pools(needs, available - total)


class _Need(NamedTuple):
    """What the worker groups of one model take at the most, without KV."""

    place: int
    """The model's place in the configuration."""
    config: ServeConfig
    folder: Path
    replicas: int
    group_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.replicas * self.group_bytes


def _need_of(place: int, config: ServeConfig, folder: Path) -> _Need:
    group_bytes = _weight_bytes(config, folder) + config.tensor_parallel_size * _PROCESS_BYTES
    return _Need(place, config, folder, config.most_replicas, group_bytes)


def _too_large(needs: Sequence[_Need], total: int, available: int) -> str:
    groups = f"{sum(need.replicas for need in needs)} worker groups need about {total / 2**30:.1f} GiB for weights and"
    flag = "--max-replicas" if any(need.config.max_replicas for need in needs) else "--replicas"
    told = f"{flag}: {groups} processes, but {available / 2**30:.1f} GiB are available"
    if len(needs) == 1:
        return f"{told}; at most {available // needs[0].group_bytes}"
    shares = [f"models.{need.place}: {need.replicas} × {gib(need.group_bytes)}" for need in needs]
    return f"{told} ({', '.join(shares)})"


def _weight_bytes(config: ServeConfig, folder: Path) -> int:
    """Of the files, or of about what is left of them: with --quantization a byte for each number of the matrices."""
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    model = ModelConfig.from_folder(folder)
    return stored if config.quantization is None else min(stored, model.num_matrix_values + 4 * model.num_table_values)


def _check_pools(config: ServeConfig, folder: Path, left: int) -> None:
    """Raises ConfigurationError when the KV pools of one model that were set do not fit in ``left`` bytes together.

    Each rank sees to its own pool; that those of all ranks fit is seen best before any of them is there.
    """
    if (pools := _set_pools(config, folder)) is None:
        return
    num_ranks = config.most_replicas * config.tensor_parallel_size
    if num_ranks * pools.rank_bytes > left:
        raise ConfigurationError(
            f"{pools.flag} is {pools.value}, which takes {gib(num_ranks * pools.rank_bytes)} for the KV of {num_ranks}"
            f" workers, but weights and processes leave {gib(left)} of this machine's memory; at most"
            f" {left // (num_ranks * pools.unit)}"
        )


def _check_all_pools(needs: Sequence[_Need], left: int) -> None:
    """As ``_check_pools``, of all models together."""
    total = 0
    for need in needs:
        if (pools := _set_pools(need.config, need.folder)) is not None:
            total += need.replicas * need.config.tensor_parallel_size * pools.rank_bytes
    if total > left:
        raise ConfigurationError(
            f"--kv-cache-memory-bytes: the KV pools of all models take {gib(total)} as they are set, but weights and"
            f" processes leave {gib(left)} of this machine's memory"
        )


class _SetPools(NamedTuple):
    """KV pools that were set: by which flag, to what."""

    flag: str
    value: int
    unit: int
    """Bytes of one of what the flag counts."""

    @property
    def rank_bytes(self) -> int:
        return self.value * self.unit


def _set_pools(config: ServeConfig, folder: Path) -> _SetPools | None:
    if config.num_gpu_blocks_override is not None:
        block_bytes = _bytes_per_block(config, ModelConfig.from_folder(folder), _CPU_KV_ITEMSIZE)
        return _SetPools("--num-gpu-blocks-override", config.num_gpu_blocks_override, block_bytes)
    if config.kv_cache_memory_bytes is not None:
        return _SetPools("--kv-cache-memory-bytes", int(config.kv_cache_memory_bytes), 1)
    return None


def set_num_blocks(config: ServeConfig, model: ModelConfig) -> int | None:
    """KV blocks of a worker, if they are set. None as well where it takes the workers to know."""
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override
    itemsize = _kv_itemsize(config, model)
    if config.kv_cache_memory_bytes is None or itemsize is None:
        return None
    return int(config.kv_cache_memory_bytes) // _bytes_per_block(config, model, itemsize)


def _bytes_per_block(config: ServeConfig, model: ModelConfig, itemsize: int) -> int:
    """K and V of one block in all layers, on the rank with the most KV heads; ``itemsize`` of a plain number."""
    kv_heads = max(len(share.kv_heads) for share in partition(model, config.tensor_parallel_size))
    head_bytes = model.head_dim * itemsize if config.kv_cache_dtype == "auto" else model.head_dim + _SCALE_BYTES
    return model.num_layers * 2 * kv_heads * config.block_size * head_bytes


def _kv_itemsize(config: ServeConfig, model: ModelConfig) -> int | None:
    """Bytes of a number in the KV cache; None where the device is not known yet."""
    device = device_of(config)
    if device != "cuda":
        return _CPU_KV_ITEMSIZE if device == "cpu" else None
    import torch

    from ..worker.model.dtype import choose_dtype

    return choose_dtype(config.dtype, model, torch.device("cuda")).itemsize


def device_of(config: ServeConfig) -> Literal["cpu", "cuda"] | None:
    """None: a cluster that is joined decides."""
    if config.device != "auto":
        return config.device
    if config.address is not None:
        return None
    return "cuda" if _num_gpus() > 0 else "cpu"


def _num_gpus() -> int:
    import pynvml

    try:
        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError:
        return 0
