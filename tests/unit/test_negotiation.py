"""Our way of agreeing on protocols, with itself and with libp2p's."""

from __future__ import annotations

import itertools

import pytest
import trio
from libp2p.io.abc import ReadWriteCloser
from libp2p.protocol_muxer.exceptions import MultiselectClientError, MultiselectError
from libp2p.protocol_muxer.multiselect import Multiselect
from libp2p.protocol_muxer.multiselect_client import MULTISELECT_PROTOCOL_ID, MultiselectClient
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.utils import encode_delim
from libp2p.utils.varint import encode_uvarint
from trio.testing import memory_stream_pair

from petalnode.node.network.transport.negotiation import MAX_NAME, MAX_ROUNDS, OneAnswer, OneRoundTrip, question

pytestmark = pytest.mark.virtual_time


class Pipe(ReadWriteCloser):
    def __init__(self, stream: trio.StapledStream) -> None:
        self.stream = stream
        self.writes = 0

    async def read(self, n: int | None = None) -> bytes:
        return bytes(await self.stream.receive_some(n))

    async def write(self, data: bytes) -> None:
        self.writes += 1
        await self.stream.send_all(data)

    async def close(self) -> None:
        await self.stream.aclose()

    def get_remote_address(self) -> None:
        return None


def pipes() -> tuple[Pipe, Pipe]:
    left, right = memory_stream_pair()
    return Pipe(left), Pipe(right)


@pytest.mark.parametrize(
    ("initiator", "responder"), list(itertools.product((MultiselectClient, OneRoundTrip), (Multiselect, OneAnswer)))
)
async def test_both_ends_agree_also_with_libp2ps(initiator, responder):
    left, right = pipes()
    agreed = []

    async def respond() -> None:
        protocol, _ = await responder({"/a/1": None, "/b/1": None}).negotiate(MultiselectCommunicator(right), 5)
        agreed.append(protocol)

    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(respond)
            agreed.append(await initiator().select_one_of(["/b/1"], MultiselectCommunicator(left), 5))
    assert agreed == ["/b/1", "/b/1"]


@pytest.mark.parametrize("responder", [Multiselect, OneAnswer])
async def test_protocol_that_nobody_speaks_is_refused_at_once(responder):
    left, right = pipes()

    async def respond() -> None:
        with pytest.raises(MultiselectError):
            await responder({"/a/1": None}).negotiate(MultiselectCommunicator(right), 5)

    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(respond)
            with pytest.raises(MultiselectClientError, match="does not speak /b/1"):
                await OneRoundTrip().select_one_of(["/b/1"], MultiselectCommunicator(left), 5)
            await left.close()


async def test_asking_takes_one_write_and_consent_is_question():
    left, right = pipes()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(OneAnswer({"/a/1": None}).negotiate, MultiselectCommunicator(right), 5)
        await left.write(question("/a/1"))
        answer = b""
        while len(answer) < len(question("/a/1")):
            answer += await left.read(1024)
    assert answer == question("/a/1")


@pytest.mark.parametrize("responder", [Multiselect, OneAnswer])
async def test_several_protocols_are_asked_for_one_after_other(responder):
    left, right = pipes()
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(responder({"/a/1": None, "/b/1": None}).negotiate, MultiselectCommunicator(right), 5)
            agreed = await OneRoundTrip().select_one_of(["/x/1", "/b/1"], MultiselectCommunicator(left), 5)
    assert agreed == "/b/1"


@pytest.mark.parametrize("goes", [True, False], ids=["goes", "is silent"])
async def test_peer_that_goes_or_is_silent_is_error(goes):
    left, right = pipes()
    if goes:
        await right.stream.send_stream.aclose()
    begun = trio.current_time()
    with pytest.raises(MultiselectClientError, match="went away" if goes else "did not agree on /b/1 within 5 s"):
        await OneRoundTrip().select_one_of(["/b/1"], MultiselectCommunicator(left), 5)
    assert trio.current_time() - begun == (0 if goes else 5)


async def test_peer_may_ask_for_so_many_protocols_only() -> None:
    """A stream's window holds 50,000 questions, each of which cost 0.1 ms."""
    left, right = pipes()
    await left.write(encode_delim(MULTISELECT_PROTOCOL_ID.encode()) + encode_delim(b"/x") * 1000)
    with pytest.raises(MultiselectError):
        await OneAnswer({"/a/1": None}).negotiate(MultiselectCommunicator(right), 5)
    assert right.writes <= MAX_ROUNDS + 1
    assert trio.current_time() == 0


@pytest.mark.parametrize(
    "agree",
    [
        lambda conn: OneRoundTrip().select_one_of(["/b/1"], conn, 5),
        lambda conn: OneRoundTrip().select_one_of(["/a/1", "/b/1"], conn, 5),
        lambda conn: OneAnswer({"/a/1": None}).negotiate(conn, 5),
    ],
    ids=["asks for one", "asks for several", "answers"],
)
async def test_a_name_without_end_is_not_waited_for(agree) -> None:
    left, right = pipes()
    endless = encode_uvarint(1 << 30) + bytes(2 * MAX_NAME)
    await left.write(encode_delim(MULTISELECT_PROTOCOL_ID.encode()) + endless)
    with pytest.raises((MultiselectClientError, MultiselectError)):
        await agree(MultiselectCommunicator(right))
    assert trio.current_time() == 0


async def test_the_longest_name_may_be_asked_for() -> None:
    left, right = pipes()
    name = "/" + "a" * (MAX_NAME - 2)
    await left.write(question(name))
    assert (await OneAnswer({name: None}).negotiate(MultiselectCommunicator(right), 5))[0] == name


async def test_what_ends_in_no_newline_is_no_name() -> None:
    left, right = pipes()
    await left.write(encode_delim(MULTISELECT_PROTOCOL_ID.encode()) + b"\x05/a/1x")
    with pytest.raises(MultiselectError):
        await OneAnswer({"/a/1": None}).negotiate(MultiselectCommunicator(right), 5)
