"""``octavo serve``: brings a cluster up on this machine (or joins one), waits for the signal to stop, takes it down."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

from ..worker.checkpoint.store import resolve_model
from ..worker.errors import ConfigurationError, OctavoError
from .config import ServeConfig
from .environment import read_environment
from .local_ray import (
    OBJECT_STORE_BYTES,
    adopt_orphans,
    auth_environment,
    free_ports,
    no_process_left,
    own_ray_environment,
    scratch_folder,
    set_environment,
)
from .phases import Phases
from .plan import NAMESPACE, ServePlan
from .preflight import check_model

POLL_S = 0.2

_LAST_CONFIGURATION_ERROR = re.compile(r"^(?:[\w.]+\.)?ConfigurationError: (.+)$", re.MULTILINE)
_LAST_ERROR = re.compile(r"^((?:[\w.]+\.)?\w+(?:Error|Exception): .+)$", re.MULTILINE)


class StartFailed(OctavoError):
    """The cluster did not come up; the message says why as far as it is known."""


def serve(config: ServeConfig) -> None:
    """Serve until SIGINT or SIGTERM. Raises ConfigurationError for what the user can mend, StartFailed otherwise."""
    phases = Phases(sys.stderr)
    config = _with_port(config) if config.port == 0 or config.address is None else config
    resolved = resolve_model(config.model, cache_dir=config.cache_dir, report=phases.note)
    with phases.phase("checking the model"):
        check_model(config, resolved.path)
    # Names in the folder that we were started in must not hide installed packages in Ray's workers.
    config.cache_dir.mkdir(parents=True, exist_ok=True)
    os.chdir(config.cache_dir)
    adopt_orphans()
    with no_process_left(), scratch_folder() as scratch:
        set_environment(auth_environment(read_environment(), joining=config.address is not None))
        if config.address is None:
            set_environment(own_ray_environment(scratch))
        stop = threading.Event()
        _stop_on_signals(stop)
        with _ray(config, phases), _application(config, phases, stop) as url:
            if not stop.is_set():
                phases.ready(url, config.served_model_name or resolved.served_name)
            stop.wait()
            phases.note("stopping: requests under way are finished first")


def _with_port(config: ServeConfig) -> ServeConfig:
    """Refuse a port that is taken, before anything is started; choose one for 0."""
    if config.port == 0:
        return config.model_copy(update={"port": free_ports(1)[0]})
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((config.host, config.port))
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigurationError(f"--port: cannot listen on {config.host}:{config.port}: {reason}") from error
    return config


def _stop_on_signals(stop: threading.Event) -> None:
    """The first SIGINT or SIGTERM sets ``stop``; the second ends the process at once.

    Ray installs a handler of its own in ``ray.init`` that prints a stack and lets an alarm kill the process after three
    seconds; so this is called again after it.
    """

    def on_signal(number: int, _: Any) -> None:
        signal.alarm(0)
        if stop.is_set():
            raise SystemExit(128 + number)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)


@contextlib.contextmanager
def _ray(config: ServeConfig, phases: Phases) -> Iterator[None]:
    """A Ray of our own, or the one at ``--address``."""
    with phases.phase("importing Ray"):
        import ray
    with phases.phase(f"joining Ray at {config.address}" if config.address else "starting Ray"):
        ray.init(**_ray_options(config))
    try:
        yield
    finally:
        with phases.phase("stopping Ray"):
            ray.shutdown()


def _ray_options(config: ServeConfig) -> dict[str, Any]:
    common = {"namespace": NAMESPACE, "logging_level": logging.ERROR, "log_to_driver": config.log_level == "debug"}
    if config.address:
        return {"address": config.address, **common}
    num_ranks = (config.replicas or 2) * config.tensor_parallel_size
    return {
        "address": "local",
        # Booked CPUs are a matter of placement: ranks share the cores by their number of threads.
        "num_cpus": max(os.cpu_count() or 1, num_ranks + 2),
        "include_dashboard": False,
        "object_store_memory": OBJECT_STORE_BYTES,
        **common,
    }


@contextlib.contextmanager
def _application(config: ServeConfig, phases: Phases, stop: threading.Event) -> Iterator[str]:
    """The application, deployed and ready; its base URL."""
    from .application import make_plan

    _stop_on_signals(stop)
    logging.getLogger("ray.serve").setLevel(logging.DEBUG if config.log_level == "debug" else logging.WARNING)
    plan = make_plan(config)
    with phases.phase("starting Serve"):
        host, port = _start_serve(config)
    try:
        with phases.phase(f"bringing up {plan.num_ranks} workers in {plan.config.replicas} groups on {plan.device}"):
            _deploy(plan)
            url = f"http://{host}:{port}{config.route_prefix.rstrip('/')}"
            _wait_until_ready(plan, url, stop)
        yield url
    finally:
        with phases.phase("draining"):
            _stop_serve(config.app_name)


def _start_serve(config: ServeConfig) -> tuple[str, int]:
    """Start Serve if it does not run yet; the address that it listens on."""
    from ray import serve as ray_serve
    from ray.serve.config import HTTPOptions
    from ray.serve.context import _get_global_client

    ray_serve.start(proxy_location="HeadOnly", http_options=HTTPOptions(host=config.host, port=config.port))
    options = _get_global_client().http_config
    return options.host, options.port


def _stop_serve(app_name: str) -> None:
    """Delete the application, which drains it; end Serve unless it has others."""
    from ray import serve as ray_serve

    with contextlib.suppress(Exception):  # the cluster may be half up, and Ray's shutdown ends the rest
        ray_serve.delete(app_name)
        if ray_serve.status().applications:
            return
    # Serve's controller ends itself while it answers, which Ray reports as a failed task.
    with contextlib.redirect_stderr(io.StringIO()):
        ray_serve.shutdown()


def _deploy(plan: ServePlan) -> None:
    """Raises ConfigurationError or StartFailed with what a replica said when it could not start."""
    from ray import serve as ray_serve

    from .application import bind

    config = plan.config
    try:
        ray_serve.run(bind(plan), name=config.app_name, route_prefix=config.route_prefix, blocking=False)
    except RuntimeError as error:
        application = ray_serve.status().applications.get(config.app_name)
        messages = [deployment.message for deployment in application.deployments.values()] if application else []
        raise start_failure("\n".join([str(error), *messages])) from None


def start_failure(text: str) -> OctavoError:
    """The error that ``text``, which holds tracebacks of other processes, ends in."""
    mendable = _LAST_CONFIGURATION_ERROR.findall(text)
    if mendable:
        return ConfigurationError(mendable[-1])
    others = _LAST_ERROR.findall(text)
    return StartFailed(f"the cluster did not come up: {others[-1] if others else text.strip()}")


def _wait_until_ready(plan: ServePlan, url: str, stop: threading.Event) -> None:
    """All worker groups are in the router's registry, and the gateway says that it is ready."""
    import ray

    from ..worker.messages import Registry
    from ..worker.wire import unpack

    config = plan.config
    end = time.monotonic() + config.startup_timeout_s
    router = ray.get_actor(plan.router_name, NAMESPACE)
    while not stop.is_set():
        packed, _ = ray.get(router.registry.remote())
        if len(unpack(packed, Registry).entries) >= (config.replicas or 1) and _is_ready(url):
            return
        if time.monotonic() > end:
            raise StartFailed(f"--startup-timeout-s: not all worker groups were ready in {config.startup_timeout_s} s")
        stop.wait(POLL_S)


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5.0) as answer:
            return bool(answer.status == HTTPStatus.OK)
    except OSError:
        return False
