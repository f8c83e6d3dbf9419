"""``octavo drain``, ``octavo scale`` and ``octavo update`` on the command line."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import click

from .cli_options import config_parameters, given_values
from .config import ServeConfig
from .config_paths import absolute_model

Reported: TypeAlias = Callable[[click.Context], AbstractContextManager[None]]

DRAIN_S = 30.0
READY_S = 600.0

UPDATABLE = (
    "model",
    "dtype",
    "quantization",
    "max_num_batched_tokens",
    "target_itl_ms",
    "async_scheduling",
    "enforce_eager",
    "batch_invariant",
    "enable_prefix_caching",
    "kv_cache_dtype",
    "kv_cache_memory_bytes",
    "gpu_memory_utilization",
    "num_gpu_blocks_override",
    "step_timeout_s",
)
"""Settings that concern a worker group alone: gateways and routers never hear of them."""


def drain_command(reported: Reported) -> click.Command:
    @click.pass_context
    def drain(ctx: click.Context, /, group: str, remove: bool, limit_s: float, **where: Any) -> None:
        """Take the worker group GROUP out of service without losing a request; another one comes up in its place.

        It gets nothing new. Its streams finish, or go on at another group when --limit-s is over. octavo top lists the
        groups. To empty a node, drain its groups after ray drain-node, or remove them.
        """
        with reported(ctx), _operator(where) as operator:
            (operator.remove if remove else operator.drain)(group, limit_s)

    params = [
        click.Argument(["group"]),
        click.Option(["--remove"], is_flag=True, help="Let nothing come in its place: the model has one group fewer."),
        _limit(),
        *_where(),
    ]
    return click.Command("drain", callback=drain, help=drain.__doc__, params=params)


def scale_command(reported: Reported) -> click.Command:
    @click.pass_context
    def scale(ctx: click.Context, /, count: int, served_model_name: str | None, timeout_s: float, **where: Any) -> None:
        """Change the number of worker groups of a model to COUNT, and wait until they serve.

        Groups that are too many are drained. Gateways and routers stay, and no stream notices.
        """
        with reported(ctx), _operator(where) as operator:
            operator.scale(served_model_name, count, timeout_s)

    params = [click.Argument(["count"], type=click.IntRange(1, 1024)), _model(), _timeout(), *_where()]
    return click.Command("scale", callback=scale, help=scale.__doc__, params=params)


def update_command(reported: Reported) -> click.Command:
    @click.pass_context
    def update(
        ctx: click.Context,
        /,
        served_model_name: str | None,
        surge: bool,
        limit_s: float,
        timeout_s: float,
        **others: Any,
    ) -> None:
        """Replace the worker groups of a model one after the other, with the settings given here.

        Without any, the new groups read weights and code anew. Other settings concern gateways and routers too, and
        need a new deployment. Streams that have not finished after --limit-s go on at another group with the same
        weights; where the last such group is replaced they get up to --timeout-s, and end with an error after that.
        """
        with reported(ctx):
            values = {name: value for name, value in given_values(ctx, ServeConfig).items() if name in UPDATABLE}
            if "model" in values:
                values["model"] = absolute_model(values["model"])
            with _operator(others) as operator:
                operator.update(served_model_name, values, surge=surge, limit_s=limit_s, timeout_s=timeout_s)

    settings = [each for each in config_parameters(ServeConfig) if each.name in UPDATABLE and each.name != "model"]
    weights = click.Option(["--model"], metavar="TEXT", help="Other weights, with the same tokenizer and context.")
    surge = click.Option(["--surge"], is_flag=True, help="Start one group more first; needs devices for it.")
    params = [surge, _limit(), _timeout(), _model(), *_where(), weights, *settings]
    return click.Command("update", callback=update, help=update.__doc__, params=params)


def _operator(where: dict[str, Any]) -> AbstractContextManager[Any]:
    from .joining import join

    address = join(where["address"])
    from .operations import cluster

    return cluster(address, where["app_name"], lambda line: click.echo(line, err=True))


def _where() -> list[click.Parameter]:
    address = (
        "HOST:PORT of the Ray cluster, on one of whose nodes this runs; RAY_AUTH_TOKEN is its token. Default:"
        " RAY_ADDRESS, else the Ray that was started last on this machine."
    )
    return [
        click.Option(["--address"], metavar="TEXT", help=address),
        click.Option(["--app-name"], default="octavo", show_default=True, help="Name of the Ray Serve application."),
    ]


def _limit() -> click.Parameter:
    help_ = "Seconds that the group's streams may take to finish; the rest goes on elsewhere."
    return click.Option(["--limit-s"], type=click.FloatRange(0, 86_400), default=DRAIN_S, show_default=True, help=help_)


def _timeout() -> click.Parameter:
    help_ = "Seconds to wait for a group to come up."
    return click.Option(
        ["--timeout-s"], type=click.FloatRange(1, 86_400), default=READY_S, show_default=True, help=help_
    )


def _model() -> click.Parameter:
    return click.Option(["--served-model-name"], help="The model, where there are several.")
