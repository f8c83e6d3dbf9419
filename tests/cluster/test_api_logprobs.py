"""Log-probabilities, echo and token ids in answers, whole and streamed; the numbers are the engine's concern."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import httpx2
import orjson
import pytest

from octavo.cluster.api.service import GenerationRequest, TokenDelta
from octavo.cluster.api.text.processor import TextProcessor
from octavo.worker.messages import FinishReason, TokenLogprobs

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
ANSWER = "one 👩 naïve two"
NUM = 3
INF = math.inf


def judged(token_id: int, num: int = NUM) -> TokenLogprobs:
    """The token itself is the likeliest, but for every fifth, which is not among the likeliest."""
    others = [(token_id + 7 * k) % 49_152 for k in range(num + 1)]
    top = others[1:] if token_id % 5 == 0 else others[:num]
    logprobs = [-0.25 * (k + 1) - token_id / 2**20 for k in range(num)]
    own = logprobs[0] if top[:1] == [token_id] else -9.5
    return TokenLogprobs(own, 1 if top[:1] == [token_id] else 40, tuple(top), tuple(logprobs))


Judge = Callable[[int], TokenLogprobs]


@pytest.fixture
def script(service: Any, text: TextProcessor) -> Callable[..., list[int]]:
    """Make the model give the answer's tokens; returns them."""

    def set_script(
        answer: str = ANSWER,
        sizes: Sequence[int] = (1,),
        judge: Judge = judged,
        reason: FinishReason = FinishReason.LENGTH,
        end: Sequence[int] = (),
    ) -> list[int]:
        token_ids = [*text._backend.encode(answer).ids, *end]

        def play(request: GenerationRequest) -> list[TokenDelta]:
            prompt = tuple(map(judge, request.prompt_token_ids[1:]))
            deltas = [TokenDelta((), prompt_logprobs=prompt[:2]), TokenDelta((), prompt_logprobs=prompt[2:])]
            start = 0
            output = token_ids if request.sampling.max_tokens else []
            while start < len(output):
                part = tuple(output[start : start + sizes[len(deltas) % len(sizes)]])
                start += len(part)
                deltas.append(TokenDelta(part, logprobs=tuple(map(judge, part))))
            last = deltas.pop()
            ended = TokenDelta(last.token_ids, reason, logprobs=last.logprobs, prompt_logprobs=last.prompt_logprobs)
            return [*deltas, ended]

        service.script = play
        return token_ids

    return set_script


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"prompt": "The quick 👩 fox"}
    return {"model": "smollm2", **prompt, **fields}


def strict(content: bytes | str) -> Any:
    """JSON without NaN and infinities."""
    return orjson.loads(content)


async def whole(client: httpx2.AsyncClient, path: str, **fields: Any) -> Any:
    answer = await client.post(path, json=body_of(path, **fields))
    assert answer.status_code == 200, answer.text
    return strict(answer.content)


async def chunks(client: httpx2.AsyncClient, path: str, **fields: Any) -> list[Any]:
    answer = await client.post(path, json=body_of(path, stream=True, **fields))
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [strict(line) for line in lines]


async def chat_entries(client: httpx2.AsyncClient, **fields: Any) -> list[Any]:
    """The same from a stream as from a whole answer."""
    choice = (await whole(client, CHAT, logprobs=True, **fields))["choices"][0]
    streamed: list[Any] = []
    said = ""
    for part in (chunk["choices"][0] for chunk in await chunks(client, CHAT, logprobs=True, **fields)):
        said += part["delta"].get("content", "")
        streamed += part["logprobs"]["content"] if part["logprobs"] else []
    assert said == choice["message"]["content"]
    assert streamed == choice["logprobs"]["content"]
    return streamed


async def completion_logprobs(client: httpx2.AsyncClient, **fields: Any) -> tuple[str, dict[str, list[Any]]]:
    choice = (await whole(client, COMPLETION, **fields))["choices"][0]
    said, streamed = "", {name: [] for name in choice["logprobs"]}  # type: ignore[var-annotated]
    for part in (chunk["choices"][0] for chunk in await chunks(client, COMPLETION, **fields)):
        said += part["text"]
        for name, values in (part["logprobs"] or {}).items():
            streamed[name] += values
    assert (said, streamed) == (choice["text"], choice["logprobs"])
    assert len({len(values) for values in streamed.values()}) == 1
    return said, streamed


