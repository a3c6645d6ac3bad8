"""Looking for servers that may come: for how long, and who is asked again."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from petalnode.node.client.deadlines import DEADLINES
from petalnode.node.client.request import ServerRefused
from petalnode.node.client.router import ServerSearch, note_failure
from petalnode.node.errors import NoChainError, ServerCheated, ServerFailed
from petalnode.protocols import wire_pb2 as wire

pytestmark = pytest.mark.virtual_time

NOBODY = NoChainError("nobody holds block 3", (3,))
GONE = ServerFailed("server a failed: it is gone", "a")
FULL = ServerRefused("server b refused: no room", "b", wire.ERROR_CACHE_FULL)


class Client:
    """A router that counts how often the swarm was asked anew."""

    peer_id = "me"

    def __init__(self) -> None:
        self.refreshed = 0
        self.suspected: list[str] = []
        self.suspected_for: list[float] = []
        self.accused: list[tuple[str, str]] = []

    async def refresh(self) -> None:
        self.refreshed += 1

    def suspect(self, peer_id: str, seconds: float) -> None:
        self.suspected.append(peer_id)
        self.suspected_for.append(seconds)

    def accuse(self, peer_id: str, reason: str, proof: object) -> None:
        self.accused.append((peer_id, reason))


def searching(
    refused: dict[str, ServerFailed], seconds: float, *, wait: bool = False, lost: bool = False
) -> tuple[ServerSearch, Client]:
    client: Any = Client()
    until = trio.current_time() + seconds
    search = ServerSearch(client, refused, until=until, wait=wait, lost=lost, ask_again=lambda error: error is not GONE)
    return search, client


async def for_ever(search: ServerSearch) -> None:
    while True:
        await search.found_nobody(NOBODY)


async def test_swarm_is_asked_anew_before_anybody_gives_up() -> None:
    search, client = searching({}, 10.0)
    await search.found_nobody(NOBODY)
    assert client.refreshed == 1 and trio.current_time() == pytest.approx(0, abs=0.01)
    with pytest.raises(NoChainError, match="block 3") as caught:
        await search.found_nobody(NOBODY)
    assert caught.value.missing == (3,)


async def test_others_are_looked_for_after_a_loss() -> None:
    search, client = searching({"a": GONE}, 10.0)
    search.refuse(FULL)
    assert client.suspected == ["b"] and set(search.refused) == {"a", "b"}
    begun = trio.current_time()
    with pytest.raises(NoChainError, match="it is gone; server b refused"):
        await for_ever(search)
    assert 10.0 <= trio.current_time() - begun <= 10.0 + DEADLINES.retry_interval
    assert set(search.refused) == {"a"}  # the other one was asked again


async def test_error_says_whether_asking_for_less_would_help() -> None:
    for refused, gone in (({"a": GONE}, True), ({"a": GONE, "b": FULL}, False), ({}, False)):
        search, _ = searching(dict(refused), 2.0)
        with pytest.raises(NoChainError) as caught:
            await for_ever(search)
        assert caught.value.gone == gone


async def test_who_waits_does_so_for_ever() -> None:
    search, client = searching({"b": FULL}, 1.0, wait=True)
    for _ in range(1000):
        await search.found_nobody(NOBODY)
    assert client.refreshed == 500 and not search.refused


def test_refusing_server_is_not_asked_long() -> None:
    client: Any = Client()
    for error in (GONE, FULL, ServerRefused("server c refused: who are you?", "c", wire.ERROR_NOT_ALLOWED)):
        note_failure(client, error)
    assert client.suspected == ["a", "b", "c"] and not client.accused
    assert client.suspected_for == [DEADLINES.suspect, DEADLINES.suspect, DEADLINES.not_allowed]
    assert DEADLINES.not_allowed > 10 * DEADLINES.suspect
    note_failure(client, ServerCheated("server d cheated: forged", "d"))
    assert client.accused == [("d", "server d cheated: forged")] and client.suspected == ["a", "b", "c"]
