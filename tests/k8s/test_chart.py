"""The chart: it says the same as kustomize's overlays, and refuses values that cannot work by their name."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from manifests import CHART, NAMES, ROOT, Document, Rendered, container, documents, helm_template, run

from octavo.cluster.application import _SAID_ELSEWHERE
from octavo.cluster.config import DEFAULT_SHUTDOWN_TIMEOUT_S, ServeConfig


def meaning(document: Document) -> Document:
    """Without labels and annotations that say who made it, with the Serve config as data."""
    metadata = {
        key: {name: text for name, text in value.items() if not is_of_helm(name)} if isinstance(value, dict) else value
        for key, value in document["metadata"].items()
    }
    result: Document = {**document, "metadata": {key: value for key, value in metadata.items() if value}}
    if document["kind"] == "RayService":
        result["spec"] = {**document["spec"], "serveConfigV2": yaml.safe_load(document["spec"]["serveConfigV2"])}
    if document["kind"] == "PrometheusRule":
        result["spec"] = without_line_breaks(document["spec"])
    if document["kind"] == "ConfigMap":
        result["data"] = {name: json.loads(text) for name, text in document["data"].items()}
    return result


def without_line_breaks(part: Any) -> Any:
    """Kustomize adds some to folded texts; to Prometheus they say nothing."""
    if isinstance(part, dict):
        return {name: without_line_breaks(value) for name, value in part.items()}
    if isinstance(part, list):
        return [without_line_breaks(value) for value in part]
    return " ".join(part.split()) if isinstance(part, str) else part


def is_of_helm(name: str) -> bool:
    return name.startswith("helm.sh/") or name == "app.kubernetes.io/managed-by"


@pytest.mark.parametrize("name", NAMES)
def test_the_chart_and_the_overlay_mean_the_same(name: str, all_rendered: dict[str, Rendered]) -> None:
    def by_name(tool: str) -> dict[tuple[str, str], Any]:
        found = all_rendered[f"{tool}/{name}"].documents
        # helm makes the namespace by --create-namespace; its test is no part of what is installed.
        kept = [document for document in found if document["kind"] not in ("Namespace", "Pod")]
        return {(document["kind"], document["metadata"]["name"]): meaning(document) for document in kept}

    ours, theirs = by_name("helm"), by_name("kustomize")
    assert ours.keys() == theirs.keys()
    for key, document in ours.items():
        assert document == theirs[key]


def test_another_release_shares_nothing_with_the_first() -> None:
    values = CHART / "examples" / "production.yaml"
    first = helm_template("--values", values)
    second = helm_template("--values", values, release="chat")
    assert not {key(document) for document in first} & {key(document) for document in second}
    for document in second:
        assert "app.kubernetes.io/instance: octavo" not in yaml.safe_dump(document)


def key(document: Document) -> tuple[str, str]:
    return document["kind"], document["metadata"]["name"]


def test_the_path_of_the_api_moves_probes_and_scrapes_with_it() -> None:
    rendered = Rendered(tuple(helm_template("--set", "serve.routePrefix=/chat", "--set", "monitoring.enabled=true")))
    readiness = rendered.worker_pod["spec"]["containers"][0]["readinessProbe"]["httpGet"]["path"]
    scraped = rendered.of_kind("PodMonitor")["octavo"]["spec"]["podMetricsEndpoints"][0]["path"]
    assert (readiness, scraped) == ("/chat/ready", "/chat/metrics")
    assert rendered.serve_config["applications"][0]["route_prefix"] == "/chat"


def test_of_several_models_one_that_follows_load_keeps_octavo_scale_out() -> None:
    """Serve takes the number of groups from one of the two, for the whole application."""
    models = [{"model": "one", "max_replicas": 2}, {"model": "other"}]
    rendered = Rendered(tuple(helm_template("--set-json", f"serve.args.models={json.dumps(models)}")))
    assert "external_scaler_enabled" not in rendered.serve_config["applications"][0]


def test_a_redis_of_one_s_own_replaces_the_chart_s() -> None:
    options = ("--set", "redis.enabled=true", "--set", "redis.address=redis.data.svc:6379")
    rendered = Rendered(tuple(helm_template(*options)))
    assert rendered.cluster["gcsFaultToleranceOptions"]["redisAddress"] == "redis.data.svc:6379"
    assert not rendered.of_kind("StatefulSet")


def test_a_claim_of_one_s_own_replaces_the_chart_s() -> None:
    rendered = Rendered(tuple(helm_template("--set", "cache.claim=true", "--set", "cache.existingClaim=models")))
    assert not rendered.of_kind("PersistentVolumeClaim")
    for pod in rendered.ray_pods.values():
        assert {"name": "cache", "persistentVolumeClaim": {"claimName": "models"}} in pod["spec"]["volumes"]


def test_an_update_of_the_chart_leaves_the_claim() -> None:
    rendered = Rendered(tuple(helm_template("--set", "cache.claim=true")))
    (claim,) = rendered.of_kind("PersistentVolumeClaim").values()
    assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"


def test_a_deployed_chart_can_be_tried() -> None:
    (pod,) = [document for document in helm_template() if document["kind"] == "Pod"]
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    compile(pod["spec"]["containers"][0]["args"][0], "args", "exec")


WRONG = {
    "workers.replicas=0": "/workers/replicas': minimum",
    "workers.gpus=-1": "/workers/gpus': minimum",
    "workers.hosts=two": "/workers/hosts': got string",
    "workers.resources.limits.memory=8 GiB": "/workers/resources/limits/memory'",
    "workers.resouces.limits.cpu=8": "/workers': additional properties 'resouces'",
    "workers.env[0].name=RAY_AUTH_TOKEN": "/workers/env/0/name'",
    "termination.preStopSeconds=5": "/termination/preStopSeconds': minimum",
    "termination.rayDrainSeconds=30": "/termination/rayDrainSeconds': minimum",
    "termination.gracePeriodSeconds=null": "/termination': missing property 'gracePeriodSeconds'",
    "upgrade.deletionDelaySeconds=5": "/upgrade/deletionDelaySeconds'",
    "serve.args.port=9000": "/serve/args': invalid propertyName 'port'",
    "serve.args.api_key=secret": "/serve/args': invalid propertyName 'api_key'",
    "serve.args.max-num-seqs=8": "/serve/args': invalid propertyName 'max-num-seqs'",
    "serve.args.device=auto": "/serve/args/device'",
    "serve.routePrefix=chat": "/serve/routePrefix'",
    "rayVersion=2.59.0": "/rayVersion'",
    "image.tag=latest": "/image/tag'",
    "podDisruptionBudget.minAvailable=50%": "/podDisruptionBudget/minAvailable'",
    "networkPolicy.clients=null": "/networkPolicy': missing property 'clients'",
    "redis.address=nowhere": "/redis/address'",
    "head.env[0].name=RAY_REDIS_ADDRESS": "/head/env/0/name'",
    "head.env[0].valueform=x": "/head/env/0': additional properties 'valueform'",
    "apiKeys.secretName=Not_A_Name": "/apiKeys/secretName'",
    "monitoring.enable=true": "/monitoring': additional properties 'enable'",
}


@pytest.fixture(scope="module")
def refusal() -> str:
    """What helm says of all of them at once: a line for each, which ends with the rule."""
    done = run("helm", "template", "octavo", CHART, *[part for values in WRONG for part in ("--set", values)])
    assert done.returncode != 0
    return done.stderr


@pytest.mark.parametrize("values", WRONG)
def test_wrong_values_are_refused_by_name(values: str, refusal: str) -> None:
    assert f"at '{WRONG[values]}" in refusal


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ("workers.replicas=2", "workers.replicas: must be at most workers.maxReplicas (1), got 2"),
        ("workers.minReplicas=2", "workers.minReplicas: must be at most workers.replicas (1), got 2"),
        ("termination.gracePeriodSeconds=100", "termination.gracePeriodSeconds: must be at least"),
        ("upgrade.strategy=Rolling", "/upgrade/strategy"),
        ("upgrade.strategy=NewClusterWithIncrementalUpgrade", "/autoscaling/enabled"),
        ("upgrade.strategy=NewClusterWithIncrementalUpgrade", "/upgrade/gatewayClassName"),
        ("serve.args.device=cuda", "/workers/gpus"),
    ],
)
def test_values_that_do_not_go_together_are_refused_by_name(values: str, named: str) -> None:
    done = run("helm", "template", "octavo", CHART, "--set", values)
    assert done.returncode != 0
    assert named in done.stderr


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ("serve.args.num_gateways=1", "serve.args.num_gateways: must be the number of worker pods (4)"),
        ("serve.args.max_gateways_per_node=2", "serve.args.max_gateways_per_node: must be 1"),
        ("serve.args.placement=node", "serve.args.placement: must be nodes"),
        ("serve.args.tensor_parallel_size=32", "serve.args.tensor_parallel_size: must be at most"),
        ("serve.args.max_replicas=3", "serve.args.max_replicas: 48 ranks in all would need a GPU each"),
        ("serve.args.replicas=3", "serve.args.replicas: 48 ranks in all need a GPU each, and workers have 32"),
    ],
)
def test_groups_that_the_pods_cannot_hold_are_refused(values: str, named: str) -> None:
    example = CHART / "examples" / "multi-node-tp.yaml"
    done = run("helm", "template", "octavo", CHART, "--values", example, "--set", values)
    assert done.returncode != 0
    assert named in done.stderr


def test_a_name_that_kuberay_could_not_extend_is_refused() -> None:
    done = run("helm", "template", "o" * 40, CHART)
    assert done.returncode != 0
    assert "36 characters" in done.stderr


def test_the_schema_speaks_of_settings_that_exist() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    arguments = schema["properties"]["serve"]["properties"]["args"]
    assert arguments["properties"].keys() <= ServeConfig.model_fields.keys()
    forbidden = set(arguments["propertyNames"]["not"]["enum"])
    assert forbidden >= _SAID_ELSEWHERE.keys()
    assert forbidden <= ServeConfig.model_fields.keys()


def test_the_schema_knows_every_default() -> None:
    """`additionalProperties: false` at each level, so that a mistyped value is refused, and nothing left out."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert set(schema["properties"]) - {"global"} == set(values)
    for name, part in values.items():
        if isinstance(part, dict):
            assert schema["properties"][name]["additionalProperties"] is False
            assert set(schema["properties"][name]["properties"]) == set(part), name


