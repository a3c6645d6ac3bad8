"""Places that a stranger holds with many keys and does nothing with: others get theirs all the same."""

from __future__ import annotations

from contextlib import AsyncExitStack, ExitStack, suppress
from pathlib import Path
from typing import Any, cast

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from petalnode.crypto.credits import CreditQuery
from petalnode.crypto.statement import now_ms
from petalnode.node.credits.issuer import ISSUER, CreditsService
from petalnode.node.credits.ledger import Ledger
from petalnode.node.network.transport.places import PATIENCE, Place, Places, given_up
from petalnode.node.server.requests.request import REQUESTS, OpenCount
from petalnode.node.swarm.streams import SHARES
from petalnode.node.testing import MemoryNetwork, MemoryNode, open_network
from petalnode.node.validator.auditing import AUDITS
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.credits import CREDITS, ask_credit
from petalnode.protocols.framing import MessageStream, PeerError, StreamClosed
from petalnode.protocols.ids import StreamProtocol
from petalnode.protocols.inference import Refusal
from tests.origins import At

pytestmark = pytest.mark.virtual_time

Frame = wire.PushFrame
ECHO = StreamProtocol("/petalnode/test/echo/1", Frame)


@pytest.mark.parametrize("most", [AUDITS.max_calls, ISSUER.max_streams])
@pytest.mark.parametrize("addresses", [1, 5, 200])
async def test_silent_keys_that_hold_places_keep_nobody_out(most: int, addresses: int) -> None:
    """Before, 64 keys of one address shut an issuer for as long as they liked, and 8 an auditor."""
    places = Places(most)

    async def silent(number: int) -> None:
        with places.take(f"key {number}", f"10.0.0.{number % addresses}") as held:
            if held is not None:
                await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        for number in range(400):
            nursery.start_soon(silent, number)
        await trio.sleep(PATIENCE)
        assert most // 2 <= len(places) <= most
        with places.take("honest", "192.0.2.1") as mine:
            assert mine is not None
            with mine.working():
                for number in range(400, 800):
                    nursery.start_soon(silent, number)
                await trio.sleep(PATIENCE)
            assert not mine.scope.cancel_called
        nursery.cancel_scope.cancel()


def place(peer: str, origin: str, since: float = 0.0, *, busy: bool = False) -> Place:
    return Place(peer, origin, since, busy)


def test_who_has_more_gives_up_what_is_idle() -> None:
    taken = [place("a", "one", 3), place("b", "one", 1), place("c", "one", busy=True), place("d", "two")]
    assert given_up(taken, "e", "three", 4) is taken[1]
    assert given_up(taken, "e", "two", 4) is taken[1]
    assert given_up(taken, "e", "one", 4) is None  # one key has no more than another of its own address
    assert given_up([place("a", "one"), place("a", "one")], "b", "one", 0) is not None
    alone = [place("a", "one"), place("b", "two")]
    assert given_up(alone, "c", "three", PATIENCE - 1) is None
    assert given_up(alone, "c", "three", PATIENCE) is alone[0]
    assert given_up(alone, "a", "one", 100) is None
    assert given_up([place("a", "one", busy=True)] * 5, "c", "three", 100) is None


@pytest.mark.parametrize("holder", [("key {}", "one"), ("key", "{}"), ("key", "one")])
async def test_key_and_address_have_half_of_places(holder: tuple[str, str]) -> None:
    peer, origin = holder
    places = Places(8)
    with ExitStack() as stack:
        taken = [stack.enter_context(places.take(peer.format(n), origin.format(n))) for n in range(8)]
        assert sum(place is not None for place in taken) == 4


async def test_places_at_work_are_kept_and_given_back() -> None:
    places = Places(2)

    def is_room() -> bool:
        with places.take("late", "three") as late:
            return late is not None

    with places.take("key", "one") as first, places.take("other key", "two") as second:
        assert first is not None and second is not None
        with first.working(), second.working():
            await trio.sleep(2 * PATIENCE)
            assert not is_room()
        assert not is_room()  # they were at work until now
        await trio.sleep(PATIENCE)
        assert is_room() and first.scope.cancel_called and not second.scope.cancel_called
    assert not len(places)


