"""The pages of `petalnode api` as a browser gets them: headers, files, and the swarm as JSON."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from petalnode.crypto.identity import Identity
from petalnode.node.api.engine.core import Core
from petalnode.node.api.http.admission import Admission, ApiKeys, hash_of_key
from petalnode.node.web.pages import INDEX, MEDIA_TYPES, STATIC, page_routes
from petalnode.node.web.swarm_endpoint import swarm_routes
from petalnode.node.web.swarm_report import LastVerdict
from tests.api.conftest import Served
from tests.memory_api import MemoryApi, memory_api

KEY = "pn-of-this-test"
GONE = Identity.from_seed(bytes(32)).peer_id


@pytest.fixture(scope="module")
def site(served: Served) -> Iterator[MemoryApi]:
    admission = Admission(ApiKeys({hash_of_key(KEY): "alice"}))

    def verdicts(version: bytes) -> dict[str, LastVerdict]:
        known = served.swarm.network.view.servers(version, now=time.time())
        return {server.peer_id: LastVerdict("ok", "", 1.0) for server in known if server.span.start == 0}

    def pages(core: Core) -> list[Any]:
        living = min(peer for peer in served.swarm.network.nodes if core.client.swarm.is_connected(peer))
        peers = (f"/ip4/192.0.2.1/tcp/1/p2p/{GONE}", f"/ip4/192.0.2.1/tcp/2/p2p/{living}")
        return [*swarm_routes(core, peers=peers, verdicts=verdicts), *page_routes()]

    with memory_api(served.swarm, served.folder, admission=admission, pages=pages) as running:
        yield running


def get(site: MemoryApi, path: str, **headers: str) -> httpx.Response:
    return httpx.get(f"{site.url}{path}", headers=headers, timeout=None)


def directives(response: httpx.Response) -> dict[str, str]:
    parts = (part.strip().partition(" ") for part in response.headers["content-security-policy"].split(";"))
    return {name: value for name, _, value in parts}


@pytest.mark.parametrize("path", ["/", *(f"/web/{file.name}" for file in sorted(STATIC.iterdir()))])
def test_every_file_comes_with_policy_and_its_type(site: MemoryApi, path: str) -> None:
    found = get(site, path)
    name = path.rpartition("/")[2] or INDEX
    assert found.status_code == 200
    assert found.content == (STATIC / name).read_bytes()
    assert found.headers["content-type"] == MEDIA_TYPES[f".{name.rpartition('.')[2]}"]
    assert found.headers["x-content-type-options"] == "nosniff"
    assert found.headers["referrer-policy"] == "no-referrer"
    policy = directives(found)
    assert policy["default-src"] == "'none'"
    assert all(policy[name] == "'self'" for name in ("script-src", "style-src", "connect-src", "img-src"))
    assert all(policy[name] == "'none'" for name in ("base-uri", "form-action", "frame-ancestors", "trusted-types"))
    assert policy["require-trusted-types-for"] == "'script'"
    assert not re.search(r"unsafe|https?:|\*|data:|blob:", found.headers["content-security-policy"])


def test_unchanged_file_is_not_sent_again(site: MemoryApi) -> None:
    first = get(site, "/web/page.js")
    again = get(site, "/web/page.js", **{"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["content-security-policy"] == first.headers["content-security-policy"]
    assert first.headers["cache-control"] == "no-cache"


@pytest.mark.parametrize(
    "path",
    [
        "/web/",
        "/web/none.js",
        "/web/../pages.py",
        "/web/%2e%2e/pages.py",
        "/web/..%2fpages.py",
        "/web//etc/passwd",
        "/x",
    ],
)
def test_nothing_else_is_sent(site: MemoryApi, path: str) -> None:
    with httpx.Client(timeout=None) as client:
        request = client.build_request("GET", site.url)
        request.url = request.url.copy_with(raw_path=path.encode())
        found = client.send(request)
    assert found.status_code == 404
    assert found.json()["error"]["code"] == "unknown_url"


def test_pages_need_no_key_and_swarm_does(site: MemoryApi) -> None:
    assert get(site, "/").status_code == 200
    assert get(site, "/v1/petalnode/swarm").status_code == 401
    assert get(site, "/v1/petalnode/swarm", Authorization=f"Bearer {KEY}").status_code == 200


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_page_may_ask_also_behind_proxy_with_tls(site: MemoryApi, scheme: str) -> None:
    host = site.url.removeprefix("http://")
    key = f"Bearer {KEY}"
    assert get(site, "/v1/models", Authorization=key, Origin=f"{scheme}://{host}").status_code == 200
    for other in (f"{scheme}://{host}.example.org", f"{scheme}://example.org", "null"):
        assert get(site, "/v1/models", Authorization=key, Origin=other).status_code == 403


def test_the_swarm_is_who_serves_it(site: MemoryApi) -> None:
    found = get(site, "/v1/petalnode/swarm", Authorization=f"Bearer {KEY}").json()
    assert (found["model"], found["num_blocks"], found["coverage"]) == ("tiny-llama", 6, [1] * 6)
    assert [one["blocks"] for one in found["servers"]] == [[0, 2], [2, 4], [4, 6]]
    assert all(one["cache_tokens"] == 100_000 and one["state"] == "online" for one in found["servers"])
    assert found["help"]["command"].startswith("petalnode serve tiny-llama --peer /ip4/192.0.2.1/tcp/2/p2p/")
    assert [one["verdict"] and one["verdict"]["verdict"] for one in found["servers"]] == ["ok", None, None]
    assert found["self"] not in {one["peer_id"] for one in found["servers"]}
