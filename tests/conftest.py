"""Fixtures shared by all tests."""

from __future__ import annotations

from pathlib import Path

import platformdirs
import pytest
from octavo.worker.checkpoint import resolve_model


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The embedded SmolLM2-135M-Instruct as a Hugging Face folder, from the same cache that ``octavo serve`` uses."""
    return resolve_model(None, cache_dir=platformdirs.user_cache_path("octavo"), report=print).path
