"""The same numbers from the routers, by Ray: for a cluster whose API cannot be reached."""

from __future__ import annotations

import logging

import ray
from ray.exceptions import RayError

from ....worker.errors import ConfigurationError
from ...api.metrics import merge_metrics
from ...environment import read_environment
from ...local_ray import auth_environment, set_environment
from ...plan import NAMESPACE, router_names
from .sources import TIMEOUT_S, NotWatched

_MOST_ROUTERS = 4


class RaySource:
    """The application ``app_name`` in the Ray cluster at ``address``. Raises ConfigurationError."""

    def __init__(self, address: str, app_name: str) -> None:
        self.name = f"{app_name} at {address}"
        set_environment(auth_environment(read_environment(), joining=True))
        try:
            ray.init(address=address, namespace=NAMESPACE, logging_level=logging.ERROR, log_to_driver=False)
        except (ConnectionError, RuntimeError, ValueError, RayError) as error:  # of Ray itself: a wrong token
            reason = str(error).strip().split("\n")[0]
            raise ConfigurationError(f"--address: no Ray can be joined at {address}: {reason}") from error
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
