"""Two clusters for all end-to-end tests, both with the embedded model: a wide one and a narrow one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from openai import OpenAI
from serve_process import ServeProcess


@pytest.fixture(scope="package")
def cluster() -> Iterator[ServeProcess]:
    """Two groups, two gateways. Batch and queue are small enough for a test to fill them."""
    server = ServeProcess("--num-gateways", "2", "--max-num-seqs", "8", "--max-queued-requests", "16")
    yield server
    server.stop()


@pytest.fixture(scope="package")
def client(cluster: ServeProcess) -> OpenAI:
    return open_client(cluster)


NARROW = {
    "replicas": 1,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 256,
    "max_queued_requests": 2,
    "max_queued_tokens": 600,
    "max_model_len": 4_096,
    "max_output_tokens": 256,
    "num_gpu_blocks_override": 288,
}
"""Flags of the narrow cluster. Its pool holds one sequence of --max-model-len and a little beside it."""


@pytest.fixture(scope="package")
def narrow() -> Iterator[ServeProcess]:
    """One group, one gateway, and every limit within a test's reach."""
    server = ServeProcess(*(word for name, value in NARROW.items() for word in (_flag(name), str(value))))
    yield server
    server.stop()


@pytest.fixture(scope="package")
def narrow_client(narrow: ServeProcess) -> OpenAI:
    return open_client(narrow)


@pytest.fixture(scope="session")
def limits() -> dict[str, int]:
    """The narrow cluster's, by the names of its flags."""
    return NARROW


def open_client(server: ServeProcess) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
