"""Mistakes at the start: one line that names the thing, the value and the limit, exit code 2, nothing started."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **shape)).save_pretrained(folder)
    return folder


def serve(*args: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "octavo.cluster", "serve", *args], capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stderr.strip().splitlines()[-1]


def other_shape(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 50}))


def cut_off(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])


def missing_shard(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def unknown_architecture(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["WonderForCausalLM"]}))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (other_shape, ["mlp.gate_proj.weight", "[48, 32]", "[50, 32]"]),
        (cut_off, ["model.safetensors", "cut off"]),
        (missing_shard, ["model-00002-of-00002.safetensors", "missing"]),
        (unknown_architecture, ["WonderForCausalLM", "LlamaForCausalLM"]),
    ],
)
def test_a_damaged_model(tiny_folder: Path, tmp_path: Path, damage: Callable[[Path], None], words: list[str]) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    damage(folder)
    code, line = serve(str(folder), "--port", "0")
    assert code == 2
    assert line.startswith("octavo serve: error: ")
    assert all(word in line for word in words), line


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["./no-such-folder"], ["no-such-folder", "does not exist"]),
        (["--tensor-parallel-size", "11"], ["--tensor-parallel-size", "11", "9 query heads"]),
        (["--max-model-len", "100000"], ["--max-model-len", "100000", "8192"]),
        (["--blok-size", "16"], ["--blok-size", "--block-size"]),
        (["--block-size", "17"], ["--block-size", "17", "16 and 128"]),
        (["--replicas", "1000"], ["--replicas", "1000", "GiB"]),
        (["--host", "300.1.1.1"], ["--host", "300.1.1.1"]),
    ],
)
def test_a_flag_that_cannot_be(model_dir: Path, args: list[str], words: list[str]) -> None:
    code, line = serve(*args, "--port", "0")
    assert code == 2
    assert all(word in line for word in words), line


def test_a_port_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, line = serve("--port", str(port))
    assert code == 2
    assert "--port" in line
    assert str(port) in line


def test_too_little_memory_is_said_by_the_worker_that_finds_it(model_dir: Path) -> None:
    """Only a worker knows its memory: the error comes back through Ray in one line, and nothing is left."""
    code, line = serve(
        *("--kv-cache-memory-bytes", "16MiB", "--max-model-len", "8192", "--replicas", "1", "--port", "0")
    )
    assert code == 2
    assert all(word in line for word in ("--kv-cache-memory-bytes", "8192", "blocks")), line
