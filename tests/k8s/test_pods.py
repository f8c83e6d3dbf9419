"""Pods of Ray: how they start, stop, are probed, and what they may do. Each test is a trap that somebody fell into."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from manifests import ROOT, Document, Rendered, container, environment

from octavo.cluster.config import DEFAULT_SHUTDOWN_TIMEOUT_S
from octavo.cluster.hosts.node import HEALTH_CHECKS
from octavo.cluster.local_ray import LOG_ROTATION, own_ray_environment

OF_KUBERAY = {
    "RAY_AUTH_MODE",
    "RAY_AUTH_TOKEN",
    "RAY_ADDRESS",
    "RAY_IP",
    "RAY_PORT",
    "FQ_RAY_IP",
    "RAY_USAGE_STATS_EXTRA_TAGS",
}
END_PROCESSES_S = 10

RAYLET = {"path": "/api/local_raylet_healthz", "port": 52365}


def pinned(package: str) -> str:
    (line,) = re.findall(rf"^{package}==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    return str(line)


def test_ray_has_the_version_of_the_image(rendered: Rendered) -> None:
    assert rendered.cluster["rayVersion"] == pinned("ray")
    requirements = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (series,) = [line.removeprefix("ray[serve]==") for line in requirements if line.startswith("ray[serve]")]
    assert Path(rendered.cluster["rayVersion"]).match(series)


def test_the_image_has_a_version(rendered: Rendered) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    images = {container(pod)["image"] for pod in rendered.ray_pods.values()}
    needs_gpu = "nvidia.com/gpu" in container(rendered.worker_pod)["resources"]["limits"]
    assert images == {f"octavo:{version}-{'cuda' if needs_gpu else 'cpu'}"}
    for name, pod in rendered.pod_templates():
        assert re.search(r":[^:/]*\d[^:/]*$", container(pod)["image"]), name


# Stopping


def test_the_grace_period_covers_all_that_is_waited_for(rendered: Rendered) -> None:
    """KubeRay sets none, and Kubernetes kills after 30 s: streams would end in the middle."""
    for pod in rendered.ray_pods.values():
        pre_stop = container(pod)["lifecycle"]["preStop"]["sleep"]["seconds"]
        ray_drain = float(environment(pod)["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
        assert pod["spec"]["terminationGracePeriodSeconds"] >= pre_stop + ray_drain + END_PROCESSES_S


def test_what_is_waited_for_is_longer_than_a_group_drains(rendered: Rendered) -> None:
    serve_gives_a_replica_s = DEFAULT_SHUTDOWN_TIMEOUT_S + 10.0
    for pod in rendered.ray_pods.values():
        assert container(pod)["lifecycle"]["preStop"]["sleep"]["seconds"] > DEFAULT_SHUTDOWN_TIMEOUT_S
        assert float(environment(pod)["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"]) > serve_gives_a_replica_s


def test_the_old_cluster_outlives_its_streams(rendered: Rendered) -> None:
    assert rendered.service["spec"]["rayClusterDeletionDelaySeconds"] > 2 * DEFAULT_SHUTDOWN_TIMEOUT_S


# Probes


def test_a_pod_is_killed_for_its_raylet_alone(rendered: Rendered) -> None:
    """Not for the API: while a model loads, or when a group fails, Serve mends it without losing the pod."""
    for pod in rendered.ray_pods.values():
        assert container(pod)["livenessProbe"]["httpGet"] == RAYLET
        assert container(pod)["startupProbe"]["httpGet"] == RAYLET


def test_a_worker_gets_traffic_when_octavo_is_ready(rendered: Rendered) -> None:
    """KubeRay's own probe asks Serve's proxy, which is well before there is a model."""
    probe = container(rendered.worker_pod)["readinessProbe"]["httpGet"]
    prefix = rendered.serve_config["applications"][0]["route_prefix"].rstrip("/")
    assert probe == {"path": f"{prefix}/ready", "port": "serve"}


def test_the_head_is_ready_with_its_gcs(rendered: Rendered) -> None:
    assert container(rendered.head_pod)["readinessProbe"]["httpGet"] == {
        "path": "/api/gcs_healthz",
        "port": "dashboard",
    }


def test_no_probe_needs_a_program_in_the_image(rendered: Rendered) -> None:
    for pod in rendered.ray_pods.values():
        for name in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert "exec" not in container(pod)[name]


def test_a_probe_leaves_time_to_a_busy_machine(rendered: Rendered) -> None:
    for pod in rendered.ray_pods.values():
        liveness, startup = container(pod)["livenessProbe"], container(pod)["startupProbe"]
        assert liveness["failureThreshold"] * liveness["periodSeconds"] >= 60
        assert startup["failureThreshold"] * startup["periodSeconds"] >= 300


def test_ports_that_are_named_are_there(rendered: Rendered) -> None:
    """KubeRay adds `metrics` (8080); a second one of that name or number would be refused."""
    for pod in rendered.ray_pods.values():
        ports = {port["name"]: port["containerPort"] for port in container(pod)["ports"]}
        assert len(ports) == len(container(pod)["ports"]) == len(set(ports.values()))
        assert "metrics" not in ports
        assert 8080 not in ports.values()
        for name in ("startupProbe", "livenessProbe", "readinessProbe"):
            port = container(pod)[name]["httpGet"]["port"]
            assert port in ports or port == RAYLET["port"]


# Environment


def test_ray_notices_a_dead_node_within_seconds(rendered: Rendered) -> None:
    for pod in rendered.ray_pods.values():
        assert environment(pod).items() >= HEALTH_CHECKS.items()


def test_serve_runs_behind_haproxy_as_octavo_serve_sets_it_up(rendered: Rendered) -> None:
    """But for files and ports that must be unique on a machine: a pod is one."""
    ours = own_ray_environment(Path("scratch"))
    unique = {name for name, value in ours.items() if "scratch" in value or name.endswith("_PORT")}
    for pod in rendered.ray_pods.values():
        assert environment(pod).items() >= {name: ours[name] for name in ours.keys() - unique}.items()


def test_logs_turn_over_as_with_octavo_serve(rendered: Rendered) -> None:
    for pod in rendered.ray_pods.values():
        assert environment(pod).items() >= LOG_ROTATION.items()


def test_ray_s_authentication_is_said_and_left_to_kuberay(rendered: Rendered) -> None:
    assert rendered.cluster["authOptions"]["mode"] == "token"
    for pod in rendered.ray_pods.values():
        assert not environment(pod).keys() & OF_KUBERAY


def test_the_services_of_the_namespace_become_no_variables(rendered: Rendered) -> None:
    """They would look like settings of Octavo: OCTAVO_HEAD_SVC_PORT."""
    for pod in rendered.ray_pods.values():
        assert pod["spec"]["enableServiceLinks"] is False


def test_no_secret_is_written_down(rendered: Rendered) -> None:
    assert not rendered.of_kind("Secret")
    assert environment(rendered.worker_pod)["HF_TOKEN"]["secretKeyRef"]["optional"] is True
    for name, pod in rendered.pod_templates():
        for variable, value in environment(pod).items():
            is_secret = any(word in variable for word in ("TOKEN", "PASSWORD", "AUTH", "KEY")) and variable.isupper()
            assert not is_secret or variable == "TOKENIZERS_PARALLELISM" or "secretKeyRef" in value, (name, variable)


# Security


def test_pods_meet_the_restricted_standard(rendered: Rendered) -> None:
    for name, pod in rendered.pod_templates():
        spec, only = pod["spec"], container(pod)
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        assert spec["securityContext"]["runAsUser"] > 0, name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert only["securityContext"]["allowPrivilegeEscalation"] is False, name
        assert only["securityContext"]["capabilities"] == {"drop": ["ALL"]}, name
        assert not spec.keys() & {"hostNetwork", "hostPID", "hostIPC"}, name
        assert not [port for port in only.get("ports", []) if "hostPort" in port], name
        kinds = {kind for volume in spec.get("volumes", []) for kind in volume if kind != "name"}
        assert kinds <= {"emptyDir", "persistentVolumeClaim", "secret", "configMap"}, name


def test_the_namespace_enforces_it(all_rendered: dict[str, Rendered]) -> None:
    for name, rendered in all_rendered.items():
        if name.startswith("kustomize"):
            labels = rendered.of_kind("Namespace")["octavo"]["metadata"]["labels"]
            assert labels["pod-security.kubernetes.io/enforce"] == "restricted"


def test_only_a_head_that_scales_the_cluster_speaks_to_the_api_server(rendered: Rendered) -> None:
    scales = rendered.cluster.get("enableInTreeAutoscaling", False)
    for name, pod in rendered.pod_templates():
        mounts_token = pod["spec"].get("automountServiceAccountToken", True)
        assert mounts_token == (name == "head" and scales), name


def test_the_autoscaler_s_container_is_restricted_too(rendered: Rendered) -> None:
    if not rendered.cluster.get("enableInTreeAutoscaling"):
        return
    context = rendered.cluster["autoscalerOptions"]["securityContext"]
    assert context == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def test_labels_that_kuberay_selects_by_are_its_own(rendered: Rendered) -> None:
    for pod in rendered.ray_pods.values():
        labels = pod["metadata"]["labels"]
        assert "app.kubernetes.io/name" not in labels
        assert "app.kubernetes.io/created-by" not in labels
        assert not [name for name in labels if name.startswith("ray.io/")]


# Memory, volumes, devices


def test_shared_memory_is_bounded_and_holds_the_object_store(rendered: Rendered) -> None:
    """KubeRay would add one as large as the pod; with ours at its path it does not."""
    groups = {"head": rendered.cluster["headGroupSpec"], "worker": rendered.workers}
    for group in groups.values():
        volume = mounted(group["template"], "/dev/shm")
        assert volume["emptyDir"]["medium"] == "Memory"
        limit = number_of_bytes(volume["emptyDir"]["sizeLimit"])
        assert int(group["rayStartParams"]["object-store-memory"]) < limit
        assert limit < number_of_bytes(container(group["template"])["resources"]["limits"]["memory"])


def test_models_and_compiled_kernels_are_kept_on_a_volume(rendered: Rendered) -> None:
    for pod in rendered.ray_pods.values():
        folder = environment(pod)["OCTAVO_CACHE_DIR"]
        assert mounted(pod, folder)
        assert environment(pod)["HF_HOME"].startswith(f"{folder}/")
    assert "cache_dir" not in rendered.serve_args


def test_memory_is_guaranteed(rendered: Rendered) -> None:
    """A pod that may use more than it asked for is the first to be killed on a full node."""
    for pod in rendered.ray_pods.values():
        resources = container(pod)["resources"]
        assert resources["requests"]["memory"] == resources["limits"]["memory"]


def test_the_head_runs_no_replica(rendered: Rendered) -> None:
    start = rendered.cluster["headGroupSpec"]["rayStartParams"]
    assert (start["num-cpus"], start["num-gpus"]) == ("0", "0")
    assert "nvidia.com/gpu" not in container(rendered.head_pod)["resources"]["limits"]
    assert rendered.service["spec"]["excludeHeadPodFromServeSvc"] is True


def test_workers_with_gpus_go_where_gpus_are(rendered: Rendered) -> None:
    spec = rendered.worker_pod["spec"]
    if "nvidia.com/gpu" not in container(rendered.worker_pod)["resources"]["limits"]:
        assert not spec.keys() & {"nodeSelector", "tolerations"}
        return
    assert spec["nodeSelector"] == {"nvidia.com/gpu.present": "true"}
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in spec["tolerations"]


@pytest.mark.parametrize("source", ["kustomize/multi-node-tp", "helm/multi-node-tp"])
def test_ranks_on_several_hosts_know_their_interface(source: str, all_rendered: dict[str, Rendered]) -> None:
    rendered = all_rendered[source]
    assert rendered.workers["numOfHosts"] > 1
    variables = environment(rendered.worker_pod)
    assert variables["NCCL_SOCKET_IFNAME"] == variables["GLOO_SOCKET_IFNAME"] == "eth0"


def mounted(pod: Document, path: str) -> dict[str, Any]:
    """The volume at ``path``."""
    (name,) = [mount["name"] for mount in container(pod)["volumeMounts"] if mount["mountPath"] == path]
    (volume,) = [volume for volume in pod["spec"]["volumes"] if volume["name"] == name]
    return dict(volume)


def number_of_bytes(quantity: str) -> int:
    value, unit = re.fullmatch(r"(\d+)([KMGT]i)?", quantity).groups()  # type: ignore[union-attr]
    return int(value) * 1024 ** ("_KMGT".index(unit[0]) if unit else 0)
