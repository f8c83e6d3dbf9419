"""What takes long is not done on the event loop, and what an application has started ends with it."""

from __future__ import annotations

import threading
from typing import Any
from unittest.mock import Mock

import httpx2
import pytest
from one_model import one_model

from octavo.cluster.api.answer import prompt_echo, responses
from octavo.cluster.api.http.app import build_app
from octavo.cluster.api.request.judged import RequestJudge
from octavo.cluster.api.service import ServedModel
from octavo.cluster.api.text.processor import TextProcessor

COMPLETION = "/v1/completions"
BODY = {"model": "smollm2", "prompt": [5, 6, 7], "max_tokens": 3}


class Watched:
    """Notes for each call whether it is on the thread of the event loop."""

    def __init__(self, patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        self.on_loop: list[bool] = []
        wrapped, loop_thread = getattr(owner, name), threading.get_ident()

        def call(*args: Any, **options: Any) -> Any:
            self.on_loop.append(threading.get_ident() == loop_thread)
            return wrapped(*args, **options)

        patch.setattr(owner, name, call)


@pytest.mark.parametrize("field", ["echo", "return_token_ids"])
async def test_a_long_prompt_is_told_in_a_thread(
    client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    monkeypatch.setattr(responses, "_LONG_PROMPT", 3)
    wholes = Watched(monkeypatch, responses.AnswerFormat, "whole")
    chunks = Watched(monkeypatch, responses.AnswerFormat, "chunks")
    await client.post(COMPLETION, json={**BODY, field: True})
    await client.post(COMPLETION, json={**BODY, field: True, "stream": True})
    assert (wholes.on_loop, chunks.on_loop[0]) == ([False], False)
    assert all(chunks.on_loop[1:]), "what follows is short"


async def test_an_echo_is_decoded_in_a_thread(client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = Watched(monkeypatch, prompt_echo.PromptEcho, "__init__")
    assert (await client.post(COMPLETION, json={**BODY, "echo": True})).status_code == 200
    assert decoded.on_loop == [False]


async def test_the_lifespan_ends_the_judge(
    service: Any, text: TextProcessor, info: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = Mock()
    monkeypatch.setattr(RequestJudge, "close", close)
    app = build_app(service, one_model(text, info))
    async with app.router.lifespan_context(app):
        close.assert_not_called()
    close.assert_called_once()
