"""The JSON schema for editors agrees with what octavo serve takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from pydantic import ValidationError

from octavo.cluster.cli import main
from octavo.cluster.config import ServeConfig
from octavo.cluster.config_schema import config_schema
from octavo.cluster.model_settings import ModelSettings
from octavo.worker.errors import ConfigurationError

SCHEMA = config_schema()
VALIDATOR = Draft202012Validator(SCHEMA)
EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))

WORDS = ["", "auto", "8", "x", "int8", "fp8", "/", "/api", "api/", "2GiB", "2Gi", "-1", "true", "cost", "info", "none"]
NUMBERS = [-1, 0, 1, 2, 3, 16, 17, 64, 65, 128, 1024, 1025, 4096, 65535, 65536, 2**20, 2**30, 0.5, 1.5, -0.5, 1e6]
VALUES = st.one_of(
    st.sampled_from([None, True, False, *WORDS, *NUMBERS]),
    st.lists(st.sampled_from([1, "a", ""]), max_size=2),
    st.dictionaries(st.sampled_from(["a", "weight", ""]), st.sampled_from([{}, {"weight": 0}, {"weight": 1}, 3])),
)
MORE_IN_TEXT = {"tenants", *(name for name in ServeConfig.model_fields if name.endswith("_bytes"))}
FIELDS = st.sampled_from([*sorted(set(ServeConfig.model_fields) - {"models"}), "prot", "model_name"])


def test_the_schema_is_one() -> None:
    Draft202012Validator.check_schema(SCHEMA)
    printed = CliRunner().invoke(main, ["config", "schema"]).stdout
    assert json.loads(printed) == SCHEMA


def test_every_setting_is_described_and_no_other_is_allowed() -> None:
    for schema, model in [(SCHEMA, ServeConfig), (SCHEMA["$defs"]["ModelSettings"], ModelSettings)]:
        assert schema["additionalProperties"] is False
        assert {name for name, value in schema["properties"].items() if value.get("description")} == set(
            model.model_fields
        )


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.name)
def test_an_example_is_valid(file: Path) -> None:
    content = yaml.safe_load(file.read_text())
    for values in [each["args"] for each in content["applications"]] if "applications" in content else [content]:
        VALIDATOR.validate(values)
        ServeConfig.parse(values)


def accepts(values: dict[str, Any]) -> bool:
    """Whether each value is fine by itself."""
    try:
        ServeConfig.model_validate(values)
    except ValidationError:
        return False
    except ConfigurationError:  # of values that do not go together
        return True
    return True


@given(FIELDS, VALUES)
@settings(max_examples=300, deadline=None)
def test_schema_and_configuration_refuse_the_same(name: str, value: Any) -> None:
    """But for text, in which variables bring numbers, sizes below a bound, and a file of tenants."""
    for values in ({name: value}, {"models": [{name: value}]}):
        if VALIDATOR.is_valid(values):
            assert accepts(values) or (isinstance(value, str) and name in MORE_IN_TEXT)
        elif not isinstance(value, str):
            assert not accepts(values)
