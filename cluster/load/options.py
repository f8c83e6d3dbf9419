"""The options of ``octavo bench serve``; named as in vLLM's ``bench serve`` where they mean the same."""

from __future__ import annotations

import math
import urllib.parse
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import click
import orjson

from ...worker.errors import ConfigurationError
from ..command_values import ABOVE_0, COUNT, FILE, SHARE, Number
from ..environment import read_environment
from .datasets import DATASET_NAMES, DatasetName, DatasetOptions, workload_of
from .load import Load, Rate
from .target import ENDPOINTS, Server

_PENALTY = Number(min=-2.0, max=2.0)
_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
)
DEFAULT_DATASET: DatasetName = "random"
_OURS = ("model", "prompt", "messages", "stream", "stream_options", "max_tokens", "max_completion_tokens")


SERVER_OPTIONS: Mapping[str, Any] = {
    "base_url": "http://127.0.0.1:8000",
    "model": None,
    "api_key": None,
    "insecure": False,
    "ready_check_timeout_sec": 0.0,
}
"""Which server it is, and the defaults."""


class _RateType(click.ParamType[Rate]):
    name = "rate"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Rate:
        if value == "recorded":
            return "recorded"
        try:
            rate = float(value)
        except ValueError:
            rate = math.nan
        if not rate > 0.0:
            self.fail(f"{value!r} is neither a number above 0 nor inf nor recorded.", param, ctx)
        return rate


def load_parameters() -> list[click.Parameter]:
    """Names beside the first are vLLM's for one data set."""
    return [*_server_parameters(), *_arrival_parameters(), *_dataset_parameters(), *_request_parameters()]


def _option(*names: str, help: str, **more: Any) -> click.Option:
    return click.Option(names, help=help, show_default=more.get("default") is not None, **more)


def _server_parameters() -> list[click.Parameter]:
    return [
        _option("--base-url", help="The server.", default=SERVER_OPTIONS["base_url"]),
        _option("--endpoint", help="Where requests go.", type=click.Choice(ENDPOINTS), default=ENDPOINTS[0]),
        _option("--model", help="By the name it is served as. Default: the only one that is."),
        _option("--api-key", help="Default: OCTAVO_API_KEY."),
        _option("--header", help="NAME=VALUE of every request; can be repeated.", multiple=True),
        _option("--insecure", help="Do not look at the server's certificate.", is_flag=True),
        _option("--request-timeout-s", help="Of a whole request.", type=ABOVE_0, default=600.0),
        _option("--ready-check-timeout-sec", help="Wait so long for the server.", type=Number(min=0.0), default=0.0),
    ]


def _arrival_parameters() -> list[click.Parameter]:
    rate_help = (
        "Prompts a second (open loop), inf (as soon as --max-concurrency lets them), or recorded. "
        "Default: recorded for a trace, else inf."
    )
    return [
        _option(
            "--num-prompts", help="Conversations and agents count once. Default: 1000, or all there are.", type=COUNT
        ),
        _option("--duration", help="Send nothing after so many seconds.", type=ABOVE_0),
        _option("--max-concurrency", help="Requests at once; with --request-rate inf a closed loop.", type=COUNT),
        _option("--request-rate", help=rate_help, type=_RateType()),
        _option("--burstiness", help="Shape of the gamma distribution of gaps. Default: 1, Poisson.", type=ABOVE_0),
        _option("--time-scale", help="Recorded times are multiplied by it. Default: 1.", type=ABOVE_0),
        _option(
            "--num-warmups", help="Before, with prompts of their own, not counted.", type=click.IntRange(0), default=0
        ),
        _option("--seed", help="Of prompts, lengths and arrivals.", type=click.IntRange(0, 2**31 - 1), default=0),
        _option("--repeat", help="Repeats; each has the next seed.", type=click.IntRange(1, 1000), default=1),
    ]


