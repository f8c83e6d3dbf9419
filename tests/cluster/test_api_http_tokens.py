"""/tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from octavo.cluster.api.text.processor import TextProcessor

MESSAGES = [{"role": "user", "content": "How are you?"}]
TURNS = [*MESSAGES, {"role": "assistant", "content": "I am"}]


async def test_a_text_and_back(client: httpx2.AsyncClient) -> None:
    answer = (
        await client.post("/tokenize", json={"prompt": "Hello \u00e4\U0001f600", "return_token_strs": True})
    ).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert (answer["max_model_len"], answer["token_strs"][0]) == (256, "Hello")
    back = await client.post("/detokenize", json={"model": "smollm2", "tokens": answer["tokens"]})
    assert back.json() == {"prompt": "Hello \u00e4\U0001f600"}


@pytest.mark.parametrize(
    "fields", [{}, {"add_generation_prompt": False}, {"messages": TURNS, "continue_final_message": True}]
)
async def test_a_chat_has_the_tokens_of_its_completion(
    client: httpx2.AsyncClient, service: Any, fields: dict[str, Any]
) -> None:
    body = {"messages": MESSAGES, **fields}
    tokens = (await client.post("/tokenize", json=body)).json()
    await client.post("/v1/chat/completions", json={"model": "smollm2", "max_tokens": 1, **body})
    assert tuple(tokens["tokens"]) == service.requests[0].prompt_token_ids
    assert "token_strs" not in tokens
    assert "<|im_start|>user" in (await client.post("/detokenize", json={"tokens": tokens["tokens"]})).json()["prompt"]


async def test_the_context_is_no_limit(client: httpx2.AsyncClient) -> None:
    answer = await client.post("/tokenize", json={"prompt": "word " * 1_000})
    assert answer.json()["count"] > 256


async def test_what_the_tokenizer_is(client: httpx2.AsyncClient, text: TextProcessor) -> None:
    info = (await client.get("/tokenizer_info")).json()
    assert info["chat_template"].startswith("{%")
    roles = {role: info[f"{role}_token"] for role in ("bos", "eos", "pad", "unk")}
    assert set(roles.values()) <= {*text.special_tokens, None}
    assert text.special_tokens[roles["eos"]] in text.eos_token_ids


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": [1]}, "prompt"),
        ("/tokenize", {"prompt": "a", "tools": []}, "tools"),
        ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "a", "unknown": 1}, "unknown"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
    ],
)
async def test_what_is_wrong_is_named(client: httpx2.AsyncClient, path: str, body: dict[str, Any], param: str) -> None:
    answer = await client.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_another_model(client: httpx2.AsyncClient) -> None:
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": []})):
        assert (await client.post(path, json={"model": "x", **body})).status_code == 404
