"""Answers, whole and streamed, through the official OpenAI client and as bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx2
import openai
import orjson
import pytest

from octavo.cluster.api.service import Readiness, TokenDelta
from octavo.cluster.api.text.processor import TextProcessor
from octavo.worker.errors import ContextLengthExceeded, Overloaded, Unavailable
from octavo.worker.messages import FinishReason

MESSAGES: list[Any] = [{"role": "user", "content": "Say it again, 안녕 👩‍👩‍👧."}]
CHAT = {"model": "smollm2", "messages": MESSAGES}
COMPLETION = {"model": "smollm2", "prompt": "The quick brown fox 👩‍👩‍👧"}


def openai_client(address: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=30)


async def events(client: httpx2.AsyncClient, path: str, body: dict[str, Any]) -> list[Any]:
    """The events of a stream: objects, and the string [DONE]."""
    answer = await client.post(path, json={**body, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    return [line if line == "[DONE]" else orjson.loads(line) for line in lines]


def text_of(chunks: list[Any], index: int = 0) -> str:
    choices = [choice for chunk in chunks if chunk != "[DONE]" for choice in chunk["choices"]]
    return "".join(
        choice["text"] if "text" in choice else choice["delta"].get("content", "")
        for choice in choices
        if choice["index"] == index
    )


# ---- the official client ----


async def test_a_chat_by_the_synchronous_client(address: str) -> None:
    def use() -> None:
        with openai_client(address) as client:
            answer = client.chat.completions.create(model="smollm2", messages=MESSAGES)
            assert answer.choices[0].message.role == "assistant"
            assert answer.choices[0].finish_reason == "stop"
            assert answer.usage is not None
            assert answer.usage.prompt_tokens_details is not None
            assert answer.usage.prompt_tokens_details.cached_tokens == 16
            stream = client.chat.completions.create(model="smollm2", messages=MESSAGES, stream=True)
            parts = [chunk.choices[0].delta.content or "" for chunk in stream]
            assert "".join(parts) == answer.choices[0].message.content
            assert "안녕 👩‍👩‍👧" in "".join(parts)

    await asyncio.to_thread(use)


async def test_a_completion_by_the_asynchronous_client(address: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none") as client:
        answer = await client.completions.create(model="smollm2", prompt="The quick brown fox", seed=-1)
        assert answer.choices[0].text == "The quick brown fox"
        stream = await client.completions.create(
            model="smollm2", prompt="The quick brown fox", stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == answer.choices[0].text
    assert chunks[-1].usage == answer.usage


async def test_the_client_lists_models(address: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none") as client:
        assert [model.id async for model in client.models.list()] == ["smollm2"]
        assert (await client.models.retrieve("smollm2")).owned_by == "octavo"


@pytest.mark.parametrize(
    ("error", "kind", "status"),
    [
        (Overloaded("full", retry_after_s=2.5), openai.RateLimitError, 429),
        (Unavailable("no worker group"), openai.InternalServerError, 503),
        (ContextLengthExceeded("900 tokens do not fit into 512"), openai.BadRequestError, 400),
        (RuntimeError("a secret"), openai.InternalServerError, 500),
    ],
)
async def test_the_client_raises_the_right_class(
    address: str, service: Any, error: Exception, kind: type[openai.APIStatusError], status: int
) -> None:
    service.start_error = error
    async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(kind) as caught:
            await client.completions.create(model="smollm2", prompt="x", stream=True)
    assert caught.value.status_code == status
    assert caught.value.response.headers.get("retry-after") == {429: "3", 503: "1"}.get(status)
    assert "secret" not in caught.value.response.text


async def test_case_bug_017_the_client_knows_not_found_and_bad_request(address: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model="other", messages=MESSAGES)
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(model="smollm2", messages=MESSAGES, temperature=9)
    assert missing.value.code == "model_not_found"
    assert bad.value.param == "temperature"


# ---- streams as bytes ----


async def test_the_order_of_a_chats_chunks(client: httpx2.AsyncClient) -> None:
    chunks = await events(client, "/v1/chat/completions", CHAT)
    assert chunks.pop() == "[DONE]"
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert choices[-1]["delta"] == {}
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all(chunk["object"] == "chat.completion.chunk" and "usage" not in chunk for chunk in chunks)


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)])
async def test_case_bug_023_usage_only_when_asked_for(
    client: httpx2.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    whole = (await client.post(path, json=body)).json()["usage"]
    for options in (None, {}, {"include_usage": False}):
        chunks = await events(client, path, {**body, "stream_options": options})
        assert not any("usage" in chunk for chunk in chunks[:-1])
    chunks = await events(client, path, {**body, "stream_options": {"include_usage": True}})
    *normal, last, done = chunks
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in normal)
    assert (last["choices"], last["usage"], done) == ([], whole, "[DONE]")


@pytest.mark.parametrize("stop", [None, "fox", ["zzz", "ick brown", "👩‍👩‍👧"]])
@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)])
async def test_case_bug_025_streamed_and_whole_text_are_equal(
    client: httpx2.AsyncClient, path: str, body: dict[str, Any], stop: Any
) -> None:
    body = {**body, "stop": stop}
    choice = (await client.post(path, json=body)).json()["choices"][0]
    whole = choice["text"] if "text" in choice else choice["message"]["content"]
    assert text_of(await events(client, path, body)) == whole


@pytest.mark.parametrize("answer", ["", "a", "a stop", "stop"])
@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
async def test_case_bug_035_one_finish_reason_and_one_done(
    client: httpx2.AsyncClient, say: Callable[..., None], answer: str, reason: FinishReason
) -> None:
    say(answer, reason)
    chunks = await events(client, "/v1/chat/completions", {**CHAT, "stop": "stop"})
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]]
    assert [r for r in reasons if r is not None] == ["stop" if "stop" in answer else reason.value]
    assert chunks.count("[DONE]") == 1
    assert chunks[-1] == "[DONE]"


async def test_a_stop_string_ends_the_generation_at_the_engine(
    client: httpx2.AsyncClient, service: Any, say: Callable[..., None], text: TextProcessor
) -> None:
    say("one two three four five")
    answer = (await client.post("/v1/completions", json={**COMPLETION, "stop": " three"})).json()
    assert answer["choices"][0]["text"] == "one two"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == len(text._backend.encode("one two three").ids)
    assert (service.generations[0].ended, service.generations[0].num_aborts) == ([0], 0)


async def test_an_end_that_the_engine_knows_of_is_not_aborted(client: httpx2.AsyncClient, service: Any) -> None:
    await client.post("/v1/completions", json=COMPLETION)
    assert service.generations[0].num_aborts == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_case_bug_033_silence_is_filled_with_comments(address: str, service: Any, stream: bool) -> None:
    token, seen = asyncio.Event(), 0
    service.script = lambda _: [token.wait, TokenDelta((500,), FinishReason.LENGTH)]
    async with httpx2.AsyncClient() as http:
        if not stream:
            token.set()
            assert (await http.post(f"{address}/v1/completions", json=COMPLETION)).status_code == 200
            return
        async with http.stream("POST", f"{address}/v1/completions", json={**COMPLETION, "stream": True}) as answer:
            assert answer.status_code == 200  # headers come before the first token
            lines = []
            async for line in answer.aiter_lines():
                lines.append(line)
                seen += line == ": keep-alive"
                if seen == 2:
                    token.set()
    assert lines[-2] == "data: [DONE]"


# ---- several prompts ----


@pytest.mark.parametrize("prompts", [["one", "two words", "three 👩‍👩‍👧"], [[5, 6, 7], [800, 801]]])
async def test_each_prompt_is_a_choice(client: httpx2.AsyncClient, text: TextProcessor, prompts: list[Any]) -> None:
    texts = [prompt if isinstance(prompt, str) else text.decode(prompt) for prompt in prompts]
    body = {"model": "smollm2", "prompt": prompts}
    answer = (await client.post("/v1/completions", json=body)).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(prompts)))
    assert [choice["text"] for choice in answer["choices"]] == texts
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 16 * len(prompts)
    chunks = await events(client, "/v1/completions", body)
    assert [text_of(chunks, index) for index in range(len(prompts))] == texts
    ends = [choice for chunk in chunks[:-1] for choice in chunk["choices"] if choice["finish_reason"]]
    assert sorted(choice["index"] for choice in ends) == list(range(len(prompts)))


async def test_when_one_prompt_fails_none_goes_on(client: httpx2.AsyncClient, service: Any) -> None:
    def script(request: Any) -> list[Any]:
        failing = TokenDelta((), FinishReason.ERROR, error="out of luck")
        return [TokenDelta((500,)), failing] if request.request_id.endswith("-1") else [TokenDelta((500,))]

    service.script = script
    answer = await client.post("/v1/completions", json={"model": "smollm2", "prompt": ["a", "b", "c"]})
    assert (answer.status_code, answer.json()["error"]["message"]) == (500, "out of luck")
    assert [generation.num_aborts for generation in service.generations] == [1, 0, 1]


# ---- ends that are no answer ----


@pytest.mark.parametrize(
    ("reason", "status", "code"),
    [(FinishReason.ERROR, 500, "generation_failed"), (FinishReason.ABORT, 503, "service_unavailable")],
)
async def test_failures_are_errors_and_no_short_answers(
    client: httpx2.AsyncClient, service: Any, reason: FinishReason, status: int, code: str
) -> None:
    service.script = lambda _: [TokenDelta((500,)), TokenDelta((), reason, error="worker group lost")]
    answer = await client.post("/v1/chat/completions", json=CHAT)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    chunks = await events(client, "/v1/chat/completions", CHAT)
    assert chunks[-1]["error"]["message"] == "worker group lost"
    assert "[DONE]" not in chunks


async def test_a_failing_stream_raises_in_the_official_client(address: str, service: Any) -> None:
    service.script = lambda _: [TokenDelta((500,)), TokenDelta((), FinishReason.ERROR, error="worker group lost")]
    async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        stream = await client.completions.create(model="smollm2", prompt="x", stream=True)
        with pytest.raises(openai.APIError, match="worker group lost"):
            _ = [chunk async for chunk in stream]


async def test_unforeseen_exceptions_tell_nothing(client: httpx2.AsyncClient, service: Any) -> None:
    service.script = lambda _: [TokenDelta((500,)), RuntimeError("a secret")]
    answer = await client.post("/v1/chat/completions", json=CHAT)
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    assert "secret" not in answer.text
    chunks = await events(client, "/v1/chat/completions", CHAT)
    assert "secret" not in str(chunks)
    assert chunks[-1]["error"]["code"] == "internal_error"


async def test_a_timeout_with_output_is_an_answer(client: httpx2.AsyncClient, service: Any) -> None:
    service.script = lambda _: [TokenDelta((500,)), TokenDelta((), FinishReason.TIMEOUT)]
    body = {**CHAT, "timeout": 1.5}
    answer = (await client.post("/v1/chat/completions", json=body)).json()
    assert answer["choices"][0]["finish_reason"] == "timeout"
    assert answer["choices"][0]["message"]["content"]
    assert service.requests[0].timeout_s == 1.5
    assert (await events(client, "/v1/chat/completions", body))[-1] == "[DONE]"


async def test_a_timeout_without_output_is_an_error_that_is_not_retried(
    client: httpx2.AsyncClient, service: Any
) -> None:
    service.script = lambda _: [TokenDelta((), FinishReason.TIMEOUT)]
    answer = await client.post("/v1/chat/completions", json=CHAT)
    assert (answer.status_code, answer.headers["x-should-retry"]) == (408, "false")


# ---- what the cluster is asked for ----


async def test_sampling_fields_reach_the_cluster(client: httpx2.AsyncClient, service: Any) -> None:
    sent = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_tokens": 2, "stop_token_ids": [7, 2]}
    scheduling = {"priority": -3, "cache_salt": "s", "session_id": "abc", "user": "tenant"}
    await client.post("/v1/completions", json={**COMPLETION, **sent, **scheduling, "max_tokens": 9, "seed": -1})
    request = service.requests[0]
    assert request.sampling.seed == 2**64 - 1
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.top_k) == (0.5, 0.9, 7)
    assert (request.sampling.min_tokens, request.sampling.max_tokens) == (2, 9)
    assert set(request.sampling.stop_token_ids) == {2, 7}
    assert (request.priority, request.cache_salt, request.tenant) == (-3, "s", "tenant")
    assert request.wishes.session_id == "abc"


@pytest.mark.parametrize("top_k", [-1, 0, None])
async def test_top_k_is_off(client: httpx2.AsyncClient, service: Any, top_k: int | None) -> None:
    await client.post("/v1/completions", json={**COMPLETION, "top_k": top_k, "ignore_eos": True})
    assert service.requests[0].sampling.top_k is None
    assert service.requests[0].sampling.stop_token_ids == ()


async def test_without_a_seed_every_request_has_its_own(client: httpx2.AsyncClient, service: Any) -> None:
    for _ in range(2):
        await client.post("/v1/completions", json=COMPLETION)
    assert service.requests[0].sampling.seed != service.requests[1].sampling.seed


@pytest.mark.parametrize("max_tokens", [None, 10])
async def test_case_bug_015_max_completion_tokens_wins(
    client: httpx2.AsyncClient, service: Any, max_tokens: int | None
) -> None:
    body = {**CHAT, "max_completion_tokens": 3, "max_tokens": max_tokens}
    answer = (await client.post("/v1/chat/completions", json=body)).json()
    assert service.requests[0].sampling.max_tokens == 3
    assert answer["usage"]["completion_tokens"] == 3
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_text_parts_are_one_text(client: httpx2.AsyncClient, service: Any) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    for content in (parts, "one\ntwo"):
        messages = [{"role": "user", "content": content}]
        await client.post("/v1/chat/completions", json={**CHAT, "messages": messages})
    assert service.requests[0].prompt_token_ids == service.requests[1].prompt_token_ids


async def test_a_long_session_header_is_refused(client: httpx2.AsyncClient) -> None:
    answer = await client.post("/v1/completions", json=COMPLETION, headers={"x-octavo-session-id": "a" * 1025})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-octavo-session-id")


# ---- headers, operations ----


@pytest.mark.parametrize("stream", [True, False])
async def test_headers_tell_where_a_request_went(client: httpx2.AsyncClient, stream: bool) -> None:
    body = {"model": "smollm2", "prompt": [500] * 50, "stream": stream}
    headers = (await client.post("/v1/completions", json=body, headers={"x-request-id": "mine-1"})).headers
    assert headers["x-octavo-group"] == "group-1"
    assert headers["x-octavo-cached-tokens"] == "48"
    assert headers["x-octavo-route-reason"] == "prefix"
    assert headers["x-request-id"] == "mine-1"


@pytest.mark.parametrize("given", [None, "", "a" * 2000, "a b", "a;b"])
async def test_case_bug_013_request_ids_are_made_where_none_is_sane(
    client: httpx2.AsyncClient, service: Any, given: str | None
) -> None:
    headers = {} if given is None else {"x-request-id": given}
    answers = [await client.post("/v1/completions", json=COMPLETION, headers=headers) for _ in range(2)]
    ids = {answer.headers["x-request-id"] for answer in answers}
    assert len(ids) == 2
    assert given not in ids
    errors = await client.get("/v1/nope", headers=headers)
    assert len(errors.headers["x-request-id"]) == 32


async def test_case_bug_013_a_shared_request_id_is_no_key(client: httpx2.AsyncClient, service: Any) -> None:
    headers = {"x-request-id": "same"}
    for _ in range(2):
        await client.post("/v1/completions", json=COMPLETION, headers=headers)
    assert service.requests[0].request_id != service.requests[1].request_id


async def test_operations(client: httpx2.AsyncClient, service: Any) -> None:
    assert (await client.get("/health")).json() == {"status": "ok"}
    assert (await client.get("/version")).json()["version"]
    assert (await client.get("/ready")).json() == {"ready": True, "reason": "2 worker groups"}
    service.ready = Readiness(False, "0 of 2 worker groups")
    answer = await client.get("/ready")
    assert (answer.status_code, answer.json()["reason"]) == (503, "0 of 2 worker groups")


async def test_models(client: httpx2.AsyncClient) -> None:
    card = (await client.get("/v1/models/smollm2")).json()
    assert (await client.get("/v1/models")).json() == {"object": "list", "data": [card]}
    assert (card["id"], card["object"], card["max_model_len"]) == ("smollm2", "model", 256)
