"""``serve deploy`` of the examples, one after the other on one Ray of two nodes: each model answers a chat."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import yaml
from api_calls import CHAT, call
from manifests import ROOT, Document
from pods import DASHBOARD, EMBEDDED, HEAD, SERVE, Pods, pods
from serve_process import wait_until
from tiny_text_model import save_tiny_text_model

UP_S = 240.0
COMMAND_S = 120.0
KEY = "sk-of-the-test"
AUTHORIZED = {"Authorization": f"Bearer {KEY}"}
QUESTION = {
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
    "max_tokens": 16,
}


class Served:
    """One model, at the proxy of the head."""

    def __init__(self, cluster: Pods, model: str) -> None:
        self.url, self.model = cluster.head.url, model


@pytest.fixture(scope="module")
def cluster() -> Iterator[Pods]:
    """A head that computes nothing, and two nodes."""
    with pods() as cluster:
        for address in ("127.0.0.3", "127.0.0.4"):
            cluster.add_worker(address, 3)
        yield cluster


@pytest.fixture(scope="module")
def tiny(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    save_tiny_text_model(folder, tokens_of=model_dir)
    return str(folder)


def deploy(cluster: Pods, folder: Path, config: Document, *models: str) -> None:
    """Until the API has just ``models``; at a port of our own, since tests share a machine."""
    config["http_options"] = {"host": "0.0.0.0", "port": cluster.head.port(SERVE)}
    file = folder / "serve.yaml"
    file.write_text(yaml.safe_dump(config))
    dashboard = f"http://{HEAD}:{cluster.head.port(DASHBOARD)}"
    command = [str(Path(sys.executable).parent / "serve"), "deploy", str(file), "-a", dashboard]
    environment = cluster.command_environment
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=COMMAND_S)
    assert done.returncode == 0, done.stderr
    wait_until(lambda: serves(cluster, *models), timeout_s=UP_S, what=f"an API with {models}")


def serves(cluster: Pods, *models: str) -> bool:
    status = cluster.status()
    assert status.get("status") != "DEPLOY_FAILED", status["message"]
    with contextlib.suppress(httpx.HTTPError):
        answer = httpx.get(f"{cluster.head.url}/v1/models", headers=AUTHORIZED, timeout=10)
        listed = [entry["id"] for entry in answer.json()["data"]] if answer.status_code == 200 else []
        return status.get("status") == "RUNNING" and listed == list(models)
    return False


def text(cluster: Pods, model: str) -> str:
    return call(Served(cluster, model), CHAT, QUESTION, headers=AUTHORIZED).text


def example(name: str) -> dict[str, Any]:
    return dict(yaml.safe_load((ROOT / "examples" / name).read_text()))


def with_args(args: dict[str, Any]) -> Document:
    """The shipped Serve config file, with the content of an octavo.yaml: without what Serve says itself."""
    config = example("serve.yaml")
    config["applications"][0]["args"] = {name: value for name, value in args.items() if name not in ("host", "port")}
    return config


def test_the_serve_config_file(cluster: Pods, tmp_path: Path) -> None:
    deploy(cluster, tmp_path, example("serve.yaml"), EMBEDDED)
    assert "Paris" in text(cluster, EMBEDDED)


def test_several_models_one_of_them_over_two_nodes(cluster: Pods, tiny: str, tmp_path: Path) -> None:
    """As they stand there, with smaller models and fewer groups."""
    args = example("two_models.yaml")
    large, small = args["models"]
    large |= {"model": tiny, "replicas": 1, "placement": "spread"}
    small |= {"model": tiny, "max_model_len": 256}
    deploy(cluster, tmp_path, with_args(args), "chat", "small")
    assert large["tensor_parallel_size"] == 2
    assert all(pod.processes("ray::Worker") for pod in cluster.workers)
    assert text(cluster, "small") == text(cluster, "chat") != ""


def test_one_model_with_every_setting_of_the_example(cluster: Pods, tiny: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{KEY}\n")
    smaller = {"model": tiny, "served_model_name": "one", "replicas": 1, "max_model_len": 256, "placement": "spread"}
    config = with_args(example("octavo.yaml") | smaller | {"api_key_file": str(keys)})
    deploy(cluster, tmp_path, config, "one")
    assert text(cluster, "one") != ""
    assert call(Served(cluster, "one"), CHAT, QUESTION).status == 401
