"""The OpenAPI document: every endpoint with the schema that its body is judged by, an example, and its errors.

It is made here and not by FastAPI, which would judge bodies by rules of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from ..request.schemas import ChatCompletionRequest, CompletionRequest, EmbeddingRequest
from ..service import ServedModel
from .operations import model_card
from .tokens_endpoints import DETOKENIZE, TOKENIZE, TOKENIZER_INFO, DetokenizeRequest, TokenizeRequest

JSON, EVENTS, TEXT = "application/json", "text/event-stream", "text/plain"
_REF = "#/components/schemas/{model}"

_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"enum": ["invalid_request_error", "rate_limit_error", "server_error"]},
                "param": {"type": ["string", "null"], "description": "The field that is wrong."},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_ERRORS: dict[int, tuple[str, str, str | None, str]] = {
    400: ("Missing required field 'model'.", "invalid_request_error", "model", "missing_required_parameter"),
    401: ("The API key is not one of this server's.", "invalid_request_error", None, "invalid_api_key"),
    404: ("The model 'x' does not exist; this server has 'y'.", "invalid_request_error", "model", "model_not_found"),
    405: ("Method not allowed: GET /v1/completions", "invalid_request_error", None, "method_not_allowed"),
    408: ("Nothing of the request body came for 60 s.", "invalid_request_error", None, "request_timeout"),
    413: ("The request body is larger than 33554432 bytes.", "invalid_request_error", None, "request_too_large"),
    415: ("The body must be JSON.", "invalid_request_error", None, "unsupported_media_type"),
    429: ("No worker group has room.", "rate_limit_error", None, "rate_limit_exceeded"),
    431: ("The headers have 40000 bytes.", "invalid_request_error", None, "headers_too_large"),
    500: ("The engine failed while it worked on this request.", "server_error", None, "generation_failed"),
    503: ("No worker group can take the request at present.", "server_error", None, "service_unavailable"),
}
_OF_BODIES = (400, 401, 404, 408, 413, 415, 429, 431, 500, 503)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One path and method. ``example`` is a request's body, ``answer`` that of its answer."""

    path: str
    method: str
    summary: str
    answer: Any
    body: type[BaseModel] | None = None
    example: Any = None
    events: str | None = None
    """The answer as a stream, where there is one."""
    errors: tuple[int, ...] = (401, 431)
    media_type: str = JSON
    parameters: tuple[dict[str, Any], ...] = ()


def endpoints(models: Sequence[ServedModel]) -> list[Endpoint]:
    """All of them, with examples that name the first model."""
    info = models[0]
    return [*_generations(info.name), *_tokens(models), *_models(models), *_operations()]


def _generations(model: str) -> list[Endpoint]:
    usage = {"prompt_tokens": 31, "completion_tokens": 8, "total_tokens": 39}
    head = {"id": "chatcmpl-7d1c", "created": 1_800_000_000, "model": model}
    said = {"role": "assistant", "content": "The capital of France is Paris.", "refusal": None}
    chat = {"index": 0, "message": said, "logprobs": None, "finish_reason": "stop"}
    text = {"index": 0, "text": " jumps over the lazy dog.", "logprobs": None, "finish_reason": "stop"}
    return [
        Endpoint(
            "/v1/chat/completions",
            "post",
            "Answer a chat.",
            {**head, "object": "chat.completion", "choices": [chat], "usage": usage},
            ChatCompletionRequest,
            {"model": model, "messages": [{"role": "user", "content": "What is the capital of France?"}]},
            'data: {"object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"Hi"}}]}\n\n',
            _OF_BODIES,
        ),
        Endpoint(
            "/v1/completions",
            "post",
            "Continue a text, or token ids.",
            {**head, "id": "cmpl-7d1c", "object": "text_completion", "choices": [text], "usage": usage},
            CompletionRequest,
            {"model": model, "prompt": "The quick brown fox", "max_tokens": 16, "temperature": 0},
            'data: {"object":"text_completion","choices":[{"index":0,"text":" jumps"}]}\n\n',
            _OF_BODIES,
        ),
        Endpoint(
            "/v1/embeddings",
            "post",
            "Make a vector of each text.",
            {"object": "list", "data": [{"object": "embedding", "index": 0, "embedding": [0.6, -0.8]}], "model": model},
            EmbeddingRequest,
            {"model": model, "input": ["The quick brown fox"]},
            errors=_OF_BODIES,
        ),
    ]


