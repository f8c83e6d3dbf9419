"""What can be judged of a model before any process is started."""

from __future__ import annotations

from pathlib import Path

import psutil

from ..worker.errors import ConfigurationError
from ..worker.model.config import ModelConfig
from ..worker.model.partition import partition
from .config import ServeConfig


def check_model(config: ServeConfig, folder: Path) -> None:
    """Raises ConfigurationError when the model in ``folder`` cannot be served as ``config`` says."""
    model = ModelConfig.from_folder(folder)
    partition(model, config.tensor_parallel_size)
    if config.model is not None:  # the embedded one is verified by checksum, and torch takes seconds to import
        from ..worker.model.check import check_model_folder

        check_model_folder(folder)
    limit = model.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigurationError(f"--max-model-len: the model's context is {limit} tokens, got {config.max_model_len}")


_PROCESS_BYTES = 400 * 2**20
"""A rank's process without weights and KV blocks, measured with torch 2.13."""


def check_memory(config: ServeConfig, folder: Path) -> None:
    """Raises ConfigurationError when this machine's memory cannot hold all worker groups on its CPUs."""
    if config.device == "cuda" or (config.device == "auto" and _num_gpus() > 0):
        return
    replicas = config.for_device("cpu").replicas or 1
    weight_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    group_bytes = weight_bytes + config.tensor_parallel_size * _PROCESS_BYTES
    available = psutil.virtual_memory().available
    if replicas * group_bytes > available:
        raise ConfigurationError(
            f"--replicas: {replicas} worker groups need about {replicas * group_bytes / 2**30:.1f} GiB for weights and "
            f"processes, but {available / 2**30:.1f} GiB are available; at most {available // group_bytes}"
        )


def _num_gpus() -> int:
    import pynvml

    try:
        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError:
        return 0
