"""Whatever is sent is answered with 200 or a 4xx: random bodies never meet a defect of ours."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.cluster.api.app import build_app
from octavo.cluster.api.schemas import ChatCompletionRequest, CompletionRequest
from octavo.cluster.api.service import ServedModel
from octavo.cluster.api.text import TextProcessor

numbers = st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False) | st.integers(-2, 3)
words = st.text(max_size=8) | st.sampled_from(["text", "user", "system", "smollm2", "none", "auto"])
json = st.recursive(
    st.none() | st.booleans() | numbers | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=8,
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "developer"]) | json},
        optional={"content": st.text(max_size=20) | json, "name": json, "extra": json},
    ),
    max_size=3,
)
prompts = st.text(max_size=20) | st.lists(st.text(max_size=5) | st.integers(0, 60_000), max_size=3) | json


def bodies(schema: Any, **required: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Half-right bodies: known fields with random values, on top of what is required."""
    known = st.dictionaries(st.sampled_from(sorted(schema.model_fields)) | words, json, max_size=4)
    base = st.fixed_dictionaries({"model": st.just("smollm2") | json}, optional=required)
    return st.builds(lambda b, k: {**k, **b}, base, known)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", bodies(ChatCompletionRequest, messages=messages)),
        ("/v1/completions", bodies(CompletionRequest, prompt=prompts)),
        ("/v1/completions", json),
    ],
    ids=["chat", "completion", "any JSON"],
)
def test_random_bodies(
    text: TextProcessor, info: ServedModel, service: Any, path: str, body: st.SearchStrategy[Any]
) -> None:
    app = build_app(service, text, info)

    async def send(content: Any) -> None:
        transport = httpx2.ASGITransport(app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://octavo") as client:
            answer = await client.post(
                path, content=orjson.dumps(content), headers={"content-type": "application/json"}
            )
        assert answer.status_code == 200 or 400 <= answer.status_code < 500, answer.text
        if answer.status_code != 200:
            assert answer.json()["error"]["message"]

    @settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(body)
    def run(content: Any) -> None:
        asyncio.run(send(content))

    run()
