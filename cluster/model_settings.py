"""ModelSettings: what can be set about one model: which, how many copies, how it is computed, what requests may ask.

The fields stand at the top of a configuration, for every model, or in an entry of ``models``, for that one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, ByteSize, Field

from ..router.simulator.hardware import SETUPS
from ..worker.errors import ConfigurationError
from ..worker.spec import KvCacheDtype, Quantization
from .config_errors import flag
from .config_fields import AbsolutePath, Count, Settings, Text
from .placement import Placement

DEFAULT_MAX_NUM_SEQS = 64
DEFAULT_GPU_MEMORY_UTILIZATION = 0.9


FAKE_ENGINE_DECIDES = (
    "max_replicas",
    "tensor_parallel_size",
    "placement",
    "dtype",
    "quantization",
    "enforce_eager",
    "batch_invariant",
    "kv_cache_dtype",
    "kv_cache_memory_bytes",
    "gpu_memory_utilization",
)
"""Fields that say nothing where no model is computed."""

NO_FOLDER = ("auto", "none")
"""What --generation-config can be beside a folder."""


def _folder_or_word(value: str) -> str:
    """A path is made absolute, since the cluster runs in another folder."""
    return value if value in NO_FOLDER else str(Path(value).expanduser().absolute())


def _setup_or_file(value: str) -> str:
    return value if value in SETUPS else str(Path(value).expanduser().absolute())


class ModelSettings(Settings):
    """One model."""

    model: Text | None = None
    """Folder in Hugging Face format, hub id, GGUF file, or gemma-3-270m. Default: SmolLM2-135M-Instruct, embedded."""
    served_model_name: Text | None = None
    """Name of the model in the API. Default: the hub id, or the name of the folder or file."""

    replicas: Annotated[Count, Field(le=1024)] | None = None
    """Worker groups; each holds one copy of the model. Default: 2 for the embedded model on CPUs, else 1."""
    max_replicas: Annotated[Count, Field(le=1024)] | None = None
    """Worker groups at the most: between --replicas and this many, as the expected time to the first token and free KV
    blocks need. Default: always --replicas."""
    target_ttft_ms: Annotated[float, Field(gt=0, le=600000, allow_inf_nan=False)] | None = None
    """Expected milliseconds to the first token from which --max-replicas adds worker groups. Default: 1000."""
    downscale_delay_s: Annotated[float, Field(ge=0, le=86400, allow_inf_nan=False)] | None = None
    """Seconds for which there must be too many worker groups before --max-replicas takes one away. Default: 300."""
    tensor_parallel_size: Annotated[Count, Field(le=64)] = 1
    """Workers, each with a device of its own, that one copy of the model is split over."""
    placement: Placement = "node"
    """Where the workers of a copy lie. node: all on one machine; nodes: on as few machines as can be; spread: each on
    a machine of its own."""
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

    generation_config: Annotated[Text, AfterValidator(_folder_or_word)] = "auto"
    """Defaults of temperature, top_p, top_k, min_p and repetition_penalty in requests without them: auto is the model's
    own generation_config.json, none is OpenAI's, else the folder of another such file."""
    max_logprobs: Annotated[int, Field(ge=0, le=1024)] = 20
    """Alternatives with their log-probabilities that a request may ask for each token."""
    pooling: Literal["last", "mean"] = "last"
    """How /v1/embeddings makes a vector of a prompt's last hidden states where a request does not say."""
    chat_template: AbsolutePath | None = None
    """File with the Jinja template of chats. Default: the model's own."""
    trust_request_chat_template: bool = False
    """Let requests bring a chat template of their own, which is a program; it is run in a sandbox, for seconds."""
    tool_call_parser: Literal["auto", "hermes", "llama3_json", "mistral"] = "auto"
    """The form in which the model calls tools; auto tells it by the chat template."""
    reasoning_parser: Literal["auto", "none", "think", "mistral"] = "auto"
    """How reasoning is told from the answer: think is between <think> and </think>, mistral between [THINK] and
    [/THINK]; auto tells it by the chat template."""

    fake_engine: Annotated[Text, AfterValidator(_setup_or_file)] | None = None
    """Compute nothing: a step takes as long as it would on h100-8b, h100-70b-tp4, h200-8b or h200-70b-tp2 (GPU, model,
    tensor parallelism), or by a file of measured steps as octavo simulate --step-times takes it, and answers are words
    by chance. To try routing and the cluster with hundreds of worker groups on one machine."""
    target_itl_ms: Annotated[float, Field(gt=0, le=60000, allow_inf_nan=False)] | None = None
    """Milliseconds that running streams shall wait for a token at the most; prompts are computed in smaller pieces
    for it. Default: no limit."""
    async_scheduling: bool = True
    """Plan the next step while one runs."""
    enforce_eager: bool = False
    """Launch every kernel of a step by itself, also where a GPU could play back a recorded graph of them."""
    batch_invariant: bool = False
    """Compute a request to the same bits whatever runs beside it; slower on GPUs. On CPUs as far as its prompt is cut
    into the same chunks, and not with half precision."""

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
    num_gpu_blocks_override: Annotated[int, Field(ge=2)] | None = None
    """KV blocks of each worker, whatever its memory; for tests."""

    @property
    def most_replicas(self) -> int:
        """Worker groups that there may be at once; decided for a device, which may say how many there are without."""
        return self.max_replicas or self.replicas or 1

    def check_context(self, length: int) -> None:
        """Raises ConfigurationError for a setting that cannot be with sequences of ``length`` tokens."""
        if self.max_output_tokens is not None and self.max_output_tokens >= length:
            raise ConfigurationError(
                f"--max-output-tokens: must be less than the context ({length} tokens, --max-model-len), "
                f"got {self.max_output_tokens}"
            )

    def check_model(self, device: str, block_size: int) -> None:
        """Raises ConfigurationError for values that are fine alone and do not go together."""
        self._check_lengths(block_size)
        self._check_replicas()
        self._check_num_blocks(block_size)
        self._check_invariance(device)
        self._check_fake_engine()
        if device == "cpu" and self.gpu_memory_utilization is not None:
            raise ConfigurationError(
                f"--gpu-memory-utilization {self.gpu_memory_utilization:g} says nothing where the device is cpu;"
                " --kv-cache-memory-bytes sets what KV may take there"
            )

    def _check_lengths(self, block_size: int) -> None:
        budget, length = self.max_num_batched_tokens, self.max_model_len
        if budget is not None:
            _at_least("max_num_batched_tokens", budget, "max_num_seqs", self.max_num_seqs)
        if length is not None:
            _at_least("max_model_len", length, "block_size", block_size)
            self.check_context(length)

    def _check_replicas(self) -> None:
        if self.max_replicas is not None:
            _at_least("max_replicas", self.max_replicas, "replicas", self.replicas or 1)
            return
        for name in ("target_ttft_ms", "downscale_delay_s"):
            if (value := getattr(self, name)) is not None:
                raise ConfigurationError(
                    f"--{name.replace('_', '-')} {value:g} says nothing without --max-replicas, up to which there are"
                    " more worker groups where they are needed"
                )

    def _check_invariance(self, device: str) -> None:
        if not self.batch_invariant:
            return
        if device == "cpu" and self.dtype in ("bfloat16", "float16"):
            raise ConfigurationError(
                f"--batch-invariant does not go with --dtype {self.dtype} where the device is cpu: its products depend"
                " on the number of rows there; those of float32, --quantization int8 and 4-bit weights do not"
            )
        if self.tensor_parallel_size > 2:  # of two numbers the sum is the same in any order
            raise ConfigurationError(
                f"--tensor-parallel-size: must be at most 2 with --batch-invariant, got {self.tensor_parallel_size};"
                " the order of a sum over more workers depends on the size of the batch"
            )

    def _check_fake_engine(self) -> None:
        if self.fake_engine is None:
            return
        for name in FAKE_ENGINE_DECIDES:
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ConfigurationError(f"{flag(name)} says nothing with --fake-engine, which computes no model")

    def _check_num_blocks(self, block_size: int) -> None:
        num_blocks, length = self.num_gpu_blocks_override, self.max_model_len
        if num_blocks is None:
            return
        if length is not None and num_blocks * block_size < length:
            raise ConfigurationError(
                f"--num-gpu-blocks-override: {num_blocks} blocks of --block-size {block_size} hold"
                f" {num_blocks * block_size} tokens, fewer than one sequence of --max-model-len {length}"
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


def _at_least(name: str, value: int, other: str, limit: int) -> None:
    if value < limit:
        raise ConfigurationError(f"{flag(name)}: must be at least {flag(other)} ({limit}), got {value}")
