"""Fixtures shared by all tests."""

from __future__ import annotations

from pathlib import Path

import platformdirs
import pytest
from hypothesis import HealthCheck, settings
from rank_group import StartGroup, start_ranks

from octavo.worker.checkpoint import resolve_model

# No test fails because the machine is busy. ``--hypothesis-profile=long`` is for an hour's run by hand.
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("long", settings.get_profile("default"), max_examples=10_000)
settings.load_profile("default")


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The embedded SmolLM2-135M-Instruct as a Hugging Face folder, from the same cache that ``octavo serve`` uses."""
    return resolve_model(None, cache_dir=platformdirs.user_cache_path("octavo"), report=print).path


@pytest.fixture(scope="session")
def start_group() -> StartGroup:
    """``with start_group(model_dir, size, num_blocks=…) as (runner, executor)``: the leader of ``size`` real ranks."""
    return start_ranks
