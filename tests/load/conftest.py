"""A scripted server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from scripted_api import ScriptedApi, scripted_api


@pytest.fixture
def api() -> Iterator[ScriptedApi]:
    with scripted_api() as server:
        yield server
