"""Reads a safetensors checkpoint into a model, each rank only its slices: one loop over the layers.

A checkpoint is ``model.safetensors.index.json`` with its shards, or all ``*.safetensors`` files of the folder.
Every tensor is either used or named in an error; every layer is filled.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ...kernels.backend import Kernels
from ..errors import ConfigurationError
from .layers import Layer
from .matrices import Part

INDEX = "model.safetensors.index.json"

_KINDS = {True: ("F32", "BF16", "F16", "F64"), False: ("I32",)}
"""The types, by safetensors' names, that a tensor may have whose place in the model holds floating-point numbers, and
integers."""

Progress = Callable[[int, int], None]
"""Called with (layers loaded, layers in all)."""


def load_weights(
    layers: Iterable[Layer], folder: Path, kernels: Kernels, *, may_be_unused: frozenset[str], progress: Progress
) -> None:
    """Fill and prepare every layer from ``folder``.

    Tensors named in ``may_be_unused``, stored rotary frequencies and biases of zeros may stay unread. Raises
    ConfigurationError, with the tensor's or file's name, for one that is missing, left unused, of another shape or kind
    of number, or in a file cut off.
    """
    todo = list(layers)
    with ExitStack() as stack:
        checkpoint = Checkpoint(folder, stack)
        for done, layer in enumerate(todo):
            progress(done, len(todo))
            for part in layer.parts():
                checkpoint.copy(part)
            layer.prepare(kernels)
        progress(len(todo), len(todo))
        checkpoint.refuse_unused(may_be_unused)


def check_weights(layers: Iterable[Layer], folder: Path, *, may_be_unused: frozenset[str]) -> None:
    """Raise what ``load_weights`` would raise, without reading a weight; the layers may lie on the meta device."""
    with ExitStack() as stack:
        checkpoint = Checkpoint(folder, stack)
        for layer in layers:
            for part in layer.parts():
                checkpoint.find(part)
        checkpoint.refuse_unused(may_be_unused)


class Checkpoint:
    """The open files of a checkpoint and which tensors were read from them."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._file_of: dict[str, Any] = {}
        for path, names in _files(folder).items():
            file = _open(path, stack)
            held = frozenset(file.keys())
            for name in held if names is None else names:
                if name not in held:
                    raise ConfigurationError(f"{path} lacks the tensor {name}, which {INDEX} says is there")
                self._file_of[name] = file
        self._unread = set(self._file_of)

    def copy(self, part: Part) -> None:
        """Read one slice into its place, converting the dtype."""
        part.target.copy_(self.find(part)[part.slices])

    def find(self, part: Part) -> Any:
        """The stored tensor, of which the slice can be read. Raises ConfigurationError for one that does not fit."""
        file = self._file_of.get(part.name)
        if file is None:
            raise ConfigurationError(f"{self._folder} lacks the tensor {part.name} (shape {_shown(part.shape)})")
        source = file.get_slice(part.name)
        found = tuple(source.get_shape())
        if found != part.shape:
            raise ConfigurationError(
                f"tensor {part.name} in {self._folder} has the shape {_shown(found)}, expected {_shown(part.shape)} "
                "by config.json"
            )
        known = _KINDS[part.target.dtype.is_floating_point]
        if source.get_dtype() not in known:
            raise ConfigurationError(
                f"tensor {part.name} in {self._folder} has the type {source.get_dtype()}; known: {', '.join(known)}"
            )
        self._unread.discard(part.name)
        return source

    def refuse_unused(self, allowed: frozenset[str]) -> None:
        unused = sorted(name for name in self._unread if name not in allowed and not self._changes_nothing(name))
        if unused:
            raise ConfigurationError(
                f"{self._folder} holds {len(unused)} tensors that the model does not use, the first is {unused[0]}"
            )

    def _changes_nothing(self, name: str) -> bool:
        """Rotary frequencies are computed; early GPTQ checkpoints store biases of zeros for models without any."""
        if name.endswith(".bias"):
            return not bool(self._file_of[name].get_tensor(name).any())
        return name.endswith("rotary_emb.inv_freq")


def _files(folder: Path) -> Mapping[Path, list[str] | None]:
    """Each file, with the tensors to take from it; None: all that it holds."""
    index = folder / INDEX
    if not index.exists():
        paths = sorted(path for path in folder.glob("*.safetensors") if path.is_file())
        if not paths:
            raise ConfigurationError(f"{folder} has no .safetensors file")
        return dict.fromkeys(paths)
    files: dict[Path, list[str] | None] = {}
    for name, file in _weight_map(index).items():
        path = folder / file
        if not path.is_file():
            raise ConfigurationError(f"{path} is missing; {INDEX} says that it holds {name}")
        names = files.setdefault(path, [])
        assert names is not None
        names.append(name)
    return files


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"{index} has no readable weight_map: {error!r}") from error
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ConfigurationError(f"{index}: weight_map does not map tensor names to files")
    return weight_map


def _open(path: Path, stack: ExitStack) -> Any:
    try:
        return stack.enter_context(safe_open(path, framework="pt"))
    except (SafetensorError, OSError) as error:
        raise ConfigurationError(
            f"{path} ({path.stat().st_size} bytes) is no whole safetensors file: {error}; was it cut off?"
        ) from error


def _shown(shape: tuple[int, ...]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"
