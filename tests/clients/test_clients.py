"""Programs that people point at such servers, unchanged: lm-evaluation-harness, LangChain, schemathesis.

They have an environment of their own, since they pin what we do not: ``.ci/setup-clients`` makes it.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serve_process import ServeProcess

ROOT = Path(__file__).parents[2]
BIN = ROOT / ".venv-clients" / "bin"
HERE = Path(__file__).parent
LIMIT_S = 900
"""Of one program; each takes a minute or two where nothing else runs."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[ServeProcess]:
    server = ServeProcess("--max-model-len", "2048", "--max-output-tokens", "64")
    yield server
    server.stop()


@pytest.fixture
def terse_cluster() -> Iterator[ServeProcess]:
    """Answers are short: schemathesis sends some thousand requests, and judges the form of what comes back."""
    server = ServeProcess("--max-model-len", "2048", "--max-output-tokens", "4")
    yield server
    server.stop()


def run(script: str, *arguments: str) -> dict[str, Any]:
    """The JSON object that the script prints last."""
    assert BIN.is_dir(), "there is no .venv-clients: run .ci/setup-clients"
    done = subprocess.run(
        [BIN / "python", HERE / script, *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        cwd=HERE,
        env={
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "PATH": "/usr/bin:/bin",
            "HOME": str(ROOT / ".venv-clients"),
        },
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


@pytest.mark.parametrize("kind", ["completions", "chat", "loglikelihood"])
def test_lm_evaluation_harness(cluster: ServeProcess, kind: str) -> None:
    """20 questions of GSM8K; tokens are the server's own, asked for by /tokenize."""
    report = run("lm_eval_gsm8k.py", cluster.url, cluster.model, kind)
    assert report["num_samples"] == 20
    assert report["metrics"]
    if kind == "loglikelihood":
        values = [float(choice[0][0]) for sample in report["outputs"] for choice in sample]
        assert len(values) == 40
        assert all(value < 0 for value in values)
    else:
        assert sum(bool(sample[0][0].strip()) for sample in report["outputs"]) >= 10  # some begin with a stop string


def test_langchain(cluster: ServeProcess) -> None:
    report = run("langchain_chat.py", cluster.url, cluster.model)
    assert report["streamed"] == report["answer"]
    assert report["stream_usage"] == report["usage"]
    assert report["batch"][0] == report["answer"]
    assert set(report["person"]) == {"name", "age"}
    assert report["tool_call"]["name"] == "get_weather"
    assert set(report["tool_call"]["args"]) == {"city"}
    assert report["finish_reason"] == "tool_calls"
    assert report["num_logprobs"] == report["usage"]


@pytest.mark.timeout(LIMIT_S + 60)
def test_schemathesis(terse_cluster: ServeProcess) -> None:
    """What the OpenAPI document says is what the server does: no 5xx, and answers of the schemas that it names."""
    assert BIN.is_dir(), "there is no .venv-clients: run .ci/setup-clients"
    done = subprocess.run(
        [
            *(BIN / "st", "run", f"{terse_cluster.url}/openapi.json", "--url", terse_cluster.url),
            *(
                "--checks",
                "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance",
            ),
            *(
                "--phases",
                "examples,coverage,fuzzing",
                "--max-examples",
                "4",
                "--workers",
                "4",
                "--seed",
                "1",
                "--request-timeout",
                "60",
                "--generation-database",
                "none",
            ),
        ],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        cwd=HERE,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
