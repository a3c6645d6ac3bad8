"""The memory that all streams of a node share for what they receive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from petalnode.crypto.identity import Identity
from petalnode.node.swarm.streams import MessageStreams, ReceivedBytes
from petalnode.node.testing import message_streams, stream_pair
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.framing import LEAST_RATE, PATIENCE, MessageStream, StreamClosed, StreamTimeout
from petalnode.protocols.inference import INFERENCE, PUSH
from tests.attacks.one_server import header_of

MIB = 1 << 20


HERE, THERE = "192.0.2.1", "192.0.2.2"


async def test_peer_waits_for_its_own_share_alone() -> None:
    room, granted = ReceivedBytes(most=900), trio.Event()

    async def more() -> None:
        await room.take(HERE, "one", 100)
        granted.set()

    assert room.take_nowait(HERE, "one", 100)
    assert room.take_nowait(HERE, "one", 300)  # the one more
    assert not room.take_nowait(HERE, "one", 1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(more)
        await wait_all_tasks_blocked()
        assert room.take_nowait(HERE, "its neighbour", 30) and room.take_nowait(THERE, "other", 80)
        assert not room.take_nowait(THERE, "other", 10)
        assert not granted.is_set() and room.taken == 510 and room.of(HERE, "one") == 400
        room.give_back(HERE, "one", 100)
        await wait_all_tasks_blocked()
        assert not granted.is_set()
        room.give_back(HERE, "one", 300)
        await granted.wait()
    assert room.taken == 210 and room.of(HERE, "one") == 100
    room.give_back(HERE, "one", 100)
    room.give_back(HERE, "its neighbour", 30)
    room.give_back(THERE, "other", 80)
    assert room.taken == 0 and not room._of and room.take_nowait(THERE, "other", 100)


async def test_peers_are_served_in_order_and_leavers_forgotten() -> None:
    room, granted = ReceivedBytes(most=90), []

    async def take(peer_id: str, nbytes: int) -> None:
        await room.take(HERE, peer_id, nbytes)
        granted.append((peer_id, nbytes))

    assert room.take_nowait(THERE, "another", 60)
    async with trio.open_nursery() as nursery:
        large = trio.CancelScope()

        async def give_up() -> None:
            with large:
                await take("one", 80)

        nursery.start_soon(give_up)
        await wait_all_tasks_blocked()
        nursery.start_soon(take, "one", 5)
        await wait_all_tasks_blocked()
        assert not granted and not room.take_nowait(HERE, "one", 1)
        assert room.take_nowait(HERE, "its neighbour", 1)
        large.cancel()
    assert granted == [("one", 5)] and room.taken == 66


async def test_large_messages_take_turns_by_address() -> None:
    room, granted = ReceivedBytes(most=10), []

    async def take(origin: str, peer_id: str) -> None:
        await room.take(origin, peer_id, 100)
        granted.append(peer_id)

    assert room.take_nowait(HERE, "first", 100) and not room.take_nowait(HERE, "second", 100)
    async with trio.open_nursery() as nursery:
        for origin, peer_id in [(HERE, "a"), (HERE, "b"), (HERE, "c"), (THERE, "honest")]:
            nursery.start_soon(take, origin, peer_id)
            await wait_all_tasks_blocked()
        for origin, peer_id in [(HERE, "first"), (HERE, "a"), (THERE, "honest"), (HERE, "b")]:
            assert room.taken == 100
            room.give_back(origin, peer_id, 100)
            await wait_all_tasks_blocked()
    assert granted == ["a", "honest", "b", "c"]


async def test_who_holds_little_goes_before_who_holds_much() -> None:
    room, granted = ReceivedBytes(most=100), []

    async def take(origin: str, peer_id: str) -> None:
        await room.take(origin, peer_id, 50)
        granted.append(peer_id)

    assert room.take_nowait(HERE, "much", 5) and room.take_nowait(HERE, "much", 500)
    async with trio.open_nursery() as nursery:
        for origin, peer_id in [(HERE, "much"), (HERE, "its neighbour"), (THERE, "little")]:
            nursery.start_soon(take, origin, peer_id)
            await wait_all_tasks_blocked()
        room.give_back(HERE, "much", 500)
        for origin, peer_id in [(THERE, "little"), (HERE, "its neighbour")]:
            await wait_all_tasks_blocked()
            room.give_back(origin, peer_id, 50)
    assert granted == ["little", "its neighbour", "much"]


@pytest.mark.virtual_time
@pytest.mark.parametrize("keeps", [True, False])
async def test_a_stream_counts_what_it_holds(keeps: bool) -> None:
    """A server's until it asks for more, a client's until it is read."""
    room, ends = ReceivedBytes(), stream_pair(4 * MIB)
    ours, _ = message_streams(PUSH, "one", "other", ends=ends)
    theirs = MessageStream(ends[1], PUSH, "one", room=room, keeps_room=keeps)
    frame = wire.PushFrame(tensors=[wire.Tensor()])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: ours.send(frame, [bytes(MIB)], timeout=5))
        await theirs.receive(timeout=5)
    assert room.taken == (MIB if keeps else 0)
    with trio.move_on_after(1):
        await theirs.receive(timeout=None)
    assert room.taken == 0
    await ends[0].write(header_of(wire.PushFrame(tensors=[wire.Tensor(nbytes=MIB)])))
    with trio.move_on_after(1):
        await theirs.receive(timeout=None)
    assert room.of("", "one") == MIB
    await theirs.reset()
    assert room.taken == 0


@pytest.mark.parametrize("payload", [b"", bytes(MIB)])
async def test_stream_ending_while_its_reader_waits_keeps_none(payload: bytes) -> None:
    room, ends = ReceivedBytes(most=0), stream_pair(4 * MIB)
    _, theirs = message_streams(PUSH, "one", "other", ends=ends, room=room)
    assert room.take_nowait(HERE, "another", MIB)
    await ends[0].write(header_of(wire.PushFrame(tensors=[wire.Tensor(nbytes=MIB)])) + payload)

    async def receive() -> None:
        with pytest.raises(StreamClosed, match="closed on this side"):
            await theirs.receive(timeout=None)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(receive)
        await wait_all_tasks_blocked()
        await theirs.close()
        room.give_back(HERE, "another", MIB)
    await theirs.close()  # as who serves the stream does at the end
    assert room.taken == 0


@pytest.mark.virtual_time
@pytest.mark.parametrize("begun", [header_of(wire.PushFrame(tensors=[wire.Tensor(nbytes=64 * MIB)])), b"\xff", b"\x20"])
async def test_a_message_that_trickles_ends_its_stream(begun: bytes) -> None:
    ends = stream_pair()
    _, theirs = message_streams(PUSH, "one", "other", ends=ends)

    async def trickle() -> None:
        await ends[0].write(begun)
        while True:
            await trio.sleep(40)
            await ends[0].write(b"\x80")

    start = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trickle)
        await trio.sleep(1)
        with pytest.raises(StreamClosed, match="slowly"):
            await theirs.receive(timeout=1800)
        assert trio.current_time() - start < PATIENCE + 64 * MIB / LEAST_RATE + 2
        with pytest.raises(StreamClosed):
            await theirs.receive(timeout=1800)
        assert ends[1].is_lost
        nursery.cancel_scope.cancel()


@pytest.mark.virtual_time
async def test_reader_that_pauses_does_not_blame_peer() -> None:
    ends = stream_pair(4 * MIB)
    _, theirs = message_streams(PUSH, "one", "other", ends=ends)
    header = wire.PushFrame(tensors=[wire.Tensor(nbytes=MIB)])
    await ends[0].write(header_of(header))
    for _ in range(20):
        with trio.move_on_after(1):
            await theirs.receive(timeout=None)
        await trio.sleep(100)
    await ends[0].write(bytes(MIB))
    _, payloads = await theirs.receive(timeout=1)
    assert payloads == [bytes(MIB)]


@pytest.mark.virtual_time
@pytest.mark.parametrize("end", ["cut", "slow"])
async def test_never_whole_message_takes_no_lasting_memory(end: str) -> None:
    """The peer begins a large message and leaves, or goes to sleep; the owner of the stream has not closed it yet."""
    room, ends = ReceivedBytes(), stream_pair()
    sender, receiver = ends
    stream = MessageStream(receiver, INFERENCE, "sender", room=room)
    frame = wire.InferenceFrame(tensors=[wire.Tensor(shape=[MIB], dtype="int8", codec="none", nbytes=MIB)])
    await sender.write(header_of(frame) + bytes(1000))

    async def leave() -> None:
        await wait_all_tasks_blocked()
        assert room.taken == MIB
        if end == "cut":
            sender.cut()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(leave)
        with pytest.raises(StreamClosed):
            await stream.receive(timeout=None)
    assert room.taken == 0


class Host:
    """A host that reaches those whose addresses it knows, but for one who is silent."""

    def __init__(self) -> None:
        self.known: set[str] = set()
        self.handlers: dict[str, Any] = {}

    def learn(self, peer_id: str, addrs: Sequence[str]) -> None:
        if addrs:
            self.known.add(peer_id)

    remember = learn

    def knows(self, peer_id: str) -> bool:
        return peer_id in self.known

    def origin_of(self, peer_id: str) -> str:
        return HERE

    def set_stream_handler(self, protocol: str, handler: Any) -> None:
        self.handlers[protocol] = handler

    async def open_stream(self, peer_id: str, protocol: str, *, direct: bool) -> Any:
        if peer_id == "silent":
            await trio.sleep_forever()
        if not self.knows(peer_id):
            raise ConnectionError(f"nobody knows {peer_id}")
        return stream_pair()[0]


@pytest.mark.virtual_time
async def test_unknown_peer_is_looked_for() -> None:
    announced, found = {"announced": ("addr",)}, []

    class Finder:
        def addrs_of(self, peer_id: str) -> tuple[str, ...]:
            return announced.get(peer_id, ())

        async def find(self, peer_id: str) -> None:
            found.append(peer_id)
            if peer_id == "found":
                announced[peer_id] = ("addr",)

    streams = MessageStreams(Host())  # type: ignore[arg-type]
    streams.finder = Finder()

    async def reach(peer_id: str, **options: Any) -> None:
        await streams.new_stream(peer_id, PUSH, timeout=1, **options)

    await reach("announced")
    streams.host.remember("given", ["addr"])
    await reach("given")
    with pytest.raises(StreamClosed, match="nobody knows found"):
        await reach("found", direct=True)
    assert not found
    await reach("found")
    await reach("found")
    for unreached, error in (("unknown", StreamClosed), ("silent", StreamTimeout)):
        with pytest.raises(error):
            await reach(unreached)
    assert found == ["found", "unknown", "silent"]


@pytest.mark.virtual_time
@pytest.mark.parametrize("in_turn", [True, False])
async def test_served_stream_waits_for_turns_with_its_message(in_turn: bool) -> None:
    host, turns = Host(), 0
    streams = MessageStreams(host)  # type: ignore[arg-type]

    async def hold(stream: MessageStream[wire.PushFrame]) -> None:
        await stream.receive(timeout=1)
        assert streams.received_ungranted.taken == MIB

    async def turn() -> None:
        nonlocal turns
        turns += 1

    sender, receiver = stream_pair(4 * MIB)
    receiver.turn = turn  # type: ignore[method-assign]
    streams.set_handler(PUSH, hold, in_turn=in_turn)
    await sender.write(header_of(wire.PushFrame(tensors=[wire.Tensor(nbytes=MIB)])) + bytes(MIB))
    await host.handlers[PUSH.id](receiver, Identity.generate().peer_id)
    assert turns == in_turn and streams.received_ungranted.taken == 0
    assert await sender.read(1) == b""  # it was closed, and not reset as after an error
