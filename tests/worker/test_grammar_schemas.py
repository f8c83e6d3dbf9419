"""Whatever follows the grammar of a JSON Schema validates against it. ``tests/differential`` walks through more."""

from __future__ import annotations

from pathlib import Path

from random_schemas import REFUSALS, walks_on_model

NUM_SCHEMAS = 40


def test_complete_outputs_of_random_schemas_are_valid(model_dir: Path) -> None:
    walks = walks_on_model(model_dir, range(NUM_SCHEMAS))
    assert walks.num_followed > 0.7 * NUM_SCHEMAS
    assert walks.num_documents > walks.num_followed
    assert [reason for reason in walks.refused if not any(known in reason for known in REFUSALS)] == []
