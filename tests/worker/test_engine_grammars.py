"""Output follows its request's grammar whenever steps are planned, and one that fails ends its own request alone."""

from __future__ import annotations

from typing import Any

import pytest
from engine_bench import EngineBench
from engine_bench import request as any_request
from model_engine import Given, TinyModel
from phrase_grammar import Phrase

from octavo.worker.errors import InvalidRequest
from octavo.worker.messages import Branch, FinishReason, Request, SamplingParams
from octavo.worker.sampling_state import Matcher

PHRASE = (3, 40, 95, 40, 3, 0)
STOP = 2
ERROR = FinishReason.ERROR


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return TinyModel(tmp_path_factory.mktemp("model"))


@pytest.fixture(params=["", "ahead", "ahead, overlapping"])
def how(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"plans_ahead": bool(request.param), "overlaps": "overlapping" in request.param}


def matcher_of(grammar: str, stop_token_ids: tuple[int, ...]) -> Matcher:
    if grammar == "bad":
        raise InvalidRequest("the grammar is bad", param="grammar")
    failing = {"lost": {"lost_after": 3}, "broken": {"broken_after": 3}}
    return Phrase(PHRASE, stop_token_ids, **failing.get(grammar, {}))


def request(name: str = "r", *outputs: tuple[int, ...], **sampling: Any) -> Request:
    fields = {"max_tokens": 12, "seed": 1, "stop_token_ids": (STOP,), "grammar": name} | sampling
    branches = tuple(Branch(index, output) for index, output in enumerate(outputs or ((),)))
    return Request(name, "gateway", "model", tuple(range(20, 37)), b"", SamplingParams(**fields), branches)


PLAIN = request("plain", grammar=None, stop_token_ids=())


def run(model: TinyModel, how: dict[str, Any], *requests: Request) -> dict[tuple[str, int], Given]:
    with model.engine(**how, budget=24, matcher_of=matcher_of) as engine:
        return engine.run(*requests)


def test_the_output_follows_the_grammar_and_stops(model: TinyModel, how: dict[str, Any]) -> None:
    given = run(model, how, request("r", (), ()), PLAIN, request("moved", PHRASE[:2], (), PHRASE))
    for branch in [("r", 0), ("r", 1), ("moved", 1)]:
        assert (tuple(given[branch].token_ids), given[branch].reason) == ((*PHRASE, STOP), FinishReason.STOP)
    assert given["moved", 0].token_ids == [*PHRASE[2:], STOP]
    assert given["moved", 2].token_ids == [STOP]
    assert given["plain", 0].reason is FinishReason.LENGTH


@pytest.mark.parametrize("wishes", [{"stop_token_ids": ()}, {"allowed_token_ids": PHRASE}], ids=str)
def test_a_complete_output_ends_also_where_no_token_says_so(
    model: TinyModel, how: dict[str, Any], wishes: dict[str, Any]
) -> None:
    given = run(model, how, request(**wishes), PLAIN)
    assert (tuple(given["r", 0].token_ids), given["r", 0].reason) == (PHRASE, FinishReason.STOP)
    assert given["plain", 0].reason is FinishReason.LENGTH


def test_no_grammar_goes_on_for_min_tokens(model: TinyModel, how: dict[str, Any]) -> None:
    ended = run(model, how, request(min_tokens=9))["r", 0]
    assert (ended.reason, ended.param, ended.token_ids) == (ERROR, "grammar", list(PHRASE))
    assert "grammar and min_tokens exclude each other" in (ended.error or "")


@pytest.mark.parametrize(
    ("name", "param", "error"),
    [("lost", "grammar", "the grammar is too hard"), ("broken", None, "the next token could not be sampled")],
)
def test_a_grammar_that_fails_ends_its_request_alone(
    model: TinyModel, how: dict[str, Any], name: str, param: str | None, error: str
) -> None:
    given = run(model, how, request("r"), request(name), PLAIN)
    ended = given[name, 0]
    assert (ended.reason, ended.param, ended.error) == (ERROR, param, error)
    assert tuple(given[name, 0].token_ids) == PHRASE[:3]
    assert tuple(given["r", 0].token_ids) == (*PHRASE, STOP)
    assert given["plain", 0].reason is FinishReason.LENGTH


def test_a_grammar_that_cannot_be_followed_is_refused(model: TinyModel) -> None:
    ended = run(model, {}, request("bad"))["bad", 0]
    assert (ended.reason, ended.param, ended.error) == (ERROR, "grammar", "the grammar is bad")
    bench = EngineBench()
    bench.submit(any_request(grammar="any"))
    assert (bench.of()[0].finish_reason, bench.of()[0].param) == (ERROR, "grammar")
