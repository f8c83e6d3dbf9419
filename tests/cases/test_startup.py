"""Models that cannot be served are refused in a line that names what is wrong, before anything starts; what is only
unusual is served as it should be. Waiting for nodes (BUG-104) is in tests/faults."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from api_calls import complete
from model_folders import INDEX, change_json, link, save_sharded, shard_name
from refusals import refusal, refused_start
from serve_process import OneModel

from octavo.cluster.config import ServeConfig
from octavo.cluster.preflight import check_models

SECOND = shard_name(2)


@pytest.fixture(scope="module")
def whole(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model in three shards."""
    folder = tmp_path_factory.mktemp("sharded")
    save_sharded(model_dir, folder)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """Of links to it, to be damaged."""
    folder = tmp_path / "model"
    folder.mkdir()
    link(whole, folder)
    return folder


# ---- BUG-096: weights ----


def without_second_shard(folder: Path) -> None:
    (folder / SECOND).unlink()


def cut_off(folder: Path) -> None:
    content = (folder / SECOND).read_bytes()
    (folder / SECOND).unlink()
    (folder / SECOND).write_bytes(content[:-100])


def tensor_in_another_shard(folder: Path) -> None:
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    there, here = shard_name(1), SECOND
    moved = next(name for name, shard in weight_map.items() if shard == there)
    change_json(folder / INDEX, weight_map=weight_map | {moved: here})


def no_weights(folder: Path) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()


def a_folder_for_weights(folder: Path) -> None:
    no_weights(folder)
    (folder / "x.safetensors").mkdir()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (without_second_shard, [SECOND, "is missing", "model."]),
        (cut_off, [SECOND, "no whole safetensors file", "cut off"]),
        (tensor_in_another_shard, [SECOND, "lacks the tensor model.", INDEX]),
        (no_weights, ["has no .safetensors file"]),
        (a_folder_for_weights, ["has no .safetensors file"]),
    ],
)
def test_case_bug_096_weights_that_are_not_there(
    folder: Path, damage: Callable[[Path], None], words: list[str]
) -> None:
    damage(folder)
    assert all(word in refusal(folder) for word in (*words, str(folder)))


def test_case_bug_096_the_command_exits_before_it_starts_anything(folder: Path) -> None:
    without_second_shard(folder)
    code, line = refused_start(str(folder))
    assert code == 2
    assert line.startswith(f"octavo serve: error: {folder / SECOND} is missing")


def test_case_bug_096_a_file_that_the_index_does_not_name_is_not_read(cluster: OneModel, base: OneModel) -> None:
    """The base model is in three shards, with an old model.safetensors of zeros beside them."""
    fields: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "repetition_penalty": 1.0}
    expected = complete(cluster, "The capital of France is", **fields).text
    assert complete(base, "The capital of France is", **fields).text == expected


# ---- BUG-098: tokenizers and paths ----


def without_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()


def without_tokenizer_json(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def empty(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).write_text("")

    return damage


def more_tokens_than_rows(folder: Path) -> None:
    tokens = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    new = tokens[-1] | {"id": 49_152, "content": "<|new|>"}
    change_json(folder / "tokenizer.json", added_tokens=[*tokens, new])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (without_tokenizer, ["no tokenizer.json"]),
        (without_tokenizer_json, ["no tokenizer.json"]),
        (empty("tokenizer.json"), ["the tokenizer cannot be read"]),
        (empty("tokenizer_config.json"), ["the tokenizer cannot be read"]),
        (more_tokens_than_rows, ["1 tokens", "'<|new|>'", "49152", "vocab_size"]),
    ],
)
def test_case_bug_098_tokenizers_that_cannot_be_used(
    folder: Path, damage: Callable[[Path], None], words: list[str]
) -> None:
    damage(folder)
    assert all(word in refusal(folder) for word in (*words, str(folder)))


def test_case_bug_098_a_path_asks_no_hub(folder: Path) -> None:
    """Neither one that is not there nor a folder that lacks something; a listener in the hub's place sees nobody."""
    without_tokenizer(folder)
    with socket.create_server(("127.0.0.1", 0)) as hub:
        environment = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.getsockname()[1]}"}
        for model, words in ((f"{folder}/", "no tokenizer.json"), (f"{folder}-not/", "does not exist")):
            code, line = refused_start(model, environment=environment)
            assert (code, words in line) == (2, True), line
        hub.setblocking(False)
        with pytest.raises(BlockingIOError):
            hub.accept()


def test_case_bug_098_a_file_is_no_folder(folder: Path) -> None:
    assert f"{folder / 'config.json'} is a file" in refusal(folder / "config.json")


def test_case_bug_098_a_slash_at_the_end_changes_nothing(folder: Path) -> None:
    checked = check_models(ServeConfig.parse({"model": f"{folder}/"}), print)
    assert (checked.folders, checked.names) == ((folder,), ("model",))
