"""What can be judged of a model and of this machine's memory before any process is started."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

from ..worker.errors import ConfigurationError
from ..worker.host_memory import host_memory
from ..worker.ledger import gib
from ..worker.model.config import ModelConfig
from ..worker.model.device_limits import Device, check_any_device, check_device
from ..worker.model.partition import partition
from .api.chat.prompts import DEFAULT_OPTIONS, ChatOptions, ChatPrompts
from .api.http.auth import ApiKeys
from .api.request.fields import MAX_TEMPLATE_CHARS
from .api.request.generation_defaults import GenerationDefaults
from .config import ServeConfig
from .trace_recorder import check_trace_file

_PROCESS_BYTES = 400 * 2**20
"""A rank's process without weights and KV blocks, measured with torch 2.13."""

_CPU_KV_ITEMSIZE = 4
"""On CPUs KV is float32, whatever the weights are, unless it is quantised."""

_SCALE_BYTES = 4
"""Of a token and head of quantised KV, beside a byte for each number."""


def check_model(config: ServeConfig, folder: Path) -> None:
    """Raises ConfigurationError when the model in ``folder`` cannot be served as ``config`` says."""
    model = ModelConfig.from_folder(folder)
    partition(model, config.tensor_parallel_size)
    check_any_device(model, config.quantization)
    if _device(config) == "cpu":  # a GPU is asked by the worker that computes on it
        check_device(Device("cpu"), model, dtype=config.dtype, quantization=config.quantization)
    if config.model is not None:  # the embedded one is verified by checksum, and torch takes seconds to import
        from ..worker.model.check import check_model_folder

        check_model_folder(folder)
    GenerationDefaults.load(config.generation_config, folder)
    if config.record_trace is not None and config.address is None:  # else a gateway looks, on the node that it is on
        check_trace_file(config.record_trace)
    limit = model.longest_context
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigurationError(f"--max-model-len: the model's context is {limit} tokens, got {config.max_model_len}")
    config.check_context(config.max_model_len or model.max_position_embeddings)


def check_api_keys(config: ServeConfig) -> None:
    """Raises ConfigurationError for a file of API keys that the gateways will not be able to use."""
    if config.api_key_file is not None and config.address is None:  # else a gateway looks, on the node that it is on
        ApiKeys(config.api_key, config.api_key_file)


def check_chat_template(config: ServeConfig, folder: Path, note: Callable[[str], None]) -> None:
    """Say what the chat template can do. Raises ConfigurationError for one that the gateways would refuse, alone or
    with the parsers that were set.

    It is the tokenizer that knows the template. Reading it takes about half a second, which the embedded model's is not
    worth: its own template works.
    """
    template = read_chat_template(config)
    parsers = ChatOptions(tool_call_parser=config.tool_call_parser, reasoning_parser=config.reasoning_parser)
    if config.model is None and template is None and parsers == DEFAULT_OPTIONS:
        return
    from .api.text.processor import template_source  # transformers' part for tokenizers: seconds

    source = template_source(folder, template)
    if source is not None:
        name = f"the chat template of {folder}" if template is None else f"--chat-template: {config.chat_template}"
        source = replace(source, name=name)
    note(ChatPrompts(source, parsers).support.summary())


def read_chat_template(config: ServeConfig) -> str | None:
    """The text of --chat-template; None: the model's own. Raises ConfigurationError."""
    if config.chat_template is None:
        return None
    try:
        template = config.chat_template.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--chat-template: {config.chat_template} cannot be read: {error}") from error
    if len(template) > MAX_TEMPLATE_CHARS:
        raise ConfigurationError(
            f"--chat-template: {config.chat_template} has {len(template)} characters, at most {MAX_TEMPLATE_CHARS} are"
            " allowed"
        )
    return template


def note_defaults(config: ServeConfig, folder: Path, note: Callable[[str], None]) -> None:
    """Say which sampling defaults are the model's and not OpenAI's."""
    own = GenerationDefaults.load(config.generation_config, folder).own()
    if own:
        values = ", ".join(f"{name} {value:g}" for name, value in own.items())
        note(f"requests that say nothing get {values}, by generation_config.json (--generation-config none: OpenAI's)")


