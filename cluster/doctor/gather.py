"""Gathers the facts of the node that it runs on. Loads no weights and starts nothing."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ...worker.errors import ConfigurationError
from ...worker.host_memory import host_memory
from ..config import ServeConfig
from ..hosts.node import interface_of
from ..hosts.probe import PACKAGES, version_of
from .facts import EMBEDDED, Model, ModelFile, Node
from .gpus import driver_versions, gpus

DIGESTED_BYTES = 2**20
"""Files up to so many are compared by all of their content, others by their size and their first bytes."""

_PREFIXES = ("NCCL_", "GLOO_", "CUDA_", "TORCH_", "PYTORCH_", "OMP_", "MKL_", "TRITON_", "NVIDIA_", "HSA_", "HIP_")
_NAMES = ("LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHASHSEED", "RAY_AUTH_MODE", "HF_HUB_OFFLINE", "HF_HOME")
_OF_RAY = ("RAY_health_check_",)
_NOT_COMPARED = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
"""What Ray sets for each process, and images for each machine."""


@dataclass(frozen=True, slots=True)
class Question:
    """What a node is asked beside what it is."""

    config: Mapping[str, Any]
    """Of ServeConfig, as JSON."""
    address: str
    is_head: bool
    checks_port: bool
    """The API's port is to be taken on this node."""


def gather(question: Question) -> Node:
    """The facts of this node. What cannot be found out is left empty."""
    config = ServeConfig.parse(question.config)
    found = gpus()  # before torch takes memory of them
    torch_versions, num_torch_gpus, torch_gpu_error = _torch()
    cache_free_bytes, cache_error = _cache(config.cache_dir)
    return Node(
        address=question.address,
        hostname=socket.gethostname(),
        versions=_versions() | torch_versions | driver_versions(),
        environment=_environment(),
        num_cpus=os.cpu_count() or 1,
        memory_bytes=host_memory().total,
        shm_bytes=shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else None,
        interfaces=tuple(sorted(psutil.net_if_addrs())),
        interface=interface_of(question.address),
        gpus=found,
        num_torch_gpus=num_torch_gpus,
        torch_gpu_error=torch_gpu_error,
        models=tuple(model_facts(model.model) for model in config.each_model()),
        port_error=_port_error(config) if question.checks_port else None,
        key_file_error=_key_file_error(config) if question.is_head else None,
        cache_dir=str(config.cache_dir),
        cache_free_bytes=cache_free_bytes,
        cache_error=cache_error,
        is_head=question.is_head,
    )


def model_facts(name: str | None) -> Model:
    """Of the model that the user calls ``name``; nothing is fetched. None: the embedded one, checked by its sum."""
    if name is None:
        return Model(EMBEDDED, None)
    path = Path(name).expanduser()
    try:
        if path.is_dir():
            return Model(name, str(path.resolve()), dict(_files(path.resolve())), _missing(path))
        if path.is_file():
            return Model(name, str(path.resolve()), {path.name: _file(path)})
        if path.is_absolute() or path.suffix == ".gguf":
            return Model(name, None, error=f"{path} does not exist")
        return _hub_facts(name)
    except OSError as error:
        return Model(name, None, error=f"cannot be read: {error}")


def _hub_facts(name: str) -> Model:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, local_files_only=True))
    except LocalEntryNotFoundError:
        return Model(name, None)
    except HFValidationError:
        return Model(name, None, error=f"{name} is neither a file, nor a folder, nor a hub id")
    return Model(name, str(folder), dict(_files(folder)), _missing(folder))


def _missing(folder: Path) -> str | None:
    if not (folder / "config.json").is_file():
        return f"{folder} has no config.json"
    if not any(folder.glob("*.safetensors")):
        return f"{folder} has no .safetensors file"
    return None


def _files(folder: Path) -> Iterator[tuple[str, ModelFile]]:
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix in (".json", ".safetensors", ".model", ".jinja", ".txt"):
            yield path.name, _file(path)


def _file(path: Path) -> ModelFile:
    with path.open("rb") as file:
        return ModelFile(path.stat().st_size, hashlib.sha256(file.read(DIGESTED_BYTES)).hexdigest())


def _versions() -> dict[str, str | None]:
    import platform

    versions = {name: version_of(name) for name in PACKAGES}
    return versions | {"python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}


def _torch() -> tuple[dict[str, str | None], int, str | None]:
    """Versions that torch brings, how many GPUs it sees, and why it cannot use them."""
    try:
        import torch
    except (ImportError, OSError) as error:  # not there, or a library that it needs is not
        return {}, 0, str(error)
    versions: dict[str, str | None] = {"cuda": torch.version.cuda}
    if not torch.cuda.is_available():
        return versions, 0, None
    with contextlib.suppress(AttributeError, RuntimeError):
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    try:
        torch.zeros(1, device="cuda")
    except RuntimeError as error:
        return versions, torch.cuda.device_count(), str(error).splitlines()[0]
    return versions, torch.cuda.device_count(), None


def _environment() -> dict[str, str]:
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if (name.startswith((*_PREFIXES, *_OF_RAY)) or name in _NAMES) and name not in _NOT_COMPARED
    }


def _port_error(config: ServeConfig) -> str | None:
    from ..launch import with_port

    try:
        with_port(config)
    except ConfigurationError as error:
        return str(error)
    return None


def _key_file_error(config: ServeConfig) -> str | None:
    from ..preflight import check_api_keys

    try:
        check_api_keys(config.model_copy(update={"address": None}))
    except ConfigurationError as error:
        return str(error)
    return None


def _cache(folder: Path) -> tuple[int | None, str | None]:
    """Free bytes, and why nothing can be written there."""
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not there.is_dir():
        return None, f"{there} is no folder"
    if not os.access(there, os.W_OK):
        return shutil.disk_usage(there).free, f"{there} cannot be written"
    return shutil.disk_usage(there).free, None
