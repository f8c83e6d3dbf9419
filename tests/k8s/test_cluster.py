"""What is around Ray's pods: budgets, networks, the head's memory, upgrades, metrics. Each test is a trap."""

from __future__ import annotations

import json
from typing import Any

import pytest
from manifests import K8S, Document, Rendered, container, selects

KUBERAY_METRICS = {"metrics": 8080}
"""The port that KubeRay adds to every Ray container."""

CACHE_ON_THE_NODE = {"ipBlock": {"cidr": "169.254.20.10/32"}}


def labels(pod: Document) -> dict[str, str]:
    """As on a running pod: with those that KubeRay adds."""
    return {"app.kubernetes.io/name": "kuberay", "ray.io/is-ray-node": "yes", **pod["metadata"]["labels"]}


# Disruption


def test_all_but_one_group_stay_when_nodes_are_drained(rendered: Rendered) -> None:
    """A whole number: RayCluster has no scale subresource, without which other forms find no pods."""
    spec = rendered.of_kind("PodDisruptionBudget")["octavo-workers"]["spec"]
    pods_of_others = (rendered.workers["replicas"] - 1) * rendered.workers["numOfHosts"]
    assert spec["minAvailable"] == max(1, pods_of_others)
    assert isinstance(spec["minAvailable"], int)
    assert "maxUnavailable" not in spec
    assert selects(spec["selector"], labels(rendered.worker_pod))
    assert not selects(spec["selector"], labels(rendered.head_pod))


