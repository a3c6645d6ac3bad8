"""AutoNAT 2: what is said, as its specification has it; what a dial costs, and who may be dialed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from ipaddress import ip_address, ip_network
from typing import Any

import pytest
import trio
from multiaddr import Multiaddr

from petalnode.node.errors import unwrapped
from petalnode.node.network.addresses import Endpoint
from petalnode.node.network.nat import dial_back
from petalnode.node.testing import stream_pair
from petalnode.protocols import standard_pb2 as standard
from petalnode.protocols.delimited import DelimitedStream
from petalnode.protocols.framing import PeerError, ProtocolError, StreamTimeout
from petalnode.protocols.nat_traversal import (
    DialAnswer,
    DialStatus,
    ask_dial,
    bring_nonce,
    demand_bytes,
    receive_dial_request,
    take_nonce,
)

pytestmark = pytest.mark.virtual_time
AUTO, NONCE = standard.AutoNat2, 0x0102030405060708
ADDRS = ("/ip4/203.0.113.5/tcp/31330", "/ip6/2a00:77::1/tcp/1")
Side = Callable[[DelimitedStream], Awaitable[Any]]


async def converse(one: Side, other: Side) -> Any:
    """What `one` returns of its talk with `other`."""
    ends = stream_pair()
    with unwrapped(PeerError):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(other, DelimitedStream(ends[1], "us", max_message=8192))
            result = await one(DelimitedStream(ends[0], "them", max_message=8192))
            nursery.cancel_scope.cancel()
    return result


def answering(**response: Any) -> Side:
    async def answer(stream: DelimitedStream) -> None:
        await receive_dial_request(stream, timeout=5)
        await stream.send(AUTO(dial_response=AUTO.DialResponse(**response)), timeout=5)

    return answer


async def ask(stream: DelimitedStream) -> DialAnswer:
    return await ask_dial(stream, ADDRS, NONCE, timeout=5)


async def test_request_is_what_specification_says() -> None:
    async def heard(stream: DelimitedStream) -> bytes:
        return await stream.receive_bytes(timeout=5)

    first, other = (Multiaddr(addr).to_bytes() for addr in ADDRS)
    request = b"\x0a\x08" + first + b"\x0a" + bytes([len(other)]) + other + b"\x11" + NONCE.to_bytes(8, "little")

    async def asking(stream: DelimitedStream) -> None:
        with pytest.raises(PeerError):
            await ask(stream)

    assert await converse(heard, asking) == b"\x0a" + bytes([len(request)]) + request


@pytest.mark.parametrize(
    ("response", "found"),
    [
        ({"status": 200, "addr_idx": 1, "dial_status": 200}, DialAnswer(DialStatus.OK, addr=ADDRS[1])),
        ({"status": 200, "dial_status": 100}, DialAnswer(DialStatus.DIAL_ERROR, addr=ADDRS[0])),
        ({"status": 200, "dial_status": 101}, DialAnswer(DialStatus.INTERNAL_ERROR, addr=ADDRS[0])),
        ({"status": 200}, DialAnswer(DialStatus.INTERNAL_ERROR, addr=ADDRS[0])),
        ({"status": 200, "addr_idx": 2, "dial_status": 200}, DialAnswer(DialStatus.DIAL_REFUSED)),
        ({"status": 100}, DialAnswer(DialStatus.DIAL_REFUSED)),
        ({"status": 101}, DialAnswer(DialStatus.DIAL_REFUSED)),
        ({}, DialAnswer(DialStatus.DIAL_REFUSED)),
    ],
)
async def test_answers_are_understood(response: dict[str, Any], found: DialAnswer) -> None:
    assert await converse(ask, answering(**response)) == found


async def test_what_dial_costs_is_paid() -> None:
    """30,000 bytes in pieces of 4,096."""
    left: list[bytes] = []

    async def demanding(stream: DelimitedStream) -> None:
        await receive_dial_request(stream, timeout=5)
        await demand_bytes(stream, 1, 30_000, timeout=5)
        await stream.send(AUTO(dial_response=AUTO.DialResponse(status=200, addr_idx=1, dial_status=200)), timeout=5)
        with pytest.raises(PeerError):
            left.append(await stream.receive_bytes(timeout=5))

    assert (await converse(ask, demanding)).status is DialStatus.OK and left == []


async def test_who_asks_for_much_gets_nothing() -> None:
    async def greedy(stream: DelimitedStream) -> None:
        await receive_dial_request(stream, timeout=5)
        await stream.send(AUTO(dial_data_request=AUTO.DialDataRequest(num_bytes=100_001)), timeout=5)

    with pytest.raises(ProtocolError, match="100001 bytes"):
        await converse(ask, greedy)


@pytest.mark.parametrize(("size", "error"), [(0, ProtocolError), (1, StreamTimeout)], ids=["nothing", "slowly"])
async def test_who_does_not_pay_is_not_dialed(size: int, error: type[PeerError]) -> None:
    async def stingy(stream: DelimitedStream) -> None:
        while True:
            await trio.sleep(1)
            await stream.send(AUTO(dial_data_response=AUTO.DialDataResponse(data=bytes(size))), timeout=5)

    with pytest.raises(error):
        await converse(lambda stream: demand_bytes(stream, 0, 30_000, timeout=5), stingy)


async def test_unreadable_address_keeps_its_place() -> None:
    async def asking(stream: DelimitedStream) -> None:
        addrs = [b"\xff\xff", Multiaddr(ADDRS[0]).to_bytes()]
        await stream.send(AUTO(dial_request=AUTO.DialRequest(addrs=addrs, nonce=NONCE)), timeout=5)

    heard = await converse(lambda stream: receive_dial_request(stream, timeout=5), asking)
    assert heard == (("", ADDRS[0]), NONCE)


async def test_only_awaited_numbers_are_confirmed() -> None:
    def bringing(nonce: int) -> Side:
        return lambda stream: bring_nonce(stream, nonce, timeout=5)

    async def waiting(stream: DelimitedStream) -> int:
        return await take_nonce(stream, {NONCE}, timeout=5)

    assert await converse(waiting, bringing(NONCE)) == NONCE
    with pytest.raises(ProtocolError, match="nobody waits for"):
        await converse(waiting, bringing(NONCE + 1))


def at(ip: str) -> Endpoint:
    return Endpoint(ip_address(ip), 4001)


@pytest.mark.parametrize(
    ("asked", "seen", "networks", "taken"),
    [
        ("192.168.1.7", "192.168.1.7", ["192.168.1.0/24"], True),
        ("192.168.1.8", "192.168.1.7", ["192.168.1.0/24"], False),
        ("127.0.0.1", "11.77.0.1", ["192.168.1.0/24"], False),
        ("11.77.0.2", "11.77.0.1", ["192.168.1.0/24"], True),
        ("11.77.0.2", "11.77.0.1", ["127.0.0.0/8"], False),
        ("2a00:77::1", "11.77.0.1", ["192.168.1.0/24"], False),
        ("2a00:77::1", "11.77.0.1", ["192.168.1.0/24", "fe80::/64"], False),
        ("2a00:77::1", "11.77.0.1", ["192.168.1.0/24", "2a00:78::/64"], True),
        ("0.0.0.0", "0.0.0.0", ["192.168.1.0/24"], False),
    ],
)
def test_no_machine_of_private_network_is_dialed(
    monkeypatch: pytest.MonkeyPatch, asked: str, seen: str, networks: list[str], taken: bool
) -> None:
    """But who asks; nor one of a kind of address that this machine does not reach."""
    monkeypatch.setattr(dial_back, "own_networks", lambda: [ip_network(network) for network in networks])
    assert dial_back.may_be_dialed(at(asked), at(seen)) == taken
