"""NVML of a machine with one GPU, of which some things are not known."""

from __future__ import annotations

from typing import Any

GIB = 2**30


class Nvml:
    class NVMLError(Exception): ...

    NVML_TEMPERATURE_GPU = 0

    def __init__(self, *, knows_gpu: bool = True, knows_limit: bool = False) -> None:
        self._knows_gpu = knows_gpu
        self._knows_limit = knows_limit

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes) -> str:
        if not self._knows_gpu or uuid != b"GPU-abc":
            raise self.NVMLError
        return "gpu"

    def nvmlDeviceGetMemoryInfo(self, gpu: str) -> Any:
        return type("Memory", (), {"used": 60 * GIB, "total": 80 * GIB})

    def nvmlDeviceGetPowerUsage(self, gpu: str) -> int:
        return 350_500

    def nvmlDeviceGetEnforcedPowerLimit(self, gpu: str) -> int:
        if not self._knows_limit:
            raise self.NVMLError
        return 700_000

    def nvmlDeviceGetUtilizationRates(self, gpu: str) -> Any:
        return type("Rates", (), {"gpu": 93})

    def nvmlDeviceGetTemperature(self, gpu: str, sensor: int) -> int:
        return 61

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu: str) -> int:
        return 2_000_000
