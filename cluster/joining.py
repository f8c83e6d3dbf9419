"""Joining a Ray that runs: found, reached, and asked whether it takes our token, before Ray tries.

Ray itself goes on for 20 to 90 seconds, with a line for each attempt, where there is nothing, where the token is wrong
and where this machine is no node of it.
"""

from __future__ import annotations

import logging
import socket
from typing import Any

from ..worker.errors import ConfigurationError
from .environment import read_environment
from .local_ray import driver_environment, set_environment
from .plan import NAMESPACE

REACH_S = 5.0

_TOKEN = "RAY_AUTH_TOKEN, or the file that RAY_AUTH_TOKEN_PATH names, must be the cluster's"


def join(address: str | None = None, *, log_to_driver: bool = False) -> str:
    """Make this process a driver of the Ray at ``address``, HOST:PORT; ``auto`` and None: the one that RAY_ADDRESS
    names, else the one that was started last on this machine. Its address.

    To be called before Ray is imported, which reads its variables once. Raises ConfigurationError when it cannot be
    joined.
    """
    environment = read_environment()
    set_environment(driver_environment(environment, joining=True))
    import ray
    from ray.exceptions import RayError

    found = _found(environment.ray_address if address in (None, "auto") else address)
    _check_reachable(found)
    _check_token(found)
    _check_node(found)
    try:
        ray.init(address=found, namespace=NAMESPACE, logging_level=logging.ERROR, log_to_driver=log_to_driver)
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ConfigurationError(f"--address: no Ray can be joined at {found}: {reason}") from error
    return found


def _found(address: str | None) -> str:
    from ray._private.utils import read_ray_address

    found = address or read_ray_address()
    if not found:
        raise ConfigurationError("--address: no Ray runs here; say HOST:PORT of one")
    host, _, port = found.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigurationError(f"--address: must be HOST:PORT of a Ray, or auto, got {found}")
    return str(found)


def _check_reachable(address: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_S).close()
    except OSError as error:
        raise ConfigurationError(f"--address: nothing answers at {address}: {error.strerror or error}") from error


def _check_token(address: str) -> None:
    """A call without consequences, with the token that Ray would send."""
    import grpc
    from ray._private.grpc_utils import init_grpc_channel
    from ray.core.generated.gcs_service_pb2 import GetClusterIdRequest
    from ray.core.generated.gcs_service_pb2_grpc import NodeInfoGcsServiceStub

    channel = init_grpc_channel(address)
    try:
        NodeInfoGcsServiceStub(channel).GetClusterId(GetClusterIdRequest(), timeout=REACH_S)
    except grpc.RpcError as error:
        raise ConfigurationError(_refusal(address, error)) from error
    finally:
        channel.close()


def _refusal(address: str, error: Any) -> str:
    import grpc

    if error.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        has_token = read_environment().ray_auth_mode == "token"
        return f"--address: the Ray at {address} {'refuses our' if has_token else 'asks for a'} token: {_TOKEN}"
    return f"--address: no Ray answers at {address}: {error.details() or error.code().name}"


def _check_node(address: str) -> None:
    """A driver works by way of the raylet on its machine."""
    from ray._private.services import find_node_ids

    if not find_node_ids():
        raise ConfigurationError(
            f"--address: this machine is no node of the Ray at {address}: none runs here; do it on one of its nodes"
        )
