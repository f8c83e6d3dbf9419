"""Brings the application up on a Ray that runs, and takes it down: what ``octavo serve`` does with Serve.

Imported once Ray's environment is set: Serve reads it when it is imported.
"""

from __future__ import annotations

import contextlib
import io
import logging
import re
import threading
import time
import urllib.request
from collections.abc import Iterator
from http import HTTPStatus

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import HTTPOptions
from ray.serve.context import _get_global_client

from ..worker.errors import ConfigurationError, OctavoError
from ..worker.messages import Registry
from ..worker.wire import unpack
from .application import bind, make_plan
from .config import ServeConfig
from .front import Front, public_url
from .haproxy import LOOPBACK
from .ledgers import accounts, published
from .phases import Phases
from .placement_watch import PlacementWatch, check_placement
from .plan import NAMESPACE, ClusterPlan, router_names
from .stopping import finish_requests

POLL_S = 0.2
POLL_TIMEOUT_S = 5.0

_LAST_CONFIGURATION_ERROR = re.compile(r"^(?:[\w.]+\.)?ConfigurationError: (.+)$", re.MULTILINE)
_LAST_ERROR = re.compile(r"^((?:[\w.]+\.)?\w+(?:Error|Exception): .+)$", re.MULTILINE)


class StartFailed(OctavoError):
    """The cluster did not come up; the message says why as far as it is known."""


@contextlib.contextmanager
def application(
    config: ServeConfig, phases: Phases, stop: threading.Event, front: Front | None = None
) -> Iterator[str]:
    """The application, deployed and ready, behind ``front`` if there is one; its base URL. It is drained at the end."""
    with contextlib.ExitStack() as undo:
        yield bring_up(config, phases, stop, front, undo)


def bring_up(
    config: ServeConfig, phases: Phases, stop: threading.Event, front: Front | None, undo: contextlib.ExitStack
) -> str:
    """Deploy the application and wait until it is ready; its base URL. ``undo`` gets what takes it down again."""
    logging.getLogger("ray.serve").setLevel(logging.DEBUG if config.log_level == "debug" else logging.WARNING)
    plan = make_plan(config)
    check_placement(plan, phases.note)
    with phases.phase("starting Serve"):
        serve_is_ours, (host, port) = _start_serve(config, front)
    undo.callback(_drain, config, phases, serve_is_ours)
    with phases.phase(f"bringing up {_extent(plan)} on {plan.device}"):
        url = f"http://{host}:{port}{config.route_prefix.rstrip('/')}"
        _deploy(plan)
        _wait_until_ready(plan, url, stop, PlacementWatch(plan, phases.note))
    if not stop.is_set():
        _show_ledgers(config, phases)
    return url if front is None else public_url(config)


def _drain(config: ServeConfig, phases: Phases, serve_is_ours: bool) -> None:
    with phases.phase("draining"):
        stop_serve(config.app_name, config.num_routers, serve_is_ours, config.shutdown_timeout_s)


def _extent(plan: ClusterPlan) -> str:
    return " and ".join(_groups(model.config) for model in plan.models)


def _groups(config: ServeConfig) -> str:
    groups, ranks = config.replicas or 1, config.tensor_parallel_size
    if config.fake_engine is not None:
        return f"{groups} fake worker group{'s' * (groups > 1)}"
    return f"{groups} worker group{'s' * (groups > 1)} of {ranks} rank{'s' * (ranks > 1)}"


def _start_serve(config: ServeConfig, front: Front | None) -> tuple[bool, tuple[str, int]]:
    """Whether Serve had to be started, and the address that it listens on."""
    is_ours = _get_global_client(raise_if_no_controller_running=False) is None
    host, port = (config.host, config.port) if front is None else (LOOPBACK, front.port)
    serve.start(proxy_location="HeadOnly", http_options=HTTPOptions(host=host, port=port))
    options = _get_global_client().http_config
    return is_ours, (options.host, options.port)


def stop_serve(app_name: str, num_routers: int, serve_is_ours: bool, limit_s: float) -> None:
    """Let the application finish what is under way, for up to ``limit_s``, and delete it; end a Serve that we started,
    unless others use it now."""
    with contextlib.suppress(RayError, TimeoutError, RuntimeError):  # the cluster may be half up or half down
        finish_requests(app_name, num_routers, limit_s)
        serve.delete(app_name)
        if not serve_is_ours or serve.status().applications:
            return
        # Serve's controller ends itself while it answers, which Ray reports as a failed task.
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            serve.shutdown()


def _deploy(plan: ClusterPlan) -> None:
    """Hand the application to Serve, which brings it up."""
    config = plan.config
    target = serve.RunTarget(
        bind(plan),
        name=config.app_name,
        route_prefix=config.route_prefix,
        # ``octavo scale``; of Serve's own autoscaler there may be none beside it in the application
        external_scaler_enabled=all(model.config.max_replicas is None for model in plan.models),
    )
    serve.run_many([target], wait_for_applications_running=False)


def _raise_failure(app_name: str) -> None:
    """Raises ConfigurationError or StartFailed with what a replica said when it could not start."""
    application = serve.status().applications.get(app_name)
    if application is not None and application.status == "DEPLOY_FAILED":
        messages = [application.message, *[deployment.message for deployment in application.deployments.values()]]
        raise start_failure("\n".join(messages))


def start_failure(text: str) -> OctavoError:
    """The error that ``text``, which holds tracebacks of other processes, ends in."""
    mendable = _LAST_CONFIGURATION_ERROR.findall(text)
    if mendable:
        return ConfigurationError(mendable[-1])
    others = _LAST_ERROR.findall(text)
    return StartFailed(f"the cluster did not come up: {others[-1] if others else text.strip()}")


def _wait_until_ready(plan: ClusterPlan, url: str, stop: threading.Event, watch: PlacementWatch) -> None:
    """All worker groups are in every router's registry, and the gateway says that it is ready."""
    config = plan.config
    begin = time.monotonic()
    while not stop.is_set():
        if len(_registered_groups(config)) >= plan.num_groups and _is_ready(url):
            return
        _raise_failure(config.app_name)
        waited_s = time.monotonic() - begin
        watch.look(waited_s)
        if waited_s > config.startup_timeout_s:
            limit = f"--startup-timeout-s: not all worker groups were ready in {config.startup_timeout_s} s"
            raise StartFailed(f"{limit}: {watch.reason()}")
        stop.wait(POLL_S)


def _registered_groups(config: ServeConfig) -> set[str]:
    """Names of the worker groups that all routers know; none while one of them is not there."""
    routers = router_names(config.app_name, config.num_routers)
    return set[str].intersection(*map(_groups_known_to, routers))


def _groups_known_to(router_name: str) -> set[str]:
    try:
        router = ray.get_actor(router_name, NAMESPACE)
        packed, _ = ray.get(router.registry.remote(), timeout=POLL_TIMEOUT_S)
    except (RayError, ValueError):
        return set()
    return {entry.group for entry in unpack(packed, Registry).entries}


def _show_ledgers(config: ServeConfig, phases: Phases) -> None:
    """Where the memory of each rank goes."""
    if config.log_level in ("debug", "info"):
        for account in accounts(published(config.app_name, _registered_groups(config))):
            phases.note(account)


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5.0) as answer:
            return bool(answer.status == HTTPStatus.OK)
    except OSError:
        return False
