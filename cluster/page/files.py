"""The page's files, as they lie in ``static/``: what a browser is sent, and what it is told it may do with them.

They hold nothing of the cluster, so they need no API key: what they show is asked for with one.
"""

from __future__ import annotations

from pathlib import Path

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

FOLDER = Path(__file__).parent / "static"
MOUNT = "/page"

PAGE_PATHS = frozenset({"/", *(f"{MOUNT}/{file.name}" for file in FOLDER.iterdir())})
"""All paths that need no key."""

_HEADERS = {
    # Nothing from elsewhere, no script or style within the page, nobody's frame.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    # Asked for each time, and mostly answered with 304: after an update nobody sees parts of two versions.
    "cache-control": "no-cache",
}


def add_files(app: Starlette) -> None:
    """``GET /`` and what it names. These are no operations of the API: its document does not list them."""

    async def index(_: object) -> Response:
        return FileResponse(FOLDER / "index.html", headers=_HEADERS)

    app.router.routes.append(Route("/", index))
    app.router.routes.append(Mount(MOUNT, _WithHeaders(StaticFiles(directory=FOLDER))))


class _WithHeaders:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        await self._app(scope, receive, send_with_headers)
