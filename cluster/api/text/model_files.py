"""The JSON files of a model folder, as far as the API reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ....worker.errors import ConfigurationError


def read_json(path: Path) -> dict[str, Any]:
    """The object in the file; empty where there is no file. Raises ConfigurationError."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise ConfigurationError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"{path} holds no JSON object")
    return content
