"""The application in a Ray that somebody else started: by a Serve config file, and by ``octavo serve --address``."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx2 as httpx
import psutil
import pytest
import yaml
from openai import OpenAI
from serve_process import ServeProcess, wait_until

from octavo.cluster.local_ray import free_ports

BIN = Path(sys.executable).parent
SHIPPED = Path(__file__).parent.parent.parent / "k8s" / "overlays" / "cpu-demo" / "serve.yaml"
MODEL = "SmolLM2-135M-Instruct"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@dataclass(frozen=True)
class RunningRay:
    address: str
    dashboard: str
    environment: dict[str, str]

    def run(self, *command: str) -> str:
        done = subprocess.run(
            [str(BIN / command[0]), *command[1:]], env=self.environment, capture_output=True, text=True, timeout=180
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def running_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningRay]:
    """A head node as an operator starts it, with a token; ended by its own process ids."""
    port, dashboard = free_ports(2)
    scratch = Path("/tmp") / f"octavo-test-{os.getpid()}"
    environment = dict(os.environ) | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    command = [str(BIN / "ray"), "start", "--head", "--block", "--port", str(port), "--num-cpus", "6"]
    command += ["--dashboard-port", str(dashboard), "--object-store-memory", "100000000", "--disable-usage-stats"]
    command += ["--temp-dir", str(scratch), "--include-dashboard", "true"]
    log = (tmp_path_factory.mktemp("ray") / "ray.log").open("w")
    process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    ray = RunningRay(f"127.0.0.1:{port}", f"http://127.0.0.1:{dashboard}", environment)
    try:
        wait_until(lambda: is_open(ray), timeout_s=90, what="the dashboard of the Ray that was started")
        yield ray
    finally:
        children = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        for child in psutil.wait_procs(children, timeout=20)[1]:
            child.kill()
        shutil.rmtree(scratch, ignore_errors=True)


def is_open(ray: RunningRay) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{ray.dashboard}/api/version").status_code in (200, 401)
    return False


def ask(url: str, model: str) -> str:
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
    answer = client.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_tokens=16)
    return str(answer.choices[0].message.content)


def test_serve_deploy_takes_the_shipped_file(running_ray: RunningRay, tmp_path: Path) -> None:
    """The same that becomes the RayService's serveConfigV2; with a port of our own, since tests share a machine."""
    config = yaml.safe_load(SHIPPED.read_text())
    port = free_ports(1)[0]
    config["http_options"] |= {"host": "127.0.0.1", "port": port}
    file = tmp_path / "serve.yaml"
    file.write_text(yaml.safe_dump(config))
    running_ray.run("serve", "deploy", str(file), "-a", running_ray.dashboard)
    url = f"http://127.0.0.1:{port}"
    wait_until(lambda: is_ready(url), timeout_s=150, what="the deployed application")
    assert "Paris" in ask(url, MODEL)
    running_ray.run("serve", "shutdown", "-y", "-a", running_ray.dashboard)


def is_ready(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/ready", timeout=5).status_code == 200
    return False


def test_octavo_serve_joins_a_running_ray_and_leaves_it_running(running_ray: RunningRay) -> None:
    server = ServeProcess("--address", running_ray.address, "--replicas", "1", environment=running_ray.environment)
    assert "Paris" in ask(server.url, server.model)
    assert server.stop() == 0
    assert is_open(running_ray)
    assert "octavo" not in running_ray.run("serve", "status", "-a", running_ray.dashboard)
