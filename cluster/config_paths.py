"""Where the paths in a configuration begin: those in a file at the folder that it lies in, others at the current one.

So a file means the same wherever a command is started that reads it. All are made absolute, since the processes that
use them run in other folders.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .config import ServeConfig
from .config_fields import plain_type
from .model_settings import NO_FOLDER, ModelSettings


def located(values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The values of a file or of other sources, with every path in them absolute. What is no text is left as it is, to
    be judged later."""
    settings = {name: _located(name, value, folder) for name, value in values.items()}
    if isinstance(entries := values.get("models"), list):
        settings["models"] = [located(entry, folder) if isinstance(entry, dict) else entry for entry in entries]
    return settings


def absolute_model(model: str, folder: Path | None = None) -> str:
    """A model that is a path, absolute; a hub id as it is. ``folder``: where paths begin, the current one if None."""
    path = _from(folder or Path.cwd(), model)
    is_path = model.startswith((".", "~", "/")) or model.endswith(".gguf") or path.exists()
    return str(path) if model and is_path else model


def _located(name: str, value: Any, folder: Path) -> Any:
    if not isinstance(value, str) or not value:
        return value
    if name == "model":
        return absolute_model(value, folder)
    if name == "tenants":
        return f"@{_from(folder, value[1:])}" if value.startswith("@") else value
    is_path = name in _PATHS or (name == "generation_config" and value not in NO_FOLDER)
    return str(_from(folder, value)) if is_path else value


def _from(folder: Path, path: str) -> Path:
    return folder / Path(path).expanduser()


_PATHS = frozenset(
    name
    for name, field in (ServeConfig.model_fields | ModelSettings.model_fields).items()
    if plain_type(field.annotation) is Path
)
