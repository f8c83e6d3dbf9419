"""From the setting ``--dtype`` to the torch dtype of weights and KV."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...kernels.backend import Kernels
from ..errors import ConfigurationError
from .config import DTYPES, ModelConfig

_TORCH = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

ROWS_MEASURED = (1, 16, 256)
"""One stream, a batch, a prompt."""

MOST_OUTPUTS_MEASURED = 4096
"""Of a layer's, so that a large model costs no more time at start than a small one."""


def choose_dtype(
    setting: str,
    config: ModelConfig,
    device: torch.device,
    speed: Callable[[torch.dtype], float] | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> torch.dtype:
    """``auto`` is the checkpoint's own dtype, where the device multiplies it at least as fast as float32.

    GPUs do, and have bfloat16 for float32 weights. On CPUs ``speed`` is asked how many times as fast a dtype is;
    without it that is float32. ``report`` is told of a dtype that is slower. Raises ConfigurationError for an unknown
    setting.
    """
    if setting not in ("auto", *DTYPES):
        raise ConfigurationError(f"--dtype is {setting!r}; known: auto, {', '.join(DTYPES)}")
    if device.type != "cpu":
        return _TORCH[_of_gpu(config) if setting == "auto" else setting]
    wanted, fallback = (config.dtype, "float32") if setting == "auto" else (setting, setting)
    if wanted == "float32" or speed is None:
        return _TORCH[fallback]
    ratio = speed(_TORCH[wanted])
    if ratio >= 1.0:
        return _TORCH[wanted]
    report(f"--dtype {setting} is {fallback}: {wanted} products run at {ratio:.2f} times float32's speed here")
    return _TORCH[fallback]


def _of_gpu(config: ModelConfig) -> str:
    return "bfloat16" if config.dtype == "float32" else config.dtype


def speed_of_half(dtype: torch.dtype, config: ModelConfig, kernels: Kernels) -> float:
    """How many times as fast as in float32 a product of the largest layer is in ``dtype`` on this CPU.

    The geometric mean over ROWS_MEASURED. Measured on one thread, in its processor time, so that what else the machine
    does is not in it; 0.2 s for most models and processors.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _speed_of_half(dtype, config, kernels)
    finally:
        torch.set_num_threads(num_threads)


@torch.inference_mode()
def _speed_of_half(dtype: torch.dtype, config: ModelConfig, kernels: Kernels) -> float:
    outputs = min(2 * config.intermediate_size, MOST_OUTPUTS_MEASURED)
    weight = torch.full((outputs, config.hidden_size), 0.01)
    products = kernels.prepare_linear(weight), kernels.prepare_linear(weight.to(dtype))
    ratios = []
    for num_rows in ROWS_MEASURED:
        single, half = _best_s(products, torch.full((num_rows, config.hidden_size), 0.01))
        ratios.append(single / half)
    return math.prod(ratios) ** (1 / len(ratios))


def _best_s(products: Sequence[Callable[[Tensor], Tensor]], x: Tensor, runs: int = 4) -> list[float]:
    """Processor time of each product, in turns; without the first, which may compile."""
    times: list[list[float]] = [[] for _ in products]
    for _ in range(runs):
        for product, of_product in zip(products, times, strict=True):
            started = time.thread_time()
            product(x)
            of_product.append(time.thread_time() - started)
    return [min(of_product[1:]) for of_product in times]
