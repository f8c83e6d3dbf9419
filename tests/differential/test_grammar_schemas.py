"""As ``tests/worker/test_grammar_schemas.py``, with more schemas."""

from __future__ import annotations

from pathlib import Path

from random_schemas import REFUSALS, walks_on_model

SEEDS = range(1_000, 1_280)


def test_complete_outputs_of_200_random_schemas_are_valid(model_dir: Path) -> None:
    walks = walks_on_model(model_dir, SEEDS)
    assert walks.num_followed >= 200
    assert walks.num_documents >= 400
    assert [reason for reason in walks.refused if not any(known in reason for known in REFUSALS)] == []
