"""What tests of the live page have in common: sizes of screens, where pictures go, a check that all can use it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page

SIZES = {"phone": (390, 844), "desktop": (1440, 900)}
PICTURES = Path(__file__).parents[2] / "build" / "page"

OpenPage = Callable[..., Page]
"""``open_page("phone", "dark")``; ``prepare(page)`` is called before it is loaded."""


def violations(page: Page) -> list[str]:
    """What the accessibility check finds, each rule with the elements that break it."""
    found = Axe().run(page).response["violations"]
    return [f"{rule['id']}: {[node['target'] for node in rule['nodes']]}" for rule in found]


def check(page: Page, name: str) -> None:
    """Take its picture; whoever cannot see it can use it, and nobody has to scroll sideways."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=PICTURES / f"{name}.png", full_page=True)
    assert violations(page) == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "it is wider than the screen"
