"""What a request says of its output's form becomes one grammar, or a refusal that names the field (BUG-060)."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field, ValidationError
from tokenizers import Tokenizer

from octavo.cluster.api.errors import describe
from octavo.cluster.api.grammar import json_schema
from octavo.cluster.api.grammar.json_schema import check_schema
from octavo.cluster.api.grammar.lark import lark_of
from octavo.cluster.api.grammar.structured import FieldGrammar, StructuredOutputs
from octavo.worker.errors import InvalidRequest
from octavo.worker.grammar import GrammarCompiler

VOCAB_SIZE, STOP = 49152, 2


@dataclass
class Fields:
    """Of a body."""

    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


@pytest.fixture(scope="module")
def compiler(model_dir: Path) -> GrammarCompiler:
    return GrammarCompiler.of_model(model_dir, VOCAB_SIZE)


@pytest.fixture
async def structured(compiler: GrammarCompiler) -> AsyncIterator[StructuredOutputs]:
    outputs = StructuredOutputs(compiler)
    yield outputs
    outputs.close()


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_dir / "tokenizer.json"))


def response_format(schema: Any, **fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": schema, **fields}}}


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def options(count: int) -> dict[str, Any]:
    """Optional properties, of which either this or that; and so ``count`` times."""
    two = [{"anyOf": [{"properties": {f"{i}{name}": {"type": "null"}}} for name in "ab"]} for i in range(count)]
    return {"type": "object", "allOf": two}


@dataclass
class Judged:
    """Judges texts by the grammars of requests."""

    structured: StructuredOutputs
    compiler: GrammarCompiler
    tokenizer: Tokenizer

    async def follows(self, text: str, **fields: Any) -> bool:
        """Whether it is a complete output."""
        grammar = await self.structured.grammar(Fields(**fields))
        assert grammar is not None
        matcher = self.compiler.matcher(grammar.text, (STOP,))
        for token_id in self.tokenizer.encode(text, add_special_tokens=False).ids:
            if matcher.error is None:
                matcher.accept(token_id)
        row = np.zeros(VOCAB_SIZE // 32, dtype=np.int32)
        matcher.fill_mask(row)
        return matcher.error is None and bool(row[0] >> STOP & 1)


@pytest.fixture
def judged(structured: StructuredOutputs, compiler: GrammarCompiler, tokenizer: Tokenizer) -> Judged:
    return Judged(structured, compiler, tokenizer)


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a"]}
GBNF = 'root ::= word ("," word)*\nword ::= [a-z]+\n'
LARK = 'start: word ("," word)*\nword: /[a-z]+/\n'


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        (response_format(SCHEMA), '{"a": 1, "b": "x"}', '{"a": 1, "c": 2}'),
        (response_format(SCHEMA, strict=True, description="d"), '{"a":1}', '{"b":"x"}'),
        (response_format(SCHEMA), '{\n  "a": 1\n}', '{\n\n"a": 1}'),
        (response_format(SCHEMA | {"additionalProperties": True}), '{"a":1,"c":2}', '{"a":"1"}'),
        ({"guided_json": SCHEMA}, '{"a":1}', "[]"),
        ({"guided_json": json.dumps(SCHEMA)}, '{"a":1}', "[]"),
        ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, '{"a":1}', '{"a": 1}'),
        ({"response_format": {"type": "json_object"}}, '{"x": [1, {"y": null}]}', "[1]"),
        ({"structured_outputs": {"json_object": True}}, "{}", "1"),
        ({"guided_regex": r"\d{3}/[a-z]+"}, "123/ab", "12/ab"),
        ({"structured_outputs": {"regex": "^(a+)+$"}}, "aaaaaaaaaaaaaaaaaaaaaaaaaaaa", "aaaaaaaaaaaaaaaaaaaaaaaaaaab"),
        ({"guided_choice": ["yes", "no", '☃ \n"\x7f']}, '☃ \n"\x7f', "maybe"),
        ({"structured_outputs": {"choice": ["a", "ab"]}}, "ab", "b"),
        ({"guided_grammar": GBNF}, "ab,c", "ab,"),
        ({"structured_outputs": {"grammar": LARK}}, "ab,c", "ab,"),
        ({"guided_grammar": 'start: "<" %json {"type": "integer"} ">"'}, "<12>", "<a>"),
    ],
)
async def test_each_form_has_its_texts(judged: Judged, fields: dict[str, Any], good: str, bad: str) -> None:
    assert await judged.follows(good, **fields)
    assert not await judged.follows(bad, **fields)


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}])
async def test_without_a_form_any_text_will_do(structured: StructuredOutputs, fields: dict[str, Any]) -> None:
    assert await structured.grammar(Fields(**fields)) is None


IN_SCHEMA = "response_format.json_schema.schema"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (response_format({"type": "nonsense"}), IN_SCHEMA),
        (response_format({"properties": {"foo": "bar"}}), IN_SCHEMA),
        (response_format({"pattern": "(["}), IN_SCHEMA),
        (response_format({"$ref": "#/nope"}), IN_SCHEMA),
        (response_format(nested(200)), IN_SCHEMA),
        (response_format({"type": "string", "pattern": "(?=a)"}), IN_SCHEMA),
        (response_format({"type": "string", "pattern": "a" * 5_000}), IN_SCHEMA),
        (response_format({"type": "string", "pattern": "((a{1000}){1000}){1000}"}), IN_SCHEMA),
        (response_format({"type": "integer", "multipleOf": 1_000_003}), IN_SCHEMA),
        (response_format({"allOf": [{"multipleOf": number} for number in (983, 991, 997)]}), IN_SCHEMA),
        (response_format({"enum": list(range(5_001))}), IN_SCHEMA),
        (response_format({"const": "x" * 2**18}), IN_SCHEMA),
        (response_format({"type": "object", "properties": {f"p{i}": {} for i in range(501)}}), IN_SCHEMA),
        (response_format({"type": "object", "properties": {f"p{i}": {} for i in range(400)}}), IN_SCHEMA),
        (response_format({"anyOf": [{"type": "string"} for _ in range(5_001)]}), IN_SCHEMA),
        (response_format(options(8)), IN_SCHEMA),
        (response_format(options(40)), IN_SCHEMA),
        (response_format({"$ref": "#"}), IN_SCHEMA),
        (response_format({"type": "array", "items": {"$ref": "#"}, "minItems": 1}), IN_SCHEMA),
        (response_format({"allOf": [{"type": "string"}, {"type": "integer"}]}), IN_SCHEMA),
        (response_format({"oneOf": [{"type": "string"}, {"maxLength": 3}]}), IN_SCHEMA),
        (response_format([]), IN_SCHEMA),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "text", "json_schema": {"name": "p", "schema": {}}}},
            "response_format.json_schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format.json_schema.name",
        ),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema"),
        ({"guided_json": '{"type":'}, "guided_json"),
        ({"guided_json": "[]"}, "guided_json"),
        ({"guided_json": "[" * 5_000}, "guided_json"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_regex": r"(a)\1"}, "guided_regex"),
        ({"guided_regex": "a{1000000}"}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["x" * 70_000]}, "guided_choice"),
        ({"structured_outputs": {"choice": [str(number) for number in range(5_001)]}}, "structured_outputs.choice"),
        ({"guided_grammar": "("}, "guided_grammar"),
        ({"guided_grammar": "start: ("}, "guided_grammar"),
        ({"guided_grammar": "root ::= missing"}, "guided_grammar"),
        ({"guided_grammar": "root ::= " + "(" * 3_000 + '"a"' + ")" * 3_000}, "guided_grammar"),
        (
            {"guided_grammar": "".join(f"r{i} ::= r{i + 1} | r{i + 1} r{i + 1}\n" for i in range(1_500))},
            "guided_grammar",
        ),
        ({"guided_grammar": "start: x\nx: x\n"}, "guided_grammar"),
        ({"guided_grammar": "start: x\nx[temperature=0.5]: /a*/\n"}, "guided_grammar"),
        ({"guided_grammar": 'start: x\nx[suffix="]", stop="b"]: /a*/\n'}, "guided_grammar"),
        ({"guided_grammar": "start: /a/ " + '%json {"type": "null"} ' * 101}, "guided_grammar"),
        ({"guided_grammar": "start: /a/{6000}"}, "guided_grammar"),
        ({"guided_grammar": "start: /(a{1000}){1000}/"}, "guided_grammar"),
        ({"guided_grammar": "start: A\nA: B{1000}\nB: C{1000}\nC: /x/{1000}\n"}, "guided_grammar"),
        ({"guided_grammar": 'start: %json {"type": "object", "uniqueItems": true}'}, "guided_grammar"),
        ({"guided_grammar": 'start: %json {"type": '}, "guided_grammar"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " *"}}, "structured_outputs.whitespace_pattern"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ],
)
async def test_case_bug_060_what_cannot_be_followed_is_refused_by_name(
    structured: StructuredOutputs, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises((InvalidRequest, ValidationError)) as refusal:
        await structured.grammar(Fields(**fields))
    error = describe(refusal.value)
    assert (error.status, error.param) == (400, param)


@pytest.mark.parametrize("part", ["[", "/[", "<[", '"', '\\"', "\\/", "\n", "{ 1", "stop ", "/[[:a", "/a/ "])
def test_a_long_grammar_is_looked_through_once(part: str) -> None:
    """Looked through from each of its places to its end it would take minutes."""
    for start in ("start: /a/\n", ""):
        with contextlib.suppress(InvalidRequest):
            lark_of(start + part * (65_000 // len(part)), "p")


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"pattern": "[" * 4_000}] * 16},
        {"anyOf": [{"pattern": "\\p{" * 1_000}] * 20},
        {"allOf": [{"exclusiveMinimum": 2 * i} if i % 2 else {"maximum": -i} for i in range(4_800)]},
        {"$ref": "#/$defs/0", "$defs": {"4000": {}, **{f"{i}": {"$ref": f"#/$defs/{i + 1}"} for i in range(4_000)}}},
        {"$ref": "#/$defs/4000", "$defs": {"0": {}, **{f"{i}": {"$ref": f"#/$defs/{i - 1}"} for i in range(1, 4_001)}}},
    ],
    ids=["classes", "properties", "bounds", "chain", "chain back"],
)
def test_a_large_schema_is_judged_in_linear_time(schema: dict[str, Any]) -> None:
    """With the square of its size it would take half a minute."""
    check_schema(schema, "p")


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"anyOf": [{"pattern": "a" * 4_000}] * 17}, r"p\.anyOf\[\d+\]\.pattern is too much: .* 65536 characters"),
        ({"$ref": "#/anyOf/" + "1" * 5_000}, "points to no schema"),
        ({"allOf": [{"exclusiveMinimum": 3}, {"maximum": -9}, {"maximum": 3.5}]}, "less than 1 away"),
        ({"allOf": [{"exclusiveMaximum": 3}, {"minimum": 2.5}, {"minimum": 9}]}, "less than 1 away"),
    ],
    ids=["patterns", "index", "above", "below"],
)
def test_a_schema_beyond_the_limits_is_refused(schema: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        check_schema(schema, "p")


def test_judging_has_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_schema, "JUDGE_LIMIT_S", -1.0)
    with pytest.raises(InvalidRequest, match="to judge"):
        check_schema({"type": "null"}, "p")


async def test_case_bug_060_good_requests_go_on_beside_bad_ones(judged: Judged) -> None:
    bad = [judged.structured.grammar(Fields(**response_format(options(count)))) for count in (7, 8)]
    good = [judged.follows(f'{{"a": {number}}}', guided_json=SCHEMA) for number in range(3)]
    outcomes = await asyncio.gather(*bad, *good, return_exceptions=True)
    assert outcomes[2:] == [True, True, True]
    assert all(isinstance(outcome, InvalidRequest) for outcome in outcomes[:2])


async def test_what_takes_too_long_is_refused(compiler: GrammarCompiler) -> None:
    hasty = StructuredOutputs(compiler, limit_s=0.0)
    with pytest.raises(InvalidRequest, match="takes more than 0 s") as refusal:
        await hasty.grammar(Fields(**response_format(options(6))))
    assert refusal.value.param == IN_SCHEMA
    hasty.close()


async def test_the_event_loop_goes_on_while_a_grammar_is_compiled(structured: StructuredOutputs) -> None:
    compiling = asyncio.create_task(structured.grammar(Fields(guided_choice=[f"choice {i}" for i in range(4_000)])))
    num_turns = 0
    while not compiling.done():
        await asyncio.sleep(0)
        num_turns += 1
    assert await compiling is not None
    assert num_turns > 100


UNSUPPORTED = (
    *(
        "not",
        "if",
        "then",
        "else",
        "dependentRequired",
        "dependentSchemas",
        "dependencies",
        "propertyNames",
        "contains",
    ),
    *("minContains", "maxContains", "uniqueItems", "unevaluatedItems", "unevaluatedProperties"),
    *("additionalItems", "$dynamicRef", "$anchor", "$id", "id", "nullable", "contentSchema", "x-guidance"),
    *("x-anything", "typ", ""),
)


@pytest.mark.parametrize("keyword", UNSUPPORTED)
async def test_a_keyword_that_is_not_supported_is_refused_with_its_path(
    structured: StructuredOutputs, keyword: str
) -> None:
    for value in ({}, True, 1, "x", []):
        schema = {"type": "object", "properties": {"a": {"anyOf": [{"type": "array", "items": {keyword: value}}]}}}
        with pytest.raises(InvalidRequest, match="is not supported") as refusal:
            await structured.grammar(Fields(**response_format(schema)))
        assert f"{IN_SCHEMA}.properties.a.anyOf[0].items.{keyword} is not supported" in str(refusal.value)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": []},
        {"type": 1},
        {"enum": []},
        {"required": "a"},
        {"properties": []},
        {"anyOf": []},
        {"anyOf": {}},
        {"items": [{}]},
        {"minLength": -1},
        {"maxLength": 1.5},
        {"maxItems": True},
        {"maxItems": 10_000_000},
        {"minimum": "1"},
        {"exclusiveMinimum": True},
        {"multipleOf": 0},
        {"pattern": 1},
        {"format": "nonsense"},
        {"minProperties": 2},
        {"type": "number", "exclusiveMinimum": 1, "maximum": 1.5},
        {"$ref": "https://example.com/schema"},
        {"$ref": 1},
        {"$ref": "#/enum/0", "enum": [{}]},
        {"$schema": "http://json-schema.org/draft-04/schema#"},
        {"$schema": 1},
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "$ref": "#/definitions/a",
            "minLength": 1,
            "definitions": {"a": {}},
        },
        {"properties": {"\n": {}}},
    ],
    ids=json.dumps,
)
async def test_a_keyword_with_a_wrong_value_is_refused(structured: StructuredOutputs, schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="Invalid schema: ") as refusal:
        await structured.grammar(Fields(**response_format(schema)))
    assert refusal.value.param == IN_SCHEMA


KEYWORDS = st.sampled_from(
    (
        *("type", "properties", "items", "required", "$ref", "anyOf", "allOf", "oneOf", "enum", "const", "minLength"),
        *("minimum", "maximum", "exclusiveMaximum", "$defs", "multipleOf", "pattern", "format", "minProperties"),
        *("prefixItems", "$schema", "patternProperties", "additionalProperties", "maxItems"),
    )
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**70) | st.floats() | st.text(max_size=3)
    | st.sampled_from(["string", "object", "array", "number", "#", "#/$defs/a", "#/items", "(", "date"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYWORDS | st.sampled_from("ab"), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@given(schema=st.dictionaries(KEYWORDS, VALUES, max_size=4), as_grammar=st.booleans())
def test_any_schema_is_followed_or_refused(compiler: GrammarCompiler, schema: dict[str, Any], as_grammar: bool) -> None:
    async def grammar() -> FieldGrammar | None:
        outputs = StructuredOutputs(compiler)
        try:
            how = {"guided_grammar": f"start: %json {json.dumps(schema)}"} if as_grammar else {"guided_json": schema}
            return await outputs.grammar(Fields(**how))  # type: ignore[arg-type]
        finally:
            outputs.close()

    with contextlib.suppress(InvalidRequest):
        assert asyncio.run(grammar()) is not None


async def test_what_pydantic_says_of_a_model_is_followed(judged: Judged) -> None:
    """Definitions, unions by a discriminator, defaults, titles."""
    schema = Drawing.model_json_schema()
    good = {"shapes": [{"kind": "circle", "radius": 1.5}, {"kind": "box", "size": [1, 2]}], "name": None}
    jsonschema.validate(good, schema)
    assert await judged.follows(json.dumps(good), **response_format(schema))
    assert not await judged.follows('{"shapes": [{"kind": "circle", "size": [1, 2]}]}', **response_format(schema))


class Circle(BaseModel):
    kind: Literal["circle"]
    radius: float = Field(gt=0)


class Box(BaseModel):
    kind: Literal["box"]
    size: Annotated[list[int], Field(min_length=2, max_length=2)]


class Drawing(BaseModel):
    """A picture."""

    shapes: list[Annotated[Circle | Box, Field(discriminator="kind")]]
    name: str | None = None
