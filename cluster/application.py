"""The Serve application: Gateway, Routers and WorkerGroup, bound together.

``build`` is what a Serve config file names as ``import_path: octavo.cluster.application:build``; its ``args`` are the
fields of ServeConfig.
"""

from __future__ import annotations

import logging
import secrets
from typing import Any, Literal

import ray
from ray import serve
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put
from ray.serve import Application

from ..worker.checkpoint.store import resolve_model
from ..worker.errors import ConfigurationError
from .autoscaling import DEFAULT_TARGET_TTFT_MS, DOWNSCALE_DELAY_S, autoscaling_options
from .config import ServeConfig
from .config_sources import merge_args
from .fake.deployment import FakeGroups
from .gateway import Gateway
from .node_wait import num_rank_hosts, wait_for_nodes
from .placement import GATEWAY_RESOURCE, SMALL, STRATEGIES
from .placement_watch import demand_of, nodes
from .plan import NAMESPACE, ClusterPlan, ServePlan, group_deployment
from .preflight import check_models, read_chat_template
from .router_deployment import Router
from .worker_group import WorkerGroup

GATEWAY_ENVIRONMENT = {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0"}
"""A gateway runs on its replica's own event loop. In a thread of its own, as Serve has it by default, each token would
cross from one loop to the other through a queue without bounds: twice the cost, and a client that does not read would
go unnoticed."""

TAKE_DOWN_S = 10.0
"""What a group may take to end, once its requests have."""

_SAID_ELSEWHERE = {
    "host": "http_options.host",
    "port": "http_options.port",
    "ssl_certfile": "http_options.ssl_certfile",
    "ssl_keyfile": "http_options.ssl_keyfile",
    "ssl_ca_certs": "http_options.ssl_ca_certs",
    "ssl_ciphers": "the proxy in front of Serve",
    "app_name": "the application's name",
    "route_prefix": "the application's route_prefix",
    "address": "the cluster that the file is deployed to",
}
"""Fields of ServeConfig that are for ``octavo serve`` alone, and where a Serve config file says the same."""

logger = logging.getLogger(__name__)


def build(args: dict[str, Any]) -> Application:
    """The application for ``args``. Raises ConfigurationError for args that cannot work.

    What a Serve config file says in its own places cannot be said again in ``args``.
    """
    config, provenance = merge_args(args)
    said = {name: provenance.source((name,)) for name in _SAID_ELSEWHERE}
    if taken := sorted(name for name, source in said.items() if source.kind != "default"):
        places = [f"{said[name].where}: {name} is set by {_SAID_ELSEWHERE[name]}" for name in taken]
        raise ConfigurationError("; ".join(places))
    with provenance.in_errors():
        config = check_models(config, logger.info).config
        wait_for_nodes(config, logger.info)
        return bind(make_plan(config))


def make_plan(config: ServeConfig) -> ClusterPlan:
    """Decide what depends on the cluster; Ray must be up."""
    device, key = _device(config), _routing_key(config.app_name)
    num_nodes = sum(1 for node in ray.nodes() if node["Alive"])
    configs = [model.for_device(device) for model in config.each_model()]
    num_ranks = sum(model.most_replicas * model.tensor_parallel_size for model in configs)
    num_ranks_on_machine = -(-num_ranks // num_rank_hosts(device, nodes()))
    models = [_plan_model(model, device, key, num_nodes, num_ranks_on_machine) for model in configs]
    return ClusterPlan(config, tuple(models), key)


def _plan_model(
    config: ServeConfig, device: Literal["cpu", "cuda"], key: bytes, num_nodes: int, num_ranks_on_machine: int
) -> ServePlan:
    resolved = resolve_model(config.model, cache_dir=config.cache_dir, report=logger.info)
    return ServePlan(
        config=config,
        device=device,
        model=str(resolved.path) if num_nodes == 1 else config.model,
        served_model_name=config.served_model_name or resolved.served_name,
        routing_key=key,
        num_ranks_on_machine=num_ranks_on_machine,
        chat_template=read_chat_template(config),
    )


def bind(plan: ClusterPlan) -> Application:
    """The deployments: gateways, worker groups of each model, and one for each router, so that none goes with another.
    The gateway is the ingress; it finds the others by name, and is bound to them so that Serve starts and stops them
    together."""
    config = plan.config
    routers = [
        serve.deployment(Router, name=f"Router-{index}")
        .options(
            num_replicas=1,
            ray_actor_options={"num_cpus": SMALL},
            health_check_period_s=1.0,
            health_check_timeout_s=10.0,
            **_serve_logs(config),
        )
        .bind(plan, index)
        for index in range(config.num_routers)
    ]
    gateway = serve.deployment(Gateway, name="Gateway").options(
        num_replicas=config.num_gateways,
        max_replicas_per_node=config.max_gateways_per_node,
        ray_actor_options={
            "num_cpus": SMALL,
            "resources": _gateway_resources(),
            "runtime_env": {"env_vars": GATEWAY_ENVIRONMENT},
        },
        max_ongoing_requests=10_000,
        graceful_shutdown_timeout_s=config.shutdown_timeout_s,
        graceful_shutdown_wait_loop_s=0.1,
        **_serve_logs(config),
    )
    groups = [_groups_of(model, group_deployment(index)) for index, model in enumerate(plan.models)]
    return gateway.bind(plan, routers, *groups)


def _groups_of(plan: ServePlan, name: str) -> Application:
    """The worker groups of one model."""
    if plan.config.fake_engine is not None:
        return _fake_groups_of(plan, name)
    groups = serve.deployment(WorkerGroup, name=name).options(
        **_how_many(plan.config),
        ray_actor_options={"num_cpus": SMALL},
        placement_group_bundles=demand_of(plan).bundles,
        placement_group_strategy=STRATEGIES[plan.config.placement],
        health_check_period_s=1.0,
        health_check_timeout_s=30.0,
        graceful_shutdown_timeout_s=plan.config.shutdown_timeout_s + TAKE_DOWN_S,
        max_constructor_retry_count=1,
        **_serve_logs(plan.config),
    )
    return groups.bind(plan)


def _fake_groups_of(plan: ServePlan, name: str) -> Application:
    groups = serve.deployment(FakeGroups, name=name).options(
        num_replicas=1,
        ray_actor_options={"num_cpus": SMALL},
        graceful_shutdown_timeout_s=plan.config.shutdown_timeout_s + TAKE_DOWN_S,
        max_constructor_retry_count=1,
        **_serve_logs(plan.config),
    )
    return groups.bind(plan)


def _how_many(config: ServeConfig) -> dict[str, Any]:
    """Serve's options for a fixed number of groups, or for one that follows the load."""
    if config.max_replicas is None:
        return {"num_replicas": config.replicas}
    target_ms = DEFAULT_TARGET_TTFT_MS if config.target_ttft_ms is None else config.target_ttft_ms
    delay_s = DOWNSCALE_DELAY_S if config.downscale_delay_s is None else config.downscale_delay_s
    bounds = config.replicas or 1, config.max_replicas
    return {"autoscaling_config": autoscaling_options(*bounds, target_ms / 1000, delay_s)}


def _serve_logs(config: ServeConfig) -> dict[str, Any]:
    """Serve's options for what it logs of a replica itself: JSON where everything else is, and no line for each request
    beside ours."""
    form = {} if config.log_format == "text" else {"encoding": "JSON", "log_level": config.log_level.upper()}
    return {"logging_config": {"enable_access_log": False, **form}}


def _gateway_resources() -> dict[str, float]:
    return {GATEWAY_RESOURCE: SMALL} if GATEWAY_RESOURCE in ray.cluster_resources() else {}


def _device(config: ServeConfig) -> Literal["cpu", "cuda"]:
    num_gpus = int(ray.cluster_resources().get("GPU", 0))
    if config.device == "cuda" and num_gpus == 0:
        raise ConfigurationError("--device: cuda, but no node of the cluster has a GPU")
    if config.device == "auto":
        return "cuda" if num_gpus > 0 else "cpu"
    return config.device


def _routing_key(app_name: str) -> bytes:
    """The application's secret, made once in the life of a cluster: it outlives routers, groups and redeployments."""
    name = f"{NAMESPACE}:{app_name}:routing_key".encode()
    _internal_kv_put(name, secrets.token_bytes(32), overwrite=False)
    key = _internal_kv_get(name)
    if key is None:
        raise RuntimeError("the cluster's key-value store did not keep the routing key")
    return bytes(key)