def fit_context(config: ServeConfig, folder: Path, note: Callable[[str], None]) -> ServeConfig:
    """``config`` with the context lowered to what the KV pool holds, where the pool was set and the context was not.

    Only here, where all parts of the cluster are still to learn the context. A pool whose size shows when the workers
    measure their memory is refused by them when it is too small.
    """
    model = ModelConfig.from_folder(folder)
    limit, num_blocks = model.max_position_embeddings, _set_num_blocks(config, model)
    fits = limit if num_blocks is None else num_blocks * config.block_size
    if config.max_model_len is not None or fits >= limit or fits == 0:
        return config
    note(f"--max-model-len: {fits:,} tokens, all that the KV pool as set can hold; the model's context is {limit:,}")
    return ServeConfig.parse(config.model_dump(mode="json") | {"max_model_len": fits})


def check_memory(config: ServeConfig, folder: Path) -> None:
    """Raises ConfigurationError when this machine's memory cannot hold all worker groups on its CPUs."""
    if _device(config) != "cpu":
        return
    replicas = config.for_device("cpu").replicas or 1
    group_bytes = _weight_bytes(config, folder) + config.tensor_parallel_size * _PROCESS_BYTES
    available = host_memory().available
    if replicas * group_bytes > available:
        raise ConfigurationError(
            f"--replicas: {replicas} worker groups need about {replicas * group_bytes / 2**30:.1f} GiB for weights and "
            f"processes, but {available / 2**30:.1f} GiB are available; at most {available // group_bytes}"
        )
    _check_pools(config, folder, replicas * config.tensor_parallel_size, available - replicas * group_bytes)


def _weight_bytes(config: ServeConfig, folder: Path) -> int:
    """Of the files, or of about what is left of them: with --quantization a byte for each number of the matrices."""
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    model = ModelConfig.from_folder(folder)
    return stored if config.quantization is None else min(stored, model.num_matrix_values + 4 * model.num_table_values)


def _check_pools(config: ServeConfig, folder: Path, num_ranks: int, left: int) -> None:
    """Raises ConfigurationError when the KV pools that were set do not fit in ``left`` bytes together.

    Each rank sees to its own pool; that those of all ranks fit is seen best before any of them is there.
    """
    block_bytes = _bytes_per_block(config, ModelConfig.from_folder(folder), _CPU_KV_ITEMSIZE)
    if config.num_gpu_blocks_override is not None:
        flag, value, unit = "--num-gpu-blocks-override", config.num_gpu_blocks_override, block_bytes
    elif config.kv_cache_memory_bytes is not None:
        flag, value, unit = "--kv-cache-memory-bytes", int(config.kv_cache_memory_bytes), 1
    else:
        return
    if num_ranks * value * unit > left:
        raise ConfigurationError(
            f"{flag} is {value}, which takes {gib(num_ranks * value * unit)} for the KV of {num_ranks} workers, but "
            f"weights and processes leave {gib(left)} of this machine's memory; at most {left // (num_ranks * unit)}"
        )


def _set_num_blocks(config: ServeConfig, model: ModelConfig) -> int | None:
    """KV blocks of a worker, if they are set. None as well where it takes the workers to know."""
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override
    itemsize = _kv_itemsize(config, model)
    if config.kv_cache_memory_bytes is None or itemsize is None:
        return None
    return int(config.kv_cache_memory_bytes) // _bytes_per_block(config, model, itemsize)


def _bytes_per_block(config: ServeConfig, model: ModelConfig, itemsize: int) -> int:
    """K and V of one block in all layers, on the rank with the most KV heads; ``itemsize`` of a plain number."""
    kv_heads = max(len(share.kv_heads) for share in partition(model, config.tensor_parallel_size))
    head_bytes = model.head_dim * itemsize if config.kv_cache_dtype == "auto" else model.head_dim + _SCALE_BYTES
    return model.num_layers * 2 * kv_heads * config.block_size * head_bytes


def _kv_itemsize(config: ServeConfig, model: ModelConfig) -> int | None:
    """Bytes of a number in the KV cache; None where the device is not known yet."""
    device = _device(config)
    if device != "cuda":
        return _CPU_KV_ITEMSIZE if device == "cpu" else None
    import torch

    from ..worker.model.dtype import choose_dtype

    return choose_dtype(config.dtype, model, torch.device("cuda")).itemsize


def _device(config: ServeConfig) -> Literal["cpu", "cuda"] | None:
    """None: a cluster that is joined decides."""
    if config.device != "auto":
        return config.device
    if config.address is not None:
        return None
    return "cuda" if _num_gpus() > 0 else "cpu"


def _num_gpus() -> int:
    import pynvml

    try:
        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError:
        return 0
