"""nginx in front of a node and of the JavaScript client's page: `make interop`. It ends TLS and cuts idle lines."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.interop.built import PAGE, built
from tests.interop.check_browsers import COUNT, PRIMES, SHARED, Page
from tests.interop.check_client import expected
from tests.nat.lab import Host, Lab, open_lab, why_not
from tests.nat.nodes import LabNodes, lab_nodes
from tests.swarm.certificates import certificate
from tests.swarm.processes import Node, until
from tests.swarm.tokenizer import save_tokenizer
from tests.tiny_models import save_tiny

__all__ = ["built"]
pytestmark = pytest.mark.timeout(3600)
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
        self.model = folder / "tiny-llama"
        save_tokenizer(save_tiny("llama", self.model, max_position_embeddings=4096, eos_token_id=None))
        at = ("--listen", "/ip4/127.0.0.1/tcp/8080/ws", "--announce", f"/ip4/{self.host.address}/tcp/443/tls/ws")
        serve = ("serve", str(self.model), "--new-swarm", "--blocks", "0:6", *at, *SHARED)
        self.server: Node = nodes.command(self.host, *serve)
        assert self.server.ready

    def cuts(self) -> int:
        """Lines of WebSocket that have ended so far."""
        return (self.folder / "access").read_text().count('" 101 ')


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
        tokenizer = AutoTokenizer.from_pretrained(site.model)
        ids = tokenizer(PRIMES, return_tensors="pt").input_ids
        wanted = tokenizer.decode(expected(site.model, ids, COUNT), skip_special_tokens=True)
        for cuts in (0, 1):
            assert site.cuts() == cuts
            page.generate(PRIMES, COUNT)
            until(lambda: bool(page.said("done") or page.said("failed")), "the end of the answer")
            assert page.said("failed") == "" and page.text() == wanted
            until(lambda: site.cuts() > 0, "that the idle line is cut")


def test_an_expired_certificate_is_told(tmp_path: Path) -> None:
    with open_lab() as lab, lab_nodes(tmp_path / "machines") as nodes:
        site = Site(lab, nodes, tmp_path, -1)
        page = Page(nodes, lab.nat("cafe").host("laptop"), "chromium")
        page.open(site.server.address)
        page.generate(PRIMES, COUNT)
        until(lambda: bool(page.said("done") or page.said("failed")), "that it fails")
        assert "no peer of the swarm answers" in page.said("failed") and "certificate" in page.said("failed")
