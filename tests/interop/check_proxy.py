"""nginx in front of a node and of the JavaScript client's page: `make interop`. It ends TLS and cuts idle lines."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.import_graph import ROOT
from tests.interop.built import PAGE
from tests.interop.check_browsers import COUNT, PRIMES, SHARED, Page
from tests.interop.check_client import expected
from tests.nat.lab import Host, Lab, open_lab, why_not
from tests.nat.nodes import LabNodes, lab_nodes
from tests.swarm.certificates import certificate
from tests.swarm.processes import Node, ReadyNode, until
from tests.swarm.tokenizer import save_tokenizer
from tests.tiny_models import save_tiny

pytestmark = [pytest.mark.timeout(3600), pytest.mark.usefixtures("built")]
NGINX = """
daemon off;
master_process off;
user root;
error_log stderr;
pid {folder}/pid;
events {{}}
http {{
  access_log {folder}/access;
  types {{ text/html html; text/javascript js; }}
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  server {{
    listen 443 ssl;
    ssl_certificate {certificate};
    ssl_certificate_key {key};
    root {page};
    location = / {{
      proxy_pass http://127.0.0.1:8080;
      proxy_http_version 1.1;
      proxy_set_header Upgrade $http_upgrade;
      proxy_set_header Connection upgrade;
      proxy_read_timeout 3s;
      proxy_send_timeout 3s;
    }}
  }}
}}
"""


class Site:
    """nginx and a server of the whole model on one machine, of which others see nothing but nginx."""

    def __init__(self, lab: Lab, nodes: LabNodes, folder: Path, days: int) -> None:
        self.host: Host = lab.host("web")
        self.folder = folder / "nginx"
        self.folder.mkdir()
        files = certificate(folder, days)
        conf = self.folder / "conf"
        conf.write_text(NGINX.format(folder=self.folder, page=PAGE, certificate=files[0], key=files[1]))
        nodes.program(self.host, [str(shutil.which("nginx")), "-p", str(self.folder), "-c", str(conf)])
        self.model, self.server = served_behind(nodes, self.host, folder)

    def cuts(self) -> int:
        """Lines of WebSocket that have ended so far."""
        return (self.folder / "access").read_text().count('" 101 ')


def served_behind(nodes: LabNodes, host: Host, folder: Path) -> tuple[Path, Node]:
    """A model, and a server of all of it that announces the proxy on its machine."""
    model = folder / "tiny-llama"
    save_tokenizer(save_tiny("llama", model, max_position_embeddings=4096, eos_token_id=None))
    at = ("--listen", "/ip4/127.0.0.1/tcp/8080/ws", "--announce", f"/ip4/{host.address}/tcp/443/tls/ws")
    server = nodes.command(host, "serve", str(model), "--new-swarm", "--blocks", "0:6", *at, *SHARED)
    assert server.ready
    return model, server


def wanted(model: Path) -> str:
    """How the model goes on."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer(PRIMES, return_tensors="pt").input_ids
    return str(tokenizer.decode(expected(model, ids, COUNT), skip_special_tokens=True))


@pytest.fixture(autouse=True)
def prepared() -> None:
    if shutil.which("nginx") is None:
        pytest.skip("nginx is not installed")
    if reason := why_not():
        pytest.skip(reason)


@pytest.mark.parametrize("kind", ["chromium", "firefox"])
def test_page_and_node_share_nginx(kind: str, tmp_path: Path) -> None:
    with open_lab() as lab, lab_nodes(tmp_path / "machines") as nodes:
        site = Site(lab, nodes, tmp_path, 30)
        page = Page(nodes, lab.nat("cafe").host("laptop"), kind, insecure=True)
        page.tab.ask("open", url=f"https://{site.host.address}/page.html#{site.server.address}")
        text = wanted(site.model)
        for cuts in (0, 1):
            assert site.cuts() == cuts
            page.generate(PRIMES, COUNT)
            until(lambda: bool(page.said("done") or page.said("failed")), "the end of the answer")
            assert page.said("failed") == "" and page.text() == text
            until(lambda: site.cuts() > 0, "that the idle line is cut")


def test_a_proxy_that_buffers_and_cuts_changes_nothing(tmp_path: Path) -> None:
    """It gathers bytes, hands them on in other pieces, and cuts all lines in the middle of an answer."""
    with open_lab() as lab, lab_nodes(tmp_path / "machines") as nodes:
        host, files = lab.host("web"), map(str, certificate(tmp_path))
        program = host.command([sys.executable, "-m", "tests.nat.reverse_proxy", "443", "8080", *files])
        proxy: ReadyNode = nodes.kept(ReadyNode(program, nodes.env(host), ROOT))
        assert proxy.ready
        folder, server = served_behind(nodes, host, tmp_path)
        page = Page(nodes, lab.nat("cafe").host("laptop"), "chromium", insecure=True)
        page.open(server.address)
        page.generate(PRIMES, COUNT)
        until(lambda: int(page.said("count") or 0) >= 12, "twelve tokens")
        assert proxy.process.stdin is not None
        proxy.process.stdin.write("\n")
        proxy.process.stdin.flush()
        before = proxy.event("cut")["requests"]
        until(lambda: bool(page.said("done") or page.said("failed")), "the end of the answer")
        assert page.said("failed") == "" and page.text() == wanted(folder)
        proxy.process.stdin.write("\n")
        proxy.process.stdin.flush()
        assert proxy.event("cut")["requests"] > before  # the answer went on by another line


def test_an_expired_certificate_is_told(tmp_path: Path) -> None:
    with open_lab() as lab, lab_nodes(tmp_path / "machines") as nodes:
        site = Site(lab, nodes, tmp_path, -1)
        page = Page(nodes, lab.nat("cafe").host("laptop"), "chromium")
        page.open(site.server.address)
        page.generate(PRIMES, COUNT)
        until(lambda: bool(page.said("done") or page.said("failed")), "that it fails")
        assert "no peer of the swarm answers" in page.said("failed") and "certificate" in page.said("failed")
