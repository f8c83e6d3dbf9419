"""What an update of weights must keep, since gateways stay as they are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from octavo.cluster.config import ServeConfig
from octavo.cluster.group_updates import GroupsCard
from octavo.cluster.operations import _check_weights
from octavo.worker.errors import ConfigurationError


@pytest.fixture
def other(model_dir: Path, tmp_path: Path) -> Path:
    """The embedded model again, in another folder."""
    folder = tmp_path / "other"
    folder.mkdir()
    for file in model_dir.iterdir():
        if file.suffix == ".json":
            shutil.copy(file, folder)
        else:
            (folder / file.name).symlink_to(file)
    return folder


def check(model_dir: Path, other: Path) -> None:
    deployed = ServeConfig.parse({"model": str(model_dir), "device": "cpu"})
    card = GroupsCard("WorkerGroup-0", "m", deployed.model_dump(mode="json"), {})
    _check_weights(card, card.updated({"model": str(other)}), print)


def test_other_weights_with_the_same_tokenizer_are_taken(model_dir: Path, other: Path) -> None:
    check(model_dir, other)


def test_another_tokenizer_is_refused(model_dir: Path, other: Path) -> None:
    with (other / "tokenizer.json").open("a") as file:
        file.write(" ")
    with pytest.raises(ConfigurationError, match=r"--model: its tokenizer\.json is not that of the model"):
        check(model_dir, other)


def test_a_shorter_context_is_refused(model_dir: Path, other: Path) -> None:
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    with pytest.raises(ConfigurationError, match="--model: its context is 64 tokens, less than the"):
        check(model_dir, other)
