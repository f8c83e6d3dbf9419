"""Gemma-3-270M, a base model of 18 layers, 15 of them with windows of 512: what is served is what transformers says."""

from __future__ import annotations

import json
from pathlib import Path

import platformdirs
import pytest
from openai import BadRequestError, OpenAI
from serve_process import ServeProcess
from transformers import PreTrainedTokenizerFast
from transformers_reference import DATA, Reference

from octavo import LLM
from octavo.worker.checkpoint import resolve_model
from octavo.worker.model.config import ModelConfig

NAME = "gemma-3-270m"
MAX_TOKENS = 48
LONG = 3_000
"""Tokens of the longest prompt, several windows."""


@pytest.fixture(scope="module")
def folder() -> Path:
    return resolve_model(NAME, cache_dir=platformdirs.user_cache_path("octavo"), report=print).path


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    """Nineteen short prompts, and one of many of them."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    texts = json.loads((DATA / "prompts.json").read_text())["prompts"]
    prompts = [list(tokenizer(text).input_ids) for text in texts[:19]]
    prompts.append(list(tokenizer("\n\n".join(texts * 3)).input_ids)[:LONG])
    assert len(prompts[-1]) == LONG
    eos = ModelConfig.from_folder(folder).eos_token_ids
    return Reference(folder, prompts, max_tokens=MAX_TOKENS, eos_token_ids=eos)


def test_greedy_outputs_equal_those_of_transformers(reference: Reference) -> None:
    """All at once, in chunks of 512 tokens; then again, from the prefix cache."""
    with LLM(NAME, max_model_len=4096, max_num_batched_tokens=512) as llm:
        for _ in range(2):
            given = llm.generate(reference.prompts, temperature=0, max_tokens=MAX_TOKENS)
            wrong, excused = reference.differences([output.outputs[0].token_ids for output in given])
            assert not wrong
            assert excused <= 2


def test_it_is_served_by_its_name(folder: Path) -> None:
    """A base model has completions, and no chat without a template."""
    server = ServeProcess(NAME, "--replicas", "1", "--max-model-len", "2048")
    try:
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)
        (model,) = client.models.list().data
        assert model.id == NAME
        answer = client.completions.create(
            model=NAME, prompt="Monday, Tuesday, Wednesday,", max_tokens=8, temperature=0
        )
        assert "Thursday" in answer.choices[0].text
        with pytest.raises(BadRequestError, match="template"):
            client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": "Hi"}])
    finally:
        server.stop()
