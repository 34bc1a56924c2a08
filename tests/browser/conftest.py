"""A headless Chromium for the tests of the page: only with `make test-browser`.

It is the Chromium that is installed: Debian's package, or the program that the environment variable
CHROMIUM names. Without one all of these tests are skipped.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

HERE = Path(__file__).parent
SLOW_MS = 30_000  # the machine may be busy


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    """The browser."""
    program = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if program is None:
        pytest.skip("no browser is installed: apt install chromium, or set CHROMIUM")
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="Playwright is missing: make test-browser installs it"
    )
    with sync_api.sync_playwright() as playwright:
        # Chromium refuses to run as root in its sandbox.
        flags = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=program, args=flags)
        yield browser
        browser.close()


class Pages:
    """Opens pages, and notes what goes wrong in them."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self._contexts: list[BrowserContext] = []
        self.problems: list[str] = []
        self.expected: Callable[[str], bool] = lambda problem: False
        self.urls: list[str] = []  # of all requests
        self.sizes: dict[str, int] = {}  # bytes of the bodies of the page's files, by path

    def context(self, **options: Any) -> BrowserContext:
        """A browser of its own: its storage is empty."""
        context = self._browser.new_context(
            **{"viewport": {"width": 1280, "height": 860}, **options}
        )
        context.set_default_timeout(SLOW_MS)
        self._contexts.append(context)
        return context

    def open(self, url: str, context: BrowserContext | None = None, **options: Any) -> Page:
        """A tab at `url`, in a browser of its own unless `context` is given."""
        page = (context or self.context(**options)).new_page()
        page.on("console", lambda said: self._said(said.type, said.text))
        page.on("pageerror", lambda error: self.problems.append(f"uncaught: {error}"))
        page.on("dialog", lambda dialog: self.problems.append(f"dialog: {dialog.message}"))
        page.on("request", lambda request: self.urls.append(request.url))
        page.goto(url)
        return page

    def _said(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.problems.append(f"{kind}: {text}")

    def close(self) -> None:
        for context in self._contexts:
            context.close()


@pytest.fixture
def pages(chromium: Browser) -> Iterator[Pages]:
    """Opens pages. The test fails if one of them has reported an error, such as a violation of its
    Content-Security-Policy, that the test has not declared as `expected`."""
    opened = Pages(chromium)
    yield opened
    opened.close()
    assert [one for one in opened.problems if not opened.expected(one)] == []
