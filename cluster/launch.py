"""``octavo serve``: brings a cluster up on this machine (or joins one), waits for the signal to stop, takes it down."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from ..worker.errors import ConfigurationError
from .config import ServeConfig
from .environment import read_environment
from .front import Front, front_of
from .haproxy import write_haproxy
from .joining import join
from .local_ray import (
    OBJECT_STORE_BYTES,
    ONE_MACHINE,
    adopt_orphans,
    driver_environment,
    free_ports,
    no_process_left,
    own_ray_environment,
    scratch_folder,
    set_environment,
)
from .phases import Phases
from .plan import NAMESPACE
from .preflight import check_api_keys, check_models
from .preflight_memory import check_memory
from .supervisor import become_child
from .tls import check_tls


def serve(config: ServeConfig) -> None:
    """Serve until SIGINT or SIGTERM. Raises ConfigurationError for what the user can mend, StartFailed otherwise."""
    become_child()
    phases = Phases(sys.stderr)
    check_tls(config)
    check_api_keys(config)
    config = with_port(config) if config.port == 0 or config.address is None else config
    with phases.phase("checking the model" + "s" * (len(config.models) > 1)):
        config, folders, names = check_models(config, phases.note)
        if config.address is None:
            check_memory(config, folders)
    # Names in the folder that we were started in must not hide installed packages in Ray's workers.
    config.cache_dir.mkdir(parents=True, exist_ok=True)
    os.chdir(config.cache_dir)
    adopt_orphans()
    with no_process_left(), scratch_folder() as scratch:
        front = front_of(config, scratch) if config.address is None else None
        if config.address is None:
            _prepare_ray(scratch, front)
        stop = threading.Event()
        _stop_on_signals(stop)
        with _ray(config, phases, stop), _application(config, phases, stop, front) as url:
            if not stop.is_set():
                phases.ready(url, names)
            stop.wait()
            phases.note("stopping: requests under way are finished first")


def _prepare_ray(scratch: Path, front: Front | None) -> None:
    environment = own_ray_environment(scratch, front.section if front else None)
    write_haproxy(environment)
    set_environment(driver_environment(read_environment(), joining=False) | environment)
    set_environment({name: value for name, value in ONE_MACHINE.items() if name not in os.environ})


def with_port(config: ServeConfig) -> ServeConfig:
    """Refuse a port that is taken, before anything is started; choose one for 0."""
    with socket.socket(socket.AF_INET6 if ":" in config.host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((config.host, config.port))
        except OSError as error:
            flag = "--host" if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL else "--port"
            reason = error.strerror or str(error)
            raise ConfigurationError(f"{flag}: cannot listen on {config.host}:{config.port}: {reason}") from error
    return config.model_copy(update={"port": config.port or free_ports(1, config.host)[0]})


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
def _ray(config: ServeConfig, phases: Phases, stop: threading.Event) -> Iterator[None]:
    """A Ray of our own, or the one at ``--address``."""
    with phases.phase("importing Ray"):
        import ray
    if config.address is None:
        with phases.phase("starting Ray"):
            ray.init(**_ray_options(config))
    else:
        with phases.phase(f"joining Ray at {config.address}"):
            join(config.address, log_to_driver=config.log_level == "debug")
    _stop_on_signals(stop)
    try:
        yield
    finally:
        with phases.phase("stopping Ray"):
            ray.shutdown()


def _ray_options(config: ServeConfig) -> dict[str, Any]:
    num_ranks = sum(
        (model.max_replicas or model.replicas or 2) * model.tensor_parallel_size
        for model in config.each_model()
        if model.fake_engine is None
    )
    return {
        "address": "local",
        # Booked CPUs are a matter of placement: ranks share the cores by their number of threads.
        "num_cpus": max(os.cpu_count() or 1, num_ranks + 2),
        "include_dashboard": False,
        "object_store_memory": OBJECT_STORE_BYTES,
        "namespace": NAMESPACE,
        "logging_level": logging.ERROR,
        "log_to_driver": config.log_level == "debug",
    }


def _application(
    config: ServeConfig, phases: Phases, stop: threading.Event, front: Front | None
) -> AbstractContextManager[str]:
    from .deploy import application

    return application(config, phases, stop, front)
