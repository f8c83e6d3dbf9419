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
# Half of the bodies are meant to be good, so that what lies behind the schemas is met as well.
roles = st.sampled_from(["system", "user", "assistant", "developer"])
good_messages = st.lists(
    st.fixed_dictionaries({"role": roles, "content": st.text(max_size=20)}), min_size=1, max_size=3
)
messages = good_messages | st.lists(
    st.fixed_dictionaries({"role": roles | json}, optional={"content": json, "name": json, "extra": json}), max_size=2
)
prompts = st.text(max_size=20) | st.lists(st.integers(0, 60_000), max_size=3) | st.lists(st.text(max_size=5)) | json
good_fields = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.floats(0, 2),
        "top_p": st.floats(0.01, 1),
        "top_k": st.integers(-1, 2**63 - 1),
        "max_tokens": st.integers(1, 40),
        "n": st.integers(1, 5),
        "use_beam_search": st.booleans(),
        "beam_width": st.integers(1, 40),
        "cache_prompt": st.booleans(),
        "queue_timeout": st.floats(0.1, 1e9),
        "min_tokens": st.integers(0, 3),
        "seed": st.integers(-(2**63), 2**63 - 1),
        "stop": st.text(min_size=1, max_size=3) | st.lists(st.text(min_size=1, max_size=3), max_size=3),
        "stop_token_ids": st.lists(st.integers(0, 50_000), max_size=3),
        "ignore_eos": st.booleans(),
        "stream": st.booleans(),
        "timeout": st.floats(0.1, 1e9),
        "user": words,
    },
)


def bodies(schema: Any, **required: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """A model and what else is required, good fields, and perhaps known or unknown fields of any value."""
    names = st.sampled_from(sorted(schema.model_fields)) | words
    bad_fields = st.dictionaries(names, json, max_size=0) | st.dictionaries(names, json, max_size=3)
    base = st.fixed_dictionaries({"model": st.just("smollm2"), **required})
    return st.builds(lambda base, good, bad: {**base, **good, **bad}, base, good_fields, bad_fields)


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

    @settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(body)
    def run(content: Any) -> None:
        asyncio.run(send(content))

    run()
