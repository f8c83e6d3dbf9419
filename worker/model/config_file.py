"""A parsed config.json whose every complaint names the file, the key and what is known."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ..errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """Values of a JSON object, and the file that they are from. All methods raise ConfigurationError."""

    path: Path
    values: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> ConfigFile:
        try:
            values = json.loads(path.read_text())
        except FileNotFoundError as error:
            raise ConfigurationError(f"{path} does not exist") from error
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"{path} cannot be read as JSON: {error}") from error
        if not isinstance(values, dict):
            raise ConfigurationError(f"{path} holds {type(values).__name__}, expected a JSON object")
        return cls(path, values)

    def refuse(self, what: str) -> NoReturn:
        raise ConfigurationError(f"{self.path}: {what}")

    def within(self, *keys: str) -> ConfigFile:
        """The object under the first of ``keys`` that has something in it, an empty one if none has."""
        for key in keys:
            value = self.values.get(key)
            if value and not isinstance(value, dict):
                self.refuse(f"{key} is {value!r}, expected a JSON object")
            if value:
                return ConfigFile(self.path, value)
        return ConfigFile(self.path, {})

    def replaced(self, **values: Any) -> ConfigFile:
        """The same file with other values under these keys; None: as if it were absent."""
        return ConfigFile(self.path, self.values | values)

    def number(self, key: str, default: float | None = None, *, least: float | None = None) -> float:
        value = self.values.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.refuse(f"{key} is {value!r}, expected a number" if value is not None else f"{key} is missing")
        if not math.isfinite(value):
            self.refuse(f"{key} is {value!r}, expected a finite number")
        if least is not None and value < least:
            self.refuse(f"{key} is {value!r}, expected at least {least:g}")
        return value

    def positive(self, key: str, default: int | None = None) -> int:
        value = self.number(key, default)
        if not isinstance(value, int) or value < 1:
            self.refuse(f"{key} is {value!r}, expected a positive whole number")
        return value

    def optional_positive(self, key: str, default: int | None = None) -> int | None:
        """None where neither the file nor the default has one."""
        return None if self.values.get(key) is None and default is None else self.positive(key, default)

    def positive_number(self, key: str, default: float | None = None) -> float:
        value = float(self.number(key, default))
        if value <= 0:
            self.refuse(f"{key} is {value:g}, expected a number above 0")
        return value

    def optional_positive_number(self, key: str, default: float | None = None) -> float | None:
        """None where the file says null, the default where it says nothing."""
        value = self.values.get(key, default)
        return None if value is None else self.positive_number(key, default)

    def at_most(self, key: str, most: int, key_of_most: str, default: int | None = None) -> int:
        value = self.positive(key, default)
        if value > most:
            self.refuse(f"{key} is {value}, expected at most {key_of_most}, {most}")
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            self.refuse(f"{key} is {value!r}, expected true or false")
        return default if value is None else value

    def choice(self, key: str, value: object, known: Iterable[str]) -> str:
        known = tuple(known)
        if value not in known:
            self.refuse(f"{key} is {value!r}; known: {', '.join(known)}")
        return str(value)
