"""What a request's fields become in the engine's terms, and what holds where it says nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.datastructures import Headers

from octavo.cluster.api.http.caller import read_caller
from octavo.cluster.api.request.generation_defaults import GenerationDefaults
from octavo.cluster.api.request.judged import RequestJudge
from octavo.cluster.api.request.schemas import CompletionRequest
from octavo.cluster.api.service import GenerationRequest, ServedModel
from octavo.cluster.api.text.processor import TextProcessor
from octavo.worker.errors import ConfigurationError
from octavo.worker.messages import SamplingParams


async def judged(judge: RequestJudge, **fields: Any) -> GenerationRequest:
    """What the cluster is asked for a prompt of two tokens."""
    body = CompletionRequest.model_validate({"model": "smollm2", "prompt": [5, 6], "max_tokens": 8} | fields)
    (generation,) = (await judge.judge_completion(body, read_caller(Headers({})))).generations
    return generation


async def sampling(judge: RequestJudge, **fields: Any) -> SamplingParams:
    return (await judged(judge, **fields)).sampling


async def seeds(judge: RequestJudge, **fields: Any) -> list[int]:
    """Of a request with the same prompt three times."""
    body = CompletionRequest.model_validate({"model": "smollm2", "prompt": [[5, 6]] * 3, "max_tokens": 8} | fields)
    generations = (await judge.judge_completion(body, read_caller(Headers({})))).generations
    return [each.sampling.seed for each in generations]


@pytest.fixture
def judge(text: TextProcessor, info: ServedModel) -> Iterator[RequestJudge]:
    judge = RequestJudge(text, info)
    yield judge
    judge.close()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0.5),
        ("top_p", 0.9),
        ("top_k", 7),
        ("min_p", 0.1),
        ("presence_penalty", -2.0),
        ("frequency_penalty", 1.5),
        ("repetition_penalty", 1.8),
        ("seed", 7),
        ("min_tokens", 3),
    ],
)
async def test_numbers_reach_the_engine(judge: RequestJudge, field: str, value: float) -> None:
    assert getattr(await sampling(judge, **{field: value}), field) == value


async def test_prompts_without_a_seed_draw_differently(judge: RequestJudge) -> None:
    assert len(set(await seeds(judge))) == 3
    assert await seeds(judge, seed=-1) == [2**64 - 1] * 3


@pytest.mark.parametrize("top_k", [0, -1, None])
async def test_top_k_is_off(judge: RequestJudge, top_k: int | None) -> None:
    assert (await sampling(judge, top_k=top_k)).top_k is None


async def test_tokens_that_are_wanted_and_unwanted(judge: RequestJudge) -> None:
    """A bias of nothing is none, and a bad word is one at the start of a text and within it."""
    params = await sampling(
        judge, logit_bias={"9": -100, "3": 0, "7": 2}, allowed_token_ids=[9, 7, 9], bad_words=["Paris"]
    )
    assert params.logit_bias == ((9, -100.0), (7, 2.0))
    assert params.allowed_token_ids == (7, 9)
    assert len(params.bad_words) == 2


async def test_log_probabilities(judge: RequestJudge) -> None:
    """Those of the prompt are wanted by an echo, or where nothing else is (case BUG-011)."""
    params = await sampling(judge)
    assert (params.num_logprobs, params.num_prompt_logprobs) == (None, None)
    params = await sampling(judge, logprobs=0)
    assert (params.num_logprobs, params.num_prompt_logprobs) == (0, None)
    params = await sampling(judge, logprobs=3, echo=True)
    assert (params.num_logprobs, params.num_prompt_logprobs) == (3, 3)
    params = await sampling(judge, logprobs=1, prompt_logprobs=5)
    assert (params.num_logprobs, params.num_prompt_logprobs) == (1, 5)


async def test_a_prompt_is_cut_from_its_start(judge: RequestJudge) -> None:
    assert (await judged(judge, prompt=[5] * 300 + [6, 7], truncate_prompt_tokens=2)).prompt_token_ids == (6, 7)


# ---- what the model's generation_config.json says ----

CONFIG = {"temperature": 0.6, "top_k": 1, "top_p": 0.9, "repetition_penalty": 1.2, "max_new_tokens": 5}


def folder_with(tmp_path: Path, config: dict[str, Any]) -> Path:
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    return tmp_path


async def test_case_bug_053_defaults_of_the_model(text: TextProcessor, info: ServedModel, tmp_path: Path) -> None:
    """They hold where the request is silent, and only there; how much is generated is not theirs to say."""
    defaults = GenerationDefaults.load("auto", folder_with(tmp_path, CONFIG))
    judge = RequestJudge(text, replace(info, defaults=defaults))
    params = await sampling(judge, max_tokens=None)
    assert (params.temperature, params.top_k, params.top_p, params.repetition_penalty) == (0.6, 1, 0.9, 1.2)
    assert params.max_tokens == info.max_model_len - 2
    params = await sampling(judge, temperature=1, top_k=-1, top_p=1, repetition_penalty=1)
    assert (params.temperature, params.top_k, params.top_p, params.repetition_penalty) == (1.0, None, 1.0, 1.0)
    assert (await sampling(judge, use_beam_search=True, n=2)).repetition_penalty == 1.0
    judge.close()


def test_case_bug_053_the_models_defaults_can_be_switched_off_or_replaced(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, CONFIG)
    assert GenerationDefaults.load("none", folder) == GenerationDefaults()
    assert GenerationDefaults.load(str(folder), Path("elsewhere")).top_k == 1
    assert dict(GenerationDefaults.load("auto", folder).own()) == {
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 1,
        "repetition_penalty": 1.2,
    }


def test_a_whole_number_may_be_written_as_a_float(tmp_path: Path) -> None:
    top_k = GenerationDefaults.load("auto", folder_with(tmp_path, {"top_k": 50.0})).top_k
    assert (top_k, type(top_k)) == (50, int)


def test_a_model_without_defaults_has_those_of_openai(tmp_path: Path) -> None:
    assert GenerationDefaults.load("auto", tmp_path) == GenerationDefaults()
    with pytest.raises(ConfigurationError, match="--generation-config"):
        GenerationDefaults.load(str(tmp_path), tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", 9), ("top_p", 0), ("top_k", 2.5), ("top_k", math.inf), ("top_k", 2**63), ("min_p", "x")],
)
def test_defaults_that_no_request_could_have_are_named(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"{name} is {value!r}"):
        GenerationDefaults.load("auto", folder_with(tmp_path, {name: value}))
