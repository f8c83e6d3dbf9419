"""``octavo top`` on the command line."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import click

from ....worker.errors import ConfigurationError
from ...environment import read_environment
from .overview import Overview, overview
from .samples import Samples, Window
from .sources import HttpSource, NotWatched, Source

DEFAULT_URL = "http://127.0.0.1:8000"

_FILE_WIDTH = 160

Reported: TypeAlias = Callable[[click.Context], AbstractContextManager[None]]


def top_command(reported: Reported) -> click.Command:
    @click.pass_context
    def top(ctx: click.Context, /, **options: Any) -> None:
        """Watch a cluster: models, worker groups, ranks and what the routers decide, until Ctrl-C.

        URL is where its API is (default: http://127.0.0.1:8000). Rates and latencies are of the time between two looks.
        """
        with reported(ctx):
            _check(options)
            if options["profile"] is not None:
                _profile(options)
            elif options["once"]:
                _once(options)
            else:
                _watch(options)

    return click.Command("top", callback=top, help=top.__doc__, params=_parameters())


def _parameters() -> list[click.Parameter]:
    interval = click.FloatRange(0.2, 3600)
    return [
        click.Argument(["url"], required=False),
        click.Option(["--api-key"], help="Key of the API, where it asks for one. Default: OCTAVO_API_KEY."),
        click.Option(["--address"], help="Ask the routers in the Ray cluster at this address, not the API."),
        click.Option(["--app-name"], default="octavo", show_default=True, help="The application there."),
        click.Option(["--interval"], type=interval, default=2.0, show_default=True, help="Seconds between two looks."),
        click.Option(["--once"], is_flag=True, help="Two looks, one view, and the end."),
        click.Option(["--json"], is_flag=True, help="With --once: as JSON; times in seconds, sizes in bytes."),
        click.Option(
            ["--profile"],
            type=click.IntRange(1, 200),
            metavar="STEPS",
            help="Record a torch profile of the next STEPS steps instead, and say where the traces are.",
        ),
        click.Option(["--group"], help="With --profile: of this worker group alone."),
    ]


def _check(options: dict[str, Any]) -> None:
    """Raises ConfigurationError for options that do not go together."""
    if options["address"] and (options["url"] or options["api_key"]):
        raise ConfigurationError("--address: the API is not asked then; leave out URL and --api-key")
    if options["json"] and not options["once"]:
        raise ConfigurationError("--json says nothing without --once")
    if options["group"] and options["profile"] is None:
        raise ConfigurationError("--group says nothing without --profile")
    if options["profile"] is not None and options["address"]:
        raise ConfigurationError("--profile asks the API; leave out --address")
    if options["profile"] is not None and options["once"]:
        raise ConfigurationError("--once says nothing with --profile")


def _source(options: dict[str, Any]) -> Source:
    if options["address"]:
        from ...joining import join

        address = join(options["address"])
        from .ray_source import RaySource

        return RaySource(address, options["app_name"])
    return _http_source(options)


def _http_source(options: dict[str, Any]) -> HttpSource:
    return HttpSource(options["url"] or DEFAULT_URL, options["api_key"] or read_environment().api_key)


def looks(source: Source, interval_s: float, sleep: Callable[[float], None] = time.sleep) -> Iterator[Overview]:
    """A view every ``interval_s``, the first one after that. What does not answer in between is asked again."""
    before, then = Samples(source.metrics()), time.monotonic()
    while True:
        sleep(interval_s)
        now, at = Samples(source.metrics()), time.monotonic()
        yield overview(Window(before, now, at - then), at - then)
        before, then = now, at


def _once(options: dict[str, Any]) -> None:
    source = _source(options)
    view = next(looks(source, options["interval"]))
    if options["json"]:
        click.echo(json.dumps(dataclasses.asdict(view), indent=2))
        return
    from rich.console import Console

    from .screen import screen

    console = Console()
    if not console.is_terminal:
        console = Console(width=_FILE_WIDTH)
    console.print(screen(view, source.name, console.width))


def _watch(options: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.live import Live

    from .screen import screen

    source = _source(options)
    console = Console()
    with Live(f"watching {source.name} …", console=console, screen=console.is_terminal, auto_refresh=False) as live:
        try:
            for view in looks(_Patient(source), options["interval"]):
                live.update(screen(view, source.name, console.width), refresh=True)
        except KeyboardInterrupt:
            return


class _Patient:
    """A source that once answered: what fails later on is tried again, for a while."""

    MOST_FAILURES = 5
    PAUSE_S = 1.0

    def __init__(self, source: Source) -> None:
        self.name = source.name
        self._source = source
        self._has_answered = False

    def metrics(self) -> str:
        for _ in range(self.MOST_FAILURES if self._has_answered else 0):
            try:
                return self._source.metrics()
            except (ConfigurationError, NotWatched):
                time.sleep(self.PAUSE_S)
        text = self._source.metrics()
        self._has_answered = True
        return text


def _profile(options: dict[str, Any]) -> None:
    results = _http_source(options).profile(options["profile"], options["group"])
    for group, result in results.items():
        if "error" in result:
            click.echo(f"{group}: {result['error']}")
            continue
        where = "each rank's trace is on its own machine:" if result["files"] else "it computes nothing at present"
        click.echo(f"{group}: {result['steps']} steps; {where}")
        for rank, path in result["files"].items():
            click.echo(f"  rank {rank}  {path}")
