"""The real engine with a real model in this process: what the benchmarks that need one have in common."""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path

import platformdirs
import torch

from octavo.worker.checkpoint import resolve_model
from octavo.worker.engine import Engine
from octavo.worker.executor import Executor
from octavo.worker.group_engine import engine_of
from octavo.worker.messages import SequenceUpdate
from octavo.worker.rank import LoadedRank, executor_of, load_alone
from octavo.worker.sampling_row import SamplingRow, StepResult
from octavo.worker.spec import WorkerSpec
from octavo.worker.step_plan import StepPlan

Emit = Callable[[str, SequenceUpdate], None]
PROMPTS = Path(__file__).parents[1] / "data" / "prompts.json"


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, help="default: the embedded one")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())


def find_model(args: argparse.Namespace) -> Path:
    """The model's folder; also sets the number of threads."""
    torch.set_num_threads(args.threads)
    return args.model or resolve_model(None, cache_dir=platformdirs.user_cache_path("octavo"), report=print).path


def make_spec(
    model_dir: Path,
    dtype: str,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    num_blocks: int | None,
) -> WorkerSpec:
    """``num_blocks`` None: what the machine's memory leaves."""
    return WorkerSpec(
        model=str(model_dir),
        served_model_name="bench",
        group="bench",
        generation=1,
        tensor_parallel_size=1,
        device="cpu",
        dtype=dtype,
        block_size=16,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        enable_prefix_caching=True,
        kv_cache_memory_bytes=None,
        gpu_memory_utilization=0.9,
        num_gpu_blocks_override=num_blocks,
        num_ranks_on_machine=1,
        routing_key=b"benchmark's key!",
        cache_dir=platformdirs.user_cache_path("octavo"),
        router_names=(),
        ray_namespace="none",
        startup_timeout_s=600.0,
    )


class Observed:
    """An executor that lets ``observe`` see each plan, while the scheduler is as that plan has left it."""

    def __init__(self, executor: Executor) -> None:
        self.observe: Callable[[StepPlan], None] = lambda plan: None
        self._executor = executor

    def launch(self, plan: StepPlan, rows: list[SamplingRow]) -> Future[StepResult]:
        self.observe(plan)
        return self._executor.launch(plan, rows)


@dataclass(frozen=True)
class Bench:
    """A loaded model, of which engines are made."""

    spec: WorkerSpec
    loaded: LoadedRank
    executor: Executor

    @classmethod
    def load(cls, spec: WorkerSpec, model_dir: Path) -> Bench:
        loaded = load_alone(model_dir, spec)
        return cls(spec, loaded, executor_of(loaded))

    def engine(
        self, emit: Emit, observe: Callable[[Engine, StepPlan], None] | None = None, **changes: object
    ) -> Engine:
        """A new engine with an empty cache. ``changes``: of the spec, where the loaded model does not depend on it."""
        executor = Observed(self.executor)
        spec = replace(self.spec, **changes)
        engine = engine_of(spec, self.loaded, executor, emit, time.perf_counter)
        if observe is not None:
            executor.observe = lambda plan: observe(engine, plan)
        return engine

    def conditions(self) -> dict[str, object]:
        """``load_average`` is of the last minute: above ``threads``, something else was running."""
        return {
            "model": Path(self.spec.model or "").name,
            "dtype": self.spec.dtype,
            "threads": torch.get_num_threads(),
            "machine": processor(),
            "cpus": os.cpu_count(),
            "load_average": round(os.getloadavg()[0], 2),
            "torch": torch.__version__,
            "kernels": self.loaded.kernels.name,
            "blocks": self.loaded.num_blocks,
            "block_size": self.spec.block_size,
            "budget": self.spec.max_num_batched_tokens,
        }


def run_to_end(engine: Engine) -> None:
    while engine.step():
        pass


def show(conditions: dict[str, object], figures: dict[str, object]) -> None:
    """What the figures hold for, and all again as one line of JSON."""
    print(", ".join(f"{name} {value}" for name, value in conditions.items()))
    print(json.dumps({"conditions": conditions, "figures": figures}))


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()
