"""The page of the JavaScript client in Chromium and Firefox, through a relay to servers behind NAT: `make interop`.

Pictures of it come into build/interop.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.interop.built import BUILT, PAGE, invited
from tests.interop.check_client import expected
from tests.nat.lab import Host, Kind, Lab, open_lab, why_not
from tests.nat.nodes import LISTEN, LabNodes, LightNode, lab_nodes
from tests.swarm import faulty_server
from tests.swarm.processes import Node, ReadyNode, Running, until
from tests.swarm.tokenizer import save_tokenizer
from tests.tiny_models import save_tiny

# Beside much other work a browser takes minutes to start.
pytestmark = [pytest.mark.timeout(3600), pytest.mark.usefixtures("built")]
PROGRAMS = {"chromium": "chromium", "firefox": "firefox-esr"}
WEB = 8080
COUNT = 120
MAX_PAGE = 1_500_000  # bytes
SHARED = ("--share-weights", "on")
PRIMES = "how does it go on"


class Page:
    """The page in a browser on a machine of the lab, from a static host there."""

    def __init__(
        self, nodes: LabNodes, host: Host, kind: str, *, insecure: bool = False, arguments: Sequence[str] = ()
    ) -> None:
        serve = [sys.executable, "-m", "http.server", str(WEB), "--bind", "127.0.0.1", "--directory", str(PAGE)]
        self.web: Running = nodes.program(host, serve)
        options = {"kind": kind, "insecure": insecure, "arguments": list(arguments)}
        self.tab: LightNode = nodes.kept(LightNode(host, nodes.home(host), options, ("tests.interop.browser",)))
        assert self.tab.ready

    def open(self, link: str) -> None:
        assert "Serving HTTP" in self.web.line()
        self.tab.ask("open", url=f"http://127.0.0.1:{WEB}/page.html#{link}")

    def generate(self, prompt: str, count: int) -> None:
        for name, value in (("prompt", prompt), ("count", str(count))):
            self.run(f"document.getElementById('{name}').value = {value!r}")
        self.run("document.getElementById('go').click()")

    def run(self, expression: str) -> Any:
        return self.tab.ask("run", expression=expression)

    def said(self, name: str) -> str:
        """What the page has noted of its answer."""
        return self.run(f"document.getElementById('answer').dataset.{name} ?? ''") or ""

    def route(self) -> list[str]:
        return self.said("route").split()

    def text(self) -> str:
        return str(self.run("document.getElementById('answer').textContent"))


@pytest.mark.parametrize("kind", PROGRAMS)
def test_join_link_with_relay_nat_liar_and_loss(kind: str, tmp_path: Path) -> None:
    if shutil.which(PROGRAMS[kind]) is None:
        pytest.skip(f"{PROGRAMS[kind]} is not installed")
    if reason := why_not():
        pytest.skip(reason)
    folder = tmp_path / "tiny-llama"
    save_tokenizer(save_tiny("llama", folder, max_position_embeddings=4096, eos_token_id=None))
    with open_lab() as lab, lab_nodes(tmp_path / "machines") as nodes:
        relay, hidden = hidden_servers(lab, nodes, folder, {"home": "0:3", "office": "3:6", "attic": "3:6"})
        liar = lying(lab, nodes, tmp_path, folder, relay.address)
        friend = lab.host("friend")
        link = invited(lambda: nodes.run(friend, "invite", "--peer", relay.address, "--json", timeout=240))
        page = Page(nodes, lab.nat("cafe", Kind.SYMMETRIC).host("laptop"), kind)
        page.open(link)
        page.generate(PRIMES, COUNT)
        # The liar is asked first, since it has all blocks; its third answer is false.
        until(lambda: page.said("cheated") == liar.peer_id or bool(page.said("failed")), "that the liar is noticed")
        assert page.said("failed") == ""
        until(lambda: int(page.said("count")) >= 12, "twelve tokens")
        lost = page.route()[-1]
        hidden[lost].kill()
        until(lambda: bool(page.said("done") or page.said("failed")), "the end of the answer")
        page.tab.ask("picture", path=str(BUILT / f"{kind}.png"))
        assert page.said("failed") == "" and page.said("done") == "yes"
        assert lost not in page.route() and set(page.route()) <= set(hidden)
        ways = page.run("[...document.querySelectorAll('#route td:last-child')].map(cell => cell.textContent)")
        assert set(ways) == {"through a relay"}
        tokenizer = AutoTokenizer.from_pretrained(folder)
        ids = tokenizer(PRIMES, return_tensors="pt").input_ids
        assert page.text() == tokenizer.decode(expected(folder, ids, COUNT), skip_special_tokens=True)
        asked = page.tab.ask("asked")
        of_page = [url for url in asked if url.startswith("http")]
        assert all(url.startswith(f"http://127.0.0.1:{WEB}/") for url in of_page), of_page
        assert {url.rpartition("/")[2].partition("#")[0] for url in of_page} <= {"page.html", "page.js", "favicon.ico"}


def hidden_servers(lab: Lab, nodes: LabNodes, folder: Path, homes: dict[str, str]) -> tuple[Node, dict[str, Node]]:
    """A relay that only listens for WebSocket, and servers of these blocks, each behind a NAT of its own."""
    relay = nodes.command(lab.host("relay"), "bootstrap", "--new-swarm", "--listen", f"{LISTEN}/ws")
    serve = ("serve", str(folder), "--listen", LISTEN, "--peer", relay.address, *SHARED)
    started = [
        nodes.command(lab.nat(name, Kind.SYMMETRIC).host(f"{name}-pc"), *serve, "--blocks", blocks)
        for name, blocks in homes.items()
    ]
    return relay, {node.peer_id: node for node in started}


def lying(lab: Lab, nodes: LabNodes, folder_of_test: Path, folder: Path, relay: str) -> ReadyNode:
    """A server of all blocks, on the internet, whose third answer in a session is not what it signed."""
    host, control = lab.host("liar"), folder_of_test / "control.json"
    faulty_server.order(control, "altered", 3)
    serve = ["serve", str(folder), "--blocks", "0:6", "--json", "--listen", f"{LISTEN}/ws", "--peer", relay, *SHARED]
    command = [sys.executable, "-m", "tests.swarm.server_pool", str(control), *serve]
    liar: ReadyNode = nodes.kept(ReadyNode(host.command(command), nodes.env(host), Path(__file__).parents[2]))
    assert liar.ready
    return liar


def test_the_page_with_its_code_is_small() -> None:
    assert sum(file.stat().st_size for file in PAGE.iterdir()) < MAX_PAGE
