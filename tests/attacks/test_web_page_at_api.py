"""A web page in somebody's browser, at the API that the same machine serves without a key.

Its best moves: a request that needs no permission of the server (a form, `text/plain`), and a name of its own that it
lets mean 127.0.0.1 (DNS rebinding), by which the browser takes the API for the page's own server.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
import trio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from petalnode.node.api.http.admission import LOOPBACK, Admission, AdmissionMiddleware, ApiKeys, hash_of_key

OWN = "http://127.0.0.1:8000"
KEYED = ApiKeys({hash_of_key("pn-right"): "alice"})


async def ask(
    admission: Admission, method: str = "POST", path: str = "/v1/completions", **headers: str
) -> httpx.Response:
    """The response to a request with these headers, whose endpoint tells the owner of the key."""

    async def endpoint(request: Request) -> JSONResponse:
        return JSONResponse({"owner": request.state.owner})

    middleware: Any = AdmissionMiddleware(
        Starlette(routes=[Route("/{path:path}", endpoint, methods=["GET", "POST"])]), admission
    )
    async with httpx.AsyncClient(transport=httpx.ASGITransport(middleware), base_url=OWN) as client:
        return await client.request(method, path, headers=headers)


async def test_a_page_of_another_origin_is_not_answered() -> None:
    for origin in ("https://evil.example", "null", "http://127.0.0.1:9000", "http://localhost:8000.evil.example"):
        refused = await ask(Admission(), Origin=origin)
        assert refused.status_code == 403, origin
        assert "access-control-allow-origin" not in refused.headers
        assert (await ask(Admission(), "OPTIONS", Origin=origin)).status_code == 403


async def test_page_whose_name_means_this_machine_is_unanswered() -> None:
    for host in ("evil.example:8000", "127.0.0.1.evil.example", "", "[::1"):
        assert (await ask(Admission(), Host=host)).status_code == 403, host
        assert (await ask(Admission(), Host=host, Origin=f"http://{host}")).status_code == 403
    for host in ("127.0.0.1:8000", "localhost", "[::1]:8000"):
        assert (await ask(Admission(), Host=host)).status_code == 200, host
        assert (await ask(Admission(), Host=host, Origin=f"http://{host}")).status_code == 200


async def test_own_page_and_allowed_ones_are_answered() -> None:
    assert (await ask(Admission(), Origin=OWN)).status_code == 200
    asked_for = Admission(origins=("https://chat.example",))
    answered = await ask(asked_for, Origin="https://chat.example")
    assert answered.headers["access-control-allow-origin"] == "https://chat.example"
    assert (await ask(asked_for, Origin="https://chat.example.evil")).status_code == 403
    preflight = await ask(asked_for, "OPTIONS", Origin="https://chat.example")
    assert (preflight.status_code, preflight.headers["access-control-allow-origin"]) == (204, "https://chat.example")
    assert (await ask(Admission(origins=("*",)), Origin="https://any.example")).status_code == 200


async def test_without_its_key_nobody_is_answered_whatever_origin() -> None:
    keyed = Admission(KEYED, origins=("*",), hosts=())
    for headers in (
        {},
        {"Authorization": "Bearer pn-wrong"},
        {"Authorization": "Basic pn-right"},
        {"Authorization": "Bearer "},
        {"Authorization": f"Bearer {hash_of_key('pn-right')}"},
    ):
        refused = await ask(keyed, **headers)
        assert refused.status_code == 401, headers
        assert refused.json()["error"]["code"] == "invalid_api_key"
        assert (await ask(keyed, "GET", "/v1/models", **headers)).status_code == 401
    answered = await ask(keyed, Authorization="Bearer pn-right", Origin="https://any.example", Host="swarm.example")
    assert answered.json() == {"owner": "alice"}


@pytest.mark.parametrize("path", ["/v1/../v1/models", "/V1/models", "//v1/models", "/v1%2Fmodels", "/./v1/models"])
async def test_no_other_spelling_of_path_gets_around_key(path: str) -> None:
    """What the middleware does not take for the API is not what the API's routes answer to."""
    from petalnode.node.api import app

    middleware: Any = app.create_app(_NoCore(), Admission(KEYED, hosts=()))  # type: ignore[arg-type]
    received = trio.lowlevel.checkpoint

    async def receive() -> dict[str, Any]:
        await received()
        return {"type": "http.request", "body": b"", "more_body": False}

    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    from urllib.parse import unquote

    scope = {"type": "http", "method": "GET", "path": unquote(path), "query_string": b"", "headers": []}
    await middleware(scope, receive, send)
    assert sent[0]["status"] in (401, 404), sent
    assert b"tiny" not in json.dumps([str(message) for message in sent]).encode()


class _NoCore:
    def __init__(self) -> None:
        self.models = {"tiny": None}


async def test_more_requests_than_allowed_must_come_back() -> None:
    begun, go = trio.Event(), trio.Event()

    async def endpoint(request: Request) -> JSONResponse:
        begun.set()
        await go.wait()
        return JSONResponse({})

    inner = Starlette(routes=[Route("/v1/x", endpoint, methods=["POST", "GET"])])
    middleware: Any = AdmissionMiddleware(inner, Admission(hosts=LOOPBACK, requests=1))
    async with (
        httpx.AsyncClient(transport=httpx.ASGITransport(middleware), base_url=OWN) as client,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(client.post, "/v1/x")
        await begun.wait()
        refused = await client.post("/v1/x")
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
        assert int(refused.headers["retry-after"]) > 0
        go.set()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(middleware), base_url=OWN) as client:
        assert (await client.post("/v1/x")).status_code == 200
