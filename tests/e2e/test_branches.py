"""Requests with several outputs, drawn and searched, and what a request may ask of the prefix cache."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import torch
from openai import OpenAI
from serve_client import Choices, wait_until_idle
from serve_process import ServeProcess
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

TALE = [{"role": "user", "content": "Tell me a tale of a lighthouse keeper."}]
DRAWN = {"temperature": 1.0, "seed": 7, "max_tokens": 20, "ignore_eos": True}
TEXTS = ("The harbour of the old town was", "To bake a good loaf of bread, you need")

Ask = Callable[..., Choices]


@pytest.fixture(scope="module")
def ask(client: OpenAI, cluster: ServeProcess) -> Ask:
    """A chat, or with ``prompt`` a completion; fields beyond OpenAI's are sent like any other."""

    def ask(**fields: Any) -> Choices:
        own = {name: fields.pop(name) for name in list(fields) if name in OCTAVO_FIELDS}
        if fields.get("stream"):
            fields["stream_options"] = {"include_usage": True}
        endpoint: Any = client.completions if "prompt" in fields else client.chat.completions
        question = {} if "prompt" in fields else {"messages": TALE}
        answer = endpoint.create(model=cluster.model, extra_body=own, **question | fields)
        return Choices.of_stream(answer) if fields.get("stream") else Choices.of(answer)

    return ask


OCTAVO_FIELDS = frozenset(
    ("ignore_eos", "beam_width", "use_beam_search", "length_penalty", "early_stopping", "cache_prompt", "cache_salt")
)


# ---- drawn apart ----


@pytest.fixture(scope="module")
def eight(ask: Ask) -> Choices:
    return ask(n=8, **DRAWN)


def test_eight_choices_streamed_and_not(ask: Ask, eight: Choices) -> None:
    streamed = ask(n=8, stream=True, **DRAWN)
    assert len(set(eight.texts)) == 8
    assert eight.reasons == ("length",) * 8
    assert (streamed.texts, streamed.reasons) == (eight.texts, eight.reasons)
    assert streamed.usage.prompt_tokens == eight.usage.prompt_tokens
    assert streamed.usage.completion_tokens == eight.usage.completion_tokens


def test_a_choice_depends_on_seed_and_index_alone(ask: Ask, eight: Choices) -> None:
    """Not on how many others there are."""
    assert ask(n=4, **DRAWN).texts == eight.texts[:4]
    assert ask(n=1, **DRAWN).texts == eight.texts[:1]
    assert ask(n=4, **DRAWN | {"seed": 8}).texts != eight.texts[:4]


def test_the_prompt_is_counted_once(ask: Ask, eight: Choices) -> None:
    one, usage = ask(n=1, **DRAWN).usage, eight.usage
    assert usage.prompt_tokens == one.prompt_tokens
    assert usage.completion_tokens == 8 * one.completion_tokens == 8 * DRAWN["max_tokens"]
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens <= usage.prompt_tokens


def test_several_prompts_with_several_choices_each(ask: Ask) -> None:
    """Choice i · n + k is output k of prompt i."""
    apart = [ask(prompt=text, n=2, **DRAWN) for text in TEXTS]
    together = ask(prompt=list(TEXTS), n=2, **DRAWN)
    assert together.texts == apart[0].texts + apart[1].texts
    assert together.usage.prompt_tokens == sum(choices.usage.prompt_tokens for choices in apart)


def test_greedy_choices_are_equal(ask: Ask) -> None:
    greedy = ask(temperature=0, max_tokens=24).texts
    assert ask(n=3, temperature=0, max_tokens=24).texts == greedy * 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_only_the_choice_that_has_it(
    ask: Ask, eight: Choices, cluster: ServeProcess, stream: bool
) -> None:
    free = eight.texts[:4]
    index, word = word_of_one_choice(free)
    stopped = ask(n=4, stop=[word], stream=stream, **DRAWN)
    assert stopped.texts == (*free[:index], free[index].partition(word)[0], *free[index + 1 :])
    assert stopped.reasons == tuple("stop" if i == index else "length" for i in range(4))
    assert stopped.usage.completion_tokens < 4 * DRAWN["max_tokens"]
    wait_until_idle(cluster)


