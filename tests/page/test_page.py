"""The live page in a real browser, over a real cluster: it shows what is so, and everybody can use it."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest
from live_page import SIZES, OpenPage, check, violations
from playwright.sync_api import Page, Route, expect
from serve_client import wait_until_idle
from serve_process import ServeProcess, wait_until

SECRET = "xylophone"
"""A word of every prompt here."""


@contextmanager
def streams(server: ServeProcess, num: int = 4) -> Iterator[None]:
    """So many requests that share the beginning of their prompts run until the end."""
    over = threading.Event()
    threads = [threading.Thread(target=_stream, args=(server, number, over)) for number in range(num)]
    for thread in threads:
        thread.start()
    try:
        wait_until(
            lambda: server.gauge("octavo_num_requests_running") == num, timeout_s=60, what=f"{num} running requests"
        )
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def _stream(server: ServeProcess, number: int, over: threading.Event) -> None:
    prompt = f"{SECRET} " + "page block router prefix cache " * 60 + str(number)
    while not over.is_set():
        body = {"model": server.model, "prompt": prompt, "max_tokens": 800, "stream": True, "ignore_eos": True}
        with httpx2.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
            for _ in answer.iter_lines():
                if over.is_set():
                    return


def is_live(page: Page) -> None:
    expect(page.locator("#connection")).to_have_text("live")


def ask(page: Page, text: str) -> str:
    """Send a message in the chat; the facts beside its answer."""
    num_answers = page.locator(".message .facts").count()
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")
    facts = page.locator(".message .facts").nth(num_answers)
    expect(facts).to_contain_text("prompt tokens cached")
    return facts.inner_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_everybody_can_use_it_idle_and_under_load(
    server: ServeProcess, open_page: OpenPage, size: str, scheme: str
) -> None:
    page = open_page(size, scheme)
    is_live(page)
    check(page, f"idle-{size}-{scheme}")
    with streams(server):
        expect(page.locator(".sequence").first).to_be_visible()
        expect(page.locator(".chart .line").first).to_be_attached()
        page.locator(".decision summary").first.click()
        page.get_by_text("The curves as a table").click()
        page.get_by_text("Settings").click()
        check(page, f"load-{size}-{scheme}")


def test_it_shows_the_pools_as_the_leaders_know_them(server: ServeProcess, open_page: OpenPage) -> None:
    page = open_page()
    with streams(server, num=3):
        rows = page.locator(".sequence")
        expect(rows).to_have_count(3)
        expect(rows.first).to_contain_text(re.compile(r"\d+ of 3\d\d cached · \d+ out · \d+ pages"))
        view = live(server)
    for group in view["groups"]:
        pool = group["pool"]
        assert sum(pool["num_blocks_by_state"].values()) == pool["num_blocks"]
        assert pool["num_running"] == len(pool["sequences"])
        card = page.locator(f'.group[aria-label="{group["group"]}"]')
        expect(card.locator(".readout")).to_contain_text(f"{pool['num_blocks']} pages, a page is 16 tokens")
        expect(card.locator("canvas")).to_have_attribute(
            "aria-label", re.compile(r"\d+ shared, \d+ written, \d+ cached")
        )
    assert sum(group["pool"]["num_running"] for group in view["groups"]) == 3
    wait_until_idle(server)
    expect(rows).to_have_count(0)


def test_nothing_of_a_prompt_is_shown(server: ServeProcess, open_page: OpenPage) -> None:
    page = open_page()
    with streams(server, num=1):
        expect(page.locator(".decision").first).to_be_visible()
        assert SECRET not in httpx2.get(f"{server.url}/page/live").text
        assert SECRET not in page.content()


def test_a_chat_is_answered_and_the_second_time_found_cached(server: ServeProcess, open_page: OpenPage) -> None:
    page = open_page()
    page.get_by_text("Settings").click()
    page.get_by_label("System prompt").fill("You answer in one short sentence, and you like memory pages. " * 6)
    page.get_by_label("Most tokens").fill("24")
    ask(page, "What is a page?")
    page.get_by_role("button", name="New chat").click()
    again = ask(page, "What is a page?")
    cached, prompt = map(int, re.findall(r"(\d+) of (\d+) prompt tokens cached", again)[0])
    assert cached > prompt / 2
    assert re.search(r"first token after .* by \S+ \((prefix|only|even)\)", again, re.DOTALL)
    assert page.locator(".message .said").inner_text().strip()
    expect(page.locator(".decision").first).to_contain_text(f"of {prompt}")


def test_a_long_answer_can_be_stopped_with_the_keyboard_alone(server: ServeProcess, open_page: OpenPage) -> None:
    def endless(route: Route) -> None:
        route.continue_(post_data=json.dumps(route.request.post_data_json | {"ignore_eos": True}))

    page = open_page(prepare=lambda page: page.route("**/v1/chat/completions", endless))
    is_live(page)
    page.get_by_label("Most tokens").evaluate("input => { input.value = 1500 }")
    page.get_by_label("Message").focus()
    page.keyboard.type("Count from one to a thousand.")
    page.keyboard.press("Enter")
    expect(page.locator(".message.running .said")).to_have_text(re.compile(r"\S+ \S+"))
    page.keyboard.press("Escape")
    expect(page.locator("#chat-status")).to_have_text("Stopped.")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    wait_until_idle(server)


def test_what_the_server_refuses_is_said_where_it_was_asked(open_page: OpenPage) -> None:
    page = open_page()
    page.get_by_text("Settings").click()
    page.get_by_label("Most tokens").fill("100000000")
    page.get_by_label("Message").fill("Hello")
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_role("alert")).to_contain_text("100000000")


def test_a_gateway_that_does_not_answer_is_told_and_tried_again(open_page: OpenPage) -> None:
    page = open_page()
    is_live(page)
    page.route("**/page/live*", lambda route: route.abort())
    expect(page.locator("#connection")).to_have_text("disconnected")
    expect(page.locator("#notice")).to_contain_text("The gateway does not answer. What is shown is of")
    assert violations(page) == []
    page.unroute("**/page/live*")
    is_live(page)
    expect(page.locator("#notice")).to_be_hidden()


def test_where_a_key_is_asked_for_the_page_asks_for_it(open_page: OpenPage) -> None:
    def guard(route: Route) -> None:
        if route.request.headers.get("authorization") == "Bearer good":
            route.continue_()
        else:
            route.fulfill(status=401, json={"error": {"message": "No API key was sent."}})

    page = open_page(prepare=lambda page: page.route(re.compile(r"/(page/live\?|v1/)"), guard))
    key = page.get_by_label("This server asks for an API key")
    key.fill("wrong")
    key.press("Enter")
    expect(page.locator("#notice")).to_have_text("The server does not take this API key.")
    assert violations(page) == []
    key.fill("good")
    key.press("Enter")
    is_live(page)
    expect(key).to_be_hidden()
    page.get_by_label("Most tokens").evaluate("input => { input.value = 8 }")
    ask(page, "Hello")


def test_who_wants_no_motion_sees_none(server: ServeProcess, open_page: OpenPage) -> None:
    page = open_page(prepare=lambda page: page.emulate_media(reduced_motion="reduce"))
    is_live(page)
    page.evaluate(
        "new MutationObserver(() => { if (document.querySelector('.moving')) window.hasMoved = true })"
        ".observe(document.getElementById('flow'), {childList: true})"
    )
    num_before = page.locator(".decision").count()
    with streams(server, num=2):
        expect(page.locator(".sequence")).to_have_count(2)
        wait_until(lambda: page.locator(".decision").count() > min(num_before, 10), timeout_s=30, what="a decision")
    assert page.evaluate("window.hasMoved") is None


def live(server: ServeProcess) -> dict[str, Any]:
    return dict(httpx2.get(f"{server.url}/page/live").json())
