"""What a device cannot run, refused at start with names and numbers. Imports torch only where it has to be asked."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ConfigurationError
from .config import ModelConfig

MAX_HEAD_DIM = 256
"""The attention kernels hold a tile of so wide heads and no wider ones."""

GPU_GROUP_SIZE = 32
"""Packed numbers lie in quarters of so many input channels there; a quarter has one scale."""

FP8_CAPABILITY = (8, 9)
"""Compute capability of the first NVIDIA GPUs that multiply fp8 (Ada)."""
FP8_ARCHITECTURES = ("gfx95", "gfx12")
"""AMD's GPUs that do. gfx94x multiplies another fp8, whose numbers are half as large (e4m3fnuz)."""


@dataclass(frozen=True, slots=True)
class Device:
    """What is asked of a device here."""

    type: str
    """``cpu`` or ``cuda``."""
    name: str = ""
    capability: tuple[int, int] | None = None
    """Compute capability of an NVIDIA GPU; None for CPUs and AMD's GPUs."""
    architecture: str = ""
    """Of an AMD GPU: ``gfx942`` …"""

    @classmethod
    def of(cls, device_type: str) -> Device:
        """A CPU, or the GPU that this process computes on."""
        if device_type != "cuda":
            return cls(device_type)
        import torch

        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        if torch.version.hip is not None:
            return cls("cuda", properties.name, None, properties.gcnArchName.partition(":")[0])
        return cls("cuda", properties.name, (properties.major, properties.minor))

    def __str__(self) -> str:
        if self.type != "cuda":
            return self.type
        what = self.architecture if self.capability is None else f"compute capability {_shown(self.capability)}"
        return f"{self.name}, {what}"

    @property
    def multiplies_fp8(self) -> bool:
        if self.capability is not None:
            return self.capability >= FP8_CAPABILITY
        return self.architecture.startswith(FP8_ARCHITECTURES)

    @property
    def multiplies_float16(self) -> bool:
        """GPUs do; of processors those with AVX512-FP16 or AMX-FP16, by oneDNN."""
        if self.type != "cpu":
            return True
        import torch

        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def check_any_device(config: ModelConfig, quantization: str | None) -> None:
    """Raises ConfigurationError for a model, or a --quantization of it, that no device can run."""
    if config.head_dim > MAX_HEAD_DIM:
        raise ConfigurationError(f"the model's head_dim is {config.head_dim}; the kernels go up to {MAX_HEAD_DIM}")
    if quantization is not None and config.packing is not None:
        raise ConfigurationError(
            f"--quantization is {quantization}, but the model's weights are quantised already, as "
            f"{config.packing.describe()}; leave the flag out"
        )


def check_device(device: Device, config: ModelConfig, *, dtype: str, quantization: str | None) -> None:
    """Raises ConfigurationError for a model, a --dtype or a --quantization that ``device`` cannot run."""
    check_any_device(config, quantization)
    if dtype == "float16" and not device.multiplies_float16:
        raise ConfigurationError(
            "--dtype is float16, but the device is a CPU without instructions for it (AVX512-FP16 or AMX-FP16); "
            "float32 and bfloat16 run there"
        )
    packing = config.packing
    if device.type == "cuda" and packing is not None and (packing.group_size or 0) % GPU_GROUP_SIZE:
        raise ConfigurationError(
            f"the model is {packing.describe()} input channels; GPUs take multiples of {GPU_GROUP_SIZE}, or whole rows"
        )
    if quantization is not None:
        _check_quantization(device, dtype, quantization)


def _check_quantization(device: Device, dtype: str, quantization: str) -> None:
    if quantization == "fp8" and not device.multiplies_fp8:
        raise ConfigurationError(
            f"--quantization fp8 needs a GPU of compute capability {_shown(FP8_CAPABILITY)} or more, or one of AMD's "
            f"{', '.join(f'{start}x' for start in FP8_ARCHITECTURES)}; the device is {device}, where int8 runs"
        )
    if device.type == "cpu" and dtype in ("bfloat16", "float16"):
        raise ConfigurationError(
            f"--dtype {dtype} says nothing with --quantization {quantization} where the device is cpu: there it is "
            "the type of the weights that are quantised; leave one of the two out"
        )


def _shown(capability: tuple[int, int]) -> str:
    major, minor = capability
    return f"{major}.{minor}"
