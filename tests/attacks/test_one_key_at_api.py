"""A key that holds as many requests of `petalnode api` as it can: others are answered all the same."""

from __future__ import annotations

import httpx
import pytest
import trio
import trio.testing
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from petalnode.node.api.http.admission import Admission, AdmissionMiddleware, ApiKeys, hash_of_key

MOST = 64


@pytest.mark.parametrize("owners", [("mallory", "alice", "bob"), ("mallory",)], ids=["several keys", "one key"])
async def test_a_key_leaves_room_for_the_others(owners: tuple[str, ...]) -> None:
    keys = ApiKeys({hash_of_key(f"pn-{owner}"): owner for owner in owners})
    codes: dict[str, list[int]] = {owner: [] for owner in owners}
    done = trio.Event()

    async def endpoint(_: Request) -> JSONResponse:
        await done.wait()
        return JSONResponse({})

    application = Starlette(routes=[Route("/v1/completions", endpoint, methods=["POST"])])
    middleware = AdmissionMiddleware(application, Admission(keys, requests=MOST))
    transport = httpx.ASGITransport(middleware)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=None) as client:

        async def ask(owner: str) -> None:
            response = await client.post("/v1/completions", headers={"Authorization": f"Bearer pn-{owner}"})
            codes[owner].append(response.status_code)

        async with trio.open_nursery() as nursery:
            for owner in owners:  # the attacker first
                for _ in range(MOST + 1 if owner == "mallory" else 8):
                    nursery.start_soon(ask, owner)
                await trio.testing.wait_all_tasks_blocked()
            done.set()
    assert all(codes[owner] == [200] * 8 for owner in owners[1:])
    held = MOST // 2 if len(owners) > 1 else MOST
    assert codes["mallory"].count(200) == held and codes["mallory"].count(429) == MOST + 1 - held
    assert middleware.running == 0
