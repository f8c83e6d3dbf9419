"""HAProxy with the configuration that Serve writes, amended: which addresses it listens on, and what it hands on."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import psutil
import pytest
from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, RequestProtocol, ServerConfig
from ray.serve.config import HTTPOptions
from serve_process import wait_until

from octavo.cluster.config import ServeConfig
from octavo.cluster.front import front_of, public_url
from octavo.cluster.haproxy import write_haproxy
from octavo.cluster.local_ray import free_ports, own_ray_environment


def serve_s_configuration(folder: Path, environment: dict[str, str], port: int) -> Path:
    """As Serve writes it for one application without replicas."""
    file = folder / "haproxy.cfg"
    config = HAProxyConfig(
        socket_path=str(folder / "admin.sock"),
        server_state_base=str(folder),
        server_state_file=str(folder / "server-state"),
        metrics_socket_path=str(folder / "metrics.sock"),
        metrics_port=int(environment["RAY_SERVE_HAPROXY_METRICS_PORT"]),
        stats_port=int(environment["RAY_SERVE_HAPROXY_STATS_PORT"]),
        balance_algorithm=environment["RAY_SERVE_HAPROXY_BALANCE_ALGORITHM"],
        log_target=environment["RAY_SERVE_HAPROXY_LOG_TARGET"],
        http_options=HTTPOptions(host="127.0.0.1", port=port),
    )
    backend = BackendConfig(
        name="octavo", app_name="octavo", path_prefix="/", protocol=RequestProtocol.HTTP,
        servers=[ServerConfig(name="replica", host="127.0.0.1", port=1)],
    )  # fmt: skip
    HAProxyApi(config, {"octavo": backend}, str(file))._generate_config_file_internal()
    return file


@contextmanager
def haproxy(folder: Path, config: ServeConfig) -> Iterator[tuple[psutil.Process, int]]:
    """The process, and the port that Serve has."""
    front = front_of(config, folder)
    port = config.port if front is None else front.port
    environment = own_ray_environment(folder, front.section if front else None)
    write_haproxy(environment)
    file = serve_s_configuration(folder, environment, port)
    command = [environment["RAY_SERVE_HAPROXY_BINARY_PATH"], "-db", "-f", str(file), "-dR"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield psutil.Process(process.pid), port
        finally:
            process.terminate()


def listening(process: psutil.Process) -> set[tuple[str, int]]:
    connections = process.net_connections(kind="tcp")
    return {(each.laddr.ip, each.laddr.port) for each in connections if each.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "0.0.0.0", "localhost", "::1", "::"])
def test_only_the_api_is_open_to_others_and_only_where_that_was_asked(tmp_path: Path, host: str) -> None:
    config = ServeConfig.parse({"host": host, "port": free_ports(1)[0]})
    with haproxy(tmp_path, config) as (process, port):
        wait_until(lambda: len(listening(process)) >= 3 + (port != config.port), timeout_s=20, what="HAProxy")
        public = {address for address, at in listening(process) if at == config.port}
        others = {address for address, at in listening(process) if at != config.port}
        assert public == ({"127.0.0.1"} if host == "localhost" else {host})
        assert others == {"127.0.0.1"}
        reached = public_url(config).replace("0.0.0.0", "127.0.0.1").replace("[::]", "127.0.0.1")
        assert httpx2.get(f"{reached}/-/routes").status_code == 503  # Serve has told it no routes


def test_it_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    config = ServeConfig.parse({"port": free_ports(1)[0]})
    environment = own_ray_environment(tmp_path, None)
    write_haproxy(environment)
    file = serve_s_configuration(tmp_path, environment, config.port)
    command = [environment["RAY_SERVE_HAPROXY_BINARY_PATH"], "-db", "-f", str(file)]
    starter = f"import subprocess; print(subprocess.Popen({command!r}).pid, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", starter], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        process = psutil.Process(int(parent.stdout.readline()))
        wait_until(lambda: len(listening(process)) >= 3, timeout_s=20, what="HAProxy")
        parent.kill()
        process.wait(10)


def test_the_public_address_is_said_as_a_url() -> None:
    assert public_url(ServeConfig.parse({"host": "::1", "port": 80, "route_prefix": "/a"})) == "http://[::1]:80/a"
