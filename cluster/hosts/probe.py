"""What a host has, before anything is started on it.

This file is sent to the host's Python as it stands, which may have neither Ray nor Octavo: only the standard library,
and no names from around it. It prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
from importlib import metadata

PACKAGES = ("octavo", "ray", "torch", "triton", "numpy", "transformers")


def version_of(package: str) -> str | None:
    """The version that is installed, if any."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def source_address(towards: str) -> str | None:
    """The address of this host from which packets go to ``towards``; nothing is sent."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def is_own_address(address: str) -> bool:
    """Whether ``address`` is one of this host's."""
    try:
        family, kind, _, _, bound = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(bound)
            return True
    except OSError:
        return False


def boot_id() -> str:
    """Of the machine since it was started; containers on it have the same."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def num_gpus() -> int:
    """By the driver's files, which are there without any library."""
    try:
        return len(os.listdir("/proc/driver/nvidia/gpus"))
    except OSError:
        return 0


def probe(towards: list[str], own: str | None) -> dict[str, object]:
    """``towards``: other hosts; ``own``: what is said to be an address of this one."""
    versions = {name: version_of(name) for name in PACKAGES}
    versions["python"] = platform.python_version()
    versions["system"] = f"{platform.system()} {platform.machine()}"
    return {
        "versions": versions,
        "hostname": socket.gethostname(),
        "boot_id": boot_id(),
        "has_address": own is None or is_own_address(own),
        "sources": [source for name in towards if (source := source_address(name))],
        "num_cpus": os.cpu_count() or 1,
        "num_gpus": num_gpus(),
        "shm_bytes": shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0,
    }


if __name__ == "__main__":
    print("OCTAVO " + json.dumps(probe(*ARGUMENTS)))  # type: ignore[name-defined]  # noqa: F821  # put in front of the text
