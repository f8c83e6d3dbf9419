"""The lab is set up once for all tests of this folder; its modules are found from here and by ``run.py`` alike."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from judge import Judge
from lab import Lab
from random_requests import Text


@pytest.fixture(scope="session")
def lab(model_dir: Path) -> Lab:
    return Lab(model_dir)


@pytest.fixture(scope="session")
def judge(lab: Lab) -> Iterator[Judge]:
    judge = Judge(lab)
    yield judge
    judge.close()


@pytest.fixture(scope="session")
def text(lab: Lab) -> Text:
    return Text(lab)
