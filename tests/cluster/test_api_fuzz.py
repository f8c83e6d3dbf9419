"""Whatever is sent is answered with 200 or a 4xx: random bodies never meet a defect of ours."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from one_model import one_model
from random_bodies import any_json, chat_bodies, completion_bodies

from octavo.cluster.api.http.app import build_app
from octavo.cluster.api.service import ServedModel
from octavo.cluster.api.text.processor import TextProcessor


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", chat_bodies),
        ("/v1/completions", completion_bodies),
        ("/v1/completions", any_json),
    ],
    ids=["chat", "completion", "any JSON"],
)
def test_random_bodies(
    text: TextProcessor, info: ServedModel, service: Any, path: str, body: st.SearchStrategy[Any]
) -> None:
    app = build_app(service, one_model(text, info))

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
