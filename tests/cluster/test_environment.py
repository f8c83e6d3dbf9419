"""The environment variables that Octavo reads."""

from __future__ import annotations

from pathlib import Path

import pytest
from certificates import tls_files

from octavo.cluster.environment import bare_environment, ray_tls, read_environment, setting_variables
from octavo.worker.errors import ConfigurationError
from octavo.worker.line_tls import TlsFiles


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


def test_variables_that_kubernetes_sets_for_services_are_not_ours() -> None:
    of_services = {
        "OCTAVO_SERVICE_HOST": "10.0.0.1",
        "OCTAVO_SERVICE_PORT": "8000",
        "OCTAVO_HEAD_SVC_SERVICE_PORT_DASHBOARD": "8265",
        "OCTAVO_PORT": "tcp://10.0.0.1:8000",
        "OCTAVO_HEAD_SVC_PORT": "tcp://10.0.0.1:8000",
        "OCTAVO_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "OCTAVO_PORT_8000_TCP_ADDR": "10.0.0.1",
    }
    assert setting_variables(of_services) == {}


def test_variables_of_ours_that_are_set_are_known_from_others() -> None:
    assert setting_variables({"OCTAVO_PORT": "1", "OCTAVO_HOST": "", "PORT": "2"}) == {"OCTAVO_PORT": "1"}


# ---- the certificates of Ray's connections ----


def test_without_ray_s_tls_there_are_no_certificates() -> None:
    assert ray_tls({}) is None
    assert ray_tls({"RAY_USE_TLS": "0", "RAY_TLS_SERVER_CERT": "/none"}) is None


def test_with_it_they_are_those_of_ray(tmp_path: Path) -> None:
    files = tls_files(tmp_path / "pems")
    assert ray_tls(_tls_variables(files)) == files


@pytest.mark.parametrize("name", ["RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT"])
def test_a_certificate_that_is_not_there_is_named(tmp_path: Path, name: str) -> None:
    variables = _tls_variables(tls_files(tmp_path / "pems"))
    with pytest.raises(ConfigurationError, match=f"{name} is not"):
        ray_tls({**variables, name: ""})
    with pytest.raises(ConfigurationError, match=f"{name} is /none"):
        ray_tls({**variables, name: "/none"})


def _tls_variables(files: TlsFiles) -> dict[str, str]:
    names = ("RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT")
    paths = (files.certificate, files.key, files.authority)
    return {"RAY_USE_TLS": "1", **{name: str(path) for name, path in zip(names, paths, strict=True)}}
