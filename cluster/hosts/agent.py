"""What ``octavo launch`` and ``octavo stop`` have done on each host: ``python -m …hosts.agent COMMAND ID``.

Orders come as one JSON object by stdin, since they hold secrets; the answer is one line on stdout, progress is on
stderr. What the user can mend is an answer with ``error``.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ...worker.errors import ConfigurationError, OctavoError
from .answers import CONTINUED, answer_line
from .node import node_folder, start_node
from .orders import AGENT
from .processes import ProcessId, end, with_marker

if TYPE_CHECKING:
    from ..config import ServeConfig

KEEPER = "octavo.cluster.hosts.keeper"
STOP_S = 45.0
"""A keeper may take so long: longer than it lets the node take."""

CONNECT_S = 60.0
NODES_S = 30.0

Orders = Mapping[str, Any]


def prepare(orders: Orders) -> dict[str, Any]:
    """Everything that can be found out about the model and the settings on this host before anything is started."""
    from ..config import ServeConfig
    from ..phases import Phases

    config = ServeConfig.parse(orders["config"])
    note = Phases(_Progress()).note
    if not orders["is_head"]:
        _fetch(config, note)
        return {}
    from ..launch import with_port
    from ..preflight import check_api_keys, check_models
    from ..tls import check_tls

    check_tls(config)
    check_api_keys(config)
    config, _, names = check_models(config, note)
    return {"config": with_port(config).model_dump(mode="json"), "models": names}


def _fetch(config: ServeConfig, note: Callable[[str], None]) -> None:
    from ...worker.checkpoint.store import resolve_model

    for model in config.each_model():
        resolve_model(model.model, cache_dir=config.cache_dir, report=note)


def start(orders: Orders) -> dict[str, Any]:
    """A Ray node, kept by a process of its own; see ``node.py``."""
    return start_node(orders)


def deploy(orders: Orders) -> dict[str, Any]:
    """The application, on the head: it stays when this process ends."""
    from ..config import ServeConfig
    from ..front import Front
    from ..local_ray import set_environment
    from ..phases import Phases

    config = ServeConfig.parse(orders["config"])
    phases = Phases(_Progress())
    front = None if orders["front"] is None else Front(**orders["front"])
    config.cache_dir.mkdir(parents=True, exist_ok=True)
    os.chdir(config.cache_dir)
    set_environment(orders["environment"])
    with _ray(orders), contextlib.ExitStack() as undo:
        from ..deploy import bring_up

        _wait_for_nodes(orders["num_nodes"])
        url = bring_up(config, phases, threading.Event(), front, undo)
        undo.pop_all()
    return {"url": url}


def _wait_for_nodes(count: int) -> None:
    """Raises OctavoError when not all nodes that were started are in the cluster in time."""
    import ray

    end = time.monotonic() + NODES_S
    while len(there := [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]) < count:
        if time.monotonic() > end:
            raise OctavoError(f"{count} nodes were started, but after {NODES_S:g} s the cluster knows {there} alone")
        time.sleep(0.1)


def drain(orders: Orders) -> dict[str, Any]:
    """Let the application finish what is under way, and take it down."""
    with _ray(orders):
        from ..deploy import stop_serve

        stop_serve(orders["app_name"], orders["num_routers"], True, orders["shutdown_timeout_s"])
    return {}


def stop(orders: Orders) -> dict[str, Any]:
    """End the node that was started here, if it is still there, and remove its folder; what was ended."""
    recorded = [ProcessId(**fields) for fields in orders["processes"]]
    marker = f"{orders['id']}-{orders['index']}"
    for agent in with_marker(AGENT, marker):  # of a launch that was interrupted: it could still start something
        if agent.pid != os.getpid():
            end([agent], 0.0)
    ended = end([*recorded, *with_marker(KEEPER, marker)], STOP_S)
    shutil.rmtree(node_folder(marker), ignore_errors=True)
    return {"ended": ended}


@contextlib.contextmanager
def _ray(orders: Orders) -> Any:
    """A driver of the cluster. Raises OctavoError when it does not answer."""
    import logging

    from ..local_ray import set_environment

    set_environment({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": orders["token"]})
    import ray
    from ray.exceptions import RayError

    from ..plan import NAMESPACE

    _give_up_after(CONNECT_S, connected := threading.Event())
    try:
        ray.init(
            address=orders["ray_address"],
            _node_ip_address=orders["address"],
            namespace=NAMESPACE,
            logging_level=logging.ERROR,
            log_to_driver=False,
        )
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        reason = str(error).strip().split("\n")[0]
        raise OctavoError(f"the cluster at {orders['ray_address']} does not answer: {reason}") from error
    connected.set()
    try:
        yield
    finally:
        ray.shutdown()


def _give_up_after(seconds: float, unless: threading.Event) -> None:
    """Ray tries for as long as it likes to reach a head that is not there."""

    def wait() -> None:
        if not unless.wait(seconds):
            _answer({"error": f"the cluster does not answer within {seconds:g} s", "is_mendable": False})
            os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


class _Progress(io.StringIO):
    """stderr, with the further lines of a text marked: libraries write there, too."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text[:-1].replace("\n", f"\n{CONTINUED}") + text[-1:])

    def flush(self) -> None:
        sys.stderr.flush()


def _answer(answer: dict[str, Any]) -> None:
    print(answer_line(answer), flush=True)


COMMANDS: Mapping[str, Callable[[Orders], dict[str, Any]]] = {
    "prepare": prepare,
    "start": start,
    "deploy": deploy,
    "drain": drain,
    "stop": stop,
}


def main() -> None:
    orders = json.load(sys.stdin)
    try:
        _answer(COMMANDS[sys.argv[1]](orders))
    except OctavoError as error:
        text = " ".join(str(error).split())
        _answer({"error": text, "is_mendable": isinstance(error, ConfigurationError)})


if __name__ == "__main__":
    main()