def test_the_schema_keeps_every_drain_whole() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    of_values = schema["properties"]["termination"]["properties"]
    assert of_values["preStopSeconds"]["minimum"] > DEFAULT_SHUTDOWN_TIMEOUT_S
    assert of_values["rayDrainSeconds"]["minimum"] > DEFAULT_SHUTDOWN_TIMEOUT_S + 10
    assert schema["properties"]["upgrade"]["properties"]["deletionDelaySeconds"]["minimum"] > DEFAULT_SHUTDOWN_TIMEOUT_S


def test_gpus_of_another_maker() -> None:
    options = ["serve.args.device=cuda", "serve.args.kv_cache_memory_bytes=null", "workers.gpus=2"]
    sets = [part for value in [*options, "workers.gpuResource=amd.com/gpu"] for part in ("--set", value)]
    limits = container(Rendered(tuple(helm_template(*sets))).worker_pod)["resources"]["limits"]
    assert limits["amd.com/gpu"] == "2"
    assert "nvidia.com/gpu" not in limits


def test_versions_are_those_of_the_project() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert f'version = "{chart["appVersion"]}"' in (ROOT / "pyproject.toml").read_text()
    assert chart["version"] == chart["appVersion"]


def test_rules_and_dashboard_are_not_copies() -> None:
    for name in ("octavo-rules.yaml", "octavo-dashboard.json"):
        assert (CHART / "files" / name).resolve() == ROOT / "k8s" / "monitoring" / name


def test_a_packaged_chart_holds_them(tmp_path: Any) -> None:
    assert run("helm", "package", CHART, "--destination", tmp_path).returncode == 0
    (archive,) = tmp_path.glob("octavo-*.tgz")
    done = run("helm", "template", "octavo", archive, "--set", "monitoring.enabled=true")
    assert done.returncode == 0, done.stderr
    dashboards = [document for document in documents(done.stdout) if document["kind"] == "ConfigMap"]
    assert json.loads(dashboards[0]["data"]["octavo-dashboard.json"])
