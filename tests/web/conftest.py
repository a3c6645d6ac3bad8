"""Chromium for the checks of the pages. playwright is imported when it is asked for: `make test` passes by here."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.web.views import OUT, PATIENCE, SIZES, Opener

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    OUT.mkdir(parents=True, exist_ok=True)
    chromium = shutil.which("chromium")
    assert chromium, "apt-get install chromium"
    with sync_playwright() as playwright:
        root = ["--no-sandbox"] if os.geteuid() == 0 else []
        running = playwright.chromium.launch(executable_path=chromium, args=root)
        yield running
        running.close()


@pytest.fixture
def opened(browser: Browser) -> Iterator[Opener]:
    """Opens a page; nothing that it writes to the console and no error of it goes unseen."""
    contexts: list[BrowserContext] = []
    wrong: list[str] = []

    def open_page(url: str, size: str = "desk", scheme: str = "light", *, ready: bool = True) -> Page:
        width, height = SIZES[size]
        context: Any = {"viewport": {"width": width, "height": height}, "has_touch": size == "phone"}
        contexts.append(browser.new_context(color_scheme=scheme, reduced_motion="reduce", **context))
        page = contexts[-1].new_page()
        page.set_default_timeout(PATIENCE)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None)
        page.goto(url)
        if ready:
            page.wait_for_selector("pn-page[data-ready]")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []
