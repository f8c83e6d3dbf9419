"""Outputs in a given form: bad forms are refused in bounded time, good ones are kept to."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest
from api_calls import Answer, chat, complete
from openai import OpenAI
from pydantic import BaseModel
from serve_process import OneModel

pytestmark = pytest.mark.usefixtures("canary")

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "string", "maxLength": 10}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


LONG_SCHEMA = SCHEMA | {"properties": {"a": {"type": "integer"}, "b": {"type": "string", "minLength": 150}}}


def format_of(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "p", "schema": schema}}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"x": schema}}
    return schema


BAD_FORMS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": format_of({"type": "nonsense"})}, "response_format"),
    ({"response_format": format_of({"type": "object", "properties": {"foo": "bar"}})}, "response_format"),
    ({"response_format": format_of({"type": "string", "pattern": "(["})}, "response_format"),
    ({"response_format": format_of({"$ref": "#/nope"})}, "response_format"),
    ({"response_format": format_of(nested(200))}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "yaml"}}, "response_format"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
    ({"structured_outputs": {"grammar": "("}}, "structured_outputs"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    ({"guided_regex": "("}, "guided_regex"),
    ({"guided_grammar": "("}, "guided_grammar"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_FORMS, ids=lambda value: json.dumps(value)[:60])
def test_case_bug_060_forms_that_are_none(cluster: OneModel, stream: bool, fields: dict[str, Any], param: str) -> None:
    began = time.monotonic()
    answer = chat(cluster, "hi", max_tokens=8, stream=stream, **fields)
    assert answer.status == 400, answer
    assert answer.error is not None
    assert answer.error["param"].split(".")[0] == param
    assert time.monotonic() - began < 10


BOMBS = [
    {"structured_outputs": {"regex": "(a{1,1000}){1,1000}"}},
    {"structured_outputs": {"choice": [f"choice {number}" for number in range(100_000)]}},
    {"response_format": format_of({"enum": [f"value {number}" for number in range(100_000)]})},
    {"response_format": format_of({"type": "string", "pattern": "(x+x+)+y" * 500})},
]


@pytest.mark.parametrize("fields", BOMBS, ids=range(len(BOMBS)))
def test_case_bug_060_bombs(cluster: OneModel, fields: dict[str, Any]) -> None:
    """Answered or refused, in bounded time."""
    began = time.monotonic()
    answer = chat(cluster, "hi", max_tokens=4, **fields)
    assert answer.status in (200, 400), answer
    assert time.monotonic() - began < 20


def test_case_bug_060_a_pattern_that_only_looks_bad(cluster: OneModel, stream: bool) -> None:
    """(a+)+$ takes ages where patterns are tried one way after the other; here it does not."""
    answer = complete(cluster, "a", structured_outputs={"regex": "(a+)+"}, max_tokens=8, stream=stream)
    assert answer.status == 200
    assert set(answer.text) == {"a"}


def test_case_bug_060_three_good_ones_at_once(cluster: OneModel, stream: bool) -> None:
    def run(number: int) -> Answer:
        fields = [
            {"response_format": format_of(SCHEMA)},
            {"structured_outputs": {"choice": ["red", "green"]}},
            {"structured_outputs": {"regex": "[0-9]{3}-[0-9]{4}"}},
        ][number]
        return chat(cluster, "Give me one", max_tokens=80, stream=stream, **fields)

    with ThreadPoolExecutor(3) as threads:
        document, choice, number = threads.map(run, range(3))
    jsonschema.validate(json.loads(document.text), SCHEMA)
    assert choice.text in ("red", "green")
    assert len(number.text) == 8


def test_case_bug_062_several_choices(cluster: OneModel, stream: bool) -> None:
    """Each has a state of its own; one that is cut is the beginning of a document."""
    answer = chat(
        cluster,
        "Give me JSON",
        n=3,
        temperature=1,
        seed=1,
        max_tokens=60,
        response_format=format_of(SCHEMA),
        stream=stream,
    )
    assert len(answer.choices) == 3
    for choice in answer.choices:
        if choice.finish_reason == "stop":
            jsonschema.validate(json.loads(choice.text), SCHEMA)
        else:
            assert choice.finish_reason == "length"
            assert choice.text.lstrip().startswith("{")
    assert any(choice.finish_reason == "stop" for choice in answer.choices)


def test_case_bug_062_in_a_tiny_pool(short: OneModel, stream: bool) -> None:
    """Preempted again and again, and computed from the start each time."""
    before = short.gauge("octavo_num_preemptions_total")

    def run(number: int) -> Answer:
        fields = {"n": 3, "temperature": 1, "seed": number, "max_tokens": 90}
        return chat(short, f"{number}: JSON", response_format=format_of(LONG_SCHEMA), stream=stream, **fields)

    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(run, range(4)))
    for choice in (choice for answer in answers for choice in answer.choices):
        if choice.finish_reason == "stop":
            jsonschema.validate(json.loads(choice.text), LONG_SCHEMA)
    assert short.gauge("octavo_num_preemptions_total") > before


class Person(BaseModel):
    name: str
    age: int


def test_the_openai_client_parses_into_pydantic(client: OpenAI, cluster: OneModel) -> None:
    completion = client.chat.completions.parse(
        model=cluster.model,
        messages=[{"role": "user", "content": "Ada is 36 years old."}],
        response_format=Person,
        max_tokens=80,
        temperature=0,
    )
    person = completion.choices[0].message.parsed
    assert isinstance(person, Person)
    assert person.name