async def test_place_that_is_given_up_ends_its_stream() -> None:
    places = Places(2)
    ended = trio.Event()

    async def silent(key: str, address: str) -> None:
        with places.take(key, address) as mine:
            assert mine is not None
            await trio.sleep_forever()
        assert mine.scope.cancelled_caught
        ended.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(silent, "key", "one")
        nursery.start_soon(silent, "other key", "four")
        await trio.sleep(PATIENCE + 1)
        with places.take("honest", "two") as first, places.take("another", "three") as second:
            assert first is not None and second is not None
            await ended.wait()
        nursery.cancel_scope.cancel()


async def test_one_addresss_keys_leave_streams_for_others() -> None:
    """Before, 20 keys of one address held all streams of a protocol that a node serves."""

    async def echo(stream: MessageStream[wire.PushFrame]) -> None:
        while True:
            frame, _ = await stream.receive(timeout=None)
            await stream.send(frame, timeout=1)

    async with open_network() as network:
        node, honest, *attackers = [network.node() for _ in range(32)]
        network.origins = {attacker.peer_id: "10.0.0.1" for attacker in attackers}
        node.set_handler(ECHO, echo, max_streams=8 * SHARES.least_served)
        for attacker in attackers:
            for _ in range(8):
                stream = await attacker.new_stream(node.peer_id, ECHO, timeout=1)
                with suppress(StreamClosed):
                    await stream.send(Frame(), timeout=1)
        for _ in range(2):  # what is given back may be had again
            async with AsyncExitStack() as stack:
                for _ in range(2 * SHARES.least_served):
                    opening = honest.open_stream(node.peer_id, ECHO, timeout=1)
                    stream = await stack.enter_async_context(opening)
                    await stream.send(Frame(), timeout=1)
                    await stream.receive(timeout=1)
                refused = await honest.new_stream(node.peer_id, ECHO, timeout=1)
                with pytest.raises(StreamClosed):
                    await refused.receive(timeout=1)
            await wait_all_tasks_blocked()


async def test_an_issuer_answers_beside_keys_that_ask_nothing(tmp_path: Path) -> None:
    """They hold a stream each for as long as it lets them, and open another one."""

    async def silent(attacker: MemoryNode) -> None:
        while True:
            with suppress(PeerError):
                stream = await attacker.new_stream(issuer.peer_id, CREDITS, timeout=1)
                await stream.receive(timeout=2 * ISSUER.idle_timeout)
            await trio.sleep(0.1)

    async with trio.open_nursery() as nursery:
        network = MemoryNetwork(nursery)
        issuer, honest, *attackers = [network.node() for _ in range(2 + 2 * ISSUER.max_streams)]
        network.origins = {attacker.peer_id: "10.0.0.1" for attacker in attackers}
        with Ledger(tmp_path / "ledger.sqlite", issuer.identity) as ledger:
            CreditsService(cast(Any, issuer), ledger)
            for attacker in attackers:
                nursery.start_soon(silent, attacker)
            await trio.sleep(5)
            query = CreditQuery(issuer.peer_id, honest.peer_id, now_ms()).signed(honest.identity)
            async with honest.open_stream(issuer.peer_id, CREDITS, timeout=1) as stream:
                assert (await ask_credit(stream, query, timeout=5)).points == 0
            nursery.cancel_scope.cancel()


async def test_keys_of_one_address_leave_requests_for_others() -> None:
    """Before, 200 keys of one address had all the batches, adapters or sessions that a server has open. Where a client
    goes in the meantime changes nothing in what is counted for it."""
    here = {"moved": "10.0.0.2"}
    count = OpenCount("batches", 8 * REQUESTS.least_open, At(here, "10.0.0.1"))
    opened = []
    for client in ["moved", *(f"key {number}" for number in range(200))]:
        with suppress(Refusal):
            while True:
                count.check(client)
                count.add(client)
                opened.append(client)
                here["moved"] = "10.0.0.1" if len(opened) > 4 else "10.0.0.2"
        if client == "moved":
            assert len(opened) == 4 * REQUESTS.least_open
    assert len(opened) == 6 * REQUESTS.least_open
    here["honest"] = "192.0.2.1"
    for _ in range(REQUESTS.least_open):
        count.check("honest")
        count.add("honest")
    for client in opened:
        count.remove(client)
    for _ in range(3 * REQUESTS.least_open):
        count.check("key 0")
        count.add("key 0")
