"""A tiny random Llama: what transformers says of its prompts, and the ranks that run it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from model_engine import Group
from random_llama import LIMITS, RandomLlama
from rank_group import StartGroup


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> RandomLlama:
    return RandomLlama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def group(llama: RandomLlama, start_group: StartGroup) -> Iterator[Group]:
    with start_group(llama.folder, limits=LIMITS) as group:
        yield group
