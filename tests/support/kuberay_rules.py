"""What KubeRay 1.7 refuses in its own code, which no schema says: the rules that a RayService of ours could break.

The operator takes such a document and then does nothing but write an event, so they are tested here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

MAX_NAME_LENGTH = 41
"""Of a RayService: names made of it must fit into 63 characters."""

MANAGED = {"KUBERAY_GEN_AUTOSCALER_START_CMD", "RAY_CLUSTER_NAME", "RAY_CLOUD_INSTANCE_ID", "RAY_NODE_TYPE_NAME"}
REDIS = {"RAY_REDIS_ADDRESS", "REDIS_PASSWORD", "REDIS_USERNAME"}
STRATEGIES = {"NewCluster", "NewClusterWithIncrementalUpgrade", "None"}
BEHIND_FEATURE_GATES = {"networkPolicy", "tlsOptions", "historyServerOptions"}


def complaints(service: dict[str, Any]) -> list[str]:
    spec = service["spec"]
    cluster = spec["rayClusterConfig"]
    return [
        *_name(service["metadata"]["name"]),
        *_groups(cluster),
        *_auth(cluster),
        *_redis(service),
        *_autoscaler(cluster),
        *_gates(cluster),
        *_upgrade(spec),
    ]


def _name(name: str) -> Iterator[str]:
    if len(name) > MAX_NAME_LENGTH or not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name):
        yield f"metadata.name: {name}"


def _pods(cluster: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [("head", cluster["headGroupSpec"]), *((group["groupName"], group) for group in cluster["workerGroupSpecs"])]


def _environment(group: dict[str, Any]) -> set[str]:
    return {entry["name"] for entry in group["template"]["spec"]["containers"][0].get("env", [])}


def _groups(cluster: dict[str, Any]) -> Iterator[str]:
    if "name" in cluster["headGroupSpec"].get("headService", {}).get("metadata", {}):
        yield "headService.metadata.name is KubeRay's"
    for name, group in _pods(cluster):
        start = group.get("rayStartParams", {})
        if "labels" in start:
            yield f"{name}: rayStartParams.labels"
        if group.get("resources") and start.keys() & {"num-cpus", "num-gpus", "memory", "resources"}:
            yield f"{name}: resources are said twice"
        if _environment(group) & MANAGED:
            yield f"{name}: sets {sorted(_environment(group) & MANAGED)}"
    for group in cluster["workerGroupSpecs"]:
        if not 0 <= group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]:
            yield f"{group['groupName']}: minReplicas <= replicas <= maxReplicas"


def _auth(cluster: dict[str, Any]) -> Iterator[str]:
    options = cluster.get("authOptions", {})
    version = tuple(map(int, re.findall(r"\d+", cluster.get("rayVersion", ""))[:2]))
    if options.get("mode") == "token" and version < (2, 52):
        yield "authOptions.mode token needs a rayVersion from 2.52"
    if options.get("enableK8sTokenAuth"):
        yield "enableK8sTokenAuth is not for a RayService"


def _redis(service: dict[str, Any]) -> Iterator[str]:
    cluster = service["spec"]["rayClusterConfig"]
    options = cluster.get("gcsFaultToleranceOptions")
    annotations = service["metadata"].get("annotations", {})
    head = cluster["headGroupSpec"]
    said = _environment(head) & REDIS
    if said or head.get("rayStartParams", {}).keys() & {"redis-password", "redis-username"}:
        yield f"Redis is for gcsFaultToleranceOptions alone, not for the head: {sorted(said)}"
    if options and annotations.keys() & {"ray.io/ft-enabled", "ray.io/external-storage-namespace"}:
        yield "gcsFaultToleranceOptions and an annotation"
    if options and options.get("backend", "redis") == "redis" and "storage" in options:
        yield "gcsFaultToleranceOptions.storage is for rocksdb"


def _autoscaler(cluster: dict[str, Any]) -> Iterator[str]:
    is_on = cluster.get("enableInTreeAutoscaling", False)
    options = cluster.get("autoscalerOptions", {})
    if "RAY_enable_autoscaler_v2" in _environment(cluster["headGroupSpec"]):
        yield "RAY_enable_autoscaler_v2: autoscalerOptions.version says it"
    for name, group in _pods(cluster):
        if is_on and group["template"]["spec"].get("restartPolicy", "Never") != "Never":
            yield f"{name}: restartPolicy must be Never with autoscaler v2"
        if "idleTimeoutSeconds" in group and not (is_on and options.get("version", "v2") == "v2"):
            yield f"{name}: idleTimeoutSeconds needs autoscaler v2"


def _gates(cluster: dict[str, Any]) -> Iterator[str]:
    for name in sorted(cluster.keys() & BEHIND_FEATURE_GATES):
        yield f"{name} is behind a feature gate of the operator"


def _upgrade(spec: dict[str, Any]) -> Iterator[str]:
    strategy = spec.get("upgradeStrategy", {})
    if strategy.get("type", "NewCluster") not in STRATEGIES:
        yield f"upgradeStrategy.type {strategy['type']}"
    if strategy.get("type") != "NewClusterWithIncrementalUpgrade":
        return
    options = strategy.get("clusterUpgradeOptions", {})
    surge, step = options.get("maxSurgePercent", 100), options.get("stepSizePercent", 0)
    if not spec["rayClusterConfig"].get("enableInTreeAutoscaling"):
        yield "an incremental upgrade needs enableInTreeAutoscaling"
    if not options.get("gatewayClassName"):
        yield "an incremental upgrade needs gatewayClassName"
    if not 0 < step <= surge <= 100:
        yield f"stepSizePercent {step} <= maxSurgePercent {surge} <= 100"
    if options.get("intervalSeconds", 0) <= 0:
        yield "intervalSeconds must be above 0"
