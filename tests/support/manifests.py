"""The Kubernetes documents that we ship, rendered as a user does: kustomize's overlays, the chart with its examples."""

from __future__ import annotations

import copy
import os
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent.parent
K8S = ROOT / "k8s"
CHART = K8S / "chart"
TOOLS = ROOT / ".venv-k8s" / "bin"

NAMES = ("cpu-demo", "single-node-gpu", "multi-node-tp", "production")
"""Each is an overlay and an example of the chart."""

Document = dict[str, Any]


def run(tool: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """One of the tools that ``.ci/setup-k8s`` installs."""
    program = TOOLS / tool
    assert program.is_file(), f"{program} is not there: run .ci/setup-k8s"
    environment = {"PATH": os.environ["PATH"], "HOME": str(TOOLS.parent)}
    return subprocess.run([str(program), *map(str, arguments)], capture_output=True, text=True, env=environment)


def kustomize(folder: Path) -> list[Document]:
    done = run("kubectl", "kustomize", folder)
    assert done.returncode == 0, done.stderr
    return documents(done.stdout)


def helm_template(*options: str | Path, release: str = "octavo") -> list[Document]:
    done = run("helm", "template", release, CHART, "--namespace", "octavo", "--kube-version", "1.37.0", *options)
    assert done.returncode == 0, done.stderr
    return documents(done.stdout)


def documents(text: str) -> list[Document]:
    return [document for document in yaml.safe_load_all(text) if document]


@dataclass(frozen=True)
class Rendered:
    """What is applied for one name, and the parts that tests speak of."""

    documents: tuple[Document, ...]

    def of_kind(self, kind: str) -> dict[str, Document]:
        """By name."""
        return {item["metadata"]["name"]: item for item in self.documents if item["kind"] == kind}

    @property
    def service(self) -> Document:
        (found,) = self.of_kind("RayService").values()
        return found

    @property
    def cluster(self) -> Document:
        return dict(self.service["spec"]["rayClusterConfig"])

    @property
    def workers(self) -> Document:
        (group,) = self.cluster["workerGroupSpecs"]
        return dict(group)

    @property
    def head_pod(self) -> Document:
        return dict(self.cluster["headGroupSpec"]["template"])

    @property
    def worker_pod(self) -> Document:
        return dict(self.workers["template"])

    @property
    def ray_pods(self) -> dict[str, Document]:
        return {"head": self.head_pod, "worker": self.worker_pod}

    @property
    def serve_config(self) -> Document:
        return dict(yaml.safe_load(self.service["spec"]["serveConfigV2"]))

    @property
    def serve_args(self) -> Document:
        (application,) = self.serve_config["applications"]
        return dict(application["args"])

    def pod_templates(self) -> Iterator[tuple[str, Document]]:
        """Every pod that these documents make, not only Ray's."""
        yield from self.ray_pods.items()
        for name, item in self.of_kind("StatefulSet").items():
            yield name, item["spec"]["template"]
        for name, item in self.of_kind("Pod").items():
            yield name, item


def container(pod: Document) -> Document:
    (only,) = pod["spec"]["containers"]
    return dict(only)


def environment(pod: Document) -> dict[str, Any]:
    """Name → value, or where it comes from."""
    entries = container(pod).get("env", [])
    names = [entry["name"] for entry in entries]
    assert len(names) == len(set(names)), f"set twice: {names}"
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in entries}


def edited(document: Document, path: str, value: Any) -> Document:
    """A copy with ``value`` at ``path`` (dots; numbers are places in lists), or without it where it is None."""
    result = copy.deepcopy(document)
    *parents, last = path.split(".")
    place: Any = result
    for part in parents:
        place = place[int(part)] if isinstance(place, list) else place.setdefault(part, {})
    if value is None:
        place.pop(last, None)
    elif isinstance(place, list):
        place.append(value)
    else:
        place[last] = value
    return result


def selects(selector: Document, labels: dict[str, str]) -> bool:
    """Whether a label selector of matchLabels alone, or an empty one, finds ``labels``."""
    assert set(selector) <= {"matchLabels"}
    wanted: Iterable[tuple[str, str]] = selector.get("matchLabels", {}).items()
    return all(labels.get(name) == value for name, value in wanted)
