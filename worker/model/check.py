"""Judges a model folder without reading a weight: the model's shape on the meta device against the files' headers."""

from __future__ import annotations

from pathlib import Path

import torch

from ...kernels.backend import reference_kernels
from ..collectives import SingleProcess
from .config import ModelConfig
from .partition import partition
from .products import Placement
from .transformer import Transformer
from .weights import check_weights


def check_model_folder(folder: Path) -> None:
    """Raises ConfigurationError, naming file and tensor, for weights that ``ModelRunner.load`` would refuse."""
    config = ModelConfig.from_folder(folder)
    placement = Placement.on(torch.device("meta"), torch.float32, packing=config.packing)
    model = Transformer(config, partition(config, 1), placement, SingleProcess(), reference_kernels(), 1)
    check_weights(model.layers(), folder, may_be_unused=unused_tensors(config))


def unused_tensors(config: ModelConfig) -> frozenset[str]:
    """Tensors that a checkpoint may hold although the model does not read them."""
    return frozenset({"lm_head.weight"} if config.tie_word_embeddings else ())
