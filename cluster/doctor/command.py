"""``octavo doctor``: what stands in the way of a cluster, before any weight is read."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import click
from rich.console import Console

from ...worker.errors import ConfigurationError
from ..cli_options import config_parameters
from ..config import ServeConfig
from ..config_sources import load_config
from .facts import Facts
from .findings import Finding, Level, plain, red, show, worst


def doctor_parameters() -> list[click.Parameter]:
    """Those of ``octavo serve``, and the doctor's own."""
    own: list[click.Parameter] = [
        click.Option(["--json", "as_json"], is_flag=True, help="Print the facts and what was found in them as JSON."),
        click.Option(
            ["--all-reduce-s"],
            type=click.FloatRange(0, 30),
            default=2.0,
            show_default=True,
            help="Seconds that the ranks of each group spend on timed all-reduces; 0: none.",
        ),
    ]
    return own + config_parameters(ServeConfig)


def run_doctor(ctx: click.Context) -> bool:
    """Look at this machine, or with --address at each node of a Ray cluster, before any weight is read.

    Compares versions, environments and the model's files, looks at GPUs, memory, network, ports and disks, and lets the
    ranks of each group do a timed all-reduce. It takes the settings of octavo serve and judges by them. What is a FAULT
    has a line that says what to do, and makes the exit code 1.
    """
    as_json, reduce_s = ctx.params.pop("as_json"), ctx.params.pop("all_reduce_s")
    config, provenance = load_config(ctx)
    with provenance.in_errors():
        facts, findings = examined(config, reduce_s)
    if as_json:
        shown = [asdict(finding) | {"level": finding.level.name.lower()} for finding in findings]
        click.echo(json.dumps({"findings": shown, "facts": None if facts is None else asdict(facts)}, indent=1))
    elif (console := Console()).is_terminal:
        show(findings, console)
    else:
        click.echo(plain(findings))
    return worst(findings) is not Level.RED


def examined(config: ServeConfig, reduce_s: float) -> tuple[Facts | None, list[Finding]]:
    """Facts, if any could be gathered, and all findings."""
    from .checks import examine

    try:
        facts = _facts_here(config, reduce_s) if config.address is None else _facts_of_cluster(config, reduce_s)
    except ConfigurationError as error:
        advice = "is the address that of the head (ray start says it), and is RAY_AUTH_TOKEN the cluster's?"
        return None, [red("cluster", str(error), advice)]
    return facts, examine(facts)


def _facts_here(config: ServeConfig, reduce_s: float) -> Facts:
    from .here import facts_here

    return facts_here(config, reduce_s)


def _facts_of_cluster(config: ServeConfig, reduce_s: float) -> Facts:
    """Raises ConfigurationError when the cluster cannot be joined."""
    from ..joining import join

    join(config.address)
    import ray

    try:
        from .nodes import cluster_facts

        return cluster_facts(config, reduce_s)
    finally:
        ray.shutdown()


def doctor_command(report: Any) -> click.Command:
    """``report(ctx)`` turns errors into exit codes."""

    @click.pass_context
    def doctor(ctx: click.Context, /, **_: Any) -> None:
        with report(ctx):
            if not run_doctor(ctx):
                ctx.exit(1)

    return click.Command("doctor", callback=doctor, help=run_doctor.__doc__, params=doctor_parameters())
