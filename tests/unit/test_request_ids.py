"""The id of a request: its response has it, and what is logged in any of its tasks."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
import trio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from petalnode.node.api.errors import REQUEST_ID
from petalnode.node.api.http.admission import Admission, AdmissionMiddleware


@pytest.mark.parametrize(("path", "header"), [("/v1/messages", "request-id"), ("/v1/completions", "x-request-id")])
async def test_request_has_an_id_only_its_tasks_know(path: str, header: str) -> None:
    seen: list[str] = []
    both = trio.Event()

    async def answer() -> None:
        seen.append(REQUEST_ID.get())
        if len(seen) == 2:
            both.set()
        await both.wait()

    async def endpoint(request: Request) -> JSONResponse:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(answer)
        return JSONResponse({"id": REQUEST_ID.get()})

    middleware: Any = AdmissionMiddleware(
        Starlette(routes=[Route("/{path:path}", endpoint, methods=["POST"])]), Admission(hosts=())
    )
    answers: list[httpx.Response] = []
    async with httpx.AsyncClient(transport=httpx.ASGITransport(middleware), base_url="http://api") as client:

        async def ask() -> None:
            answers.append(await client.post(path))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            nursery.start_soon(ask)
    assert not REQUEST_ID.get().startswith("req_")
    ids = [response.headers[header] for response in answers]
    assert [response.json()["id"] for response in answers] == ids
    assert sorted(seen) == sorted(ids) and len(set(ids)) == 2


async def test_who_is_refused_has_an_id_too() -> None:
    middleware: Any = AdmissionMiddleware(Starlette(), Admission(hosts=("127.0.0.1",)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(middleware), base_url="http://evil") as client:
        refused = await client.post("/v1/completions")
    assert not REQUEST_ID.get().startswith("req_"), "what is logged afterwards is of no request"
    assert refused.status_code == 403 and refused.headers["x-request-id"].startswith("req_")
