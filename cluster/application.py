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

from ..kernels.cpu_environment import cpu_environment
from ..worker.checkpoint.store import resolve_model
from ..worker.errors import ConfigurationError
from .config import ServeConfig
from .gateway import Gateway
from .plan import NAMESPACE, ServePlan, compile_cache
from .preflight import check_chat_template, check_model, fit_context, note_defaults, read_chat_template
from .router_deployment import Router
from .worker_group import DRAIN_S, WorkerGroup

SMALL = 0.001
"""CPUs booked by processes that mostly wait: something, so that a bundle can hold them."""

GATEWAY_ENVIRONMENT = {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0"}
"""A gateway runs on its replica's own event loop. In a thread of its own, as Serve has it by default, each token would
cross from one loop to the other through a queue without bounds: twice the cost, and a client that does not read would
go unnoticed."""

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
    if taken := sorted(_SAID_ELSEWHERE.keys() & args.keys()):
        raise ConfigurationError("; ".join(f"args: {name} is set by {_SAID_ELSEWHERE[name]}" for name in taken))
    config = ServeConfig.parse(args)
    folder = resolve_model(config.model, cache_dir=config.cache_dir, report=logger.info).path
    check_model(config, folder)
    check_chat_template(config, folder, logger.info)
    note_defaults(config, folder, logger.info)
    return bind(make_plan(fit_context(config, folder, logger.info)))


def make_plan(config: ServeConfig) -> ServePlan:
    """Decide what depends on the cluster; Ray must be up."""
    device = _device(config)
    config = config.for_device(device)
    resolved = resolve_model(config.model, cache_dir=config.cache_dir, report=logger.info)
    nodes = [node for node in ray.nodes() if node["Alive"]]
    num_ranks = (config.replicas or 1) * config.tensor_parallel_size
    return ServePlan(
        config=config,
        device=device,
        model=str(resolved.path) if len(nodes) == 1 else config.model,
        served_model_name=config.served_model_name or resolved.served_name,
        routing_key=_routing_key(config.app_name),
        num_ranks_on_machine=-(-num_ranks // len(nodes)),
        chat_template=read_chat_template(config),
    )


def bind(plan: ServePlan) -> Application:
    """The deployments: gateways, worker groups, and one for each router, so that none goes with another. The gateway is
    the ingress; it finds the others by name, and is bound to them so that Serve starts and stops them together."""
    config = plan.config
    routers = [
        serve.deployment(Router, name=f"Router-{index}")
        .options(
            num_replicas=1,
            ray_actor_options={"num_cpus": SMALL},
            health_check_period_s=1.0,
            health_check_timeout_s=10.0,
        )
        .bind(plan, index)
        for index in range(config.num_routers)
    ]
    groups = serve.deployment(WorkerGroup, name="WorkerGroup").options(
        num_replicas=config.replicas,
        ray_actor_options={"num_cpus": SMALL},
        placement_group_bundles=[{"CPU": SMALL}, *[plan.rank_resources] * config.tensor_parallel_size],
        placement_group_strategy="PACK",
        health_check_period_s=1.0,
        health_check_timeout_s=30.0,
        graceful_shutdown_timeout_s=DRAIN_S + 10.0,
        max_constructor_retry_count=1,
    )
    gateway = serve.deployment(Gateway, name="Gateway").options(
        num_replicas=config.num_gateways,
        ray_actor_options={"num_cpus": SMALL, "runtime_env": {"env_vars": GATEWAY_ENVIRONMENT}},
        max_ongoing_requests=10_000,
        graceful_shutdown_timeout_s=DRAIN_S,
        graceful_shutdown_wait_loop_s=0.1,
    )
    return gateway.bind(plan, routers, groups.bind(plan, worker_environment(plan)))


def worker_environment(plan: ServePlan) -> dict[str, str]:
    """Environment variables of the workers' processes."""
    if plan.device == "cuda":
        return {}
    return cpu_environment(plan.num_threads_per_rank) | {"NUMBA_CACHE_DIR": str(compile_cache(plan.config.cache_dir))}


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