def test_a_worker_that_serves_nobody_holds_up_no_drain(rendered: Rendered) -> None:
    spec = rendered.of_kind("PodDisruptionBudget")["octavo-workers"]["spec"]
    assert spec["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_the_head_is_moved_only_if_its_state_is_kept(rendered: Rendered) -> None:
    budget = rendered.of_kind("PodDisruptionBudget").get("octavo-head")
    if "gcsFaultToleranceOptions" in rendered.cluster:
        assert budget is None
        return
    assert budget is not None
    assert budget["spec"]["minAvailable"] == 1
    assert selects(budget["spec"]["selector"], labels(rendered.head_pod))


def test_node_autoscalers_leave_the_head_alone(rendered: Rendered) -> None:
    annotations = rendered.head_pod["metadata"]["annotations"]
    assert annotations["cluster-autoscaler.kubernetes.io/safe-to-evict"] == "false"


# The head's memory


def test_the_head_of_production_outlives_itself(all_rendered: dict[str, Rendered]) -> None:
    for tool in ("kustomize", "helm"):
        rendered = all_rendered[f"{tool}/production"]
        options = rendered.cluster["gcsFaultToleranceOptions"]
        host, port = options["redisAddress"].split(":")
        service = rendered.of_kind("Service")[host]["spec"]
        assert [each["port"] for each in service["ports"]] == [int(port)]
        redis = rendered.of_kind("StatefulSet")[host]["spec"]
        assert selects({"matchLabels": service["selector"]}, redis["template"]["metadata"]["labels"])
        assert redis["volumeClaimTemplates"]
        assert "--appendonly" in container(redis["template"])["args"]


def test_two_clusters_never_share_their_state(rendered: Rendered) -> None:
    """During an upgrade there are two; KubeRay names the state by the cluster unless it is told a name."""
    assert "externalStorageNamespace" not in rendered.cluster.get("gcsFaultToleranceOptions", {})


# Networks


def test_every_ray_pod_is_closed_but_for_its_own(rendered: Rendered) -> None:
    """Among themselves on all ports: leaders' token lines, where ranks meet, and much of Ray have any that is free."""
    spec = rendered.of_kind("NetworkPolicy")["octavo-cluster"]["spec"]
    assert set(spec["policyTypes"]) == {"Ingress", "Egress"}
    for pod in rendered.ray_pods.values():
        assert selects(spec["podSelector"], labels(pod))
    for rules, side in ((spec["ingress"], "from"), (spec["egress"], "to")):
        among_themselves = [rule for rule in rules if "ports" not in rule]
        assert [rule[side] for rule in among_themselves] == [[{"podSelector": spec["podSelector"]}]]


def egress_ports(rendered: Rendered) -> list[tuple[Document, Any]]:
    rules = rendered.of_kind("NetworkPolicy")["octavo-cluster"]["spec"]["egress"]
    return [
        (to, (port["protocol"], port["port"])) for rule in rules for to in rule["to"] for port in rule.get("ports", [])
    ]


def test_names_can_be_looked_up(rendered: Rendered) -> None:
    """Workers find their head by name; a policy without this leaves them waiting for ever."""
    pods = {"namespaceSelector": {}, "podSelector": {"matchLabels": {"k8s-app": "kube-dns"}}}
    for dns in (pods, CACHE_ON_THE_NODE):
        assert {port for to, port in egress_ports(rendered) if to == dns} == {("UDP", 53), ("TCP", 53)}


def test_models_can_be_fetched_and_credentials_of_the_cloud_cannot(rendered: Rendered) -> None:
    blocks = [to["ipBlock"] for to, _ in egress_ports(rendered) if "ipBlock" in to and to != CACHE_ON_THE_NODE]
    assert blocks
    assert all("169.254.0.0/16" in block["except"] for block in blocks)
    assert ("TCP", 443) in [port for to, port in egress_ports(rendered) if "ipBlock" in to]


def test_the_autoscaler_reaches_the_api_server(rendered: Rendered) -> None:
    reaches = ("TCP", 6443) in [port for _, port in egress_ports(rendered)]
    assert reaches == rendered.cluster.get("enableInTreeAutoscaling", False)


def test_ray_reaches_its_redis_and_nobody_else_does(rendered: Rendered) -> None:
    for name, redis in rendered.of_kind("StatefulSet").items():
        of_redis = redis["spec"]["template"]["metadata"]["labels"]
        assert ("TCP", 6379) in [
            port for to, port in egress_ports(rendered) if "podSelector" in to and selects(to["podSelector"], of_redis)
        ]
        spec = rendered.of_kind("NetworkPolicy")[name]["spec"]
        assert selects(spec["podSelector"], of_redis)
        (rule,) = spec["ingress"]
        (peer,) = rule["from"]
        assert selects(peer["podSelector"], labels(rendered.head_pod))
        assert "egress" not in spec


def test_the_operator_reaches_what_it_watches(rendered: Rendered) -> None:
    rules = rendered.of_kind("NetworkPolicy")["octavo-cluster"]["spec"]["ingress"]
    (rule,) = [rule for rule in rules if "namespaceSelector" in rule["from"][0]]
    assert rule["from"][0]["podSelector"] == {"matchLabels": {"app.kubernetes.io/name": "kuberay-operator"}}
    assert {port["port"] for port in rule["ports"]} == {8265, 52365, 8000}


def test_clients_reach_the_api_and_nothing_else(rendered: Rendered) -> None:
    spec = rendered.of_kind("NetworkPolicy")["octavo-api"]["spec"]
    assert selects(spec["podSelector"], labels(rendered.worker_pod))
    assert not selects(spec["podSelector"], labels(rendered.head_pod))
    (rule,) = spec["ingress"]
    assert rule["ports"] == [{"port": 8000, "protocol": "TCP"}]


def test_clients_of_production_are_named(all_rendered: dict[str, Rendered]) -> None:
    for tool in ("kustomize", "helm"):
        (rule,) = all_rendered[f"{tool}/production"].of_kind("NetworkPolicy")["octavo-api"]["spec"]["ingress"]
        assert {"namespaceSelector": {}} not in rule["from"]


# Upgrades


@pytest.mark.parametrize("tool", ["kustomize", "helm"])
def test_an_upgrade_of_production_needs_no_second_cluster_s_gpus(tool: str, all_rendered: dict[str, Rendered]) -> None:
    rendered = all_rendered[f"{tool}/production"]
    strategy = rendered.service["spec"]["upgradeStrategy"]
    assert strategy["type"] == "NewClusterWithIncrementalUpgrade"
    options = strategy["clusterUpgradeOptions"]
    assert options["stepSizePercent"] <= options["maxSurgePercent"] < 100
    assert rendered.cluster["enableInTreeAutoscaling"] is True
    assert rendered.cluster["autoscalerOptions"]["version"] == "v2"
    # Both clusters must find their token, and people one that does not change.
    assert rendered.cluster["authOptions"]["secretName"] == "octavo-ray-token"


# Metrics


def test_monitors_find_pods_that_have_the_ports(rendered: Rendered) -> None:
    for monitor in rendered.of_kind("PodMonitor").values():
        found = [pod for pod in rendered.ray_pods.values() if selects(monitor["spec"]["selector"], labels(pod))]
        ports = KUBERAY_METRICS | {
            port["name"]: port["containerPort"] for pod in found for port in container(pod)["ports"]
        }
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            assert endpoint["port"] in ports
            assert ports[endpoint["port"]] in monitoring_ports(rendered)


def monitoring_ports(rendered: Rendered) -> set[int]:
    spec = rendered.of_kind("NetworkPolicy")["octavo-monitoring"]["spec"]
    assert all(selects(spec["podSelector"], labels(pod)) for pod in rendered.ray_pods.values())
    (rule,) = spec["ingress"]
    return {port["port"] for port in rule["ports"]}


def test_the_metrics_of_the_cluster_are_scraped_once(rendered: Rendered) -> None:
    """Any gateway answers for all: with a target for each pod, every sum would be a multiple."""
    monitors = [monitor for monitor in rendered.of_kind("PodMonitor").values() if endpoint_of_api(monitor)]
    for monitor in monitors:
        found = [name for name, pod in rendered.ray_pods.items() if selects(monitor["spec"]["selector"], labels(pod))]
        assert found == ["head"]
    assert bool(monitors) == bool(rendered.of_kind("PodMonitor"))


def endpoint_of_api(monitor: Document) -> list[Document]:
    return [endpoint for endpoint in monitor["spec"]["podMetricsEndpoints"] if endpoint["port"] == "serve"]


def test_the_dashboard_is_the_one_of_the_repository(rendered: Rendered) -> None:
    for config in rendered.of_kind("ConfigMap").values():
        assert config["metadata"]["labels"]["grafana_dashboard"] == "1"
        shown = json.loads(config["data"]["octavo-dashboard.json"])
        assert shown == json.loads((K8S / "monitoring" / "octavo-dashboard.json").read_text())


def test_production_is_watched(all_rendered: dict[str, Rendered]) -> None:
    for tool in ("kustomize", "helm"):
        rendered = all_rendered[f"{tool}/production"]
        assert all(rendered.of_kind(kind) for kind in ("PodMonitor", "PrometheusRule", "ConfigMap"))
