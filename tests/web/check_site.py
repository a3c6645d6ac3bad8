"""The pages of docs/ as a site (`make docs`) in Chromium: part of `make web-check`, no part of `make test`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
from playwright.sync_api import Page, expect

from tests.import_graph import ROOT
from tests.web.views import AXE, OUT, PATIENCE, SCHEMES, SIZES, Opener

SITE = ROOT / "build/site"
LOOKED_AT = ("index", "start", "how-it-works", "apps", "performance", "decisions/index")
"""Pages with pictures, code, and the widest tables."""

NOT_OURS = ("landmark-unique", "scrollable-region-focusable", "empty-table-header")
"""What axe-core says of the theme (buttons that copy code, frames of wide tables), and of tables without a corner."""


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    assert (SITE / "index.html").exists(), "make docs"
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(SITE))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def watched(page: Page, url: str) -> list[str]:
    """What the page asks others for, as it goes on."""
    asked: list[str] = []
    page.on("request", lambda request: None if request.url.startswith((url, "data:")) else asked.append(request.url))
    return asked


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("size", SIZES)
def test_pages_are_readable_and_ask_nobody_else(url: str, opened: Opener, size: str, scheme: str) -> None:
    page = opened("about:blank", size, scheme, ready=False)
    asked = watched(page, url)
    for name in LOOKED_AT:
        page.goto(f"{url}/{name}.html")
        for image in page.locator("article img").all():
            image.scroll_into_view_if_needed()
            assert image.evaluate("async shown => (await shown.decode(), shown.naturalWidth)") > 0
        page.evaluate("scrollTo(0, 0)")
        page.screenshot(path=OUT / f"site-{size}-{scheme}-{name.replace('/', '-')}.png")
        found = page.evaluate(f"{AXE.read_text('utf-8')}; axe.run(document, {{resultTypes: ['violations']}})")
        wrong = [(one["id"], [node["target"] for node in one["nodes"]]) for one in found["violations"]]
        assert [one for one in wrong if one[0] not in NOT_OURS] == [], name
        assert page.evaluate("document.documentElement.scrollWidth") <= SIZES[size][0], name
    assert asked == []


def test_a_page_is_found_by_its_words(url: str, opened: Opener) -> None:
    page = opened(f"{url}/index.html", ready=False)
    asked = watched(page, url)
    page.get_by_role("textbox", name="Search").fill("Grafana")
    expect(page.locator(".md-search-result__item").first).to_contain_text("Watching a node", timeout=PATIENCE)
    assert asked == []
