"""The pages in Chromium, over servers in memory that run the default model: `make web-check`, no part of `make test`.

Chromium is Debian's, driven by playwright; axe-core (npm) looks for what keeps people out. Pictures of all views come
into build/web-check.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from playwright.sync_api import Browser, Page, Route, expect
from transformers import AutoTokenizer

from petalnode.node.api.engine.core import Core
from petalnode.node.api.http.admission import Admission, ApiKeys, hash_of_key
from petalnode.node.blocks.images.pictures import Picture, PictureReader
from petalnode.node.models import resolve
from petalnode.node.testing.memory_servers import MemoryServer, MemorySwarm, memory_swarm
from petalnode.node.web.pages import page_routes
from petalnode.node.web.swarm_endpoint import swarm_routes
from tests.memory_api import MemoryApi, memory_api
from tests.swarm.processes import Node, nodes, petalnode
from tests.tiny_pictures import png, save_processor, save_seeing
from tests.web.views import AXE, OUT, PATIENCE, SCHEMES, SIZES, Opener

SPANS = ("0:10", "10:20", "20:30")
NAMES = ("attic", "office", "cellar")
QUESTION = "What is the capital of France?"


@dataclass
class Site:
    """A swarm of the default model and the API over it."""

    swarm: MemorySwarm
    api: MemoryApi
    folder: Path
    servers: list[MemoryServer]

    @property
    def url(self) -> str:
        return self.api.url

    def start(self, index: int, name: str) -> MemoryServer:
        server = self.swarm.start(self.folder, SPANS[index], name=name)
        self.servers.append(server)
        return server


@contextmanager
def site_of(admission: Admission | None = None) -> Iterator[Site]:
    folder = OUT / "smollm2"  # the name by which people know it
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for file in resolve("smollm2", need="all").path.iterdir():
        (folder / file.name).symlink_to(file)

    def pages(core: Core) -> list[Any]:
        return [*swarm_routes(core), *page_routes()]

    with memory_swarm() as swarm:
        started = [swarm.start(folder, span, name=name) for span, name in zip(SPANS, NAMES, strict=True)]
        for server in started:
            assert server.ready
        with memory_api(swarm, folder, admission=admission, pages=pages) as api:
            yield Site(swarm, api, folder, started)


@contextmanager
def seeing_site(folder: Path) -> Iterator[Site]:
    """Of a tiny model that takes pictures."""
    with memory_swarm() as swarm:
        started = [swarm.start(folder, span) for span in ("0:2", "2:4")]
        for server in started:
            assert server.ready
        with memory_api(swarm, folder, pages=lambda core: [*swarm_routes(core), *page_routes()]) as api:
            yield Site(swarm, api, folder, started)


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with site_of() as running:
        yield running


def ask(page: Page, text: str) -> None:
    page.get_by_label("Your question").fill(text)
    page.get_by_role("button", name="Send", exact=True).click()


def wait_answered(page: Page, count: int = 1) -> None:
    expect(page.locator(".message.assistant[aria-busy=false] details summary")).to_have_count(count, timeout=PATIENCE)


def settle(page: Page, **settings: Any) -> None:
    """Changes settings of a page before its next load."""
    page.evaluate("given => localStorage.setItem('petalnode-settings', JSON.stringify(given))", settings)
    page.reload()
    page.wait_for_selector("pn-page[data-ready]")


def check_axe(page: Page, name: str) -> None:
    """Everything that axe-core knows, best practices included; and that nothing is wider than the screen."""
    page.screenshot(path=OUT / f"{name}.png")
    found = page.evaluate(f"{AXE.read_text('utf-8')}; axe.run(document, {{resultTypes: ['violations']}})")
    told = [[one["id"], one["impact"], [node["target"] for node in one["nodes"]]] for one in found["violations"]]
    assert told == [], json.dumps(told, indent=1)
    assert page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"]  # type: ignore[index]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("size", SIZES)
def test_every_view_is_for_everybody(site: Site, opened: Opener, size: str, scheme: str) -> None:
    page = opened(site.url, size, scheme)
    name = f"{size}-{scheme}"
    expect(page.get_by_label("Your question")).to_be_focused()
    check_axe(page, f"{name}-welcome")
    settle(page, temperature=0)
    ask(page, QUESTION)
    wait_answered(page)
    assert "Paris" in page.locator(".message.assistant .body").inner_text()
    hops = page.locator(".message.assistant .hop")
    expect(hops).to_have_count(3)
    for index, (span, server) in enumerate(zip(SPANS, NAMES, strict=True)):
        assert {server, f"blocks {span}"} <= set(hops.nth(index).inner_text().split("\n"))
    page.locator(".route summary").click()
    check_axe(page, f"{name}-answer")
    if size == "phone":
        page.get_by_role("button", name="Conversations and settings").click()
        expect(page.get_by_role("button", name="New chat", exact=True)).to_be_focused()
        check_axe(page, f"{name}-menu")
    page.get_by_role("button", name="Settings", exact=True).click()
    check_axe(page, f"{name}-settings")
    page.keyboard.press("Escape")
    page.evaluate("location.hash = '#swarm'")
    page.wait_for_selector("pn-swarm table")
    expect(page.locator("pn-swarm .bar")).to_have_count(3)
    expect(page.locator("pn-swarm .help code")).to_have_text("petalnode serve smollm2")
    check_axe(page, f"{name}-swarm")


def test_answer_that_is_stopped_stops_at_servers(site: Site, opened: Opener) -> None:
    page = opened(site.url)
    settle(page, max_tokens=1500)
    ask(page, "Count from 1 to 500 in words, one number a line.")
    expect(page.locator(".message.assistant .body")).not_to_be_empty(timeout=PATIENCE)
    page.wait_for_selector(".chain.live .hop")
    page.screenshot(path=OUT / "streaming.png")
    page.keyboard.press("Escape")
    expect(page.locator(".foot").get_by_text("Stopped")).to_be_visible()
    expect(page.locator("[role=status]").first).to_have_text("Stopped.")
    for _ in range(600):
        if not site.api.running:
            break
        page.wait_for_timeout(100)
    assert site.api.running == 0
    text = page.locator(".message.assistant .body").inner_text()
    page.reload()
    page.wait_for_selector("pn-page[data-ready]")
    assert page.locator(".message.assistant .body").inner_text() == text


def test_branches_conversations_and_what_stays(site: Site, opened: Opener) -> None:
    page = opened(site.url)
    settle(page, max_tokens=12, temperature=0.9)
    ask(page, "Say hello.")
    wait_answered(page)
    first = page.locator(".message.assistant .body").inner_text()
    page.get_by_role("button", name="Answer again").click()
    expect(page.locator(".message.assistant .branches")).to_contain_text("2 / 2", timeout=PATIENCE)
    wait_answered(page)
    page.locator(".message.assistant").get_by_role("button", name="The version before").click()
    expect(page.locator(".message.assistant .body")).to_have_text(first, use_inner_text=True)
    page.get_by_role("button", name="Edit this question").click()
    page.screenshot(path=OUT / "editing.png")
    page.get_by_label("Edit your question").fill("Say goodbye.")
    page.get_by_role("button", name="Ask this").click()
    expect(page.locator(".message.user .branches")).to_contain_text("2 / 2")
    wait_answered(page)
    page.screenshot(path=OUT / "branches.png")
    page.locator(".message.user").get_by_role("button", name="The version before").click()
    expect(page.locator(".message.user .body")).to_have_text("Say hello.")
    expect(page.locator(".message.assistant .branches")).to_contain_text("1 / 2")
    page.get_by_role("button", name="New chat", exact=True).click()
    expect(page.get_by_label("Your question")).to_be_focused()
    ask(page, "Another one.")
    wait_answered(page)
    page.reload()
    page.wait_for_selector("pn-page[data-ready]")
    expect(page.locator(".conversations li")).to_have_count(2)
    page.get_by_role("button", name="Say hello.", exact=True).click()
    expect(page.locator(".message.assistant .body")).to_have_text(first, use_inner_text=True)
    page.once("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete Say hello.").click()
    expect(page.locator(".conversations li")).to_have_count(1)


def test_chat_deleted_while_answered_stays_deleted(site: Site, opened: Opener) -> None:
    page = opened(site.url)
    settle(page, max_tokens=1500)
    ask(page, "Count from 1 to 500 in words, one number a line.")
    page.wait_for_selector(".chain.live .hop")
    page.once("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete Count").click()
    expect(page.locator("[role=status]").first).to_have_text("Stopped.")
    expect(page.locator(".conversations li")).to_have_count(0)
    page.reload()
    page.wait_for_selector("pn-page[data-ready]")
    expect(page.locator(".conversations li")).to_have_count(0)


def test_chat_in_two_tabs_loses_no_answer(site: Site, opened: Opener) -> None:
    page = opened(site.url)
    settle(page, max_tokens=8)
    ask(page, "Say hello.")
    wait_answered(page)
    other = page.context.new_page()
    other.goto(site.url)
    other.wait_for_selector("pn-page[data-ready]")
    ask(other, "And again.")
    wait_answered(other, 2)
    wait_answered(page, 2)
    ask(page, "And once more.")
    wait_answered(page, 3)
    page.reload()
    page.wait_for_selector("pn-page[data-ready]")
    expect(page.locator(".message.assistant")).to_have_count(3)


def test_by_keyboard_alone(site: Site, opened: Opener) -> None:
    page = opened(site.url)
    settle(page, max_tokens=12)
    expect(page.get_by_label("Your question")).to_be_focused()
    page.get_by_role("link", name="Skip to the question").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_label("Your question")).to_be_focused()
    page.keyboard.type("Say hello.")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("Briefly.")
    page.keyboard.press("Enter")
    wait_answered(page)
    expect(page.locator(".message.user .body")).to_have_text("Say hello.\nBriefly.")
    expect(page.locator("[role=status]").first).to_have_text("The answer is complete.")
    page.keyboard.press("Control+Shift+O")
    expect(page.locator(".welcome")).to_be_visible()


def test_lost_server_is_shown_and_who_takes_over(opened: Opener) -> None:
    with site_of() as site:
        page = opened(site.url)
        settle(page, temperature=0, max_tokens=150)
        ask(page, "Tell me about the history of bridges, in two paragraphs.")
        page.wait_for_selector(".chain.live .hop")
        site.servers[1].kill()
        expect(page.locator(".hop.lost")).to_contain_text("office", timeout=PATIENCE)
        expect(page.locator(".held-by")).to_contain_text("is gone")
        expect(page.locator("[role=status]").first).to_have_text("Lost server office. Looking for another one.")
        check_axe(page, "recovery-lost")
        page.evaluate("location.hash = '#swarm'")
        page.evaluate("location.hash = '#chat'")
        site.start(1, "garden")
        wait_answered(page)
        expect(page.locator(".change")).to_contain_text("took over from office (10:20)")
        expect(page.locator(".hop.fresh")).to_have_count(1)
        page.locator(".change").scroll_into_view_if_needed()
        check_axe(page, "recovery-done")
        page.screenshot(path=OUT / "recovery.png")


def test_what_is_missing_and_what_would_help(opened: Opener) -> None:
    with site_of() as site:
        page = opened(f"{site.url}/#swarm")
        expect(page.locator("pn-swarm tbody tr").first).to_contain_text("new")
        site.servers[1].kill()
        expect(page.locator("pn-swarm tbody")).to_contain_text("not answering", timeout=20_000)
        expect(page.locator(".swarm-line")).to_have_text("Swarm: 2 servers, 1 not answering, blocks missing")
        expect(page.locator(".help code")).to_have_text("petalnode serve smollm2 --blocks 10:20", timeout=PATIENCE)
        expect(page.locator(".cover.none")).to_have_count(10)
        check_axe(page, "swarm-missing")


def test_key_is_asked_for_where_server_wants_one(opened: Opener, browser: Browser) -> None:
    with site_of(Admission(ApiKeys({hash_of_key("pn-right"): "alice"}))) as site:
        context = browser.new_context()
        page = context.new_page()
        page.set_default_timeout(PATIENCE)
        page.goto(site.url)
        expect(page.get_by_role("dialog", name="API key")).to_be_visible()
        check_axe(page, "key")
        page.locator("dialog input[type=password]").fill("pn-wrong")
        page.get_by_role("button", name="Use it").click()
        expect(page.get_by_text("The server does not know this key.")).to_be_visible()
        page.locator("dialog input[type=password]").fill("pn-right")
        page.get_by_role("button", name="Use it").click()
        expect(page.get_by_label("Model")).to_have_value("smollm2")
        assert page.evaluate("[localStorage.getItem('petalnode-key'), sessionStorage.getItem('petalnode-key')]") == [
            None,
            "pn-right",
        ]
        page.reload()
        expect(page.get_by_label("Model")).to_have_value("smollm2")
        context.close()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("size", SIZES)
def test_an_answer_with_all_that_markdown_has(site: Site, opened: Opener, size: str, scheme: str) -> None:
    page = opened(site.url, size, scheme)
    page.route("**/v1/chat/completions", lambda route: answer(route, RICH))
    ask(page, "A question of some length, which fills most of a line of this page, so that its box is wide: what now?")
    expect(page.locator(".message.assistant[aria-busy=false] table")).to_be_visible()
    expect(page.get_by_role("checkbox", name="done")).to_be_checked()
    expect(page.locator(".formula.shown")).to_contain_text("∑")
    expect(page.locator(".t-keyword").first).to_have_text("def")
    page.locator(".messages-scroll").evaluate("it => { it.scrollTop = 0; }")
    check_axe(page, f"{size}-{scheme}-markdown")
    rule = "cell => getComputedStyle(cell).borderBottomWidth"
    assert page.locator(".message.assistant tbody tr").last.locator("td").first.evaluate(rule) == "0px"
    width = "it => it.getBoundingClientRect().width"
    asked = page.locator(".message.user .body").evaluate(width)
    page.get_by_role("button", name="Edit this question").click()
    assert page.get_by_label("Edit your question").evaluate(width) >= asked
    check_axe(page, f"{size}-{scheme}-editing")


def test_chats_are_renamed_searched_and_carried_in_file(site: Site, opened: Opener, tmp_path: Path) -> None:
    page = opened(site.url)
    page.route("**/v1/chat/completions", lambda route: answer(route, texts[-1]))
    texts: list[str] = []
    for question, text in (("First?", "of bridges"), ("Second?", "of towers")):
        texts.append(text)
        page.get_by_role("button", name="New chat", exact=True).click()
        ask(page, question)
        expect(page.locator(".message.assistant[aria-busy=false]")).to_contain_text(text)
    page.get_by_role("button", name="Rename Second?").click()
    page.get_by_label("Name of the chat").fill("On towers")
    page.get_by_label("Name of the chat").press("Enter")
    expect(page.get_by_role("heading", name="On towers")).to_be_visible()
    page.get_by_label("Search your chats").fill("BRIDGES")
    expect(page.locator(".conversations .open")).to_have_text(["First?"])
    check_axe(page, "search")
    page.get_by_label("Search your chats").fill("")
    page.get_by_role("button", name="Settings", exact=True).click()
    with page.expect_download() as download:
        page.get_by_role("button", name="Export all").click()
    download.value.save_as(tmp_path / "chats.json")
    other = opened(site.url)
    expect(other.locator(".conversations li")).to_have_count(0)
    other.get_by_role("button", name="Settings", exact=True).click()
    for file, told in (
        ("chats.json", "2 chats taken in."),
        ("chats.json", "0 chats taken in; 2 chats were here already."),
    ):
        other.get_by_label("A file of chats").set_input_files(tmp_path / file)
        expect(other.get_by_text(told)).to_be_visible()
    other.keyboard.press("Escape")
    expect(other.locator(".conversations .open")).to_have_text(["On towers", "First?"])


def test_page_without_the_api_says_so(site: Site, browser: Browser) -> None:
    context = browser.new_context()
    page = context.new_page()
    page.set_default_timeout(PATIENCE)
    page.goto(site.url)
    page.wait_for_selector("pn-page[data-ready]")
    expect(page.locator(".swarm-line")).to_contain_text("3 servers")
    context.set_offline(True)
    ask(page, QUESTION)
    expect(page.locator(".failed")).to_contain_text("petalnode does not answer.")
    expect(page.locator(".swarm-line")).to_have_text("Swarm: no answer")
    check_axe(page, "offline")
    page.get_by_role("link", name="Look at the swarm").click()
    expect(page.locator("pn-swarm .notice")).to_contain_text("What stands below was seen before.")
    context.set_offline(False)
    page.evaluate("location.hash = '#chat'")
    page.get_by_role("button", name="Try again").click()
    wait_answered(page)
    expect(page.locator(".swarm-line")).to_contain_text("3 servers")
    context.close()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_invitation_is_a_command_and_a_picture(site: Site, opened: Opener, scheme: str) -> None:
    """Servers in memory have no address that a link could have: the answer of the API is made here."""
    link = f"petalnode:{'aeaq' * 60}"
    made = {"command": f"petalnode join {link}", "check_word": "babab-dadad", "expires": time.time() + 86400}
    rows = ["".join("01"[(x * y) % 3 == 0] for x in range(61)) for y in range(61)]
    said = json.dumps({"link": link, **made, "reached_from": "anywhere", "qr": rows})
    page = opened(f"{site.url}/#swarm", "phone", scheme)
    page.route("**/v1/petalnode/invite", lambda route: route.fulfill(body=said, content_type="application/json"))
    page.get_by_role("button", name="Make a link").click()
    expect(page.locator(".invite .command code")).to_have_text(made["command"])
    expect(page.locator(".invite")).to_contain_text("Check word: babab-dadad.")
    page.get_by_role("img", name="The link as a QR code").scroll_into_view_if_needed()
    check_axe(page, f"phone-{scheme}-invite")


RICH = """# What is left

