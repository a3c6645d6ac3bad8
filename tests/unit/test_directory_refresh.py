"""Asking the swarm anew: peers that are silent hold nobody up for long once others have answered."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
import trio
import trio.testing

from petalnode.crypto.identity import Identity
from petalnode.node.errors import SwarmError
from petalnode.node.swarm.directory import Directory
from petalnode.protocols.announcement import SignedAnnouncement
from petalnode.protocols.framing import PeerError
from tests.announcements import MODEL, signed
from tests.directories import Stream, a_directory, answered_by

pytestmark = pytest.mark.virtual_time

TIMEOUT = 5.0
ME, ASKED = Identity.generate(), Identity.generate()


def announced(count: int) -> list[SignedAnnouncement]:
    """Servers of which nobody ever hears anything else."""
    return [announcement(Identity.generate()) for _ in range(count)]


def announcement(identity: Identity) -> SignedAnnouncement:
    """Another one with each call, newer than those before."""
    return signed(identity, addrs=("/ip4/192.0.2.2/tcp/1",))


async def refreshing(silent: int, check: Callable[[Directory, float], None], *, asked_answers: bool = True) -> None:
    async with trio.open_nursery() as nursery:
        there = a_directory(ASKED)
        there.merge(announced(silent))

        open_there = answered_by(there.serve, nursery, ME.peer_id)

        async def open_stream(peer_id: str, timeout: float) -> Stream:
            if peer_id != ASKED.peer_id or not asked_answers:
                await trio.sleep_forever()
            return await open_there(peer_id, timeout)

        here = a_directory(ME, open_stream, [ASKED.peer_id])
        begun = trio.current_time()
        try:
            await here.refresh(nursery, model_version=b"", timeout=TIMEOUT)
        finally:
            check(here, trio.current_time() - begun)
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("silent", [1, 6, 30])
async def test_silent_named_peers_are_not_waited_for(silent: int) -> None:
    def check(here: Directory, seconds: float) -> None:
        assert len(here.view.records) == silent
        assert seconds <= TIMEOUT / 2

    await refreshing(silent, check)


async def test_where_nobody_answers_that_is_said_in_time() -> None:
    def check(here: Directory, seconds: float) -> None:
        assert seconds == pytest.approx(TIMEOUT)

    with pytest.raises(BaseExceptionGroup) as caught:
        await refreshing(3, check, asked_answers=False)
    assert caught.group_contains(SwarmError, match="no peer has answered")


async def test_another_peer_is_asked_for_an_unreachable_one() -> None:
    """Whose new addresses only others know."""
    there, moved = a_directory(ASKED), Identity.generate()

    async def open_stream(peer_id: str, timeout: float) -> Stream:
        if peer_id != ASKED.peer_id:
            raise PeerError("cannot connect", peer_id)
        return await answered_by(there.serve, nursery, ME.peer_id)(peer_id, timeout)

    here = a_directory(ME, open_stream, [ASKED.peer_id])
    here.merge([announcement(moved)])
    async with trio.open_nursery() as nursery:
        # A client that needs a sample only asks one peer in a round.
        await here.refresh(nursery, model_version=MODEL, sample=True, timeout=TIMEOUT)
        nursery.start_soon(here._pull_forever)
        for _ in range(20):  # one of two peers, by chance, would be left out of some
            there.merge([newer := announcement(moved)])
            await trio.sleep(16)
            assert here.view.records[moved.peer_id] == newer
        nursery.cancel_scope.cancel()


async def test_failed_call_forgets_no_peer_met_meanwhile() -> None:
    """At an address of an earlier run nobody is; at that of the local network the peer answers."""
    good, opened = "/ip4/192.0.2.9/tcp/1", list[str]()

    async def open_stream(peer_id: str, timeout: float) -> Stream:
        opened.append(peer_id)
        if len(opened) == 1:
            await trio.sleep(TIMEOUT / 2)
            raise PeerError("cannot connect", peer_id)
        return await answered_by(there.serve, nursery, ME.peer_id)(peer_id, timeout)

    async def call(addr: str) -> None:
        with suppress(PeerError):
            await here.meet(ASKED.peer_id, [addr], timeout=TIMEOUT)

    there, here = a_directory(ASKED), a_directory(ME, open_stream)
    async with trio.open_nursery() as nursery:
        async with trio.open_nursery() as calls:
            calls.start_soon(call, "/ip4/192.0.2.8/tcp/1")
            await trio.testing.wait_all_tasks_blocked()
            calls.start_soon(call, good)
        nursery.cancel_scope.cancel()
    assert here.addrs_of(ASKED.peer_id) == [good]
