"""``octavo simulate``: what a cluster would have done with a trace, by the production router and scheduler."""

from __future__ import annotations

import functools
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import orjson
from tqdm import tqdm

from ..router.policies import POLICIES, PolicyName
from ..router.simulator.faults import EventFaults, Faults
from ..router.simulator.group import GroupConfig
from ..router.simulator.hardware import SETUPS
from ..router.simulator.metrics import Result
from ..router.simulator.page import page
from ..router.simulator.plots import svg, write_png
from ..router.simulator.policies import RouterPolicy
from ..router.simulator.simulation import Simulation, SimulationConfig
from ..router.simulator.step_times import load_fitted
from ..router.simulator.table import table, table_rows
from ..router.simulator.trace_files import read_trace
from ..router.simulator.traces import Trace
from ..worker.errors import ConfigurationError
from .command_values import ABOVE_0, COUNT, FILE, SHARE, Number, require_writable


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """As typed; ranges of single numbers are judged already."""

    trace: Path
    prefixes: Path | None
    policy: tuple[PolicyName, ...]
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
    event_loss: float
    event_reorder: float
    event_duplicate: float
    plot: Path | None
    html: Path | None
    json: bool


def simulate_parameters() -> list[click.Parameter]:
    """The options of the command, one for each field of ``SimulateOptions``."""

    def option(name: str, help: str, **fields: Any) -> click.Option:
        return click.Option([name], help=help, show_default=True, **fields)

    return [
        option("--trace", "Mooncake JSONL, Azure CSV, or recorded by octavo; .gz too.", type=FILE, required=True),
        option("--prefixes", "Draw the prompts' common prefixes from this other trace.", type=FILE),
        option("--policy", "Repeat it to compare.", type=click.Choice(POLICIES), multiple=True, default=("cost",)),
        option("--groups", "Worker groups.", type=click.IntRange(1, 10_000), default=4),
        option("--setup", "GPU, Llama-3.1 model and TP of a group.", type=click.Choice([*SETUPS]), default="h100-8b"),
        option("--step-times", "Fit the times of steps to this benchmark's last line instead.", type=FILE),
        option("--kv-tokens", "Room for KV in a group.  [default: what the setup leaves]", type=COUNT),
        option("--block-size", "Tokens of a KV block.", type=click.IntRange(1, 4096), default=16),
        option("--max-num-seqs", "Sequences that a group runs at once.", type=click.IntRange(1, 4096), default=256),
        option("--max-num-batched-tokens", "Tokens of a step.", type=COUNT, default=8192),
        option("--target-itl-ms", "Keep steps within this time.  [default: no target]", type=ABOVE_0),
        option("--speed", "Compress the trace's time so many times.", type=ABOVE_0, default=1.0),
        option("--repeat", "Run the trace so often, with new prompts each time.", type=COUNT, default=1),
        option("--num-requests", "Only the first so many.  [default: all]", type=COUNT),
        option("--submit-delay-ms", "From gateway to group.", type=Number(min=0.0), default=2.0),
        option("--report-delay-ms", "From group to router.", type=Number(min=0.0), default=10.0),
        option("--report-pause-ms", "Between two reports of a group.", type=Number(min=0.0), default=10.0),
        option("--seed", "Of what policies choose at random.", type=int, default=0),
        option("--slo-ttft", "Seconds to the first token that are good enough.", type=ABOVE_0, default=2.0),
        option("--slo-itl", "Mean seconds between tokens that are good enough.", type=ABOVE_0, default=0.05),
        option("--event-loss", "Share of the messages of KV events that never arrive.", type=SHARE, default=0.0),
        option("--event-reorder", "Share that the next one overtakes.", type=SHARE, default=0.0),
        option("--event-duplicate", "Share that comes twice.", type=SHARE, default=0.0),
        option("--plot", "Draw the results into this PNG file.", type=FILE),
        option("--html", "Write table, figure and conditions as one page into this file.", type=FILE),
        click.Option(["--json"], is_flag=True, help="Print the figures as one line of JSON last."),
    ]


def simulate(options: SimulateOptions) -> None:
    """Run each policy in turn and print what came of it. Raises ConfigurationError before anything is simulated."""
    for flag, path in (("--plot", options.plot), ("--html", options.html)):
        require_writable(flag, path)
    trace, config = _trace(options), _config(options)
    config.check(trace)
    results: dict[str, Result] = {}
    wall_s: dict[str, float] = {}
    for policy in dict.fromkeys(options.policy):
        begin = time.perf_counter()
        results[policy] = _run(config, trace, policy)
        wall_s[policy] = time.perf_counter() - begin
    _show(options, trace, results, wall_s)


def _show(options: SimulateOptions, trace: Trace, results: dict[str, Result], wall_s: dict[str, float]) -> None:
    hit_rate, slo_s = trace.infinite_cache_hit_rate(), (options.slo_ttft, options.slo_itl)
    rows = table_rows(results, hit_rate, slo_ttft_s=options.slo_ttft, slo_itl_s=options.slo_itl)
    summary = f"{trace.name}: {len(trace.requests)} requests in {trace.duration_s:.0f} s, {options.groups} groups"
    conditions = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(options).items()}
    click.echo(summary)
    click.echo(table(rows))
    if options.plot is not None:
        write_png(options.plot, results, hit_rate, slo_s)
    if options.html is not None:
        drawings = [svg(results, hit_rate, slo_s)]
        options.html.write_text(page("octavo simulate", trace.name, [summary], rows, drawings, conditions))
    if options.json:
        policies = {name: result.figures(*slo_s) | {"wall_s": wall_s[name]} for name, result in results.items()}
        figures = {"conditions": conditions, "infinite_cache_hit_rate": hit_rate, "policies": policies}
        click.echo(orjson.dumps(figures).decode())


def _run(config: SimulationConfig, trace: Trace, policy: PolicyName) -> Result:
    with tqdm(total=len(trace.requests), desc=policy, unit=" requests", disable=None, leave=False) as bar:
        new_policy = functools.partial(RouterPolicy, policy)
        return Simulation(config, trace, new_policy, on_finished=lambda: bar.update() and None).run()


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
        faults=Faults(EventFaults(options.event_loss, options.event_reorder, options.event_duplicate)),
    )
