"""What we ship is what Kubernetes and KubeRay take, as far as their schemas say it."""

from __future__ import annotations

from pathlib import Path

import custom_resources
import kuberay_rules
import pytest
import yaml
from manifests import CHART, NAMES, Document, Rendered, edited, run

OF_OPERATORS = {"RayService", "PodMonitor", "PrometheusRule"}
OLDEST, NEWEST = "1.31", "1.37"
WORKERS = "spec.rayClusterConfig.workerGroupSpecs.0"
HEAD = "spec.rayClusterConfig.headGroupSpec"


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_kubernetes_knows_every_field(version: str, all_rendered: dict[str, Rendered], tmp_path: Path) -> None:
    files = []
    for name, found in all_rendered.items():
        for index, document in enumerate(found.documents):
            if document["kind"] not in OF_OPERATORS:
                files.append(tmp_path / f"{name.replace('/', '-')}-{index}.yaml")
                files[-1].write_text(yaml.safe_dump(document))
    done = run("kubernetes-validate", "--strict", "--quiet", "--no-warn", "-k", version, *files)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_a_wrong_field_would_be_found(tmp_path: Path) -> None:
    budget = {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "spec": {"minAvailible": 1}}
    (tmp_path / "wrong.yaml").write_text(yaml.safe_dump(budget))
    assert run("kubernetes-validate", "--strict", "-k", NEWEST, tmp_path / "wrong.yaml").returncode != 0


def test_kuberay_knows_every_field(rendered: Rendered) -> None:
    assert rendered.service["apiVersion"] == "ray.io/v1"
    assert not custom_resources.complaints(rendered.service)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec.rayClusterConfig.workerGroups", []),
        ("spec.rayClusterConfig.authOptions.mode", "tokens"),
        (f"{WORKERS}.replicas", "1"),
        (f"{WORKERS}.groupName", None),
        (f"{HEAD}.template.spec.containers.0.livenesProbe", {}),
    ],
)
def test_a_field_that_kuberay_does_not_know_would_be_found(
    path: str, value: object, all_rendered: dict[str, Rendered]
) -> None:
    assert custom_resources.complaints(edited(all_rendered["kustomize/production"].service, path, value))


def test_the_operator_refuses_nothing(rendered: Rendered) -> None:
    assert not kuberay_rules.complaints(rendered.service)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("metadata.name", "octavo" * 7),
        ("metadata.annotations", {"ray.io/ft-enabled": "true"}),
        ("spec.upgradeStrategy.type", "Rolling"),
        ("spec.upgradeStrategy.clusterUpgradeOptions.stepSizePercent", 60),
        ("spec.upgradeStrategy.clusterUpgradeOptions.intervalSeconds", 0),
        ("spec.upgradeStrategy.clusterUpgradeOptions.gatewayClassName", ""),
        ("spec.rayClusterConfig.enableInTreeAutoscaling", None),
        ("spec.rayClusterConfig.rayVersion", None),
        ("spec.rayClusterConfig.authOptions.enableK8sTokenAuth", True),
        ("spec.rayClusterConfig.networkPolicy", {}),
        ("spec.rayClusterConfig.gcsFaultToleranceOptions.storage", {"size": "1Gi"}),
        (f"{HEAD}.rayStartParams.redis-password", "x"),
        (f"{HEAD}.rayStartParams.labels", "a=b"),
        (f"{HEAD}.resources", {"cpu": "1"}),
        (f"{HEAD}.headService", {"metadata": {"name": "head"}}),
        (f"{HEAD}.template.spec.containers.0.env.-", {"name": "RAY_REDIS_ADDRESS", "value": "redis:6379"}),
        (f"{HEAD}.template.spec.containers.0.env.-", {"name": "RAY_enable_autoscaler_v2", "value": "1"}),
        (f"{WORKERS}.template.spec.containers.0.env.-", {"name": "RAY_CLUSTER_NAME", "value": "x"}),
        (f"{WORKERS}.template.spec.restartPolicy", "Always"),
        (f"{WORKERS}.minReplicas", 9),
    ],
)
def test_what_the_operator_would_refuse_is_found(path: str, value: object, all_rendered: dict[str, Rendered]) -> None:
    assert kuberay_rules.complaints(edited(all_rendered["kustomize/production"].service, path, value))


@pytest.mark.parametrize("name", NAMES)
def test_the_chart_passes_its_linter(name: str) -> None:
    done = run("helm", "lint", "--strict", "--quiet", CHART, "--values", CHART / "examples" / f"{name}.yaml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_documents_of_the_prometheus_operator_have_its_form(rendered: Rendered) -> None:
    for monitor in rendered.of_kind("PodMonitor").values():
        assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
        assert set(monitor["spec"]) <= {"selector", "podMetricsEndpoints", "podTargetLabels"}
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            assert set(endpoint) <= {"port", "path", "interval"}
    for rules in rendered.of_kind("PrometheusRule").values():
        assert rules["apiVersion"] == "monitoring.coreos.com/v1"
        assert set(rules["spec"]) == {"groups"}


def test_every_document_is_in_the_same_namespace(rendered: Rendered) -> None:
    def namespace(document: Document) -> object:
        return document["metadata"]["name" if document["kind"] == "Namespace" else "namespace"]

    assert {namespace(document) for document in rendered.documents} == {"octavo"}