- [x] a task that is *done*
- [ ] one that is not, with a [link](https://example.org/)

1. The roots are $x = \\frac{-b \\pm \\sqrt{b^2 - 4ac}}{2a}$, and $5 is a price.
2. And a sum:

$$
\\sum_{i=1}^{n} i^2 = \\frac{n(n+1)(2n+1)}{6}
$$

```python
def reverse(text: str) -> str:
    # The other way round
    return "".join(text[-1 - at] for at in range(len(text)))  # 1, 2
```

| model | blocks | GB |
|---|---:|---:|
| smollm2 | 30 | 0.1 |
| llama | 80 | 141 |

> A remark, and `code` in it.
"""


def answer(route: Route, text: str) -> None:
    chunk = {"id": "a", "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": "stop"}]}
    body = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
    route.fulfill(body=body, content_type="text/event-stream")


HAND_OVER = """(area, [event, name, kind, bytes]) => {
  const data = new DataTransfer();
  data.items.add(new File([Uint8Array.from(bytes)], name, { type: kind }));
  const given = { bubbles: true, cancelable: true };
  area.dispatchEvent(event === "paste" ? new ClipboardEvent(event, { ...given, clipboardData: data })
    : new DragEvent(event, { ...given, dataTransfer: data }));
}"""


def test_pictures_are_chosen_pasted_and_dropped(opened: Opener, tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    whole = save_seeing("qwen2_vl", folder)
    save_processor(folder)
    with seeing_site(folder) as site:
        page = opened(site.url)
        settle(page, max_tokens=6, temperature=0)
        sent: list[dict[str, Any]] = []
        page.on(
            "request", lambda request: sent.append(request.post_data_json) if "completions" in request.url else None
        )
        question, tray = page.get_by_label("Your question"), page.locator(".ask .picture")
        chosen = [
            {"name": f"{at}.png", "mimeType": "image/png", "buffer": png(colour=at)} for at in (0xF01020, 0x20F010)
        ]
        page.locator("input[type=file]").set_input_files(chosen)
        expect(tray).to_have_count(2)
        page.get_by_role("button", name="Remove picture 1").click()
        expect(tray).to_have_count(1)
        for event, count in (("paste", 2), ("drop", 3)):
            question.evaluate(HAND_OVER, [event, "a.png", "image/png", list(png(3000, 1500))])
            expect(tray).to_have_count(count)
        question.evaluate(HAND_OVER, ["drop", "a.txt", "text/plain", [65]])
        expect(page.get_by_role("alert")).to_contain_text("PNG, JPEG")
        question.evaluate(HAND_OVER, ["paste", "b.png", "image/png", [1, 2, 3]])
        expect(page.get_by_role("alert")).to_contain_text("could not be opened")
        expect(tray).to_have_count(3)
        ask(page, "What is it?")
        wait_answered(page)
        content = sent[0]["messages"][0]["content"]
        parts = [
            {"type": "image", "image": Picture.of_url(part["image_url"]["url"])} if "image_url" in part else part
            for part in content
        ]
        assert [part["type"] for part in parts] == ["image"] * 3 + ["text"]
        tokenizer = AutoTokenizer.from_pretrained(folder)
        read = PictureReader(folder, tokenizer).read([{"role": "user", "content": parts}])
        ids = torch.tensor([read.ids])
        said = whole.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0, **read.values)
        text = str(tokenizer.decode(said[0, ids.shape[1] :], skip_special_tokens=True))
        stored = "() => document.querySelector('pn-page').conversations[0]"
        nodes = page.evaluate(stored)["nodes"].values()
        assert [node["content"] for node in nodes if node["role"] == "assistant"] == [text]
        ask(page, "And now?")  # the pictures stay a part of the conversation
        wait_answered(page, 2)
        assert sent[1]["messages"][0]["content"] == content
        page.reload()
        page.wait_for_selector("pn-page[data-ready]")
        expect(page.locator(".message.user .picture canvas[width='56']")).to_have_count(1)
        expect(page.locator(".message.user .picture")).to_have_count(3)
        check_axe(page, "pictures")


def test_a_model_of_text_is_shown_no_pictures(site: Site, opened: Opener) -> None:
    page = opened(site.url)
    expect(page.get_by_role("button", name="Add a picture")).to_be_hidden()
    page.get_by_label("Your question").evaluate(HAND_OVER, ["paste", "a.png", "image/png", list(png())])
    expect(page.locator(".ask .picture")).to_have_count(0)


HOSTILE = """<script>window.ran = 1</script> <img src="https://evil.example/a.png" onerror="window.ran = 2">

[click](javascript:window.ran=3) [data](data:text/html,<script>window.ran=4</script>) ![p](https://evil.example/b.png)

```html
<script>window.ran = 5</script>
```

| <b>a</b> | <iframe src="https://evil.example"></iframe> |
|---|---|
| <svg onload="window.ran = 6"> | [x](//evil.example) |
"""


def test_nothing_that_model_writes_runs_or_is_fetched(site: Site, opened: Opener) -> None:
    page = opened(site.url)
    others: list[str] = []
    page.on("request", lambda request: None if request.url.startswith(site.url) else others.append(request.url))
    page.route("**/v1/chat/completions", lambda route: answer(route, HOSTILE))
    ask(page, "<img src=x onerror='window.ran = 7'>")
    expect(page.locator(".message.assistant[aria-busy=false] table")).to_be_visible()
    page.wait_for_timeout(500)
    assert page.evaluate("window.ran") is None
    messages = page.locator(".messages")
    assert messages.locator("script, img, iframe, svg:not(.drawn), object, embed, style, link").count() == 0
    links = messages.locator("a").evaluate_all("links => links.map(link => link.href)")
    assert links and all(link.startswith("https://evil.example/") for link in links)
    assert others == []
    page.screenshot(path=OUT / "hostile.png")
    page.reload()  # and from storage
    page.wait_for_selector(".message.assistant table")
    assert page.evaluate("window.ran") is None


def test_policy_holds_against_fault_of_page(site: Site, browser: Browser) -> None:
    context = browser.new_context()
    page = context.new_page()
    page.goto(site.url)
    page.wait_for_selector("pn-page[data-ready]", timeout=PATIENCE)
    tried = """async () => {
        const found = {};
        await new Promise(resolve => setTimeout(resolve, 0));  // what a debugger calls directly may use eval
        const attempt = async (name, work) => {
            try { await work(); found[name] = true; } catch { found[name] = false; }
        };
        await attempt('innerHTML', () => { document.createElement('div').innerHTML = '<b>x</b>'; });
        await attempt('eval', () => (0, eval)('1'));
        await attempt('Function', () => new Function('return 1')());
        await attempt('elsewhere', () => fetch('https://example.org/', {mode: 'no-cors'}));
        const script = document.createElement('script');
        await attempt('inline', () => { script.textContent = 'window.inline = 1'; document.body.append(script); });
        await attempt('inline', () => { if (!window.inline) throw new Error(); });
        return found;
    }"""
    names = ("innerHTML", "eval", "Function", "elsewhere", "inline")
    assert page.evaluate(tried) == dict.fromkeys(names, False)
    context.close()


def test_made_link_leads_in_and_deaths_are_told(opened: Opener, tmp_path: Path) -> None:
    """With processes as people have them; how long the page takes to tell is written to build/web-check."""
    kept = str(resolve("smollm2", need="all").path.parents[1])
    with nodes(tmp_path) as started:
        started.env["PETALNODE_CACHE"] = kept
        servers = [started.server("smollm2", "0:15", "--name", "attic")]
        servers.append(started.server("smollm2", "15:30", "--name", "cellar", peer=servers[0].address))
        assert servers[1].ready
        api = Node("api", "--http-port", "0", "--json", "--peer", servers[0].address, env=started.env)
        started.running.append(api)
        page = opened(f"{api.event('ready')['url']}/#swarm")
        page.get_by_role("button", name="Make a link").click()
        command = page.locator(".invite .command code").text_content()
        assert command is not None
        arguments = [*command.split()[1:], "--chat", "--yes", "--prompt", QUESTION, "--json"]
        joined = petalnode(*arguments, env=started.env)
        assert "Paris" in joined.objects[-1]["text"], joined
        servers[1].kill()
        began = time.monotonic()
        expect(page.locator("pn-swarm tbody")).to_contain_text("not answering", timeout=PATIENCE)
        took = time.monotonic() - began
        (OUT / "not-answering.txt").write_text(f"{took:.1f} s\n")
        assert took < 10
