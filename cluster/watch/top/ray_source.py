"""The same numbers from the routers, by Ray, which must have been joined: for a cluster whose API cannot be reached."""

from __future__ import annotations

import ray
from ray.exceptions import RayError

from ...api.metrics import merge_metrics
from ...plan import NAMESPACE, router_names
from .sources import TIMEOUT_S, NotWatched

_MOST_ROUTERS = 4


class RaySource:
    """The application ``app_name`` in the Ray cluster at ``address``, of which this process is a driver."""

    def __init__(self, address: str, app_name: str) -> None:
        self.name = f"{app_name} at {address}"
        self._app_name = app_name

    def metrics(self) -> str:
        """What any of the routers has been told of lately."""
        texts: dict[str, str] = {}
        for index, name in enumerate(router_names(self._app_name, _MOST_ROUTERS)):
            try:
                told = ray.get(ray.get_actor(name, NAMESPACE).cluster_metrics.remote(), timeout=TIMEOUT_S)
            except (RayError, ValueError):
                continue
            texts |= {source: text for source, text in told.items() if source != "router"}
            texts[f"router:{index}"] = told["router"]
        if not texts:
            raise NotWatched(f"--app-name: no router of {self._app_name} answers")
        return merge_metrics(texts.values())
