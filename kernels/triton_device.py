"""What the sizes of launches and the choice of kernels depend on: the GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Device:
    """A GPU as the Triton kernels see it."""

    num_multiprocessors: int
    is_amd: bool = False
    capability: int = 90
    """NVIDIA's compute capability, 10 × major + minor."""

    @classmethod
    def of(cls, device: torch.device) -> Device:
        """A CPU, where the kernels are interpreted, counts as one multiprocessor."""
        if device.type != "cuda":
            return cls(num_multiprocessors=1, capability=0)
        properties = torch.cuda.get_device_properties(device)
        capability = 10 * properties.major + properties.minor
        return cls(properties.multi_processor_count, torch.version.hip is not None, capability)

    @property
    def has_fp8(self) -> bool:
        """Triton's type fp8e4nv; else bytes are taken apart."""
        return self.is_amd or self.capability >= 89
