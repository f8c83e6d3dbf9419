"""GGUFFile: the metadata and tensors of a GGUF file (ggml's docs/gguf.md)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize
from numpy.typing import NDArray

from ..errors import ConfigurationError


class GGUFFile:
    """Metadata and tensors of a GGUF file. Raises ConfigurationError when it cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._reader = GGUFReader(path)
        except (ValueError, OSError, IndexError, KeyError) as error:
            size = path.stat().st_size
            reason = f"{error}; it has {size} bytes, is that all of it?"
            raise ConfigurationError(f"{path} cannot be read as a GGUF file: {reason}") from error
        self.architecture = str(self.require("general.architecture"))
        """By llama.cpp's name; the keys of the model begin with it."""
        self.tensor_names = frozenset(tensor.name for tensor in self._reader.tensors)

    def get(self, key: str, default: Any = None) -> Any:
        field = self._reader.fields.get(key)
        return default if field is None else field.contents()

    def require(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ConfigurationError(f"{self.path} lacks the key {key}")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """Raises ConfigurationError for what is no positive number, as a list of one for each layer."""
        value = self.require(key) if default is None else self.get(key, default)
        if not isinstance(value, int) or value < 1:
            raise ConfigurationError(f"{self.path}: {key} is {value!r}, expected a positive whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """The shortest decimal that is the same float32: 1e-05 for 9.999999747378752e-06. Raises ConfigurationError."""
        value = self.require(key) if default is None else self.get(key, default)
        if not isinstance(value, int | float):
            raise ConfigurationError(f"{self.path}: {key} is {value!r}, expected a number")
        return float(str(np.float32(value)))

    def own(self, key: str) -> str:
        """The key of the model's architecture: ``llama.block_count`` for ``block_count``."""
        return f"{self.architecture}.{key}"

    def tensor(self, name: str) -> NDArray[np.float32] | None:
        """The values of a tensor that need not be there."""
        return next((self._values(tensor) for tensor in self._reader.tensors if tensor.name == name), None)

    def tensors(self) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Each tensor's GGUF name and its values, dequantised to float32, the output dimension first."""
        for tensor in self._reader.tensors:
            yield tensor.name, self._values(tensor)

    def _values(self, tensor: ReaderTensor) -> NDArray[np.float32]:
        try:
            return dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise ConfigurationError(f"{self.path}: tensor {tensor.name} has the unknown type {kind}") from error
