"""A Ray that cannot be joined is one line within moments, whatever is wrong with it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from ray.core.generated.gcs_service_pb2 import GetClusterIdReply
from ray.core.generated.gcs_service_pb2_grpc import NodeInfoGcsServiceServicer, add_NodeInfoGcsServiceServicer_to_server

from octavo.cluster.environment import Environment, read_environment
from octavo.cluster.joining import _check_node, join
from octavo.cluster.local_ray import driver_environment
from octavo.worker.errors import ConfigurationError


class Head(NodeInfoGcsServiceServicer):
    """Ray's GCS, as far as it is asked before a driver is made."""

    def __init__(self, token: str) -> None:
        self._token = token

    def GetClusterId(self, request: Any, context: Any) -> GetClusterIdReply:
        if ("authorization", f"Bearer {self._token}") not in context.invocation_metadata():
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "token")
        return GetClusterIdReply()


@contextmanager
def head(token: str) -> Iterator[str]:
    """Its address."""
    server = grpc.server(ThreadPoolExecutor(1))
    add_NodeInfoGcsServiceServicer_to_server(Head(token), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(0).wait()


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Joining sets variables: they go again."""
    for name in ("RAY_AUTH_MODE", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "ours")
    monkeypatch.setenv("RAY_ADDRESS", "")


def refusal(address: str | None) -> str:
    with pytest.raises(ConfigurationError) as error:
        join(address)
    return str(error.value)


@pytest.mark.parametrize("address", ["10.0.0.1", "10.0.0.1:port", "10.0.0.1:70000", ":6379", "ray://10.0.0.1"])
def test_an_address_that_is_none_is_named(address: str) -> None:
    assert refusal(address) == f"--address: must be HOST:PORT of a Ray, or auto, got {address}"


def test_where_nothing_listens_that_is_said() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        assert refusal(address) == f"--address: nothing answers at {address}: Connection refused"


def test_the_address_is_ray_s_variable_where_none_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "elsewhere")
    assert refusal(None).endswith("got elsewhere")
    assert refusal("auto").endswith("got elsewhere")


@pytest.mark.parametrize(
    ("variables", "advice"),
    [({"RAY_AUTH_TOKEN": "ours"}, "refuses our token: RAY_AUTH_TOKEN"), ({}, "asks for a token: RAY_AUTH_TOKEN")],
)
def test_a_wrong_token_is_one_line_that_says_what_to_do(variables: dict[str, str], advice: str) -> None:
    """A process of its own: Ray reads these variables when it is imported."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | variables
    with head("theirs") as address:
        command = [sys.executable, "-m", "octavo.cluster", "top", "--once", "--address", address]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(f"octavo top: error: --address: the Ray at {address} {advice}")


def test_something_that_is_no_ray_is_said() -> None:
    with grpc_server_without_services() as address:
        assert refusal(address).startswith(f"--address: no Ray answers at {address}: ")


@contextmanager
def grpc_server_without_services() -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(0).wait()


def test_a_machine_without_a_raylet_is_no_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray._private.services.find_node_ids", list)
    with pytest.raises(ConfigurationError, match=r"--address: this machine is no node of the Ray at 10.0.0.1:6379: "):
        _check_node("10.0.0.1:6379")


# ---- how Ray's processes authenticate ----


@pytest.mark.parametrize(
    ("variables", "joining", "mode", "makes_token"),
    [
        ({}, False, "token", True),
        ({}, True, "disabled", False),
        ({"RAY_AUTH_TOKEN": "t"}, False, "token", False),
        ({"RAY_AUTH_TOKEN_PATH": "/t"}, True, "token", False),
        ({"RAY_AUTH_MODE": "disabled"}, False, "disabled", False),
    ],
)
def test_authentication_is_always_said(variables: dict[str, str], joining: bool, mode: str, makes_token: bool) -> None:
    environment: Environment = read_environment(variables)
    said = driver_environment(environment, joining=joining)
    assert said["RAY_AUTH_MODE"] == mode
    assert ("RAY_AUTH_TOKEN" in said) is makes_token
    assert not makes_token or said != driver_environment(environment, joining=joining)
