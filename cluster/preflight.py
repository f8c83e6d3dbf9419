"""What can be judged of a model before any process is started. Imports neither torch nor Ray."""

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
    limit = model.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigurationError(f"--max-model-len: the model's context is {limit} tokens, got {config.max_model_len}")