def _dataset_parameters() -> list[click.Parameter]:
    repetition, tokens = "--prefix-repetition", "Tokens of"
    return [
        _option("--dataset-name", help="See octavo bench serve --help.", type=click.Choice(DATASET_NAMES)),
        _option("--dataset-path", help="File of gsm8k or of the trace.", type=FILE),
        _option("--input-len", "--random-input-len", f"{repetition}-suffix-len", help=f"{tokens} a turn.", type=COUNT),
        _option(
            "--output-len", "--random-output-len", f"{repetition}-output-len", help=f"{tokens} an answer.", type=COUNT
        ),
        _option("--range-ratio", "--random-range-ratio", help="Lengths differ so far from these.", type=SHARE),
        _option(
            "--prefix-len",
            "--random-prefix-len",
            f"{repetition}-prefix-len",
            help=f"{tokens} a shared beginning.",
            type=click.IntRange(min=0),
        ),
        _option("--num-prefixes", f"{repetition}-num-prefixes", help="Shared beginnings.", type=COUNT),
        _option("--num-turns", help="Of a conversation or an agent.", type=COUNT),
        _option("--think-time-s", help="Mean time from an answer to the next turn.", type=Number(min=0.0)),
        _option("--num-shots", help="Solved examples before a question of gsm8k.", type=click.IntRange(min=0)),
        _option("--length-scale", help="Lengths of the trace are multiplied by it.", type=ABOVE_0),
        _option("--tokenizer", help="Folder whose tokenizer.json counts. Default: the server's /tokenize.", type=FILE),
    ]


def _request_parameters() -> list[click.Parameter]:
    return [
        _option("--ignore-eos", help="Answers are as long as asked for; not every server can.", is_flag=True),
        _option("--temperature", help="", type=Number(min=0.0)),
        _option("--top-p", help="", type=SHARE),
        _option("--top-k", help="", type=int),
        _option("--min-p", help="", type=SHARE),
        _option("--frequency-penalty", help="", type=_PENALTY),
        _option("--presence-penalty", help="", type=_PENALTY),
        _option("--repetition-penalty", help="", type=ABOVE_0),
        _option("--extra-body", help="Further fields of every request: a JSON object."),
    ]


def load_of(options: Mapping[str, Any]) -> Load:
    """All that is typed, judged. Raises ConfigurationError."""
    dataset = DatasetOptions(**{field.name: options[field.name] for field in fields(DatasetOptions)})
    body = _body(options)
    server = _server(options)
    _check_arrivals(options)
    workload = workload_of(options["dataset_name"] or DEFAULT_DATASET, dataset)
    rate = options["request_rate"]
    return Load(
        server=server,
        model=options["model"],
        endpoint=options["endpoint"],
        fields=body,
        workload=workload,
        tokenizer=options["tokenizer"],
        num_scripts=options["num_prompts"],
        duration_s=options["duration"],
        max_concurrency=options["max_concurrency"],
        rate=rate or ("recorded" if workload.has_arrivals else math.inf),
        burstiness=options["burstiness"] or 1.0,
        time_scale=options["time_scale"] or 1.0,
        num_warmups=options["num_warmups"],
        seed=options["seed"],
        num_repeats=options["repeat"],
        ready_timeout_s=options["ready_check_timeout_sec"],
    )


def _check_arrivals(options: Mapping[str, Any]) -> None:
    rate = options["request_rate"]
    if options["burstiness"] is not None and (rate in (None, "recorded") or math.isinf(rate)):
        raise ConfigurationError("--burstiness: says nothing without --request-rate NUMBER")
    is_recorded = rate == "recorded" or (rate is None and options["dataset_name"] == "trace")
    if options["time_scale"] is not None and not is_recorded:
        raise ConfigurationError("--time-scale: says nothing where arrivals are not recorded ones")


def _server(options: Mapping[str, Any]) -> Server:
    url: str = options["base_url"].rstrip("/").removesuffix("/v1")
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigurationError(f"--base-url: must be such as http://127.0.0.1:8000, got {url[:200]!r}")
    headers = dict(_header(text) for text in options["header"])
    if (key := options["api_key"] or read_environment().api_key) is not None:
        headers["Authorization"] = f"Bearer {key}"
    return Server(url, headers, options["insecure"], options["request_timeout_s"])


def _header(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip() or not f"{name}{value}".isascii() or not f"{name}{value}".isprintable():
        raise ConfigurationError(f"--header: must be NAME=VALUE of printable ASCII, got {text[:200]!r}")
    return name.strip(), value.strip()


def _body(options: Mapping[str, Any]) -> dict[str, Any]:
    body = {name: options[name] for name in _SAMPLING if options[name] is not None}
    if options["ignore_eos"]:
        body["ignore_eos"] = True
    if options["extra_body"] is None:
        return body
    try:
        extra = orjson.loads(options["extra_body"])
    except ValueError as error:
        raise ConfigurationError(f"--extra-body: no JSON: {error}") from error
    if not isinstance(extra, dict):
        raise ConfigurationError(f"--extra-body: must be a JSON object, got {options['extra_body'][:200]}")
    if taken := [name for name in extra if name in _OURS]:
        raise ConfigurationError(f"--extra-body: {', '.join(taken)} is set by other options")
    return body | extra
