"""AutoNAT, identify and DCUtR: what is said, byte for byte as libp2p says it, and what is not taken for an answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st
from libp2p.host.autonat.pb import autonat_pb2
from libp2p.identity.identify.pb import identify_pb2
from libp2p.relay.circuit_v2.pb import dcutr_pb2
from multiaddr import Multiaddr

from petalnode.crypto.identity import Identity, peer_id_to_bytes
from petalnode.node.errors import unwrapped
from petalnode.node.testing import stream_pair
from petalnode.protocols import standard_pb2 as standard
from petalnode.protocols.delimited import DelimitedStream
from petalnode.protocols.framing import PeerError, ProtocolError, StreamClosed
from petalnode.protocols.nat_traversal import (
    DialAnswer,
    DialStatus,
    answer_dial_back,
    ask_dial_back,
    ask_identify,
    exchange_first,
    exchange_second,
    give_sign,
)
from tests.node_inspection import raw_of

US, THEM = Identity.generate().peer_id, Identity.generate().peer_id
ADDRS = ("/ip4/203.0.113.5/tcp/31330", "/ip6/2a00:77::1/tcp/1")


async def converse(
    one: Callable[[DelimitedStream], Awaitable[Any]], other: Callable[[DelimitedStream], Awaitable[Any]]
) -> Any:
    """What `one` returns of its talk with `other`."""
    ends = stream_pair()
    with unwrapped(PeerError):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(other, DelimitedStream(ends[1], US))
            result = await one(DelimitedStream(ends[0], THEM))
            nursery.cancel_scope.cancel()
    return result


def binary(addrs: tuple[str, ...]) -> list[bytes]:
    return [Multiaddr(addr).to_bytes() for addr in addrs]


# --- AutoNAT


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    "answer",
    [
        DialAnswer(DialStatus.OK, addr=ADDRS[0]),
        DialAnswer(DialStatus.DIAL_ERROR, "all dials failed"),
        DialAnswer(DialStatus.DIAL_REFUSED, "busy"),
    ],
)
async def test_a_dial_back_is_asked_for_and_answered(answer: DialAnswer) -> None:
    asked = []

    async def decide(peer_id: str, addrs: tuple[str, ...]) -> DialAnswer:
        asked.append((peer_id, addrs))
        return answer

    heard = await converse(
        lambda stream: ask_dial_back(stream, US, ADDRS, timeout=5),
        lambda stream: answer_dial_back(stream, decide, timeout=5),
    )
    assert heard == answer and asked == [(US, ADDRS)]


def test_autonat_messages_are_libp2ps() -> None:
    theirs = autonat_pb2.Message()
    theirs.type = autonat_pb2.Message.DIAL
    theirs.dial.peer.id = peer_id_to_bytes(US)
    theirs.dial.peer.addrs.extend(binary(ADDRS))
    ours = standard.AutoNat(type=standard.AutoNat.DIAL)
    ours.dial.peer.id = peer_id_to_bytes(US)
    ours.dial.peer.addrs.extend(binary(ADDRS))
    assert ours.SerializeToString() == theirs.SerializeToString()
    theirs = autonat_pb2.Message(type=autonat_pb2.Message.DIAL_RESPONSE)
    theirs.dialResponse.status = autonat_pb2.Message.E_DIAL_REFUSED
    theirs.dialResponse.statusText = "no"
    read = standard.AutoNat.FromString(theirs.SerializeToString())
    assert read.dial_response.status == DialStatus.DIAL_REFUSED and read.dial_response.status_text == "no"


HERE = standard.AutoNat.Dial(peer=standard.AutoNat.PeerInfo(id=peer_id_to_bytes(US), addrs=[]))


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    "asked",
    [
        standard.AutoNat(type=standard.AutoNat.DIAL_RESPONSE),
        standard.AutoNat(type=standard.AutoNat.DIAL_RESPONSE, dial=HERE),
        standard.AutoNat(type=standard.AutoNat.DIAL),
        standard.AutoNat(type=standard.AutoNat.DIAL, dial=standard.AutoNat.Dial()),
    ],
    ids=["an answer", "both", "no peer", "nothing"],
)
async def test_what_is_no_request_is_answered_as_such(asked: standard.AutoNat) -> None:
    async def nonsense(stream: DelimitedStream) -> standard.AutoNat:
        await stream.send(asked, timeout=5)
        return await stream.receive(standard.AutoNat, timeout=5)

    async def never(peer_id: str, addrs: tuple[str, ...]) -> DialAnswer:
        raise AssertionError

    answer = await converse(nonsense, lambda stream: answer_dial_back(stream, never, timeout=5))
    assert answer.dial_response.status == DialStatus.BAD_REQUEST
    assert "no request" in answer.dial_response.status_text


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    "said",
    [
        standard.AutoNat(type=standard.AutoNat.DIAL_RESPONSE, dial_response=standard.AutoNat.DialResponse()),
        standard.AutoNat(
            type=standard.AutoNat.DIAL,
            dial_response=standard.AutoNat.DialResponse(status=standard.AutoNat.OK),
        ),
    ],
    ids=["no status", "a question"],
)
async def test_an_answer_without_a_status_says_nothing(said: standard.AutoNat) -> None:
    async def answer(stream: DelimitedStream) -> None:
        await stream.receive(standard.AutoNat, timeout=5)
        await stream.send(said, timeout=5)

    found = await converse(lambda stream: ask_dial_back(stream, US, ADDRS, timeout=5), answer)
    assert found == DialAnswer(DialStatus.INTERNAL_ERROR, "the answer says nothing")


@pytest.mark.virtual_time
async def test_unreadable_address_in_answer_is_left_out() -> None:
    async def answer(stream: DelimitedStream) -> None:
        await stream.receive(standard.AutoNat, timeout=5)
        response = standard.AutoNat.DialResponse(status=standard.AutoNat.OK, addr=b"\xff\xff", status_text="a\x00b")
        await stream.send(standard.AutoNat(type=standard.AutoNat.DIAL_RESPONSE, dial_response=response), timeout=5)

    assert await converse(lambda stream: ask_dial_back(stream, US, ADDRS, timeout=5), answer) == DialAnswer(
        DialStatus.OK, "ab", None
    )


# --- identify


@pytest.mark.virtual_time
async def test_identify_is_read() -> None:
    async def answer(stream: DelimitedStream) -> None:
        message = identify_pb2.Identify(
            agent_version="x", listen_addrs=binary(ADDRS), observed_addr=binary(ADDRS)[0], protocols=["/a", "/b"]
        )
        await stream.send(message, timeout=5)

    identified = await converse(lambda stream: ask_identify(stream, timeout=5), answer)
    assert (identified.observed, identified.addrs, identified.protocols) == (ADDRS[0], ADDRS, ("/a", "/b"))


# --- DCUtR


@pytest.mark.virtual_time
async def test_two_agree_on_when_to_dial() -> None:
    heard = []

    async def second(stream: DelimitedStream) -> None:
        heard.append(await exchange_second(stream, ADDRS[:1], timeout=5))

    async def first(stream: DelimitedStream) -> tuple[tuple[str, ...], float]:
        result = await exchange_first(stream, ADDRS, timeout=5)
        assert not heard
        await give_sign(stream, timeout=5)
        await trio.testing.wait_all_tasks_blocked()
        return result

    addrs, rtt = await converse(first, second)
    assert addrs == ADDRS[:1] and 0 <= rtt < 1 and heard == [ADDRS]


def test_punch_messages_are_libp2ps() -> None:
    theirs = dcutr_pb2.HolePunch(type=dcutr_pb2.HolePunch.CONNECT, ObsAddrs=binary(ADDRS))
    ours = standard.HolePunch(type=standard.HolePunch.CONNECT, observed_addrs=binary(ADDRS))
    assert ours.SerializeToString() == theirs.SerializeToString()
    theirs = dcutr_pb2.HolePunch(type=dcutr_pb2.HolePunch.SYNC)
    assert standard.HolePunch(type=standard.HolePunch.SYNC).SerializeToString() == theirs.SerializeToString()


@pytest.mark.virtual_time
async def test_who_gives_sign_too_early_is_not_dialed() -> None:
    async def hasty(stream: DelimitedStream) -> None:
        await give_sign(stream, timeout=5)

    with pytest.raises(ProtocolError, match="no addresses"):
        await converse(lambda stream: exchange_second(stream, ADDRS, timeout=5), hasty)


# --- the framing that all share


@pytest.mark.virtual_time
async def test_nothing_behind_a_message_is_taken() -> None:
    async def both(stream: DelimitedStream) -> None:
        await stream.send(standard.HolePunch(type=standard.HolePunch.SYNC), timeout=5)
        await raw_of(stream).write(b"what follows")

    async def one(stream: DelimitedStream) -> bytes:
        await stream.receive(standard.HolePunch, timeout=5)
        return await raw_of(stream).read(100)

    assert await converse(one, both) == b"what follows"


@pytest.mark.virtual_time
@given(st.binary(max_size=40))
async def test_garbage_never_raises_anything_but_a_peers_error(garbage: bytes) -> None:
    async def send(stream: DelimitedStream) -> None:
        await raw_of(stream).write(garbage or b"\0")
        await raw_of(stream).close()

    async def receive(stream: DelimitedStream) -> Any:
        try:
            return await stream.receive(standard.AutoNat, timeout=5)
        except PeerError:
            return None

    await converse(receive, send)


@pytest.mark.virtual_time
async def test_too_long_a_message_is_refused_unread() -> None:
    async def send(stream: DelimitedStream) -> None:
        await raw_of(stream).write(b"\x81\x20")  # 4097 bytes to come
        await trio.sleep_forever()

    with pytest.raises(ProtocolError, match="4097 bytes; 4096 are allowed"):
        await converse(lambda stream: stream.receive(standard.AutoNat, timeout=5), send)


@pytest.mark.virtual_time
async def test_an_ended_stream_is_told_as_such() -> None:
    with pytest.raises(StreamClosed):
        await converse(lambda stream: stream.receive(standard.AutoNat, timeout=5), lambda stream: stream.close())
