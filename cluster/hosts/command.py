"""``octavo launch`` and ``octavo stop`` on the command line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from ...worker.errors import ConfigurationError, OctavoError
from ..cli_options import config_parameters
from ..config import ServeConfig
from ..config_sources import load_config
from ..environment import default_cache_dir
from ..phases import Phases
from .host import SETTINGS, read_hosts
from .orders import Agents
from .shell import Shell
from .state import StateFiles
from .stop import take_down

_LEFT_OUT = ("address", "model")
"""Of a launched cluster the address is not known before, and the words of the command line are hosts."""


def launch_parameters() -> list[click.Parameter]:
    """Those of ``octavo launch``: the hosts, and the flags of ``octavo serve``."""
    own: list[click.Parameter] = [
        click.Argument(["words"], nargs=-1, metavar="[HOST]..."),
        click.Option(
            ["--hosts", "file"],
            type=click.Path(path_type=Path),
            metavar="FILE",
            help=f"File with a host a line, and behind it what is particular about it: {'=, '.join(SETTINGS)}=.",
        ),
        click.Option(["--head-here"], is_flag=True, help="This machine is the head; the hosts are the others."),
        click.Option(["--name"], default="octavo", show_default=True, help="What octavo stop knows the cluster by."),
        click.Option(
            ["--python"],
            metavar="PATH",
            help="The hosts' Python, in whose environment Octavo is installed. Default: the same path as here.",
        ),
        click.Option(
            ["--ssh-command"],
            default="ssh",
            show_default=True,
            help="Program with the command line of ssh; or, with {host} in it, a command behind which a line for a"
            " shell is put, such as 'kubectl exec -i {host} -- sh -c'.",
        ),
        click.Option(
            ["--ray-port"],
            type=click.IntRange(0, 65535),
            default=0,
            show_default=True,
            help="Port of Ray on the head; 0 takes a free one.",
        ),
        click.Option(["--model"], metavar="TEXT", help=ServeConfig.model_fields["model"].description),
    ]
    return own + [parameter for parameter in config_parameters(ServeConfig) if parameter.name not in _LEFT_OUT]


def run_launch(ctx: click.Context) -> None:
    """Bring a cluster up on HOSTs over SSH, the first of them its head, and return when it serves.

    HOST is user@host:port or a name of ~/.ssh/config; the user's keys apply, nobody is asked for a password. Every host
    needs Octavo in the same versions. What is started is recorded, and octavo stop ends it. Paths are those of the
    hosts.
    """
    from .launch import LaunchOptions, farewell, launch

    own = {name: ctx.params.pop(name) for name in ("words", "file", "head_here", "name", "python", "ssh_command")}
    ray_port = ctx.params.pop("ray_port")
    config, provenance = load_config(ctx)
    if config.address is not None:
        raise ConfigurationError("--address: octavo launch starts a Ray of its own; octavo serve --address joins one")
    options = LaunchOptions(
        hosts=read_hosts(own["words"], own["file"], head_here=own["head_here"]),
        name=own["name"],
        python=own["python"],
        ssh_command=own["ssh_command"],
        ray_port=ray_port,
    )
    phases = Phases(sys.stderr)
    try:
        with provenance.in_errors():
            state = launch(options, config, phases)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    phases.note(f"ready: {farewell(state, config)}")


def stop_parameters() -> list[click.Parameter]:
    cache_help = "The one that the cluster was launched with. Default: OCTAVO_CACHE_DIR, else ~/.cache/octavo."
    return [
        click.Argument(["name"], required=False),
        click.Option(["--cache-dir"], type=click.Path(path_type=Path), help=cache_help),
        click.Option(["--now"], is_flag=True, help="Do not wait for requests under way."),
    ]


def run_stop(name: str | None, cache_dir: Path | None, now: bool) -> None:
    """Take down the cluster NAME that octavo launch has started, and nothing else.

    NAME can be left out when there is one cluster. Requests under way are finished first. A host that is away is said;
    the command can be given again when it is back.
    """
    files = StateFiles((cache_dir or default_cache_dir()).expanduser().absolute())
    phases = Phases(sys.stderr)
    chosen = name or _only(files)
    state = None if chosen is None else files.load(chosen)
    if state is None:
        others = f" (there are: {', '.join(files.names())})" if files.names() else ""
        phases.note(f"nothing to stop: no cluster {chosen or ''} was launched from here{others}".replace("  ", " "))
        return
    agents = Agents(Shell(state.ssh_command), state.id, phases.note)
    with phases.phase(f"stopping {state.name}, launched {state.started}"):
        away = take_down(state, files, agents, phases.note, drains=not now)
    if away:
        raise OctavoError(f"{len(away)} of {len(state.members)} hosts could not be asked; try again when they are back")


def _only(files: StateFiles) -> str | None:
    """Raises ConfigurationError when there are several."""
    names = files.names()
    if len(names) > 1:
        raise ConfigurationError(f"NAME: say which of {', '.join(names)}")
    return names[0] if names else None


def launch_command(report: Any) -> click.Command:
    """``report(ctx)`` turns errors into exit codes."""

    @click.pass_context
    def launch(ctx: click.Context, /, **_: Any) -> None:
        with report(ctx):
            run_launch(ctx)

    return click.Command("launch", callback=launch, help=run_launch.__doc__, params=launch_parameters())


def stop_command(report: Any) -> click.Command:
    """``report(ctx)`` turns errors into exit codes."""

    @click.pass_context
    def stop(ctx: click.Context, /, name: str | None, cache_dir: Path | None, now: bool) -> None:
        with report(ctx):
            run_stop(name, cache_dir, now)

    return click.Command("stop", callback=stop, help=run_stop.__doc__, params=stop_parameters())
