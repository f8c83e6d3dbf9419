"""Branches with one grammar follow it each for itself, also where they are preempted or moved (BUG-062, BUG-075)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from letter_tokenizer import NUM_TOKENS, STOP, write_tokenizer
from model_engine import Given, TinyModel
from tokenizers import Tokenizer

from octavo.cluster.api.grammar.schema_grammar import grammar_of_schema
from octavo.worker.grammar import GrammarCompiler
from octavo.worker.messages import Branch, FinishReason, Request, SamplingParams

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 999}, "b": {"type": "string", "maxLength": 6}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
NUM_BRANCHES = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def model(folder: Path) -> TinyModel:
    return TinyModel(folder)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return write_tokenizer(folder)


@pytest.fixture
def compiler(folder: Path, tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler.of_model(folder, NUM_TOKENS)


def request(name: str = "r", *, num_branches: int = NUM_BRANCHES, **fields: Any) -> Request:
    grammar = grammar_of_schema(SCHEMA, compact=True)
    sampling = SamplingParams(max_tokens=40, seed=7, stop_token_ids=(STOP,), grammar=grammar)
    branches = tuple(map(Branch, range(num_branches)))
    prompt = tuple(range(20, 37))
    return Request(name, "gateway", "model", prompt, b"", replace(sampling, **fields), branches)


Outputs = dict[tuple[str, int], Given]


def run(model: TinyModel, compiler: GrammarCompiler, *requests: Request, **how: Any) -> Outputs:
    with model.engine(matcher_of=compiler.matcher, **how) as engine:
        return engine.run(*requests)


def tokens(given: Outputs) -> dict[tuple[str, int], list[int]]:
    return {key: output.token_ids for key, output in given.items()}


def check_documents(given: Outputs, tokenizer: Tokenizer) -> None:
    for output in given.values():
        assert output.reason is FinishReason.STOP
        jsonschema.validate(json.loads(tokenizer.decode(output.token_ids)), SCHEMA)


def test_each_branch_is_a_document_of_its_own(
    model: TinyModel, compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    given = run(model, compiler, request())
    assert len(given) == NUM_BRANCHES
    check_documents(given, tokenizer)
    assert len({tuple(output.token_ids) for output in given.values()}) == NUM_BRANCHES


def test_a_preempted_branch_goes_on_where_its_document_stopped(
    model: TinyModel, compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    requests = [request("r"), request("s", seed=8)]
    with model.engine(matcher_of=compiler.matcher, num_blocks=22) as engine:
        given = engine.run(*requests)
        assert engine.engine.scheduler.counters.num_preemptions > 0
    check_documents(given, tokenizer)
    alone = tokens(run(model, compiler, requests[0])) | tokens(run(model, compiler, requests[1]))
    assert tokens(given) == alone


def test_a_branch_that_moves_goes_on_where_its_document_stopped(
    model: TinyModel, compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    whole = {key[1]: tuple(output.token_ids) for key, output in run(model, compiler, request()).items()}
    moved = replace(request(), branches=(Branch(0, whole[0][:9]), Branch(1, whole[1][:2]), Branch(2)))
    given = run(model, compiler, moved)
    assert [tuple(given["r", index].token_ids) for index in range(3)] == [whole[0][9:], whole[1][2:], whole[2]]


def test_a_cut_document_is_the_beginning_of_one(
    model: TinyModel, compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    whole = run(model, compiler, request())
    given = run(model, compiler, request(max_tokens=7))
    for key, output in given.items():
        assert (output.reason, output.token_ids) == (FinishReason.LENGTH, whole[key].token_ids[:7])


def test_a_bad_grammar_ends_its_request_alone(
    model: TinyModel, compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    bad = request("bad", grammar='{"grammars": [{"json_schema": {"type": "nonsense"}}]}')
    given = run(model, compiler, request("r"), bad)
    check_documents({key: output for key, output in given.items() if key[0] == "r"}, tokenizer)
    ended = given["bad", 0]
    assert (ended.reason, ended.param, ended.token_ids) == (FinishReason.ERROR, "grammar", [])
    assert "nonsense" in (ended.error or "")
