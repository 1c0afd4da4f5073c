"""A real browser for the pages: Debian's Chromium, without a screen, one for all tests of this folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
WAIT_MS = 20_000  # two busy cores


def chromium() -> str:
    """The browser's path. Where CI has none the test fails; elsewhere it is skipped, and says how to have it."""
    found = os.environ.get("DS4_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        message = "no Chromium: apt-get install chromium, or name one with DS4_CHROMIUM"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    return found


# Of the folder and not of the session: while it is open, an event loop of Playwright's runs in this thread, and tests
# of others want one of their own.
@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    path = chromium()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        made = driver.chromium.launch(executable_path=path, args=FLAGS)
        yield made
        made.close()


@pytest.fixture(scope="package")
def window(browser: Any) -> Iterator[Any]:
    """For all tabs without options of their own. Storage is an origin's, and every server has a port of its own."""
    made = browser.new_context()
    yield made
    made.close()


class Tab:
    """A tab, what it asked for, and what it complained of in its console."""

    def __init__(self, window: Any) -> None:
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page = window.new_page()
        self.page.set_default_timeout(WAIT_MS)
        self.page.on("console", lambda m: self.complaints.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda e: self.complaints.append(str(e)))
        self.page.on("request", lambda r: self.requests.append(r.url))

    def refused(self, *statuses: int) -> None:
        """These statuses were meant: the browser itself notes each in the console, and that is all it noted."""
        said = {c for c in self.complaints if not any(f"status of {s} " in c for s in statuses)}
        assert said == set() and self.complaints
        self.complaints.clear()

    def open(self, url: str) -> Any:
        """The chat page, once it knows the server."""
        self.page.goto(url)
        self.page.locator("#state.good").wait_for()
        return self.page

    def ask(self, text: str) -> None:
        self.page.get_by_label("Message", exact=True).fill(text)
        self.page.keyboard.press("Enter")

    @property
    def answer(self) -> Any:
        """The newest answer."""
        return self.page.locator(".turn.assistant").last

    def done(self) -> None:
        """Wait until nothing is being written."""
        self.page.locator("#send").wait_for()
        self.page.locator(".turn.assistant[aria-busy=false]").last.wait_for()


@pytest.fixture
def tab(browser: Any, window: Any, request: pytest.FixtureRequest) -> Iterator[Tab]:
    """A fresh tab; parameters are options of a window. The test fails if the page complained in its console."""
    options = getattr(request, "param", None)
    mine = window if options is None else browser.new_context(**options)
    made = Tab(mine)
    yield made
    made.page.close()
    if mine is not window:
        mine.close()
    assert made.complaints == []
