"""The workloads by name, with the settings that each of them has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from ...router.simulator.trace_files import read_trace
from ...worker.errors import ConfigurationError
from .gsm8k import read_gsm8k
from .trace_workload import TraceWorkload
from .workload import Conversations, Length, Workload

DatasetName: TypeAlias = Literal["random", "prefix_repetition", "conversations", "agents", "gsm8k", "trace"]
DATASET_NAMES: tuple[DatasetName, ...] = get_args(DatasetName)


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetOptions:
    """As typed; None where nothing was said. Ranges of single numbers are judged already."""

    dataset_path: Path | None = None
    input_len: int | None = None
    output_len: int | None = None
    range_ratio: float | None = None
    prefix_len: int | None = None
    num_prefixes: int | None = None
    num_turns: int | None = None
    think_time_s: float | None = None
    num_shots: int | None = None
    length_scale: float | None = None


_LENGTHS = {"input_len", "output_len", "range_ratio", "prefix_len"}
_TURNS = {"num_turns", "think_time_s"}


@dataclass(frozen=True, slots=True)
class _Preset:
    """What one name means. An option that is not among ``honoured`` is refused."""

    honoured: frozenset[str]
    build: Callable[[DatasetOptions], Workload]


def workload_of(name: DatasetName, options: DatasetOptions) -> Workload:
    """Raises ConfigurationError for what the workload does not have, and for files that cannot be read."""
    preset = _PRESETS[name]
    for field in fields(options):
        if getattr(options, field.name) is not None and field.name not in preset.honoured:
            flag = field.name.replace("_", "-")
            raise ConfigurationError(f"--{flag}: says nothing with --dataset-name {name}")
    return preset.build(options)


def _conversations(defaults: Mapping[str, float]) -> Callable[[DatasetOptions], Conversations]:
    def build(options: DatasetOptions) -> Conversations:
        def value(name: str) -> float:
            given: float | None = getattr(options, name)
            return defaults[name] if given is None else given

        ratio = value("range_ratio")
        return Conversations(
            num_prefixes=int(value("num_prefixes")),
            prefix_len=int(value("prefix_len")),
            num_turns=int(value("num_turns")),
            input_len=Length(int(value("input_len")), ratio),
            output_len=Length(int(value("output_len")), ratio),
            think_time_s=value("think_time_s"),
        )

    return build


def _gsm8k(options: DatasetOptions) -> Workload:
    num_shots = 5 if options.num_shots is None else options.num_shots
    return read_gsm8k(_path(options, "gsm8k"), num_shots, options.output_len or 256)


def _trace(options: DatasetOptions) -> Workload:
    return TraceWorkload(read_trace(_path(options, "trace")), options.length_scale or 1.0, options.output_len)


def _path(options: DatasetOptions, name: str) -> Path:
    if options.dataset_path is None:
        raise ConfigurationError(f"--dataset-path: must be said with --dataset-name {name}")
    return options.dataset_path


_NO_TURNS = {"num_turns": 1, "think_time_s": 0.0, "range_ratio": 0.0}
_RANDOM = {"num_prefixes": 1, "prefix_len": 0, "input_len": 1024, "output_len": 128, **_NO_TURNS}
_PREFIXES = {"num_prefixes": 10, "prefix_len": 256, "input_len": 256, "output_len": 128, **_NO_TURNS}
_TALKS = {"num_prefixes": 4, "prefix_len": 256, "input_len": 64, "output_len": 128, "range_ratio": 0.5}
_AGENTS = {"num_prefixes": 1, "prefix_len": 1024, "input_len": 256, "output_len": 48, "range_ratio": 0.5}

_PRESETS: dict[DatasetName, _Preset] = {
    "random": _Preset(frozenset(_LENGTHS), _conversations(_RANDOM)),
    "prefix_repetition": _Preset(frozenset(_LENGTHS | {"num_prefixes"}), _conversations(_PREFIXES)),
    "conversations": _Preset(
        frozenset(_LENGTHS | _TURNS | {"num_prefixes"}),
        _conversations({**_TALKS, "num_turns": 4, "think_time_s": 0.0}),
    ),
    "agents": _Preset(
        frozenset(_LENGTHS | _TURNS | {"num_prefixes"}),
        _conversations({**_AGENTS, "num_turns": 10, "think_time_s": 0.0}),
    ),
    "gsm8k": _Preset(frozenset({"dataset_path", "num_shots", "output_len"}), _gsm8k),
    "trace": _Preset(frozenset({"dataset_path", "length_scale", "output_len"}), _trace),
}