@pytest.mark.parametrize("sizes", [(1,), (2, 1), (5,), (99,)])
async def test_case_bug_043_every_token_has_its_own_entry(
    client: httpx2.AsyncClient, script: Callable[..., list[int]], text: TextProcessor, sizes: Sequence[int]
) -> None:
    token_ids = script(sizes=sizes)
    entries = await chat_entries(client, top_logprobs=NUM)
    for token_id, entry in zip(token_ids, entries, strict=True):
        expected = judged(token_id)
        assert (entry["token"], entry["logprob"]) == (text.token_bytes.text(token_id), expected.logprob)
        assert [top["logprob"] for top in entry["top_logprobs"]] == list(expected.top_logprobs)
        assert [top["token"] for top in entry["top_logprobs"]] == list(
            map(text.token_bytes.text, expected.top_token_ids)
        )
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == ANSWER


@pytest.mark.parametrize("num", [None, 0, 1, NUM])
async def test_case_bug_037_as_many_alternatives_as_asked_for(
    client: httpx2.AsyncClient, script: Callable[..., list[int]], num: int | None
) -> None:
    script(judge=lambda token_id: judged(token_id, num or 0))
    for entry in await chat_entries(client, top_logprobs=num):
        tops = [top["logprob"] for top in entry["top_logprobs"]]
        assert len(tops) == (num or 0)
        assert tops == sorted(tops, reverse=True)


@pytest.mark.parametrize("num", [0, NUM])
async def test_a_completions_alternatives_have_the_token_itself(
    client: httpx2.AsyncClient, script: Callable[..., list[int]], num: int
) -> None:
    token_ids = script(judge=lambda token_id: judged(token_id, num))
    said, logprobs = await completion_logprobs(client, logprobs=num)
    assert said == ANSWER
    for token_id, own, top, logprob in zip(
        token_ids, logprobs["tokens"], logprobs["top_logprobs"], logprobs["token_logprobs"], strict=True
    ):
        assert top[own] == logprob
        assert len(top) == num + (num == 0 or token_id % 5 == 0)
        assert list(top.values()) == sorted(top.values(), reverse=True)


async def test_offsets_are_where_the_tokens_begin(
    client: httpx2.AsyncClient, script: Callable[..., list[int]], text: TextProcessor
) -> None:
    token_ids = script()
    for echo in (False, True):
        said, logprobs = await completion_logprobs(client, logprobs=1, echo=echo)
        prompt = "The quick 👩 fox" if echo else ""
        assert said == prompt + ANSWER
        for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
            assert "\ufffd" in token or said[offset : offset + len(token)] == token
        assert logprobs["text_offset"][-len(token_ids)] == len(prompt)


@pytest.mark.parametrize("stop", ["naïve", "ve tw"])
async def test_a_cut_off_stop_string_is_counted_and_told(
    client: httpx2.AsyncClient, script: Callable[..., list[int]], stop: str
) -> None:
    """As many entries as usage counts, which clients that judge outputs rely on; and nothing behind the text's end."""
    script()
    said, logprobs = await completion_logprobs(client, logprobs=1, stop=stop)
    assert said == ANSWER[: ANSWER.index(stop)]
    usage = (await whole(client, COMPLETION, logprobs=1, stop=stop))["usage"]
    assert len(logprobs["tokens"]) == usage["completion_tokens"]
    assert max(logprobs["text_offset"]) <= len(said)


async def test_a_stop_token_has_an_entry(client: httpx2.AsyncClient, script: Callable[..., list[int]]) -> None:
    """lm-eval takes the last entry of one generated token off, whatever it was."""
    script("yes", reason=FinishReason.STOP, end=[2])
    said, logprobs = await completion_logprobs(client, logprobs=1)
    assert (said, logprobs["tokens"]) == ("yes", ["yes", "<|im_end|>"])
    assert [entry["token"] for entry in await chat_entries(client)] == ["yes", "<|im_end|>"]


# ---- numbers that JSON does not have ----


async def test_case_bug_039_impossible_tokens(client: httpx2.AsyncClient, script: Callable[..., list[int]]) -> None:
    script(judge=lambda token_id: TokenLogprobs(-INF, 7, (token_id + 1, token_id + 2), (-0.5, -INF)))
    for entry in await chat_entries(client, top_logprobs=2):
        assert entry["logprob"] == -9999.0
        assert [top["logprob"] for top in entry["top_logprobs"]] == [-0.5]
    _, logprobs = await completion_logprobs(client, logprobs=2, echo=True)
    assert set(logprobs["token_logprobs"]) == {None, -9999.0}
    assert all(sorted(top.values()) == [-9999.0, -0.5] for top in logprobs["top_logprobs"][1:])
    told = (await whole(client, COMPLETION, prompt_logprobs=2))["choices"][0]["prompt_logprobs"]
    assert {each["logprob"] for entry in told[1:] for each in entry.values()} == {-9999.0, -0.5}


