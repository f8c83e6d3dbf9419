"""ServeConfig: everything that can be set about a serving cluster, with its type, bounds and meaning.

One class is the command line's flags (``cluster/cli_options.py`` makes them from its fields), octavo.yaml, the ``args``
of the application in a Serve config file, and what every part of the cluster is built from. Its errors speak of flags:
a field ``block_size`` is ``--block-size``; ``config_sources.py`` puts the names in their place that the user gave
values by.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    ByteSize,
    Field,
    ValidationError,
    WithJsonSchema,
    field_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

from ..router.policies import PolicyName
from ..worker.errors import ConfigurationError
from ..worker.logs import LogFormat
from ..worker.spec import SchedulingPolicy
from .config_errors import Place, describe, flag_place
from .config_fields import AbsolutePath, Count, Text
from .environment import default_cache_dir
from .http_config import HttpConfig
from .model_settings import ModelSettings
from .tenants import Tenants

DEFAULT_PRIORITY_AGING_S = 60.0
DEFAULT_ROUTER_MAX_QUEUED_REQUESTS = 1024
DEFAULT_SHUTDOWN_TIMEOUT_S = 30.0
MOST_MODELS = 64

_BLOCK_SIZES = (16, 32, 64, 128)


def _power_of_two(value: int) -> int:
    if value not in _BLOCK_SIZES:
        raise PydanticCustomError("block_size", "must be a power of two between 16 and 128")
    return value


def _matches(pattern: str, rule: str) -> tuple[AfterValidator, WithJsonSchema]:
    def judge(value: str) -> str:
        if re.fullmatch(pattern, value) is None:
            raise PydanticCustomError("pattern", rule)
        return value

    return AfterValidator(judge), WithJsonSchema({"type": "string", "pattern": f"^({pattern})$"})


AppName = Annotated[
    str, *_matches(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}", "must be up to 63 letters, digits, dots, dashes and underscores")
]
RoutePrefix = Annotated[str, *_matches(r"/|(/[^/\s?#]+)+", "must begin with / and not end with it")]
BlockSize = Annotated[
    int, AfterValidator(_power_of_two), WithJsonSchema({"type": "integer", "enum": list(_BLOCK_SIZES)})
]


class ServeConfig(ModelSettings, HttpConfig):
    """How to serve one or several models. Immutable; ``model_dump(mode="json")`` gives what ``parse`` takes."""

    models: Annotated[tuple[ModelSettings, ...], Field(max_length=MOST_MODELS)] = ()
    """Several models, each with worker groups of its own: a list of the settings in which each differs from what the
    rest of the file says. Default: the one model that the rest says."""

    host: Text = "127.0.0.1"
    """Address that the HTTP server listens on."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Port that the HTTP server listens on; 0 takes a free one."""
    num_gateways: Annotated[Count, Field(le=64)] = 1
    """HTTP processes."""
    max_gateways_per_node: Annotated[Count, Field(le=64)] | None = None
    """HTTP processes on one node at the most; further ones wait for nodes. Default: any number."""
    num_routers: Annotated[Count, Field(le=4)] = 1
    """Processes that choose worker groups for requests; each knows what the others know, and any one is enough."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What the workers compute on; auto takes GPUs where the cluster has them."""

    routing_policy: PolicyName = "cost"
    """How a request's worker group is chosen. cost: where it costs the least time, its own and that of requests to
    come; the others are plain rules to compare that with."""
    router_index_bytes: Annotated[ByteSize, Field(ge=16 * 2**20)] = ByteSize(2**30)
    """Memory of each router for what the worker groups have cached; where there is more, it is known more coarsely."""
    router_max_queued_requests: Annotated[int, Field(ge=0)] | None = None
    """Requests that may wait in each router until a worker group has room; further ones are refused. 0: they are given
    to worker groups at once, and wait there. Default: 1024, or 0 with --max-queued-requests, --max-queued-tokens or
    --scheduling-policy shortest, which say how requests wait in a worker group."""
    tenants: Tenants = Field(default_factory=dict)
    """Shares and limits by tenant, as a JSON object or @FILE that holds one: {"NAME": {"weight": 2,
    "max_running_requests": 8, "max_queued_requests": 32}, "*": {...}}; each number may be left out, and * stands for
    every other tenant. Default: all alike, without limits."""
    record_trace: AbsolutePath | None = None
    """File that each gateway records served requests in, for octavo simulate: times, lengths, and keyed hashes of
    prompts; no text. Each model has its own. A name that is taken gets a number."""

    scheduling_policy: SchedulingPolicy = "priority"
    """Who is served first: who came first, the smaller priority, the least work, or each tenant in turn."""
    priority_aging_s: Annotated[float, Field(gt=0, le=86400, allow_inf_nan=False)] | None = None
    """Seconds of waiting that outweigh one unit of priority. Default: 60."""
    max_queued_requests: Count | None = None
    """Requests that may wait in a worker group; further ones are refused. Default: any number."""
    max_queued_tokens: Count | None = None
    """Tokens of prompts that may wait in a worker group; further ones are refused, but for the only one that waits.
    Default: any number."""

    block_size: BlockSize = 16
    """Tokens of a KV block: 16, 32, 64 or 128."""

    cache_dir: AbsolutePath = Field(default_factory=default_cache_dir)
    """Folder for converted models and compiled CPU kernels. Default: OCTAVO_CACHE_DIR, else ~/.cache/octavo."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """What the logs hold."""
    log_format: LogFormat = "text"
    """Lines of the logs for people, or JSON for programs: one object for each event."""

    address: Text | None = None
    """Address of a running Ray cluster to join. Default: a Ray of our own, stopped at the end."""
    app_name: AppName = "octavo"
    """Name of the Ray Serve application."""
    route_prefix: RoutePrefix = "/"
    """Path under which the API is found."""
    startup_timeout_s: Annotated[float, Field(gt=0, le=86400, allow_inf_nan=False)] = 600.0
    """Seconds until every worker group must be ready."""
    shutdown_timeout_s: Annotated[float, Field(ge=0, le=86400, allow_inf_nan=False)] = DEFAULT_SHUTDOWN_TIMEOUT_S
    """Seconds that requests under way have when the application or a worker group is stopped. What has not ended by
    then goes on at another group, or ends with an error where all are stopped."""
    step_timeout_s: Annotated[float, Field(ge=1, le=86400, allow_inf_nan=False)] | None = None
    """Seconds after which a step counts as hung; its worker group is then ended and replaced. Default: 60, or ten times
    what the slowest step took where that is more; 600 for the first hundred steps, in which kernels are compiled."""

    @classmethod
    def parse(cls, values: Mapping[str, Any], place: Place = flag_place) -> ServeConfig:
        """Validate values from a command line or a file. Raises ConfigurationError with limits and with the values'
        names, as ``place`` gives them."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigurationError(describe(error, tuple(cls.model_fields), place)) from None

    @field_serializer("models")
    def _given(self, models: tuple[ModelSettings, ...]) -> list[dict[str, Any]]:
        """Only what was said of each: the rest is taken from the top."""
        return [entry.model_dump(mode="json", exclude_unset=True) for entry in models]

    @model_validator(mode="after")
    def _check_combinations(self) -> ServeConfig:
        """Values that are fine alone and do not go together; their ConfigurationError passes through pydantic."""
        self.check_http()
        self._check_policy()
        if self.models:
            self._check_names()
            self.each_model()
        else:
            self.check_model(self.device, self.block_size)
        return self

    def _check_policy(self) -> None:
        if self.scheduling_policy == "fcfs" and self.priority_aging_s is not None:
            raise ConfigurationError(
                f"--priority-aging-s {self.priority_aging_s:g} says nothing with --scheduling-policy fcfs,"
                " which knows no priorities; leave one of them out"
            )

    def _check_names(self) -> None:
        """As far as names are known before the models are."""
        said = [
            entry.served_model_name
            or self.served_model_name
            or (entry.model if "model" in entry.model_fields_set else self.model)
            for entry in self.models
        ]
        check_served_names([name or "the embedded model" for name in said])

    def each_model(self) -> tuple[ServeConfig, ...]:
        """For each model, a configuration with that one alone. Raises ConfigurationError that begins with the entry."""
        if not self.models:
            return (self,)
        return tuple(self._of_entry(index, entry) for index, entry in enumerate(self.models))

    def _of_entry(self, index: int, entry: ModelSettings) -> ServeConfig:
        common = self.model_dump(mode="json", exclude={"models"})
        with self.errors_of_model(index):
            return type(self).parse(common | entry.model_dump(mode="json", exclude_unset=True))

    @contextlib.contextmanager
    def errors_of_model(self, index: int) -> Iterator[None]:
        """A ConfigurationError from within begins with the entry, if ``models`` has any."""
        try:
            yield
        except ConfigurationError as error:
            raise ConfigurationError(f"models.{index}: {error}" if self.models else str(error)) from error

    def with_models(self, configs: Sequence[ServeConfig]) -> ServeConfig:
        """The same cluster with the models of ``configs``, as ``each_model`` gave them and somebody changed them."""
        if not self.models:
            return configs[0]
        names = set(ModelSettings.model_fields)
        entries = [config.model_dump(mode="json", include=names) for config in configs]
        return type(self).parse(self.model_dump(mode="json") | {"models": entries})

    @property
    def num_queued_in_router(self) -> int | None:
        """How many may wait in a router; None: none does, all are given to worker groups at once."""
        if self.router_max_queued_requests is not None:
            return self.router_max_queued_requests or None
        waits_in_groups = self.max_queued_requests or self.max_queued_tokens or self.scheduling_policy == "shortest"
        return None if waits_in_groups else DEFAULT_ROUTER_MAX_QUEUED_REQUESTS

    def for_device(self, device: Literal["cpu", "cuda"]) -> ServeConfig:
        """The same, of one model, with everything decided that depends on the device. Raises as ``parse``."""
        on_cpu = device == "cpu"
        values = self.model_dump(mode="json")
        values["device"] = device
        if self.replicas is None:
            values["replicas"] = 2 if on_cpu and self.model is None else 1
        if self.max_num_batched_tokens is None:
            values["max_num_batched_tokens"] = max(512 if on_cpu else 2048, self.max_num_seqs)
        return type(self).parse(values)


def check_served_names(names: Sequence[str]) -> None:
    """Raises ConfigurationError where two of the models have one name."""
    for index, name in enumerate(names):
        if (first := names.index(name)) < index:
            raise ConfigurationError(
                f"models.{index}: --served-model-name: {name} is the name of models.{first} too; requests choose by it"
            )
