"""The Serve configs that we ship: Octavo takes them, and the cluster beside them can hold what they ask for."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from manifests import K8S, NAMES, Rendered, container, environment
from ray.serve.schema import ServeDeploySchema

from octavo.cluster.config import ServeConfig
from octavo.cluster.config_sources import merge_args
from octavo.cluster.placement import Demand, Placement, num_fitting, rank_resources


@pytest.fixture
def pod_environment(rendered: Rendered, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment(rendered.head_pod).items():
        if name.startswith("OCTAVO_"):
            monkeypatch.setenv(name, value)


def test_octavo_takes_the_arguments(rendered: Rendered) -> None:
    ServeConfig.parse(rendered.serve_args)


def test_octavo_takes_them_in_a_pod(rendered: Rendered, pod_environment: None) -> None:
    config, _ = merge_args(rendered.serve_args)
    assert str(config.cache_dir) == environment(rendered.head_pod)["OCTAVO_CACHE_DIR"]


def test_serve_takes_the_file(rendered: Rendered) -> None:
    config = ServeDeploySchema.model_validate(rendered.serve_config)
    (application,) = config.applications
    assert application.import_path == "octavo.cluster.application:build"
    assert config.proxy_location == "EveryNode"
    assert (config.http_options.host, config.http_options.port) == ("0.0.0.0", 8000)


def test_the_device_is_said(rendered: Rendered) -> None:
    """With `auto` it would be what the cluster has at the moment when its head is up and its workers are not."""
    needs_gpu = "nvidia.com/gpu" in container(rendered.worker_pod)["resources"]["limits"]
    assert rendered.serve_args["device"] == ("cuda" if needs_gpu else "cpu")


def test_the_workers_hold_all_groups(rendered: Rendered) -> None:
    config = ServeConfig.parse(rendered.serve_args)
    demand = Demand(
        config.replicas or 1,
        config.tensor_parallel_size,
        rank_resources("cuda" if config.device == "cuda" else "cpu"),
        config.placement,
    )
    pod = capacity(rendered)
    pods = rendered.workers["replicas"] * rendered.workers["numOfHosts"]
    assert num_fitting(demand, [pod] * pods) == demand.num_groups
    most = dataclasses.replace(demand, num_groups=config.max_replicas or demand.num_groups)
    assert (
        num_fitting(most, [pod] * rendered.workers["maxReplicas"] * rendered.workers["numOfHosts"]) == most.num_groups
    )


def test_groups_are_added_where_pods_can_be(rendered: Rendered) -> None:
    scales = rendered.cluster.get("enableInTreeAutoscaling", False)
    assert ("max_replicas" in rendered.serve_args) == scales


def test_octavo_scale_sets_the_number_of_groups_where_load_does_not(rendered: Rendered) -> None:
    """Serve takes it from one of the two."""
    (application,) = ServeDeploySchema.model_validate(rendered.serve_config).applications
    assert application.external_scaler_enabled == ("max_replicas" not in rendered.serve_args)


def capacity(rendered: Rendered) -> dict[str, float]:
    """Of a worker pod, as KubeRay tells Ray."""
    limits = container(rendered.worker_pod)["resources"]["limits"]
    return {"CPU": float(limits["cpu"]), "GPU": float(limits.get("nvidia.com/gpu", 0))}


def test_a_new_cluster_has_room_for_a_group_from_the_start(rendered: Rendered) -> None:
    """Octavo asks for groups when one has a place; before, an autoscaler sees nothing that is wanted."""
    assert rendered.workers["minReplicas"] >= 1


def test_a_group_over_several_hosts_is_as_large_as_they_are_together(rendered: Rendered) -> None:
    hosts = rendered.workers["numOfHosts"]
    if hosts > 1:
        placement: Placement = rendered.serve_args["placement"]
        assert placement == "nodes"
        gpus = int(container(rendered.worker_pod)["resources"]["limits"]["nvidia.com/gpu"])
        assert rendered.serve_args["tensor_parallel_size"] == hosts * gpus


def test_pods_without_a_group_s_leader_have_a_gateway(rendered: Rendered) -> None:
    """Serve runs a proxy beside a replica only; a pod without a proxy is never ready, and budgets do not count it."""
    pods = rendered.workers["replicas"] * rendered.workers["numOfHosts"]
    leaders = rendered.serve_args["replicas"]
    if leaders < pods:
        assert rendered.serve_args["num_gateways"] == pods
        assert rendered.serve_args["max_gateways_per_node"] == 1


def test_gateways_do_not_share_a_pod(rendered: Rendered) -> None:
    """Connections do not outlive their gateway's pod: one pod less, one gateway less."""
    assert rendered.serve_args.get("num_gateways", 1) == 1 or rendered.serve_args["max_gateways_per_node"] == 1


def test_keys_of_the_api_are_a_file_that_is_mounted(rendered: Rendered) -> None:
    mounts = {mount["mountPath"]: mount for mount in container(rendered.worker_pod)["volumeMounts"]}
    assert "api_key" not in rendered.serve_args
    file = rendered.serve_args.get("api_key_file")
    if file is None:
        assert "/etc/octavo" not in mounts
        return
    mount = mounts["/etc/octavo"]
    assert mount["readOnly"] is True
    assert "subPath" not in mount  # such a file is never renewed
    (volume,) = [each for each in rendered.worker_pod["spec"]["volumes"] if each["name"] == mount["name"]]
    assert [f"/etc/octavo/{item['path']}" for item in volume["secret"]["items"]] == [file]


def test_production_asks_for_keys(all_rendered: dict[str, Rendered]) -> None:
    for tool in ("kustomize", "helm"):
        assert "api_key_file" in all_rendered[f"{tool}/production"].serve_args


@pytest.mark.parametrize("name", NAMES)
def test_the_overlay_s_file_is_what_is_applied(name: str, all_rendered: dict[str, Rendered]) -> None:
    """``serve deploy`` takes the same file."""
    text = (K8S / "overlays" / name / "serve.yaml").read_text()
    applied: Any = all_rendered[f"kustomize/{name}"].service["spec"]["serveConfigV2"]
    assert applied == text