# ---- prompts ----


async def test_case_bug_011_a_prompt_that_is_only_judged(
    client: httpx2.AsyncClient, script: Callable[..., list[int]], text: TextProcessor
) -> None:
    script()
    fields = {"max_tokens": 0, "echo": True, "logprobs": 1}
    said, logprobs = await completion_logprobs(client, **fields)
    token_ids = text._backend.encode("The quick 👩 fox").ids
    assert said == "The quick 👩 fox"
    assert logprobs["token_logprobs"] == [None, *(judged(token_id).logprob for token_id in token_ids[1:])]
    assert logprobs["top_logprobs"][0] is None
    answer = await whole(client, COMPLETION, **fields)
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_every_choice_begins_with_its_own_prompt(
    client: httpx2.AsyncClient, service: Any, text: TextProcessor
) -> None:
    prompts = ["one", "the second"]
    service.script = lambda request: [
        TokenDelta((500 + branch,), FinishReason.LENGTH, branch=branch) for branch in range(request.num_branches)
    ]
    expected = [prompt + text.decode([500 + branch]) for prompt in prompts for branch in range(2)]
    for given in (prompts, [text._backend.encode(prompt).ids for prompt in prompts]):
        fields = {"prompt": given, "echo": True, "n": 2}
        choices = (await whole(client, COMPLETION, **fields))["choices"]
        assert [choice["text"] for choice in choices] == expected
        streamed = [""] * 4
        for part in (chunk["choices"][0] for chunk in await chunks(client, COMPLETION, **fields)):
            streamed[part["index"]] += part["text"]
        assert streamed == expected


@pytest.mark.parametrize("prompt", ["<|im_start|>user\nhi<|im_end|>", " blank", "👩\u200d👩 한"])
async def test_an_echoed_text_is_the_text_that_came(
    client: httpx2.AsyncClient, script: Callable[..., list[int]], prompt: str
) -> None:
    script()
    said, logprobs = await completion_logprobs(client, prompt=prompt, echo=True, logprobs=0)
    assert said == prompt + ANSWER
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert "\ufffd" in token or said[offset : offset + len(token)] == token


async def test_vllms_prompt_logprobs(
    client: httpx2.AsyncClient, script: Callable[..., list[int]], text: TextProcessor
) -> None:
    script(judge=lambda token_id: judged(token_id, 2))
    for path in (CHAT, COMPLETION):
        answer = await whole(client, path, prompt_logprobs=2, return_token_ids=True)
        source = answer if path == CHAT else answer["choices"][0]
        token_ids = source["prompt_token_ids"]
        first, *others = source["prompt_logprobs"]
        assert first is None
        for token_id, entry in zip(token_ids[1:], others, strict=True):
            expected = judged(token_id, 2)
            own = {"logprob": expected.logprob, "rank": expected.rank, "decoded_token": text.token_bytes.text(token_id)}
            assert entry[str(token_id)] == own
            assert list(entry) == [str(t) for t in dict.fromkeys([token_id, *expected.top_token_ids])]


# ---- ids ----


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
async def test_token_ids_are_told_once(client: httpx2.AsyncClient, script: Callable[..., list[int]], path: str) -> None:
    token_ids = script(sizes=(1, 3))
    answer = await whole(client, path, return_token_ids=True)
    assert answer["choices"][0]["token_ids"] == token_ids
    parts = await chunks(client, path, return_token_ids=True)
    assert [t for chunk in parts for t in chunk["choices"][0].get("token_ids", [])] == token_ids
    sources = [chunk if path == CHAT else chunk["choices"][0] for chunk in parts]
    told = [source["prompt_token_ids"] for source in sources if "prompt_token_ids" in source]
    assert told == [(answer if path == CHAT else answer["choices"][0])["prompt_token_ids"]]


async def test_tokens_named_by_their_ids(client: httpx2.AsyncClient, script: Callable[..., list[int]]) -> None:
    token_ids = script()
    names = [f"token_id:{token_id}" for token_id in token_ids]
    entries = await chat_entries(client, top_logprobs=1, return_tokens_as_token_ids=True)
    assert [entry["token"] for entry in entries] == names
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == ANSWER
    _, logprobs = await completion_logprobs(client, logprobs=1, return_tokens_as_token_ids=True)
    assert logprobs["tokens"] == names
