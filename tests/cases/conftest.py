"""The faults that users of such servers have met, each a test with its id, against real clusters.

Everything goes over HTTP, through the gateways and the router. After each test the canary answers as it did before.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from api_calls import complete
from model_folders import save_sharded, save_stray
from openai import OpenAI
from serve_process import OneModel, ServeProcess
from start_watch import Guarded, StartWatch

from octavo.cluster.local_ray import free_ports

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Unlike the model's own it adds no system prompt."""
OWN_DEFAULTS = {"temperature": 0.6, "top_k": 1, "top_p": 0.9, "repetition_penalty": 1.2, "max_new_tokens": 5}

CANARY = {"prompt": "The capital of France is", "max_tokens": 3, "temperature": 0}


@pytest.fixture(scope="package")
def models(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    """One cluster of two gateways for four models, each with settings of its own: see the fixtures below."""
    folder = tmp_path_factory.mktemp("models")
    template = folder / "my.jinja"
    template.write_text(TEMPLATE)
    base, plain = (_copy(model_dir, folder / name) for name in ("base", "plain"))
    (plain / "chat_template.jinja").write_text(TEMPLATE)
    save_sharded(model_dir, base)
    save_stray(base)
    config = folder / "octavo.yaml"
    models = [
        {"served_model_name": "cluster", "replicas": 2, "max_num_seqs": 16, "max_model_len": 2048}
        | {"kv_cache_memory_bytes": "512MiB"},
        {"served_model_name": "short", "replicas": 1, "max_model_len": 256, "max_num_seqs": 4}
        | {"num_gpu_blocks_override": 18, "chat_template": str(template)},
        {"served_model_name": "base", "model": str(base), "replicas": 1, "num_gpu_blocks_override": 64},
        {"served_model_name": "smollm2", "model": str(plain), "replicas": 2, "generation_config": "none"}
        | {"max_output_tokens": 12, "max_model_len": 512, "kv_cache_memory_bytes": "512MiB"},
    ]
    config.write_text(json.dumps({"num_gateways": 2, "models": models}))  # which is YAML too
    server = ServeProcess("--config", str(config))
    yield server
    server.stop()


@pytest.fixture(scope="package")
def cluster(models: ServeProcess) -> OneModel:
    """The embedded model; two groups."""
    return OneModel(models, "cluster")


@pytest.fixture(scope="package")
def short(models: ServeProcess) -> OneModel:
    """One group with a short context, few places, a tiny pool, and another template."""
    return OneModel(models, "short")


@pytest.fixture(scope="package")
def base(models: ServeProcess) -> OneModel:
    """A base model with sampling defaults of its own; a pool of 64 blocks of 16 tokens, fewer than its context. Its
    weights are in shards, and a stray file lies beside them."""
    return OneModel(models, "base")


@pytest.fixture(scope="package")
def plain(models: ServeProcess) -> OneModel:
    """The same with a template as a file of its own, its sampling defaults switched off, and short outputs whatever is
    asked for. Two groups."""
    return OneModel(models, "smollm2")


@pytest.fixture(scope="package")
def guarded() -> Iterator[Guarded]:
    """One group of four places; eight requests may wait for one."""
    key = {"authorization": "Bearer the-key-of-these-tests"}
    port = free_ports(1)[0]
    completion = {"model": "SmolLM2-135M-Instruct", "prompt": "Hi", "max_tokens": 1}
    with StartWatch(f"http://127.0.0.1:{port}", completion, key) as watch:
        server = ServeProcess(
            *("--port", str(port), "--api-key", key["authorization"].removeprefix("Bearer ")),
            *("--replicas", "1", "--max-num-seqs", "4", "--router-max-queued-requests", "8"),
        )
    yield Guarded(server, tuple(watch.looks), key)
    server.stop()


@pytest.fixture(scope="package")
def client(cluster: OneModel) -> OpenAI:
    return OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=120)


@pytest.fixture(scope="package")
def canary_text(cluster: OneModel) -> str:
    return complete(cluster, **CANARY).text


@pytest.fixture
def canary(cluster: OneModel, canary_text: str) -> Iterator[None]:
    """What a test did has disturbed nothing."""
    yield
    assert complete(cluster, **CANARY).text == canary_text


@pytest.fixture(params=[False, True], ids=["whole", "streamed"])
def stream(request: Any) -> bool:
    return bool(request.param)


def _copy(model_dir: Path, folder: Path) -> Path:
    """The model as base models are published, without a template; with ``OWN_DEFAULTS``."""
    shutil.copytree(model_dir, folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer, generation = folder / "tokenizer_config.json", folder / "generation_config.json"
    config = json.loads(tokenizer.read_text())
    config.pop("chat_template", None)
    tokenizer.write_text(json.dumps(config))
    generation.write_text(json.dumps(json.loads(generation.read_text()) | OWN_DEFAULTS))
    return folder
