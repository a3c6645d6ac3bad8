"""Many keys fill no node's memory for messages, and keep nobody else waiting, whatever was granted to them."""

from __future__ import annotations

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from petalnode.node.network.transport.memory import budgets_of
from petalnode.node.swarm.streams import ReceivedBytes
from petalnode.node.testing import message_streams, stream_pair
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.framing import MessageStream
from petalnode.protocols.inference import INFERENCE
from tests.attacks.one_server import header_of

pytestmark = pytest.mark.virtual_time

MIB = 1 << 20
ADDRESSES, KEYS, STREAMS = 5, 20, 16


class Node:
    """Serves streams of peers, each in a task that waits for a message."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self.received = ReceivedBytes(budgets_of(24 << 30).received)
        self.refusing = ReceivedBytes(self.received.most // 4, self.received)

    @property
    def taken(self) -> int:
        return self.received.taken + self.refusing.taken

    async def send(self, address: str, key: str, nbytes: int, payload: bytes = b"", granted: bool = True) -> trio.Event:
        """Sends what a message begins with; the event is set once all of it has come."""
        ends, has_come = stream_pair(INFERENCE.max_payload), trio.Event()
        ends[1].origin = address
        _, stream = message_streams(INFERENCE, key, "node", ends=ends, room=self.refusing)
        if granted:
            stream.grant()

        async def serve(stream: MessageStream[wire.InferenceFrame]) -> None:
            await stream.receive(timeout=None)
            has_come.set()
            await stream.close()

        self._nursery.start_soon(serve, stream)
        await ends[0].write(header_of(wire.InferenceFrame(tensors=[wire.Tensor(nbytes=nbytes)])) + payload)
        await wait_all_tasks_blocked()
        return has_come


async def attack(node: Node, nbytes: int, granted: bool) -> None:
    """Each message is begun, and never ends."""
    for number in range(KEYS * STREAMS):
        await node.send(f"192.0.2.{number % ADDRESSES}", f"key {number % KEYS}", nbytes, granted=granted)


@pytest.mark.parametrize(
    ("nbytes", "granted", "most"),
    [(4 * MIB, True, 64 * MIB), (INFERENCE.max_payload, True, 64 * MIB), (MIB, False, 16 * MIB)],
)
async def test_messages_of_many_keys_that_never_end(nbytes: int, granted: bool, most: int) -> None:
    """They took 384 MiB. An honest message, as large as a step usually is, waits for none of them."""
    async with trio.open_nursery() as nursery:
        node = Node(nursery)
        await attack(node, nbytes, granted)
        assert node.taken <= most + MIB
        taken = node.taken
        for size in (2 * MIB, 3 * MIB) if granted else (64 << 10, 8 * MIB):
            has_come = await node.send("198.51.100.7", "honest", size, bytes(size), granted=granted or size > MIB)
            assert has_come.is_set()
        assert node.taken == taken
        nursery.cancel_scope.cancel()


async def test_one_client_alone_sends_any_messages_at_once() -> None:
    async with trio.open_nursery() as nursery:
        node = Node(nursery)
        assert (await node.send("198.51.100.7", "alone", INFERENCE.max_payload, bytes(INFERENCE.max_payload))).is_set()
        for _ in range(10):
            await node.send("198.51.100.7", "alone", MIB)
        assert node.taken == 10 * MIB
        nursery.cancel_scope.cancel()


async def test_a_neighbour_of_many_streams_leaves_room() -> None:
    """Both are behind one NAT, or one relay."""
    async with trio.open_nursery() as nursery:
        node = Node(nursery)
        for _ in range(100):
            await node.send("192.0.2.1", "greedy", MIB)
        assert (await node.send("192.0.2.1", "honest", 3 * MIB, bytes(3 * MIB))).is_set()
        nursery.cancel_scope.cancel()
