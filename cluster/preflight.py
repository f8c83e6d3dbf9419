"""What can be judged of a model before any process is started."""

from __future__ import annotations

from pathlib import Path

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
