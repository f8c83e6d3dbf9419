"""One cluster for all end-to-end tests: the embedded model on two groups, as ``make serve`` starts it, two gateways."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from openai import OpenAI
from serve_process import ServeProcess


@pytest.fixture(scope="package")
def cluster() -> Iterator[ServeProcess]:
    server = ServeProcess("--num-gateways", "2")
    yield server
    server.stop()


@pytest.fixture
def client(cluster: ServeProcess) -> OpenAI:
    return OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=60)
