"""``POST /debug/profile``: asked for within limits, answered with where the traces are, or why there are none."""

from __future__ import annotations

import importlib.util
from typing import Any

import httpx2
import pytest

from octavo.cluster.config import ServeConfig
from octavo.worker.errors import ConfigurationError


async def test_a_profile_is_of_so_many_steps_of_all_groups_or_one(client: httpx2.AsyncClient, service: Any) -> None:
    answer = await client.post("/debug/profile")
    assert answer.json() == {"groups": service.profiled}
    await client.post("/debug/profile?steps=200&group=group-1")
    assert service.profiles == [(10, None), (200, "group-1")]


@pytest.mark.parametrize(
    ("query", "param"), [("steps=0", "steps"), ("steps=201", "steps"), ("steps=x", "steps"), ("step=3", "step")]
)
async def test_what_is_not_to_be_profiled_is_refused_by_name(
    client: httpx2.AsyncClient, service: Any, query: str, param: str
) -> None:
    answer = await client.post(f"/debug/profile?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert service.profiles == []


@pytest.mark.parametrize(
    ("results", "status"),
    [
        ({"a": {"error": "busy", "is_busy": True}}, 429),
        ({"a": {"error": "lost"}}, 503),
        ({}, 503),
        ({"a": {"error": "lost"}, "b": {"steps": 3, "files": {}}}, 200),
    ],
)
async def test_a_profile_that_there_is_not_is_an_error(
    client: httpx2.AsyncClient, service: Any, results: dict[str, Any], status: int
) -> None:
    service.profiled = results
    assert (await client.post("/debug/profile")).status_code == status


def test_spans_without_their_packages_are_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"--otlp-traces-endpoint.*pip install 'octavo\[otel\]'"):
        ServeConfig.parse({"otlp_traces_endpoint": "http://collector:4318/v1/traces"})


@pytest.mark.parametrize("url", ["collector:4318", "grpc://collector:4317", "http://"])
def test_an_endpoint_of_another_kind_is_refused_by_name(url: str) -> None:
    with pytest.raises(ConfigurationError, match="--otlp-traces-endpoint"):
        ServeConfig.parse({"otlp_traces_endpoint": url})
