"""What --fake-engine names: how long steps take, and how much KV a group holds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...router.simulator.hardware import SETUPS
from ...router.simulator.step_times import StepTimes, load_fitted
from ...worker.errors import ConfigurationError
from ..config import ServeConfig

FLAG = "--fake-engine"


@dataclass(frozen=True, slots=True)
class FakeEngine:
    step_times: StepTimes
    num_blocks: int


def fake_engine_of(config: ServeConfig) -> FakeEngine:
    """Of a model that has one. Raises ConfigurationError."""
    assert config.fake_engine is not None
    setup, num_blocks = SETUPS.get(config.fake_engine), config.num_gpu_blocks_override
    if setup is not None:
        return FakeEngine(setup.step_times(), num_blocks or setup.num_kv_tokens() // config.block_size)
    path = Path(config.fake_engine)
    if not path.exists():
        raise ConfigurationError(f"{FLAG}: {config.fake_engine} is neither a file nor one of {', '.join(SETUPS)}")
    step_times = load_fitted(path, FLAG)
    if num_blocks is None:
        raise ConfigurationError(f"{FLAG} {path} says nothing of memory: --num-gpu-blocks-override is needed")
    return FakeEngine(step_times, num_blocks)
