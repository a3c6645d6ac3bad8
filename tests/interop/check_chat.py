"""The chat page on a static host, over the JavaScript client, in Chromium and Firefox: `make interop`.

Pictures of it come into build/interop.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from tests.interop.built import BUILT, CHAT, invited
from tests.interop.check_browsers import PROGRAMS, hidden_servers
from tests.interop.check_client import SHARED, by_transformers, is_unused, led_by_strangers
from tests.interop.peers import JsNodes
from tests.nat.lab import Host, Kind, open_lab, why_not
from tests.nat.nodes import LabNodes, LightNode, ToldNode, lab_nodes
from tests.patience import children
from tests.swarm.processes import WS, Nodes, ReadyNode, Running, petalnode, until
from tests.swarm.tokenizer import save_tokenizer
from tests.tiny_models import save_tiny

pytestmark = [pytest.mark.timeout(3600), pytest.mark.usefixtures("built")]
COUNT: Final = 60
LONG: Final = 1000  # tokens of an answer that is not over before the tab sleeps
MAX_PAGE: Final = 1_500_000  # bytes
KEPT: Final = "caches.open('petalnode').then(store => store.keys()).then(keys => keys.length)"
FILES: Final = {"", "page.js", "page.css", "icon.svg", "favicon.ico"}
NODES: Final = "Object.values(document.querySelector('pn-chat')?.conversation?.nodes ?? {})"


class ChatPage:
    """The page in a tab, on this machine or on one of a lab. Who `allow`s some tokens wants the likeliest ones."""

    def __init__(self, nodes: Nodes | LabNodes, kind: str, host: Host | None = None) -> None:
        serve = [sys.executable, "-m", "http.server", "0", "--bind", "127.0.0.1", "--directory", str(CHAT)]
        if isinstance(nodes, LabNodes):
            assert host is not None
            web = nodes.program(host, serve)
            browser = LightNode(host, nodes.home(host), {"kind": kind}, ("tests.interop.browser",))
            self.tab: ToldNode = nodes.kept(browser)
        else:
            web = Running(serve, nodes.env)
            command = [sys.executable, "-m", "tests.interop.browser", json.dumps({"kind": kind})]
            self.tab = ToldNode(command, nodes.home)
            nodes.running += [web, self.tab]
        assert self.tab.ready
        self.host: Final = f"http://127.0.0.1:{web.line().split(' port ')[1].split()[0]}/"

    def open(self, query: str = "") -> None:
        self.tab.ask("open", url=self.host + query)

    def run(self, expression: str) -> Any:
        return self.tab.ask("run", expression=expression)

    def allow(self, tokens: int) -> None:
        settings = json.dumps({"temperature": 0, "max_tokens": tokens})
        self.run(f"localStorage.setItem('petalnode-settings', {settings!r})")

    def join(self, key: str) -> None:
        self.open("?#" + key)
        until(lambda: self.run("document.querySelector('pn-page')?.dataset.ready") == "", "that it has joined")

    def ask(self, question: str) -> None:
        self.run(f"document.getElementById('question').value = {question!r}")
        self.run("document.querySelector('form.ask').requestSubmit()")

    def answers(self) -> list[dict[str, Any]]:
        """In their order, as the page keeps them."""
        found: list[dict[str, Any]] = self.run(NODES)
        return [node for node in found if node["role"] == "assistant"]

    def answer(self, number: int) -> dict[str, Any]:
        """Once it is complete."""
        until(lambda: len(self.answers()) > number and self.answers()[number]["state"] != "answering", "the answer")
        found = self.answers()[number]
        assert found["state"] == "done", found
        return found

    def devtools(self, method: str, **given: Any) -> None:
        """In Chromium alone."""
        self.tab.ask("devtools", method=method, given=given)

    def asked_by_http(self) -> list[str]:
        return [url for url in self.tab.ask("asked") if url.startswith("http")]


@pytest.mark.parametrize("kind", ["chromium", "firefox"])
def test_chat_page_answers_by_link_without_petalnode_api(node_starter: Nodes, tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "tiny-llama"
    save_tokenizer(save_tiny("llama", folder, max_position_embeddings=4096, eos_token_id=None))
    relay = node_starter.bootstrap("--listen", WS)
    at = ("--listen", WS, *SHARED)
    servers = [node_starter.server(folder, blocks, *at, peer=relay.address) for blocks in ("0:3", "3:6", "3:6")]
    named = {server.peer_id: server for server in servers}
    link = invited(lambda: petalnode("invite", "--peer", relay.address, "--json", env=node_starter.env, timeout=240))
    page = ChatPage(node_starter, kind)
    page.open()
    until(lambda: bool(page.run("document.querySelector('dialog')?.textContent ?? ''")), "that it asks for a link")
    page.allow(COUNT)
    page.join(link)
    assert page.run("location.hash") == "#chat"  # the link, which may have a swarm's key, stands there no longer
    loaded = page.asked_by_http()
    page.ask("how does it go on?")
    until(lambda: any(node["route"]["tokens"] >= 8 for node in page.answers()), "eight tokens")
    lost = page.answers()[0]["route"]["hops"][-1]["peer"]
    named[lost].kill()
    first = page.answer(0)
    page.ask("and then?")
    second = page.answer(1)
    page.tab.ask("picture", path=str(BUILT / f"chat-{kind}.png"))
    assert [first["route"]["recoveries"], second["route"]["recoveries"]] == [1, 0]
    assert [change["lost"][0]["peer"] for change in first["route"]["changes"]] == [lost]
    assert {hop["peer"] for hop in second["route"]["hops"]} == set(named) - {lost}
    said = [("user", "how does it go on?"), ("assistant", first["content"]), ("user", "and then?")]
    assert first["content"] == by_transformers(folder, said[:1], COUNT)
    assert second["content"] == by_transformers(folder, said, COUNT)
    swarm = page.run("document.querySelector('pn-swarm').known")
    assert swarm["num_blocks"] == 6 and swarm["model"] == "tiny-llama"
    assert {server["peer_id"] for server in swarm["servers"]} >= set(named) - {lost}
    assert page.run(KEPT) == 2  # embeddings; norm and head
    assert page.asked_by_http() == loaded
    assert {url.removeprefix(page.host).partition("?")[0].rpartition("/")[2] for url in loaded} <= FILES


@pytest.mark.parametrize("kind", PROGRAMS)
def test_a_chat_through_a_relay_shows_its_route(tmp_path: Path, kind: str) -> None:
    """Tab and servers are behind NATs that cannot be punched."""
    if reason := why_not():
        pytest.skip(reason)
    folder = tmp_path / "tiny-llama"
    save_tokenizer(save_tiny("llama", folder, max_position_embeddings=4096, eos_token_id=None))
    with open_lab() as lab, lab_nodes(tmp_path / "machines") as nodes:
        relay, hidden = hidden_servers(lab, nodes, folder, {"home": "0:3", "office": "3:6"})
        friend = lab.host("friend")
        link = invited(lambda: nodes.run(friend, "invite", "--peer", relay.address, "--json", timeout=240))
        page = ChatPage(nodes, kind, lab.nat("cafe", Kind.SYMMETRIC).host("laptop"))
        page.open()
        page.allow(COUNT)
        page.join(link)
        loaded = page.asked_by_http()
        page.ask("how does it go on?")
        answer = page.answer(0)
        page.tab.ask("picture", path=str(BUILT / f"chat-relay-{kind}.png"))
        assert answer["content"] == by_transformers(folder, [("user", "how does it go on?")], COUNT)
        assert [(hop["peer"], hop["relayed"]) for hop in answer["route"]["hops"]] == [(peer, True) for peer in hidden]
        shown = page.run("[...document.querySelectorAll('.hop-blocks')].map(({ textContent }) => textContent)")
        assert shown == ["blocks 0:3, by a relay", "blocks 3:6, by a relay"]
        assert page.asked_by_http() == loaded


def test_a_chat_goes_on_behind_a_stopped_answer(node_starter: Nodes, tmp_path: Path) -> None:
    folder, _, page = begun(node_starter, tmp_path)
    page.run("document.querySelector('button.stop').click()")
    until(lambda: page.answers()[0]["state"] == "stopped", "that it has stopped")
    first = page.answers()[0]
    assert 8 <= first["route"]["tokens"] < LONG
    page.ask("and then?")
    said = [("user", "how does it go on?"), ("assistant", first["content"]), ("user", "and then?")]
    assert page.answer(1)["content"] == by_transformers(folder, said, LONG)


def test_strangers_lead_a_tab_to_servers(node_starter: Nodes, js: JsNodes, tmp_path: Path) -> None:
    folder = tmp_path / "tiny-llama"
    save_tokenizer(save_tiny("llama", folder, max_position_embeddings=4096, eos_token_id=None))
    link, servers = led_by_strangers(node_starter, js, folder, WS)
    page = ChatPage(node_starter, "chromium")
    page.open()
    page.allow(COUNT)
    page.join(link)
    loaded = page.asked_by_http()
    page.ask("how does it go on?")
    answer = page.answer(0)
    assert answer["content"] == by_transformers(folder, [("user", "how does it go on?")], COUNT)
    assert [hop["peer"] for hop in answer["route"]["hops"]] == servers
    assert page.asked_by_http() == loaded


def served(nodes: Nodes, tmp_path: Path) -> tuple[Path, ReadyNode]:
    """A model, and a server of all of it."""
    folder = tmp_path / "tiny-llama"
    save_tokenizer(save_tiny("llama", folder, max_position_embeddings=4096, eos_token_id=None))
    return folder, nodes.server(folder, "0:6", "--listen", WS, *SHARED)


def begun(nodes: Nodes, tmp_path: Path) -> tuple[Path, ReadyNode, ChatPage]:
    """A model, its server, and a page with eight tokens of a long answer to "how does it go on?"."""
    folder, server = served(nodes, tmp_path)
    page = ChatPage(nodes, "chromium")
    page.open()
    page.allow(LONG)
    page.join(server.address)
    page.ask("how does it go on?")
    until(lambda: any(node["route"]["tokens"] >= 8 for node in page.answers()), "eight tokens")
    return folder, server, page


def test_full_storage_costs_no_answer(node_starter: Nodes, tmp_path: Path) -> None:
    """Neither parts of the model nor chats fit into it: they last as long as the page."""
    folder, server = served(node_starter, tmp_path)
    page = ChatPage(node_starter, "chromium")
    page.open()
    page.devtools("Storage.overrideQuotaForOrigin", origin=page.host.removesuffix("/"), quotaSize=1024)
    page.allow(COUNT)
    page.join(server.address)
    page.ask("how does it go on?")
    first = page.answer(0)
    page.ask("and then?")
    second = page.answer(1)
    said = [("user", "how does it go on?"), ("assistant", first["content"]), ("user", "and then?")]
    assert first["content"] == by_transformers(folder, said[:1], COUNT)
    assert second["content"] == by_transformers(folder, said, COUNT)
    assert page.run(f"{KEPT}.catch(() => 0)") == 0
    assert page.run("document.querySelector('pn-page').storage.all().then(all => all.length)") == 1


def renderers(pid: int) -> list[int]:
    """The processes of a browser that run its pages."""
    found = [one for child in children(pid) for one in renderers(child)]
    return [pid, *found] if b"--type=renderer" in Path(f"/proc/{pid}/cmdline").read_bytes() else found


def test_a_tab_that_slept_goes_on(node_starter: Nodes, tmp_path: Path) -> None:
    """The server has given up the session by the time that it wakes. DevTools freezes no tab that playwright drives."""
    folder, server, page = begun(node_starter, tmp_path)
    asleep = renderers(page.tab.pid)
    for pid in asleep:
        os.kill(pid, signal.SIGSTOP)
    until(lambda: is_unused(node_starter, server), "that the session is given up")
    for pid in asleep:
        os.kill(pid, signal.SIGCONT)
    answer = page.answer(0)
    assert answer["content"] == by_transformers(folder, [("user", "how does it go on?")], LONG)
    assert answer["route"]["recoveries"] == 1


def test_the_chat_page_with_its_code_is_small() -> None:
    size = sum(file.stat().st_size for file in CHAT.rglob("*") if file.is_file())
    print(f"{size} bytes")
    assert size < MAX_PAGE
