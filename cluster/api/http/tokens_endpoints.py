"""``POST /tokenize`` and ``POST /detokenize``, of vLLM's shapes: what tokenizer and chat template make of an input.

| field of /tokenize | |
|---|---|
| prompt or messages | a text, or a chat: of that the token ids are those that ``/v1/chat/completions`` would compute |
| model | may be left out where there is one |
| add_special_tokens | of a text; true by default |
| return_token_strs | each token as text too, with replacement characters where it is none by itself |
| tools, add_generation_prompt, continue_final_message, chat_template, chat_template_kwargs | of a chat, as there |

``GET /tokenizer_info`` tells clients such as lm-evaluation-harness that they can use the two as their tokenizer.
``/detokenize`` takes ``tokens`` and gives ``prompt``, special tokens by their names. The context's length is no limit.
"""

from __future__ import annotations

from typing import Annotated, Any

import orjson
from fastapi import FastAPI, Request, Response
from pydantic import Field

from ....worker.errors import InvalidRequest
from ..chat.plan import plan_chat
from ..request.chat_messages import ChatMessage, Tools
from ..request.fields import MAX_TEMPLATE_CHARS, Body, Identifier, only
from ..request.judged import RequestJudge
from ..request.judges import Judges
from ..request.judging import Judging
from ..request.schemas import ChatCompletionRequest
from .bodies import Bodies
from .caller import Caller
from .operations import GET, json_response
from .transport import until_disconnect

TOKENIZE, DETOKENIZE, TOKENIZER_INFO = "/tokenize", "/detokenize", "/tokenizer_info"

_OF_CHATS = (
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "chat_template_kwargs",
)


class TokenizeRequest(Body):
    """``POST /tokenize``."""

    model: Identifier | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    tools: Tools | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Annotated[str, Field(max_length=MAX_TEMPLATE_CHARS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: Annotated[dict[str, Any] | None, only({})] = None


class DetokenizeRequest(Body):
    """``POST /detokenize``."""

    model: Identifier | None = None
    tokens: list[int]


def add_tokens_endpoints(app: FastAPI, bodies: Bodies, judges: Judges) -> None:
    @app.api_route(TOKENIZER_INFO, methods=GET)
    async def tokenizer_info(request: Request) -> Response:
        """As vLLM's: the special tokens by their roles, and the chat template; ?model= says of which model."""
        text = judges.named_or_only(request.query_params.get("model")).text
        return json_response(dict(text.tokenizer_info))

    def endpoint(judging: Judging[bytes]) -> Any:
        async def answer(request: Request) -> Response:
            raw = await bodies.read(request)
            body = await until_disconnect(request, bodies.judge(judging, raw, request.headers))
            return Response(body, media_type="application/json")

        return answer

    app.add_api_route(TOKENIZE, endpoint(tokenize), methods=["POST"])
    app.add_api_route(DETOKENIZE, endpoint(detokenize), methods=["POST"])


async def tokenize(judges: Judges, raw: bytes | bytearray, caller: Caller) -> bytes:
    """The answer's body. Raises as ``judging.chat``."""
    content = orjson.loads(raw)
    body = TokenizeRequest.model_validate(content)
    judge = judges.named_or_only(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("Exactly one of prompt and messages must be given.", param="prompt")
    if body.prompt is not None:
        _check_text(body)
        special_tokens = body.add_special_tokens is not False
        token_ids = await judge.text.encode(body.prompt, max_tokens=None, special_tokens=special_tokens)
    else:
        token_ids = await _chat_token_ids(judge, body, content)
    answer = {"count": len(token_ids), "max_model_len": judge.model.max_model_len, "tokens": token_ids}
    if body.return_token_strs:
        answer["token_strs"] = [judge.text.token_bytes.text(token_id) for token_id in token_ids]
    return orjson.dumps(answer)


def _check_text(body: TokenizeRequest) -> None:
    for name in _OF_CHATS:
        if getattr(body, name) is not None:
            raise InvalidRequest(f"{name} is only allowed with messages.", param=name)


async def _chat_token_ids(judge: RequestJudge, body: TokenizeRequest, content: dict[str, Any]) -> list[int]:
    if body.add_special_tokens:
        message = "add_special_tokens is only allowed with prompt: a chat template writes its own."
        raise InvalidRequest(message, param="add_special_tokens")
    fields = {name: content[name] for name in ("messages", *_OF_CHATS) if name in content}
    chat = ChatCompletionRequest.model_validate({"model": judge.model.name, **fields})
    plan = await plan_chat(judge.text, chat, max_tokens=None)
    return list(plan.prompt_token_ids)


async def detokenize(judges: Judges, raw: bytes | bytearray, caller: Caller) -> bytes:
    """The answer's body. Raises as ``judging.chat``."""
    body = DetokenizeRequest.model_validate(orjson.loads(raw))
    judge = judges.named_or_only(body.model)
    size = judge.text.vocab_size
    if body.tokens and not 0 <= min(body.tokens) <= max(body.tokens) < size:
        bad = min(body.tokens) if min(body.tokens) < 0 else max(body.tokens)
        raise InvalidRequest(f"Token id {bad} is not in the vocabulary: ids are 0 to {size - 1}.", param="tokens")
    prompt = await judge.text.in_thread(lambda: judge.text.decode(body.tokens, skip_special_tokens=False))
    return orjson.dumps({"prompt": prompt})
