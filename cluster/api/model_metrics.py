"""ModelsMetrics: the metrics of one gateway, for each model that it serves, and of its HTTP answers."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, generate_latest

from ...worker.process_metrics import LoopLag, ProcessMetrics
from .metrics import GatewayMetrics, harmless, merge_metrics


class ModelsMetrics:
    """``metrics[name]`` are those of one model. ``gateway`` is the label that tells gateways apart."""

    def __init__(self, models: Sequence[str], gateway: str) -> None:
        self._of = {model: GatewayMetrics(model, gateway) for model in models}
        self._gateway = gateway
        self._registry = CollectorRegistry()
        self._http = Counter(
            "octavo_http_requests_total",
            "HTTP answers by route and status. model_name is empty where there are several and none was found out.",
            ["model_name", "gateway", "path", "status"],
            registry=self._registry,
        )
        self.lag = LoopLag()
        """Of the gateway's event loop, where somebody lets it measure."""
        self._registry.register(ProcessMetrics({"role": "gateway", "gateway": gateway}, self.lag))

    @property
    def models(self) -> tuple[str, ...]:
        """Their names."""
        return tuple(self._of)

    def __getitem__(self, model: str) -> GatewayMetrics:
        return self._of[model]

    @harmless
    def http_answer(self, model: str | None, path: str, status: int) -> None:
        """``model`` None: the answer is not about one, or did not come so far."""
        name = model or (self.models[0] if len(self._of) == 1 else "")
        self._http.labels(name, self._gateway, path, str(status)).inc()

    def text(self) -> str:
        """Prometheus text exposition, format 0.0.4."""
        own = generate_latest(self._registry).decode()
        return merge_metrics([*(metrics.text() for metrics in self._of.values()), own])
