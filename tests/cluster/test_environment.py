"""The environment variables that Octavo reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.cluster.environment import bare_environment, read_environment
from octavo.worker.errors import ConfigurationError


def test_without_variables_the_cache_is_the_user_s() -> None:
    environment = read_environment({})
    assert environment.cache_dir.is_absolute()
    assert environment.cache_dir.name == "octavo"
    assert (environment.ray_address, environment.ray_auth_mode, environment.ray_auth_token) == (None, None, None)


def test_what_is_set_is_read_and_empty_is_unset() -> None:
    environment = read_environment({"OCTAVO_CACHE_DIR": "~/models", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": ""})
    assert environment.cache_dir == Path.home() / "models"
    assert (environment.ray_auth_mode, environment.ray_auth_token) == ("token", None)


def test_the_token_is_not_shown() -> None:
    assert "secret" not in repr(read_environment({"RAY_AUTH_TOKEN": "secret"}))


def test_a_bare_environment_holds_no_secret() -> None:
    environ = {"OCTAVO_API_KEY": "secret", "RAY_AUTH_TOKEN": "secret", "HF_TOKEN": "secret", "PYTHONPATH": "folder"}
    assert bare_environment(environ) == {"PYTHONPATH": "folder"}


def test_an_unknown_variable_of_ours_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"OCTAVO_CACHEDIR: .* mean OCTAVO_CACHE_DIR"):
        read_environment({"OCTAVO_CACHEDIR": "x"})
