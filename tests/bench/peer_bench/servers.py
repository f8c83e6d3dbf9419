"""The servers that are compared: how each is started, and what it wants in a request.

All serve the same model with the same threads, in their own defaults otherwise. Prompts are token ids where a server
takes them, else the text that these decode to.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SLOTS, SLOT_TOKENS = 16, 4_352
"""Of llama.cpp, which divides its context evenly: as many as there are clients, each for the longest prompt."""
TRANSFORMERS_BLOCKS, VLLM_KV_GIB = 364, 4
"""KV of 93,184 tokens, 4 GiB: transformers alone would take nine tenths of the machine's free memory."""
MAX_MODEL_LEN = 8_192
USAGE = {"stream_options": {"include_usage": True}}


@dataclass(frozen=True)
class Server:
    """``precision`` is that of the weights. ``fields`` go with every request, ``to_length`` with those whose output
    must not end before ``max_tokens``."""

    name: str
    precision: str
    model: str
    command: Callable[[int], list[str]]
    """From the port."""
    version: str
    environment: dict[str, str] = field(default_factory=dict)
    takes_token_ids: bool = True
    fields: dict[str, Any] = field(default_factory=lambda: USAGE)
    to_length: dict[str, Any] = field(default_factory=lambda: {"ignore_eos": True})

    @property
    def is_octavo(self) -> bool:
        return self.name.startswith("octavo")


def octavo(variant: str, version: str) -> Server:
    """One worker group on all cores, the embedded model. ``variant``: ``float32``, or what ``--quantization`` takes."""
    flags = [] if variant == "float32" else ["--quantization", variant]
    command = [sys.executable, "-m", "octavo.cluster", "serve", "--replicas", "1", *flags, "--port"]
    return Server(
        f"octavo {variant}", variant, "SmolLM2-135M-Instruct", lambda port: [*command, str(port)], f"octavo {version}"
    )


def vllm(python: Path, version: str, model_dir: Path, cores: list[int]) -> Server:
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model_dir)]
    command += ["--served-model-name", "model", "--dtype", "float32", "--max-model-len", str(MAX_MODEL_LEN)]
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_KVCACHE_SPACE": str(VLLM_KV_GIB),
        "VLLM_CACHE_ROOT": str(python.parents[1] / "cache"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    at = ["--host", "127.0.0.1", "--port"]
    return Server("vllm float32", "float32", "model", lambda port: [*command, *at, str(port)], version, environment)


def transformers(python: Path, version: str, model_dir: Path) -> Server:
    """It takes text only, counts tokens unasked, and knows end tokens by its generation config alone."""
    command = [str(python.with_name("transformers")), "serve", str(model_dir), "--continuous-batching"]
    command += ["--dtype", "float32", "--device", "cpu", "--cb-num-blocks", str(TRANSFORMERS_BLOCKS)]
    command += ["--host", "127.0.0.1", "--port"]
    return Server(
        "transformers float32",
        "float32",
        str(model_dir),
        lambda port: [*command, str(port)],
        version,
        {"HF_HUB_OFFLINE": "1"},
        takes_token_ids=False,
        fields={},
        to_length={"generation_config": '{"do_sample": false, "eos_token_id": -1}'},
    )


def llamacpp(python: Path, version: str, kind: str, file: Path, num_threads: int) -> Server:
    program = Path(__file__).with_name("llamacpp_main.py")
    numbers = [str(SLOTS), str(SLOTS * SLOT_TOKENS), str(num_threads)]
    return Server(
        f"llamacpp {kind}",
        kind,
        "model",
        lambda port: [str(python), str(program), str(file), str(port), *numbers],
        version,
    )
