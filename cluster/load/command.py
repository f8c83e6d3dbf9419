"""``octavo bench serve`` and ``octavo bench compare``."""

from __future__ import annotations

import asyncio
import datetime
import os
import platform
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

import click

from ...worker.errors import OctavoError
from ..command_values import FILE, require_writable
from .compare import compare, has_repeats
from .load import Outcome, perform
from .options import DEFAULT_DATASET, load_of, load_parameters
from .progress import Progress
from .report import changes, comparison, lines, text, time_rows
from .result import Result, read_result
from .slo import parse_slo

_INTERRUPTED = 130
"""Exit code, as of a shell whose command was ended by Ctrl-C."""
_NO_CONDITIONS = ("api_key", "header", "json", "plot", "html", "disable_tqdm")
"""Options that are secret, or say only where results go."""

Reported: TypeAlias = Callable[[click.Context], AbstractContextManager[None]]


def serve_command(reported: Reported) -> click.Command:
    @click.pass_context
    def serve(ctx: click.Context, /, **options: Any) -> None:
        """Put load on a server with the OpenAI API, and measure what it does.

        \b
        --dataset-name:
          random             the default: prompts of random words, --prefix-len of them alike
          prefix_repetition  --num-prefixes shared beginnings, each prompt behind one of them
          conversations      several turns; the next one goes out with the real answer to the last
          agents             conversations of many turns: long inputs, short answers, a growing context
          gsm8k              few-shot school mathematics, from a file of its JSON lines
          trace              Mooncake JSONL, Azure CSV, or from octavo serve --record-trace; .gz too

        Latencies count from when a request was due, also where the generator or the server was late.
        """
        with reported(ctx):
            result, outcome = _measured(options)
        if outcome.is_interrupted:
            ctx.exit(_INTERRUPTED)
        with reported(ctx):
            if not any(run.good() for run in result.runs):
                raise OctavoError("no request was answered")

    return click.Command(
        "serve", callback=serve, help=serve.__doc__, params=[*load_parameters(), *_output_parameters()]
    )


def compare_command(reported: Reported) -> click.Command:
    @click.command(help="Say what differs between two files of octavo bench serve --json, beyond noise.")
    @click.argument("a", type=FILE)
    @click.argument("b", type=FILE)
    @click.pass_context
    def command(ctx: click.Context, a: Path, b: Path) -> None:
        with reported(ctx):
            first, second = read_result(a), read_result(b)
            click.echo("\n".join([f"A: {first.title}", f"B: {second.title}", *changes(first, second), ""]))
            click.echo(comparison(compare(first, second), by_repeats=has_repeats(first, second)))

    return command


def _output_parameters() -> list[click.Parameter]:
    slo = "Limits of a good request, such as ttft=500ms,tpot=50ms,e2e=10s; what goodput counts."
    return [
        click.Option(["--slo"], help=slo),
        click.Option(
            ["--json"], type=click.Path(path_type=Path, allow_dash=True), help="All figures and requests; - is stdout."
        ),
        click.Option(["--plot"], type=FILE, help="Draw the figures into this PNG file."),
        click.Option(["--html"], type=FILE, help="Write one page with everything into this file."),
        click.Option(["--disable-tqdm"], is_flag=True, help="No progress bar."),
    ]


def _measured(options: Mapping[str, Any]) -> tuple[Result, Outcome]:
    slo = None if options["slo"] is None else parse_slo(options["slo"])
    load = load_of(options)
    for flag in ("json", "plot", "html"):
        if options[flag] != Path("-"):
            require_writable(f"--{flag}", options[flag])
    outcome = asyncio.run(perform(load, Progress(load.num_repeats, is_hidden=options["disable_tqdm"])))
    title = f"{outcome.model} at {load.server.url}: {options['dataset_name'] or DEFAULT_DATASET}"
    result = Result(title, _conditions(options, outcome), slo, tuple(outcome.runs))
    _write(result, options)
    return result, outcome


def _conditions(options: Mapping[str, Any], outcome: Outcome) -> dict[str, Any]:
    said = {name: value for name, value in options.items() if value not in (None, (), False)}
    conditions = said | {
        "model": outcome.model,
        "lengths": outcome.words.how,
        "server": outcome.server_version,
        "client": f"octavo {version('octavo')}, Python {platform.python_version()}, {os.cpu_count()} cores",
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    return {name: value for name, value in conditions.items() if name not in _NO_CONDITIONS}


def _write(result: Result, options: Mapping[str, Any]) -> None:
    """The table goes to stderr where the JSON goes to stdout."""
    is_json = options["json"] == Path("-")
    click.echo(text(result), err=is_json)
    if is_json:
        click.echo(result.to_json())
    elif options["json"] is not None:
        options["json"].write_bytes(result.to_json())
    if options["plot"] is not None:
        from .panels import write_png

        write_png(options["plot"], result)
    if options["html"] is not None:
        options["html"].write_text(_page(result))


def _page(result: Result) -> str:
    from ...router.simulator.page import page
    from .panels import svgs

    rows = time_rows(result)
    return page("octavo bench serve", result.title, list(lines(result)), rows, svgs(result), result.conditions)