def word_of_one_choice(texts: tuple[str, ...]) -> tuple[int, str]:
    """A word in the first half of one text that no other has."""
    for index, text in enumerate(texts):
        others = " ".join(texts[:index] + texts[index + 1 :])
        for word in text[: len(text) // 2].split()[1:-1]:
            if len(word) > 3 and word not in others:
                return index, word
    raise AssertionError(f"no word is in one text alone: {texts}")


# ---- beam search ----


def test_beams_are_those_of_transformers(ask: Ask, model_dir: Path) -> None:
    """Width 4, the best two of each: streamed, not streamed, and again from the cache."""
    fields = {"beam_width": 4, "n": 2, "max_tokens": 24, "temperature": 0}
    for text, expected in zip(TEXTS, searched_by_transformers(model_dir), strict=True):
        found = ask(prompt=text, **fields)
        assert found.texts == expected
        assert found.texts[0] != found.texts[1]
        assert ask(prompt=text, **fields).texts == expected
        streamed = ask(prompt=text, stream=True, **fields)
        assert (streamed.texts, streamed.reasons) == (found.texts, found.reasons)
        assert streamed.usage.completion_tokens == found.usage.completion_tokens


@torch.inference_mode()
def searched_by_transformers(model_dir: Path) -> list[tuple[str, ...]]:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    results = []
    for text in TEXTS:
        prompt = tokenizer(text, return_tensors="pt").input_ids
        outputs = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=24,
            num_beams=4,
            num_return_sequences=2,
            early_stopping=False,
            do_sample=False,
        )
        tokens = outputs[:, prompt.shape[1] :]
        results.append(tuple(tokenizer.backend_tokenizer.decode(row.tolist()) for row in tokens))
    return results


def test_a_search_of_one_beam_is_greedy_and_use_beam_search_has_n_beams(ask: Ask) -> None:
    greedy = ask(prompt=TEXTS[0], temperature=0, max_tokens=16).texts
    assert ask(prompt=TEXTS[0], beam_width=1, max_tokens=16).texts == greedy
    fields = {"prompt": TEXTS[0], "n": 3, "max_tokens": 16}
    assert ask(use_beam_search=True, **fields).texts == ask(beam_width=3, **fields).texts


def test_searches_and_streams_beside_each_other_change_nothing(
    client: OpenAI, cluster: ServeProcess, ask: Ask, eight: Choices
) -> None:
    search = {"prompt": TEXTS[1], "beam_width": 4, "n": 4, "max_tokens": 24, "early_stopping": True}
    alone = ask(**search).texts
    drawn = {name: value for name, value in DRAWN.items() if name not in OCTAVO_FIELDS}
    with client.chat.completions.create(
        model=cluster.model, messages=TALE, n=3, stream=True, extra_body={"ignore_eos": True}, **drawn
    ) as stream:
        beside: list[tuple[str, ...]] = []

        def search_once(texts: dict[int, str]) -> None:
            if not beside:
                beside.append(ask(**search).texts)

        assert Choices.of_stream(stream, search_once).texts == eight.texts[:3]
    assert beside == [alone]


# ---- the prefix cache ----


def fresh_text() -> str:
    """About 200 tokens that no request has had before."""
    return f"{secrets.token_hex(8)}. " + "The tide table says so. " * 30


def cached_tokens(ask: Ask, text: str, **fields: Any) -> int:
    return int(ask(prompt=text, max_tokens=1, **fields).usage.prompt_tokens_details.cached_tokens)


def test_cache_prompt_false_finds_nothing_and_leaves_nothing(ask: Ask) -> None:
    text = fresh_text()
    assert cached_tokens(ask, text, cache_prompt=False) == 0
    assert cached_tokens(ask, text) == 0
    assert cached_tokens(ask, text, cache_prompt=True) > 100
    assert cached_tokens(ask, text, cache_prompt=False) == 0
    assert cached_tokens(ask, text) > 100


def test_a_cache_salt_separates(ask: Ask) -> None:
    text = fresh_text()
    assert cached_tokens(ask, text, cache_salt="north") == 0
    assert cached_tokens(ask, text, cache_salt="north") > 100
    assert cached_tokens(ask, text, cache_salt="south") == 0
    assert cached_tokens(ask, text) == 0


def test_reset_prefix_cache_forgets(ask: Ask, cluster: ServeProcess) -> None:
    text = fresh_text()
    cached_tokens(ask, text)
    assert cached_tokens(ask, text) > 100
    forgotten = httpx.post(f"{cluster.url}/reset_prefix_cache", timeout=30).json()["blocks_forgotten"]
    assert len(forgotten) == 2
    assert sum(forgotten.values()) >= 100 // 16
    assert cached_tokens(ask, text) == 0
    assert cached_tokens(ask, text) > 100
