"""How a host's Ray node is started: its command, its environment, and what is looked at before."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from octavo.cluster.hosts.node import check_reachable, interface_of, node_environment, ray_command, start_keeper
from octavo.worker.errors import ConfigurationError, OctavoError

ORDERS: dict[str, Any] = {
    "index": 0,
    "head_address": "10.0.0.1",
    "token": "secret",
    "num_cpus": None,
    "num_gpus": 4,
    "interface": None,
    "head_resources": {"octavo_gateway": 1},
}


def value_of(flag: str, command: list[str]) -> str:
    return command[command.index(flag) + 1]


def test_the_head_and_the_others_are_started_each_in_its_way(tmp_path: Path) -> None:
    head = ray_command(ORDERS, "10.0.0.1", 6400, tmp_path)
    other = ray_command(ORDERS | {"index": 1, "num_cpus": 8}, "10.0.0.2", 6400, tmp_path)
    assert "--head" in head
    assert value_of("--port", head) == "6400"
    assert value_of("--resources", head) == '{"octavo_gateway": 1}'
    assert value_of("--address", other) == "10.0.0.1:6400"
    assert value_of("--num-cpus", other) == "8"
    for command in (head, other):
        assert value_of("--num-gpus", command) == "4"
        assert value_of("--temp-dir", command) == str(tmp_path)
        assert "--disable-usage-stats" in command
        assert "secret" not in " ".join(command)


def test_collectives_use_the_interface_of_the_node_s_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    environment = node_environment(ORDERS, tmp_path, "127.0.0.2", None)
    assert (environment["GLOO_SOCKET_IFNAME"], environment["NCCL_SOCKET_IFNAME"]) == ("lo", "lo")
    assert environment["RAY_health_check_period_ms"] == "500"
    assert environment["RAY_AUTH_MODE"] == "token"
    assert "secret" not in environment.values()


def test_what_the_host_says_of_its_interface_stays_unless_the_user_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    assert "NCCL_SOCKET_IFNAME" not in node_environment(ORDERS, tmp_path, "127.0.0.2", None)
    given = node_environment(ORDERS | {"interface": "ib1"}, tmp_path, "127.0.0.2", None)
    assert given["NCCL_SOCKET_IFNAME"] == "ib1"


def test_an_address_belongs_to_an_interface_or_to_none() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.7") is None


def test_a_head_that_cannot_be_reached_is_said_before_ray_tries() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        with pytest.raises(ConfigurationError, match=rf"the head at 127.0.0.1:{port} cannot be reached.*firewalls"):
            check_reachable("127.0.0.1", port)


def test_a_node_that_does_not_start_is_said_with_ray_s_words(tmp_path: Path) -> None:
    command = ["sh", "-c", "echo the disk is full; exit 3"]
    with pytest.raises(OctavoError, match=r"Ray did not start: .*the disk is full"):
        start_keeper("0-0", tmp_path, command, {})
