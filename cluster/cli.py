"""The command line: ``octavo serve``, ``octavo config show``, ``octavo model fetch`` and the others.

Errors that a user can mend are one line on stderr and exit code 2. What escapes as another exception is a defect: it
shows its traceback and ends with exit code 1. Commands are built when they are used, so that ``octavo --help`` loads
neither pydantic nor Ray.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import click

from ..worker.errors import ConfigurationError, OctavoError


class _Entry(NamedTuple):
    short_help: str
    build: Callable[[], click.Command]


class LazyGroup(click.Group):
    """A group whose commands are built on first use; their short help is known without building them."""

    def __init__(self, *args: Any, entries: dict[str, _Entry], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._entries = entries

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._entries)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.commands and cmd_name in self._entries:
            self.add_command(self._entries[cmd_name].build(), cmd_name)
        return self.commands.get(cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.short_help) for name, entry in self._entries.items()])


class _Failure(click.ClickException):
    """``octavo serve: error: …``, on one line."""

    exit_code = 1

    def __init__(self, command: str, error: OctavoError) -> None:
        super().__init__(f"{command}: error: {' '.join(str(error).split())}")

    def show(self, file: Any = None) -> None:
        click.echo(self.message, file=file or sys.stderr)


class _UserError(_Failure):
    exit_code = 2


@contextmanager
def _reported(ctx: click.Context) -> Iterator[None]:
    """The one place that turns our exceptions into exit codes: 2 for what the user set, 1 for the rest."""
    try:
        yield
    except ConfigurationError as error:
        raise _UserError(ctx.command_path, error) from error
    except OctavoError as error:
        raise _Failure(ctx.command_path, error) from error


def _serve_command() -> click.Command:
    from .cli_options import config_parameters
    from .config import ServeConfig
    from .config_sources import load_config

    @click.pass_context
    def serve(ctx: click.Context, /, **_: Any) -> None:
        """Serve MODEL over the OpenAI API until Ctrl-C.

        MODEL is a folder in Hugging Face format, a hub id, a GGUF file or gemma-3-270m; without it, the embedded
        SmolLM2-135M-Instruct. Each setting can also stand in a YAML file (--config), and be an environment variable:
        OCTAVO_MAX_MODEL_LEN for --max-model-len. A flag goes before a variable, and a variable before the file.
        """
        with _reported(ctx):
            config, provenance = load_config(ctx)
            from .launch import serve as launch

            with provenance.in_errors():
                launch(config)

    return click.Command("serve", callback=serve, help=serve.__doc__, params=config_parameters(ServeConfig))


def _model_command() -> click.Command:
    entries = {"fetch": _Entry("Download and convert a model; print its folder.", _fetch_command)}
    return LazyGroup("model", entries=entries, help="Models in the cache folder.")


def _fetch_command() -> click.Command:
    @click.command(help="Download MODEL and convert it as far as serving it needs, then print its folder.")
    @click.argument("model", required=False)
    @click.option(
        "--cache-dir", type=click.Path(path_type=Path), help="Default: OCTAVO_CACHE_DIR, else ~/.cache/octavo."
    )
    @click.pass_context
    def fetch(ctx: click.Context, model: str | None, cache_dir: Path | None) -> None:
        with _reported(ctx):
            from ..worker.checkpoint.store import resolve_model
            from .config_paths import absolute_model
            from .config_sources import setting_values
            from .environment import default_cache_dir

            setting_values()  # refuses unknown ones

            folder = (cache_dir or default_cache_dir()).expanduser().absolute()
            name = None if model is None else absolute_model(model)
            click.echo(resolve_model(name, cache_dir=folder, report=_to_stderr).path)

    return fetch


def _config_command() -> click.Command:
    entries = {
        "show": _Entry("Print the merged configuration, and where each value came from.", _config_show_command),
        "schema": _Entry("Print the JSON schema of octavo.yaml, for editors.", _config_schema_command),
    }
    return LazyGroup("config", entries=entries, help="The configuration: flags, environment and octavo.yaml.")


def _config_show_command() -> click.Command:
    from .cli_options import config_parameters
    from .config import ServeConfig
    from .config_command import as_json_option, shown
    from .config_sources import load_config

    @click.pass_context
    def show(ctx: click.Context, /, **options: Any) -> None:
        """Print what octavo serve would be told by the same flags, environment and file, as YAML; a comment says where
        each value came from.

        API keys are not shown.
        """
        with _reported(ctx):
            config, provenance = load_config(ctx)
            click.echo(shown(config, provenance, as_json=options["json"]))

    return click.Command(
        "show", callback=show, help=show.__doc__, params=[as_json_option(), *config_parameters(ServeConfig)]
    )


def _config_schema_command() -> click.Command:
    @click.command(help="Print the JSON schema (draft 2020-12) of octavo.yaml.")
    def schema() -> None:
        import json

        from .config_schema import config_schema

        click.echo(json.dumps(config_schema(), indent=2))

    return schema


def _simulate_command() -> click.Command:
    from .simulate import SimulateOptions, simulate, simulate_parameters

    @click.pass_context
    def command(ctx: click.Context, /, **options: Any) -> None:
        """Replay a trace of requests with the production router and scheduler, under a virtual clock.

        Prints for each policy how often prompts were found in a prefix cache, how long requests waited, and how evenly
        the groups were loaded. No GPU and no model is needed.
        """
        with _reported(ctx):
            simulate(SimulateOptions(**options))

    return click.Command("simulate", callback=command, help=command.__doc__, params=simulate_parameters())


def _bench_command() -> click.Command:
    entries = {
        "serve": _Entry("Put load on a server and measure what it does.", _bench_serve_command),
        "compare": _Entry("Say what differs between two results beyond noise.", _bench_compare_command),
        "affinity": _Entry("Measure routing policies, each on a cluster of this machine.", _bench_affinity_command),
    }
    return LazyGroup("bench", entries=entries, help="Load tests of servers with the OpenAI API.")


def _bench_serve_command() -> click.Command:
    from .load.command import serve_command

    return serve_command(_reported)


def _bench_compare_command() -> click.Command:
    from .load.command import compare_command

    return compare_command(_reported)


def _bench_affinity_command() -> click.Command:
    from .load.affinity import affinity_command

    return affinity_command(_reported)


def _launch_command() -> click.Command:
    from .hosts.command import launch_command

    return launch_command(_reported)


def _doctor_command() -> click.Command:
    from .doctor.command import doctor_command

    return doctor_command(_reported)


def _stop_command() -> click.Command:
    from .hosts.command import stop_command

    return stop_command(_reported)


def _drain_command() -> click.Command:
    from .operations_command import drain_command

    return drain_command(_reported)


def _scale_command() -> click.Command:
    from .operations_command import scale_command

    return scale_command(_reported)


def _update_command() -> click.Command:
    from .operations_command import update_command

    return update_command(_reported)


def _top_command() -> click.Command:
    from .watch.top.command import top_command

    return top_command(_reported)


def _to_stderr(line: str) -> None:
    click.echo(line, err=True)


def _print_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        from importlib.metadata import version

        click.echo(f"octavo {version('octavo')}")
        ctx.exit()


main = LazyGroup(
    "octavo",
    entries={
        "serve": _Entry("Start a cluster that serves a model.", _serve_command),
        "config": _Entry("Show the configuration and its schema.", _config_command),
        "launch": _Entry("Start a cluster on several hosts over SSH.", _launch_command),
        "doctor": _Entry("Find what stands in the way of a cluster.", _doctor_command),
        "stop": _Entry("Take down a cluster that was launched.", _stop_command),
        "drain": _Entry("Take a worker group out of service.", _drain_command),
        "scale": _Entry("Change the number of worker groups.", _scale_command),
        "update": _Entry("Replace worker groups one after the other.", _update_command),
        "model": _Entry("Download and convert models.", _model_command),
        "top": _Entry("Watch a cluster: models, worker groups, ranks, routing.", _top_command),
        "bench": _Entry("Put load on a server; compare results.", _bench_command),
        "simulate": _Entry("Replay a trace of requests on a simulated cluster.", _simulate_command),
    },
    help="Serve language models over many GPUs, by the page.",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    params=[
        click.Option(
            ["--version"],
            is_flag=True,
            expose_value=False,
            is_eager=True,
            callback=_print_version,
            help="Show the version and exit.",
        )
    ],
    no_args_is_help=True,
)