def _tokens(models: Sequence[ServedModel]) -> list[Endpoint]:
    info = models[0]
    return [
        Endpoint(
            TOKENIZE,
            "post",
            "The tokens of a text, or of a chat's prompt.",
            {
                "count": 2,
                "max_model_len": info.max_model_len,
                "tokens": [19556, 905],
                "token_strs": ["Hello", " world"],
            },
            TokenizeRequest,
            {"model": info.name, "prompt": "Hello world", "return_token_strs": True},
            errors=_OF_BODIES,
        ),
        Endpoint(
            DETOKENIZE,
            "post",
            "The text of tokens.",
            {"prompt": "Hello world"},
            DetokenizeRequest,
            {"model": info.name, "tokens": [19556, 905]},
            errors=_OF_BODIES,
        ),
        Endpoint(
            TOKENIZER_INFO,
            "get",
            "What a client needs to know of the tokenizer to use /tokenize in its place.",
            {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": "{% for m in messages %}…"},
            errors=(400, 401, 404, 431),
            parameters=(
                {
                    "name": "model",
                    "in": "query",
                    "schema": {"enum": [model.name for model in models]},
                    "required": len(models) > 1,
                    "description": "May be left out where there is one.",
                },
            ),
        ),
    ]


def _models(models: Sequence[ServedModel]) -> list[Endpoint]:
    info, cards = models[0], [model_card(each) for each in models]
    name = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}, "example": info.name}
    return [
        Endpoint("/v1/models", "get", "The served models.", {"object": "list", "data": cards}),
        Endpoint("/v1/models/{model}", "get", "One model.", cards[0], errors=(401, 404, 431), parameters=(name,)),
    ]


def _operations() -> list[Endpoint]:
    limit = {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": 256, "default": 20}}
    request_id = {
        "name": "request_id",
        "in": "query",
        "schema": {"type": "string", "minLength": 1, "maxLength": 128},
        "description": "Only decisions for requests whose id begins so.",
    }
    steps = {"name": "steps", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": 200, "default": 10}}
    group = {"name": "group", "in": "query", "schema": {"type": "string"}, "example": "group-1"}
    decision = {"request_id": "cmpl-7d1c-0", "group": "group-1", "reason": "prefix"}
    return [
        Endpoint("/health", "get", "This process is alive.", {"status": "ok"}, errors=(431,)),
        Endpoint(
            "/ready",
            "get",
            "A request can be answered now; else 503.",
            {"ready": True, "reason": "2 worker groups ready"},
            errors=(431,),
        ),
        Endpoint("/version", "get", "Octavo's version.", {"version": version("octavo")}, errors=(431,)),
        Endpoint(
            "/metrics",
            "get",
            "Prometheus metrics.",
            "octavo_num_requests_running 3.0\n",
            errors=(431,),
            media_type=TEXT,
        ),
        Endpoint(
            "/debug/route",
            "get",
            "The routers' last decisions.",
            {"decisions": [decision]},
            errors=(400, 401, 431, 503),
            parameters=(limit, request_id),
        ),
        Endpoint(
            "/debug/profile",
            "post",
            "A torch profile of the next steps of one worker group, or of all.",
            {"groups": {"group-1": {"steps": 10, "files": {"0": "~/.cache/octavo/profiles/group-1-1-rank0.json.gz"}}}},
            errors=(400, 401, 429, 431, 503),
            parameters=(steps, group),
        ),
        Endpoint(
            "/reset_prefix_cache",
            "post",
            "Forget all cached KV blocks that no request uses.",
            {"blocks_forgotten": {"group-1": 120, "group-2": None}},
            errors=(401, 429, 431, 503),
        ),
    ]


def openapi(models: Sequence[ServedModel]) -> dict[str, Any]:
    """The document. It takes 0.2 s."""
    table = endpoints(models)
    bodies = [endpoint.body for endpoint in table if endpoint.body is not None]
    _, definitions = models_json_schema([(body, "validation") for body in bodies], ref_template=_REF)
    paths: dict[str, Any] = {}
    for endpoint in table:
        paths.setdefault(endpoint.path, {})[endpoint.method] = _operation(endpoint)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Octavo", "version": version("octavo")},
        "paths": paths,
        "components": {
            "schemas": {**definitions["$defs"], "Error": _ERROR_SCHEMA},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    operation: dict[str, Any] = {"summary": endpoint.summary, "responses": _responses(endpoint)}
    if endpoint.parameters:
        operation["parameters"] = list(endpoint.parameters)
    if endpoint.body is not None:
        schema = {"$ref": _REF.format(model=endpoint.body.__name__)}
        operation["requestBody"] = {
            "required": True,
            "content": {JSON: {"schema": schema, "example": endpoint.example}},
        }
    if 401 in endpoint.errors:
        operation["security"] = [{"key": []}, {}]
    return operation


def _responses(endpoint: Endpoint) -> dict[str, Any]:
    schema = {"type": "object" if endpoint.media_type == JSON else "string"}
    content: dict[str, Any] = {endpoint.media_type: {"schema": schema, "example": endpoint.answer}}
    if endpoint.events is not None:
        content[EVENTS] = {"example": endpoint.events}
    responses: dict[str, Any] = {"200": {"description": "The answer.", "content": content}}
    if endpoint.path == "/ready":
        responses["503"] = {"description": "Not ready.", "content": {JSON: {"schema": schema}}}
    for status in endpoint.errors:
        message, kind, param, code = _ERRORS[status]
        example = {"error": {"message": message, "type": kind, "param": param, "code": code}}
        error = {"schema": {"$ref": _REF.format(model="Error")}, "example": example}
        responses[str(status)] = {"description": code, "content": {JSON: error}}
    return responses
