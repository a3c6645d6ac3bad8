"""Bodies that take `petalnode api` longer than their sender: many values in few bytes, many large bodies at once."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing
from starlette.requests import Request

from petalnode.node.api.engine.generation import ApiLimits
from petalnode.node.api.errors import ApiError
from petalnode.node.api.fields import json_limits, parse_object
from petalnode.node.api.http.answers import page
from petalnode.node.api.http.bodies import read_asked, read_body
from petalnode.node.network.shares import Turns
from tests.lines_run import LinesRun

pytestmark = pytest.mark.virtual_time


def test_empty_lists_are_counted_and_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 8 MiB, the former bound, a parser holds the interpreter for a second; now 1 MiB is read, and refused as soon
    as it has more values than it may."""
    body = b'{"messages": [], "x": [' + b"[]," * 340_000 + b"[]]}"
    assert len(body) < ApiLimits().body_bytes == 1 << 20
    monkeypatch.setattr(json, "loads", None)
    with LinesRun(20 * json_limits().values), pytest.raises(ApiError, match="too much JSON"):
        parse_object(body)
    with LinesRun(1000), pytest.raises(ApiError, match="bytes"):
        parse_object(body * 2)


@pytest.mark.parametrize("announced", [None, b"10", b"11"])
@pytest.mark.parametrize("chunk", [5, 6])
async def test_chunked_body_is_read_within_its_limit(announced: bytes | None, chunk: int) -> None:
    chunks = iter([True, False])

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": bytes(chunk), "more_body": next(chunks)}

    headers = [] if announced is None else [(b"content-length", announced)]
    request = Request({"type": "http", "method": "POST", "headers": headers}, receive)
    if chunk == 5 and announced != b"11":
        assert await read_body(request, 10) == bytes(10)
        return
    with pytest.raises(ApiError, match="more than 10 bytes"):
        await read_body(request, 10)


@pytest.mark.parametrize("limit", ["0", "10001", "-1", "1.0", "x", "", "9" * 5000])
def test_a_page_has_so_many_objects(limit: str) -> None:
    with pytest.raises(ApiError, match="from 1 to 10000"):
        page(Request({"type": "http", "query_string": f"limit={limit}".encode()}), [{"id": "a"}])


async def test_keys_take_turns_with_large_bodies() -> None:
    """Who has sent eight is not served eight times before somebody who came after."""
    turns, all_there, order = Turns(), trio.Event(), []
    running = 0

    async def parse(owner: str, number: int) -> None:
        nonlocal running
        async with turns.turn(owner):
            order.append((number, owner))
            running += 1
            await all_there.wait()
            assert running == 1
            running -= 1

    async with trio.open_nursery() as nursery:
        for number, owner in enumerate(["first", *["attacker"] * 8, "bob", "carol", "bob"]):
            nursery.start_soon(parse, owner, number)
            await trio.testing.wait_all_tasks_blocked()
        all_there.set()
    assert [owner for _, owner in order] == ["first", "attacker", "bob", "carol", "attacker", "bob", *["attacker"] * 6]
    for of in ("attacker", "bob"):
        own = [number for number, owner in order if owner == of]
        assert own == sorted(own)


async def test_a_small_body_waits_for_no_large_one() -> None:
    core: Any = SimpleNamespace(limits=ApiLimits(), turns=Turns())

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": b'{"a": 1}', "more_body": False}

    async with core.turns.turn("attacker"):
        with trio.fail_after(60):
            request = Request({"type": "http", "method": "POST", "headers": []}, receive)
            assert await read_asked(request, core, lambda fields: fields.data) == {"a": 1}


async def test_who_goes_while_waiting_leaves_his_turn() -> None:
    turns, done = Turns(), []

    async def wait(owner: str) -> None:
        async with turns.turn(owner):
            done.append(owner)

    async with trio.open_nursery() as nursery, turns.turn("first"):
        async with trio.open_nursery() as gone:
            gone.start_soon(wait, "gone")
            await trio.testing.wait_all_tasks_blocked()
            for owner in ("gone", "next"):
                nursery.start_soon(wait, owner)
                await trio.testing.wait_all_tasks_blocked()
            gone.cancel_scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
        assert not done, "the first still has its turn"
    assert done == ["gone", "next"]
    async with turns.turn("last"):  # nothing is left behind
        done.append("last")
    # One that is given its turn in the moment in which it goes hands it on.
    async with trio.open_nursery() as nursery:
        scope = trio.CancelScope()

        async def leaving() -> None:
            with scope:
                await wait("leaving")

        async with turns.turn("first"):
            nursery.start_soon(leaving)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(wait, "behind")
            await trio.testing.wait_all_tasks_blocked()
            scope.cancel()
    assert done[-1] == "behind"
