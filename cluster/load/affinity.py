"""``octavo bench affinity``: the same load on a cluster of this machine under one routing policy after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import click
import orjson

from ...router.policies import POLICIES, PolicyName
from ...router.simulator.table import table
from ...worker.errors import ConfigurationError
from ..command_values import require_writable
from .client import Client
from .load import Load, perform
from .options import SERVER_OPTIONS, load_of, load_parameters
from .prefill_counts import PrefillCounts, read_grown_counts
from .processes import KINDS, spent_s
from .progress import Progress
from .result import Result, Spread
from .sample import Run
from .served import Served, served
from .target import Server

Reported: TypeAlias = Callable[[click.Context], AbstractContextManager[None]]

_DEFAULTS = {
    "dataset_name": "prefix_repetition",
    "num_prefixes": 8,
    "prefix_len": 1000,
    "input_len": 32,
    "output_len": 32,
}
_FAKE_ENGINE = "h100-8b"
_OURS = ("--port", "--host", "--replicas", "--routing-policy", "--api-key", "--api-key-file")
"""Flags of ``octavo serve`` that the comparison sets itself, or does without."""
_HEADINGS = ("policy", "cache hits", "prefill tokens", "TTFT p50, s", "TTFT p99, s", "requests/s", "output tokens/s")


@dataclass(frozen=True, slots=True)
class Trial:
    """One policy. ``counts`` and ``cpu_s`` are of all repeats."""

    result: Result
    counts: PrefillCounts
    cpu_s: Mapping[str, float]
    """What the cluster's processes spent, by kind."""
    is_interrupted: bool


def affinity_command(reported: Reported) -> click.Command:
    @click.pass_context
    def affinity(ctx: click.Context, /, **options: Any) -> None:
        """Measure routing policies: start octavo serve with each in turn, and put the same load on it.

        SERVE_FLAGS, behind --, are octavo serve's: a model, and how its groups are set up. Without other options the
        load is 1,000 requests behind 8 beginnings of 1,000 tokens, 32 tokens in and 32 out.

        With --fake-groups nothing is computed: what is measured is what routers, gateways and proxy can do. By default
        the groups take their time as Llama-3.1-8B on an H100 each; SERVE_FLAGS may say --fake-engine.
        """
        with reported(ctx):
            _run(options)

    return click.Command("affinity", callback=affinity, help=affinity.__doc__, params=_parameters())


def _parameters() -> list[click.Parameter]:
    policies = click.Choice(POLICIES)
    return [
        click.Argument(["serve_flags"], nargs=-1, type=click.UNPROCESSED),
        click.Option(["--policy"], type=policies, multiple=True, help="Repeat it. Default: cost and round_robin."),
        click.Option(["--replicas"], type=click.IntRange(1), help="Worker groups. Default: 2."),
        click.Option(["--fake-groups"], type=click.IntRange(1), help="So many worker groups without a model instead."),
        *[parameter for parameter in load_parameters() if parameter.name not in SERVER_OPTIONS],
        click.Option(["--json"], type=click.Path(path_type=Path, allow_dash=True), help="All figures; - is stdout."),
        click.Option(["--disable-tqdm"], is_flag=True, help="No progress bar."),
    ]


def _run(options: dict[str, Any]) -> None:
    load, flags = _load(options), serve_flags(options)
    trials: dict[str, Trial] = {}
    for policy in dict.fromkeys(options["policy"] or ("cost", "round_robin")):
        click.echo(f"{policy}: octavo serve {' '.join(flags)}", err=True)
        trials[policy] = _trial(policy, load, flags, is_quiet=options["disable_tqdm"])
        if trials[policy].is_interrupted:
            break
    is_json = options["json"] == Path("-")
    click.echo(table(rows(trials)), err=is_json)
    click.echo(table(cpu_rows(trials)), err=is_json)
    if is_json:
        click.echo(_json(trials))
    elif options["json"] is not None:
        options["json"].write_bytes(_json(trials))


def _load(options: dict[str, Any]) -> Load:
    """Raises ConfigurationError, before anything is started. Where the server will be is not known yet."""
    for flag in options["serve_flags"]:
        if flag.partition("=")[0] in _OURS:
            raise ConfigurationError(f"{flag}: the comparison sets it itself")
    if options["json"] != Path("-"):
        require_writable("--json", options["json"])
    if options["dataset_name"] is None:
        options |= {name: value for name, value in _DEFAULTS.items() if options[name] is None}
    return load_of({**options, **SERVER_OPTIONS})


