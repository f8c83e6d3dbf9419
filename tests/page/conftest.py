"""A cluster of two worker groups with small pools, and a real browser that looks at it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from live_page import SIZES, OpenPage
from playwright.sync_api import Browser, Page, expect, sync_playwright
from serve_process import ServeProcess

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = ("--no-sandbox", "--disable-dev-shm-usage")
"""As in any container: it has no sandbox to give, and little shared memory."""

PATIENCE_MS = 60_000
"""For what has to show: a busy machine is no failure."""

REFUSED = "Failed to load resource"
"""What a browser says of an answer that is an error; the page has to say it too, and tests look for that."""


@pytest.fixture(scope="session")
def server() -> Iterator[ServeProcess]:
    process = ServeProcess("--replicas", "2", "--kv-cache-memory-bytes", "225MiB")
    try:
        yield process
    finally:
        process.stop()


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    assert path is not None, f"no browser is installed; tried: {', '.join(BROWSERS)}"
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture
def open_page(server: ServeProcess, browser: Browser) -> Iterator[OpenPage]:
    """Nothing may fail in a page that is opened, and it may ask nobody but its server."""
    complaints: list[str] = []

    def listen(page: Page) -> None:
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        page.on(
            "request",
            lambda request: complaints.append(request.url) if not request.url.startswith(server.url) else None,
        )

    with ExitStack() as stack:

        def open_page(
            size: str = "desktop", scheme: str = "light", prepare: Callable[[Page], None] = lambda page: None
        ) -> Page:
            width, height = SIZES[size]
            context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
            stack.callback(context.close)
            page = context.new_page()
            listen(page)
            prepare(page)
            page.goto(server.url)
            return page

        yield open_page
    assert [complaint for complaint in complaints if not complaint.startswith(REFUSED)] == []
