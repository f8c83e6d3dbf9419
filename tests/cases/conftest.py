"""The faults that users of such servers have met, each a test with its id, against real clusters.

Everything goes over HTTP, through the gateways and the router. After each test the canary answers as it did before.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from api_calls import complete
from openai import OpenAI
from serve_process import ServeProcess

CANARY = {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="package")
def cluster() -> Iterator[ServeProcess]:
    """Two groups, two gateways."""
    server = ServeProcess("--num-gateways", "2", "--max-num-seqs", "16", "--max-model-len", "2048")
    yield server
    server.stop()


@pytest.fixture(scope="package")
def client(cluster: ServeProcess) -> OpenAI:
    return OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=120)


@pytest.fixture(scope="package")
def canary_text(cluster: ServeProcess) -> str:
    return complete(cluster, **CANARY).text


@pytest.fixture
def canary(cluster: ServeProcess, canary_text: str) -> Iterator[None]:
    """What a test did has disturbed nothing."""
    yield
    assert complete(cluster, **CANARY).text == canary_text


@pytest.fixture(params=[False, True], ids=["whole", "streamed"])
def stream(request: Any) -> bool:
    return bool(request.param)