def serve_flags(options: Mapping[str, Any]) -> list[str]:
    """Of ``octavo serve``, the same for each policy. Raises ConfigurationError."""
    flags, num_fake, num_groups = list(options["serve_flags"]), options["fake_groups"], options["replicas"]
    says_engine = any(flag.partition("=")[0] == "--fake-engine" for flag in flags)
    if num_fake is None:
        return [*flags, "--replicas", str(num_groups or 2)]
    if num_groups is not None:
        raise ConfigurationError(f"--replicas: says nothing with --fake-groups {num_fake}")
    return [*flags, *(() if says_engine else ("--fake-engine", _FAKE_ENGINE)), "--replicas", str(num_fake)]


def _trial(policy: PolicyName, load: Load, flags: Sequence[str], *, is_quiet: bool) -> Trial:
    with served([*flags, "--routing-policy", policy]) as server:
        here = replace(load, server=Server(server.url, load.server.headers, timeout_s=load.server.timeout_s))
        return asyncio.run(measure(here, policy, server, Progress(load.num_repeats, is_hidden=is_quiet)))


async def measure(load: Load, policy: str, server: Served, progress: Progress) -> Trial:
    """The load on a cluster that serves already; what groups counted and processes spent is without the warm-up."""
    before, spent_before_s = PrefillCounts({}, {}), dict[str, float]()

    async def count_warm_up(client: Client, warm_up: Run | None) -> None:
        nonlocal before, spent_before_s
        before = await read_grown_counts(client, before, 0 if warm_up is None else _num_prompt_tokens(warm_up))
        spent_before_s = spent_s(server.pid)

    outcome = await perform(load, progress, count_warm_up)
    cpu_s = {kind: seconds - spent_before_s.get(kind, 0.0) for kind, seconds in spent_s(server.pid).items()}
    num_prompt_tokens = sum(_num_prompt_tokens(run) for run in outcome.runs)
    async with Client(load.server) as client:
        counts = await read_grown_counts(client, before, num_prompt_tokens)
    return Trial(Result(policy, {}, None, tuple(outcome.runs)), counts, cpu_s, outcome.is_interrupted)


def _num_prompt_tokens(run: Run) -> int:
    return sum(sample.num_prompt_tokens or 0 for sample in run.good())


def rows(trials: Mapping[str, Trial]) -> list[tuple[str, ...]]:
    """Headings, and a row for each policy; times and rates are means over the repeats, ± where there are several."""
    return [(*_HEADINGS, "most / mean"), *[_row(policy, trial) for policy, trial in trials.items()]]


def _row(policy: str, trial: Trial) -> tuple[str, ...]:
    spreads, counts = trial.result.spreads(), trial.counts
    names = ("ttft_s.p50", "ttft_s.p99", "requests_per_s", "output_tokens_per_s")
    computed = f"{sum(counts.computed.values()) / len(trial.result.runs):,.0f}"
    return (
        policy,
        f"{counts.hit_rate:.1%}",
        computed,
        *[_shown(spreads[name]) for name in names],
        f"{counts.imbalance:.2f}",
    )


def cpu_rows(trials: Mapping[str, Trial]) -> list[tuple[str, ...]]:
    """Headings, and for each kind of process the CPU that it spent on a request, under each policy, and in brackets the
    part of a core that this was. What is spent without requests is among it."""
    kinds = [kind for kind in KINDS if any(trial.cpu_s.get(kind) for trial in trials.values())]
    headings = ("CPU, ms/request (cores)", *trials)
    return [headings, *[(kind, *[_cpu(trial, kind) for trial in trials.values()]) for kind in kinds]]


def _cpu(trial: Trial, kind: str) -> str:
    runs = trial.result.runs
    cpu_s, num_good, wall_s = trial.cpu_s.get(kind, 0.0), sum(len(run.good()) for run in runs), _wall_s(trial)
    return f"{1e3 * cpu_s / max(1, num_good):.2f} ({cpu_s / wall_s:.2f})"


def _wall_s(trial: Trial) -> float:
    return sum(run.wall_s for run in trial.result.runs)


def _shown(spread: Spread) -> str:
    return f"{spread.mean:.3f}" if spread.deviation is None else f"{spread.mean:.3f} ± {spread.deviation:.3f}"


def _json(trials: Mapping[str, Trial]) -> bytes:
    """By policy: what groups counted, and the figures of each repeat."""
    value = {policy: _as_json(trial) for policy, trial in trials.items()}
    return orjson.dumps({"policies": value}, option=orjson.OPT_SERIALIZE_NUMPY)


def _as_json(trial: Trial) -> dict[str, Any]:
    return {
        "hit_rate": trial.counts.hit_rate,
        "computed_prompt_tokens": trial.counts.computed,
        "imbalance": trial.counts.imbalance,
        "cpu_s": trial.cpu_s,
        "wall_s": _wall_s(trial),
        "repeats": trial.result.figures(),
    }
