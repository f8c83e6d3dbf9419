"""``octavo simulate``: what a cluster would have done with a trace, by the production router and scheduler."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import orjson
from tqdm import tqdm

from ..router.simulator.group import GroupConfig
from ..router.simulator.hardware import SETUPS
from ..router.simulator.metrics import Result
from ..router.simulator.policies import POLICIES
from ..router.simulator.simulation import Simulation, SimulationConfig
from ..router.simulator.step_times import load_fitted
from ..router.simulator.table import table
from ..router.simulator.trace_files import read_trace
from ..router.simulator.traces import Trace
from ..worker.errors import ConfigurationError


class _Number(click.FloatRange):
    """Neither infinite nor NaN."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


_ABOVE_0 = _Number(min=0.0, min_open=True)
_COUNT = click.IntRange(min=1)
_FILE = click.Path(path_type=Path)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """As typed; ranges of single numbers are judged already."""

    trace: Path
    prefixes: Path | None
    policy: tuple[str, ...]
    groups: int
    setup: str
    step_times: Path | None
    kv_tokens: int | None
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    target_itl_ms: float | None
    speed: float
    repeat: int
    num_requests: int | None
    submit_delay_ms: float
    report_delay_ms: float
    report_pause_ms: float
    seed: int
    slo_ttft: float
    slo_itl: float
    json: bool


def simulate_parameters() -> list[click.Parameter]:
    """The options of the command, one for each field of ``SimulateOptions``."""

    def option(name: str, help: str, **fields: Any) -> click.Option:
        return click.Option([name], help=help, show_default=True, **fields)

    return [
        option("--trace", "Mooncake JSONL, Azure CSV, or recorded by octavo; .gz too.", type=_FILE, required=True),
        option("--prefixes", "Draw the prompts' common prefixes from this other trace.", type=_FILE),
        option("--policy", "Repeat it to compare.", type=click.Choice(POLICIES), multiple=True, default=("cost",)),
        option("--groups", "Worker groups.", type=click.IntRange(1, 10_000), default=4),
        option("--setup", "GPU, Llama-3.1 model and TP of a group.", type=click.Choice([*SETUPS]), default="h100-8b"),
        option("--step-times", "Fit the times of steps to this benchmark's last line instead.", type=_FILE),
        option("--kv-tokens", "Room for KV in a group.  [default: what the setup leaves]", type=_COUNT),
        option("--block-size", "Tokens of a KV block.", type=click.IntRange(1, 4096), default=16),
        option("--max-num-seqs", "Sequences that a group runs at once.", type=click.IntRange(1, 4096), default=256),
        option("--max-num-batched-tokens", "Tokens of a step.", type=_COUNT, default=8192),
        option("--target-itl-ms", "Keep steps within this time.  [default: no target]", type=_ABOVE_0),
        option("--speed", "Compress the trace's time so many times.", type=_ABOVE_0, default=1.0),
        option("--repeat", "Run the trace so often, with new prompts each time.", type=_COUNT, default=1),
        option("--num-requests", "Only the first so many.  [default: all]", type=_COUNT),
        option("--submit-delay-ms", "From gateway to group.", type=_Number(min=0.0), default=2.0),
        option("--report-delay-ms", "From group to router.", type=_Number(min=0.0), default=10.0),
        option("--report-pause-ms", "Between two reports of a group.", type=_Number(min=0.0), default=10.0),
        option("--seed", "Of what policies choose at random.", type=int, default=0),
        option("--slo-ttft", "Seconds to the first token that are good enough.", type=_ABOVE_0, default=2.0),
        option("--slo-itl", "Mean seconds between tokens that are good enough.", type=_ABOVE_0, default=0.05),
        click.Option(["--json"], is_flag=True, help="Print the figures as one line of JSON last."),
    ]


def simulate(options: SimulateOptions) -> None:
    """Run each policy in turn and print what came of it. Raises ConfigurationError before anything is simulated."""
    trace, config = _trace(options), _config(options)
    config.check(trace)
    results, wall_s = {}, {}
    for policy in dict.fromkeys(options.policy):
        begin = time.perf_counter()
        results[policy] = _run(config, trace, policy)
        wall_s[policy] = time.perf_counter() - begin
    hit_rate = trace.infinite_cache_hit_rate()
    click.echo(f"{trace.name}: {len(trace.requests)} requests in {trace.duration_s:.0f} s, {options.groups} groups")
    click.echo(table(results, hit_rate, slo_ttft_s=options.slo_ttft, slo_itl_s=options.slo_itl))
    if options.json:
        policies = {
            name: result.figures(options.slo_ttft, options.slo_itl) | {"wall_s": wall_s[name]}
            for name, result in results.items()
        }
        conditions = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(options).items()}
        figures = {"conditions": conditions, "infinite_cache_hit_rate": hit_rate, "policies": policies}
        click.echo(orjson.dumps(figures).decode())


def _run(config: SimulationConfig, trace: Trace, policy: str) -> Result:
    with tqdm(total=len(trace.requests), desc=policy, unit=" requests", disable=None, leave=False) as bar:
        return Simulation(config, trace, policy, on_finished=lambda: bar.update() and None).run()


def _trace(options: SimulateOptions) -> Trace:
    trace = read_trace(options.trace)
    if options.prefixes is not None:
        trace = trace.with_prefixes_of(read_trace(options.prefixes))
    trace = trace.repeated(options.repeat)
    trace = trace if options.num_requests is None else trace.first(options.num_requests)
    return trace.faster(options.speed)


def _config(options: SimulateOptions) -> SimulationConfig:
    setup = SETUPS[options.setup]
    num_kv_tokens = setup.num_kv_tokens() if options.kv_tokens is None else options.kv_tokens
    if num_kv_tokens < options.block_size:
        raise ConfigurationError(
            f"--kv-tokens: must be at least --block-size ({options.block_size}), got {num_kv_tokens}"
        )
    if options.max_num_batched_tokens < options.max_num_seqs:
        raise ConfigurationError(
            f"--max-num-batched-tokens: must be at least --max-num-seqs ({options.max_num_seqs}),"
            f" got {options.max_num_batched_tokens}"
        )
    group = GroupConfig(
        num_blocks=num_kv_tokens // options.block_size,
        block_size=options.block_size,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        step_times=setup.step_times() if options.step_times is None else load_fitted(options.step_times),
        target_itl_s=None if options.target_itl_ms is None else options.target_itl_ms / 1e3,
    )
    return SimulationConfig(
        options.groups,
        group,
        submit_delay_s=options.submit_delay_ms / 1e3,
        report_delay_s=options.report_delay_ms / 1e3,
        report_pause_s=options.report_pause_ms / 1e3,
        seed=options.seed,
    )
