"""A port that Serve opens in each replica, kept off networks that it is not meant for."""

from __future__ import annotations

from typing import Any

import ray
from ray._common.tls_utils import add_port_to_grpc_server
from ray.serve._private import replica


def keep_calls_on_the_node() -> None:
    """To be called in the constructor of each deployment's class: the port is opened after it.

    Serve's deployments could call each other by gRPC, at a port of all interfaces that unpickles what it gets; there is
    no setting for the interface. Ours call each other as actors. Here the port is bound to the address that Ray knows
    the node by, as other ports are.
    """
    _ = replica.add_port_to_grpc_server  # an AttributeError where another version of Serve opens it otherwise
    replica.add_port_to_grpc_server = _at_the_node_s_address


def _at_the_node_s_address(server: Any, address: str) -> int:
    host = ray.util.get_node_ip_address()
    _, _, port = address.rpartition(":")
    return int(add_port_to_grpc_server(server, f"[{host}]:{port}" if ":" in host else f"{host}:{port}"))
