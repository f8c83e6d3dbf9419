"""ServeConfig: everything that can be set about a serving cluster, with its type, bounds and meaning.

One class is the command line's flags (``cluster/cli.py`` makes them from its fields), the ``args`` of the application
in a Serve config file, and what every part of the cluster is built from. Its errors speak of flags: a field
``block_size`` is ``--block-size``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    ByteSize,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from ..router.policies import PolicyName
from ..worker.errors import ConfigurationError
from ..worker.spec import KvCacheDtype, Quantization, SchedulingPolicy
from .config_errors import describe, flag
from .config_fields import AbsolutePath, Count, Int, Text
from .environment import default_cache_dir
from .http_config import HttpConfig
from .tenants import Tenants

DEFAULT_MAX_NUM_SEQS = 64
DEFAULT_GPU_MEMORY_UTILIZATION = 0.9
DEFAULT_PRIORITY_AGING_S = 60.0
DEFAULT_ROUTER_MAX_QUEUED_REQUESTS = 1024


def _power_of_two(value: int) -> int:
    if not 16 <= value <= 128 or value.bit_count() != 1:
        raise PydanticCustomError("block_size", "must be a power of two between 16 and 128")
    return value


def _folder_or(*words: str) -> Callable[[str], str]:
    """A path is made absolute, since the cluster runs in another folder; the words are kept."""
    return lambda value: value if value in words else str(Path(value).expanduser().absolute())


def _matches(pattern: str, rule: str) -> AfterValidator:
    def judge(value: str) -> str:
        if re.fullmatch(pattern, value) is None:
            raise PydanticCustomError("pattern", rule)
        return value

    return AfterValidator(judge)


AppName = Annotated[
    str, _matches(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}", "must be up to 63 letters, digits, dots, dashes and underscores")
]
RoutePrefix = Annotated[str, _matches(r"/|(/[^/\s?#]+)+", "must begin with / and not end with it")]


class ServeConfig(HttpConfig):
    """How to serve one model. Immutable; ``model_dump(mode="json")`` gives what ``parse`` takes."""

    model: Text | None = None
    """Folder in Hugging Face format, hub id, or GGUF file. Default: SmolLM2-135M-Instruct, embedded."""
    served_model_name: Text | None = None
    """Name of the model in the API. Default: the hub id, or the name of the folder or file."""

    host: Text = "127.0.0.1"
    """Address that the HTTP server listens on."""
    port: Annotated[Int, Field(ge=0, le=65535)] = 8000
    """Port that the HTTP server listens on; 0 takes a free one."""
    num_gateways: Annotated[Count, Field(le=64)] = 1
    """HTTP processes."""
    num_routers: Annotated[Count, Field(le=4)] = 1
    """Processes that choose worker groups for requests; each knows what the others know, and any one is enough."""

    replicas: Annotated[Count, Field(le=1024)] | None = None
    """Worker groups; each holds one copy of the model. Default: 2 for the embedded model on CPUs, else 1."""
    tensor_parallel_size: Annotated[Count, Field(le=64)] = 1
    """Workers, each with a device of its own, that one copy of the model is split over."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What the workers compute on; auto takes GPUs where the cluster has them."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of weights and activations; auto is what the model says, or float32 where a CPU is faster with it. On CPUs
    bfloat16 and float16 are for the weights of matrix products alone."""
    quantization: Quantization | None = None
    """Round the weights of matrix products to int8 or, on GPUs that multiply it, fp8 when they are loaded. Default: as
    the model has them."""

    max_model_len: Count | None = None
    """Tokens of a sequence at the most, prompt and output together. Default: the model's own limit."""
    max_num_seqs: Annotated[Count, Field(le=4096)] = DEFAULT_MAX_NUM_SEQS
    """Sequences that a worker group runs at once."""
    max_num_batched_tokens: Annotated[Count, Field(le=131072)] | None = None
    """Tokens that one step computes at the most, prefill and decode together. Default: 512 on CPUs, 2048 on GPUs."""
    max_output_tokens: Count | None = None
    """Tokens that a request may generate for each choice at the most. Default: what the context leaves."""

    routing_policy: PolicyName = "cost"
    """How a request's worker group is chosen. cost: where it costs the least time, its own and that of requests to
    come; the others are plain rules to compare that with."""
    router_index_bytes: Annotated[ByteSize, Field(ge=16 * 2**20)] = ByteSize(2**30)
    """Memory of each router for what the worker groups have cached; where there is more, it is known more coarsely."""
    router_max_queued_requests: Annotated[Int, Field(ge=0)] | None = None
    """Requests that may wait in each router until a worker group has room; further ones are refused. 0: they are given
    to worker groups at once, and wait there. Default: 1024, or 0 with --max-queued-requests, --max-queued-tokens or
    --scheduling-policy shortest, which say how requests wait in a worker group."""
    tenants: Tenants = Field(default_factory=dict)
    """Shares and limits by tenant, as a JSON object or @FILE that holds one: {"NAME": {"weight": 2,
    "max_running_requests": 8, "max_queued_requests": 32}, "*": {...}}; each number may be left out, and * stands for
    every other tenant. Default: all alike, without limits."""
    record_trace: AbsolutePath | None = None
    """File that each gateway records served requests in, for octavo simulate: times, lengths, and keyed hashes of
    prompts; no text. A name that is taken gets a number."""

    generation_config: Annotated[Text, AfterValidator(_folder_or("auto", "none"))] = "auto"
    """Defaults of temperature, top_p, top_k, min_p and repetition_penalty in requests without them: auto is the model's
    own generation_config.json, none is OpenAI's, else the folder of another such file."""
    max_logprobs: Annotated[Int, Field(ge=0, le=1024)] = 20
    """Alternatives with their log-probabilities that a request may ask for each token."""
    pooling: Literal["last", "mean"] = "last"
    """How /v1/embeddings makes a vector of a prompt's last hidden states where a request does not say."""
    chat_template: AbsolutePath | None = None
    """File with the Jinja template of chats. Default: the model's own."""
    trust_request_chat_template: bool = False
    """Let requests bring a chat template of their own, which is a program; it is run in a sandbox, for seconds."""
    tool_call_parser: Literal["auto", "hermes", "llama3_json", "mistral"] = "auto"
    """The form in which the model calls tools; auto tells it by the chat template."""
    reasoning_parser: Literal["auto", "none", "think"] = "auto"
    """How reasoning is told from the answer: think is between <think> and </think>; auto tells it by the chat
    template."""

    scheduling_policy: SchedulingPolicy = "priority"
    """Who is served first: who came first, the smaller priority, the least work, or each tenant in turn."""
    priority_aging_s: Annotated[float, Field(gt=0, le=86400, allow_inf_nan=False)] | None = None
    """Seconds of waiting that outweigh one unit of priority. Default: 60."""
    target_itl_ms: Annotated[float, Field(gt=0, le=60000, allow_inf_nan=False)] | None = None
    """Milliseconds that running streams shall wait for a token at the most; prompts are computed in smaller pieces
    for it. Default: no limit."""
    max_queued_requests: Count | None = None
    """Requests that may wait in a worker group; further ones are refused. Default: any number."""
    max_queued_tokens: Count | None = None
    """Tokens of prompts that may wait in a worker group; further ones are refused, but for the only one that waits.
    Default: any number."""
    async_scheduling: bool = True
    """Plan the next step while one runs."""
    enforce_eager: bool = False
    """Launch every kernel of a step by itself, also where a GPU could play back a recorded graph of them."""
    batch_invariant: bool = False
    """Compute a request to the same bits whatever runs beside it; slower on GPUs. On CPUs as far as its prompt is cut
    into the same chunks, and not with half precision."""

    block_size: Annotated[Int, AfterValidator(_power_of_two)] = 16
    """Tokens of a KV block: 16, 32, 64 or 128."""
    enable_prefix_caching: bool = True
    """Reuse the KV blocks of prompts that begin alike."""
    kv_cache_dtype: KvCacheDtype = "auto"
    """Type of K and V in the cache; auto is that of the activations, int8 and fp8_e4m3 take about a quarter of
    float32."""
    kv_cache_memory_bytes: Annotated[ByteSize, Field(ge=1024 * 1024)] | None = None
    """Memory of each worker for KV blocks, such as 2GiB. Default: on GPUs what is left within
    --gpu-memory-utilization, on CPUs a quarter of what is available, divided by the workers of the machine."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    """Part of each GPU's memory that weights, KV blocks, workspace and other programs may fill together; not for
    CPUs. Default: 0.9."""
    num_gpu_blocks_override: Annotated[Int, Field(ge=2)] | None = None
    """KV blocks of each worker, whatever its memory; for tests."""

    cache_dir: AbsolutePath = Field(default_factory=default_cache_dir)
    """Folder for converted models and compiled CPU kernels. Default: OCTAVO_CACHE_DIR, else ~/.cache/octavo."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """What the logs hold."""

    address: Text | None = None
    """Address of a running Ray cluster to join. Default: a Ray of our own, stopped at the end."""
    app_name: AppName = "octavo"
    """Name of the Ray Serve application."""
    route_prefix: RoutePrefix = "/"
    """Path under which the API is found."""
    startup_timeout_s: Annotated[float, Field(gt=0, le=86400, allow_inf_nan=False)] = 600.0
    """Seconds until every worker group must be ready."""

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> ServeConfig:
        """Validate values from a command line or a file. Raises ConfigurationError that names flags and limits."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigurationError(describe(error, tuple(cls.model_fields))) from None

    @model_validator(mode="after")
    def _check_combinations(self) -> ServeConfig:
        """Values that are fine alone and do not go together; their ConfigurationError passes through pydantic."""
        self.check_http()
        self._check_lengths()
        self._check_num_blocks()
        self._check_policy()
        self._check_invariance()
        if self.device == "cpu" and self.gpu_memory_utilization is not None:
            raise ConfigurationError(
                f"--gpu-memory-utilization {self.gpu_memory_utilization:g} says nothing where the device is cpu;"
                " --kv-cache-memory-bytes sets what KV may take there"
            )
        return self

    def _check_lengths(self) -> None:
        budget, length = self.max_num_batched_tokens, self.max_model_len
        if budget is not None:
            _at_least("max_num_batched_tokens", budget, "max_num_seqs", self.max_num_seqs)
        if length is not None:
            _at_least("max_model_len", length, "block_size", self.block_size)
            self.check_context(length)

    def check_context(self, length: int) -> None:
        """Raises ConfigurationError for a setting that cannot be with sequences of ``length`` tokens."""
        if self.max_output_tokens is not None and self.max_output_tokens >= length:
            raise ConfigurationError(
                f"--max-output-tokens: must be less than the context ({length} tokens, --max-model-len), "
                f"got {self.max_output_tokens}"
            )

    def _check_policy(self) -> None:
        if self.scheduling_policy == "fcfs" and self.priority_aging_s is not None:
            raise ConfigurationError(
                f"--priority-aging-s {self.priority_aging_s:g} says nothing with --scheduling-policy fcfs,"
                " which knows no priorities; leave one of them out"
            )

    def _check_invariance(self) -> None:
        if not self.batch_invariant:
            return
        if self.device == "cpu" and self.dtype in ("bfloat16", "float16"):
            raise ConfigurationError(
                f"--batch-invariant does not go with --dtype {self.dtype} where the device is cpu: its products depend"
                " on the number of rows there; those of float32, --quantization int8 and 4-bit weights do not"
            )
        if self.tensor_parallel_size > 2:  # of two numbers the sum is the same in any order
            raise ConfigurationError(
                f"--tensor-parallel-size: must be at most 2 with --batch-invariant, got {self.tensor_parallel_size};"
                " the order of a sum over more workers depends on the size of the batch"
            )

    def _check_num_blocks(self) -> None:
        num_blocks, length = self.num_gpu_blocks_override, self.max_model_len
        if num_blocks is None:
            return
        if length is not None and num_blocks * self.block_size < length:
            raise ConfigurationError(
                f"--num-gpu-blocks-override: {num_blocks} blocks of --block-size {self.block_size} hold"
                f" {num_blocks * self.block_size} tokens, fewer than one sequence of --max-model-len {length}"
            )
        if self.kv_cache_memory_bytes is not None:
            raise ConfigurationError(
                f"--num-gpu-blocks-override {num_blocks} and --kv-cache-memory-bytes"
                f" {int(self.kv_cache_memory_bytes)} both say how large the KV cache is; set one of them"
            )
        if num_blocks < self.max_num_seqs != DEFAULT_MAX_NUM_SEQS:  # the default is a limit that need not be reached
            raise ConfigurationError(
                f"--max-num-seqs: {self.max_num_seqs} sequences need a KV block each, more than the {num_blocks} of"
                " --num-gpu-blocks-override"
            )

    @property
    def num_queued_in_router(self) -> int | None:
        """How many may wait in a router; None: none does, all are given to worker groups at once."""
        if self.router_max_queued_requests is not None:
            return self.router_max_queued_requests or None
        waits_in_groups = self.max_queued_requests or self.max_queued_tokens or self.scheduling_policy == "shortest"
        return None if waits_in_groups else DEFAULT_ROUTER_MAX_QUEUED_REQUESTS

    def for_device(self, device: Literal["cpu", "cuda"]) -> ServeConfig:
        """The same with everything decided that depends on the device. Raises ConfigurationError, as ``parse``."""
        on_cpu = device == "cpu"
        values = self.model_dump(mode="json")
        values["device"] = device
        if self.replicas is None:
            values["replicas"] = 2 if on_cpu and self.model is None else 1
        if self.max_num_batched_tokens is None:
            values["max_num_batched_tokens"] = max(512 if on_cpu else 2048, self.max_num_seqs)
        return type(self).parse(values)


def _at_least(name: str, value: int, other: str, limit: int) -> None:
    if value < limit:
        raise ConfigurationError(f"{flag(name)}: must be at least {flag(other)} ({limit}), got {value}")
