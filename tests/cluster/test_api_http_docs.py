"""The OpenAPI document and its page say what the server does."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from one_model import one_model

from octavo.cluster.api.http.app import build_app
from octavo.cluster.api.service import ServedModel, TokenDelta
from octavo.cluster.api.text.processor import TextProcessor
from octavo.worker.messages import FinishReason


@pytest.fixture(scope="module")
def app(text: TextProcessor) -> FastAPI:
    service: Any = None
    return build_app(service, one_model(text, ServedModel("smollm2", 256, created=0, max_num_seqs=32)))


@pytest.fixture(scope="module")
def document(app: FastAPI) -> dict[str, Any]:
    return app.openapi()


def test_every_route_is_in_it_and_nothing_else(app: FastAPI, document: dict[str, Any]) -> None:
    routes = {
        (route.path_format, method.lower())
        for route in app.routes
        if isinstance(route, APIRoute)
        for method in (route.methods or set()) - {"HEAD"}
    }
    routes -= {("/docs", "get"), ("/openapi.json", "get")}
    assert routes == {(path, method) for path, methods in document["paths"].items() for method in methods}


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    known = document["components"]["schemas"]
    assert {reference.rsplit("/", 1)[1] for reference in _references(document)} <= known.keys()


def _references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        node = list(node.values())
    if isinstance(node, list):
        for each in node:
            yield from _references(each)


def test_what_only_a_neutral_value_is_accepted_for_says_so(document: dict[str, Any]) -> None:
    field = document["components"]["schemas"]["ChatCompletionRequest"]["properties"]["verbosity"]
    assert set(field["enum"]) == {None, "medium"}


async def test_every_example_is_accepted(client: httpx2.AsyncClient, service: Any, document: dict[str, Any]) -> None:
    def answer(request: Any) -> list[TokenDelta]:
        return [TokenDelta((), FinishReason.STOP, embedding=b"\0" * 8 if request.pooling else None)]

    service.script = answer
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("example")
            response = await client.request(method, path.replace("{model}", "smollm2"), json=body)
            assert (path, response.status_code) == (path, 200), response.text
            assert response.headers["content-type"].split(";")[0] in operation["responses"]["200"]["content"]


async def test_the_page_needs_nothing_from_elsewhere(client: httpx2.AsyncClient, document: dict[str, Any]) -> None:
    page = (await client.get("/docs", headers={"host": "<b>"})).text
    assert not re.search(r"<script|<link|src=|<b>", page)
    for path in document["paths"]:
        assert path in page
