"""What NVML says of a rank's GPU: memory, power, temperature, how busy it is. Nothing where there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pynvml
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

_GAUGES: tuple[tuple[str, str, Callable[[Any, Any], float]], ...] = (
    ("memory_used_bytes", "Memory in use, by all processes.", lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used),
    ("memory_total_bytes", "Memory of the GPU.", lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).total),
    ("power_watts", "Power drawn.", lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000),
    (
        "power_limit_watts",
        "Power that the GPU may draw.",
        lambda nvml, gpu: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000,
    ),
    (
        "utilization_ratio",
        "Share of the last moments in which a kernel ran, 0 to 1.",
        lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
    ),
    (
        "temperature_celsius",
        "Temperature.",
        lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
    ),
)


class GpuMetrics(Collector):
    """``uuid`` as CUDA has it, without ``GPU-``. A number that NVML does not know of this GPU is left out."""

    def __init__(self, uuid: str, labels: Mapping[str, str], nvml: Any = pynvml) -> None:
        self._labels = labels
        self._nvml = nvml
        self._gpu: Any = None
        try:
            nvml.nvmlInit()
            self._gpu = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())
        except nvml.NVMLError:
            pass  # a MIG slice, or no driver: there are no numbers then

    def collect(self) -> Iterator[Metric]:
        if self._gpu is None:
            return
        for name, text, read in _GAUGES:
            if (value := self._read(read)) is not None:
                yield self._with(value, GaugeMetricFamily(f"octavo_gpu_{name}", text, labels=[*self._labels]))
        energy_mj = self._read(lambda nvml, gpu: nvml.nvmlDeviceGetTotalEnergyConsumption(gpu))
        if energy_mj is not None:
            text = "Energy used since the driver was loaded."
            yield self._with(
                energy_mj / 1000, CounterMetricFamily("octavo_gpu_energy_joules", text, labels=[*self._labels])
            )

    def _read(self, read: Callable[[Any, Any], float]) -> float | None:
        try:
            return read(self._nvml, self._gpu)
        except self._nvml.NVMLError:
            return None

    def _with(self, value: float, family: Any) -> Metric:
        family.add_metric([*self._labels.values()], value)
        return family  # type: ignore[no-any-return]
