"""What can be judged of the models before any process is started; ``preflight_memory.py`` judges their memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ..worker.checkpoint.store import resolve_model
from ..worker.errors import ConfigurationError
from ..worker.model.config import ModelConfig
from ..worker.model.device_limits import Device, check_any_device, check_device
from ..worker.model.partition import partition
from .api.chat.prompts import DEFAULT_OPTIONS, ChatOptions, ChatPrompts
from .api.http.auth import ApiKeys
from .api.request.fields import MAX_TEMPLATE_CHARS
from .api.request.generation_defaults import GenerationDefaults
from .config import ServeConfig, check_served_names
from .fake.engine import fake_engine_of
from .preflight_memory import device_of, set_num_blocks
from .trace_recorder import check_trace_file


class CheckedModels(NamedTuple):
    """What was found out about a cluster's models before anything is started."""

    config: ServeConfig
    """With contexts that fit."""
    folders: tuple[Path, ...]
    names: tuple[str, ...]
    """In the API."""


def check_models(config: ServeConfig, note: Callable[[str], None]) -> CheckedModels:
    """Fetch all models and judge everything that can be judged of them; ``note`` is told what people should know.
    Raises ConfigurationError, which begins with the entry where ``models`` has several."""
    fitted, folders, names = [], [], []
    for index, model in enumerate(config.each_model()):
        with config.errors_of_model(index):
            resolved = resolve_model(model.model, cache_dir=config.cache_dir, report=note)
            name = model.served_model_name or resolved.served_name
            of_model = _with_name(name, note) if config.models else note
            check_model(model, resolved.path)
            check_chat_template(model, resolved.path, of_model)
            fitted.append(fit_context(model, resolved.path, of_model))
            note_defaults(model, resolved.path, of_model)
        folders.append(resolved.path)
        names.append(name)
    check_served_names(names)
    return CheckedModels(config.with_models(fitted), tuple(folders), tuple(names))


def _with_name(name: str, note: Callable[[str], None]) -> Callable[[str], None]:
    """``note`` for what is said of one model of several."""
    return lambda text: note(f"{name}: {text}")


def check_model(config: ServeConfig, folder: Path) -> None:
    """Raises ConfigurationError when the model in ``folder`` cannot be served as ``config`` says."""
    model = ModelConfig.from_folder(folder)
    partition(model, config.tensor_parallel_size)
    check_any_device(model, config.quantization)
    if device_of(config) == "cpu":  # a GPU is asked by the worker that computes on it
        check_device(Device("cpu"), model, dtype=config.dtype, quantization=config.quantization)
    if config.model is not None:  # the embedded one is verified by checksum, and torch takes seconds to import
        from ..worker.model.check import check_model_folder

        check_model_folder(folder)
    if config.fake_engine is not None:
        fake_engine_of(config)
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
    limit, num_blocks = model.max_position_embeddings, set_num_blocks(config, model)
    fits = limit if num_blocks is None else num_blocks * config.block_size
    if config.max_model_len is not None or fits >= limit or fits == 0:
        return config
    note(f"--max-model-len: {fits:,} tokens, all that the KV pool as set can hold; the model's context is {limit:,}")
    return ServeConfig.parse(config.model_dump(mode="json") | {"max_model_len": fits})
