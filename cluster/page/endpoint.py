"""``GET /`` is the page, ``GET /page/live`` what it shows."""

from __future__ import annotations

import math

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...worker.errors import InvalidRequest
from ..api.model_metrics import ModelsMetrics
from ..api.service import GenerationService
from .files import MOUNT, add_files
from .live import LiveView


def add_page(app: Starlette, service: GenerationService, metrics: ModelsMetrics) -> None:
    """``/page/live`` wants an API key where the API does; its form is the page's own concern and may change."""
    live = LiveView(service, metrics)

    async def view(request: Request) -> Response:
        body = await live.view(_since(request.query_params.get("since", "0")))
        return Response(body, media_type="application/json", headers={"cache-control": "no-store"})

    app.router.routes.append(Route(f"{MOUNT}/live", view))
    add_files(app)


def _since(text: str) -> float:
    try:
        since = float(text)
    except ValueError:
        since = math.nan
    if not math.isfinite(since):
        raise InvalidRequest(f"since must be a Unix time in seconds, got {text[:32]!r}.", param="since")
    return since
