"""Circuits through our relay, between hosts of this process: what they carry, what is refused, what is left behind."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest
import trio
from libp2p.transport.tcp.tcp import TCP
from multiaddr import Multiaddr

from petalnode.node.network.host import Host
from petalnode.node.network.nat.relay import RelayStats
from petalnode.node.network.transport import connections
from petalnode.node.network.transport.stream_bytes import StreamBytes
from petalnode.protocols import standard_pb2 as pb
from petalnode.protocols.circuit import (
    HOP,
    STOP,
    CircuitLimit,
    RelayRefused,
    answer_stop,
    ask_reservation,
    ask_stop,
    receive_stop,
)
from petalnode.protocols.delimited import DelimitedStream
from tests.node_inspection import raw_of, relay_at
from tests.swarm.relay_node import ECHO
from tests.swarm.relays import echoed, host_here, received, relay_here, reserve, until

MIB = 1024 * 1024


async def raw_target(host: Host, relay: Host, arrived: trio.MemorySendChannel[StreamBytes]) -> list[str]:
    """Makes `host` hand over what comes through the relay as it is, without making a connection of it."""

    async def accept(raw: StreamBytes, relay_id: str) -> None:
        stream = DelimitedStream(raw, relay_id)
        await receive_stop(stream, timeout=60)
        await answer_stop(stream, pb.OK, timeout=60)
        raw.grant()
        await arrived.send(raw)
        await trio.sleep_forever()

    addrs = await reserve(host, relay)
    host.set_stream_handler(STOP, accept)
    return addrs


async def test_what_is_sent_through_a_relay_comes_back():
    async with relay_here() as (relay, service), host_here() as target, host_here() as client:
        client.remember(target.peer_id, await reserve(target, relay))
        stream = await client.open_stream(target.peer_id, ECHO)
        assert not stream.path.direct
        assert stream.path.relay == relay.peer_id
        for size in (1, 16 * 1024, 65477, 65507, 3 * MIB):
            await echoed(stream, bytes(range(256)) * (size // 256) + bytes(size % 256))
        (path,) = target.paths(client.peer_id)
        assert path.inbound and path.relay == relay.peer_id
        assert not client.is_direct(target.peer_id)
        with pytest.raises(ConnectionError, match="no direct connection"):
            await client.open_stream(target.peer_id, ECHO, direct=True)
        # And the other way on the same connection.
        back = await target.open_stream(client.peer_id, ECHO)
        await echoed(back, b"x" * MIB)
        assert service.stats.circuits == 1
        await client.close_path(target.peer_id)
        await until(lambda: service.stats.circuits == 0, "the circuit's place is free")


async def test_hundreds_of_messages_pass():
    async with relay_here() as (relay, _), host_here() as target, host_here() as client:
        client.remember(target.peer_id, await reserve(target, relay))
        client.remember(relay.peer_id, relay.addrs())
        for peer in (relay, target):
            stream = await client.open_stream(peer.peer_id, ECHO)
            for _ in range(300):
                await stream.write(bytes(16 * 1024))
                await received(stream, 16 * 1024)


async def test_direct_connection_is_preferred_at_once():
    async with relay_here() as (relay, _), host_here(listens=True) as target, host_here() as client:
        paths = []
        client.on_connected(lambda peer_id, path: paths.append((peer_id, path.direct)))
        client.remember(target.peer_id, await reserve(target, relay))
        relayed = await client.open_stream(target.peer_id, ECHO)
        client.remember(target.peer_id, target.addrs())
        await client.connect(target.peer_id, direct=True)
        assert [path.direct for path in client.paths(target.peer_id)] == [True, False]
        direct = await client.open_stream(target.peer_id, ECHO)
        assert direct.path.direct and direct.path.relay is None
        await echoed(relayed, b"the old stream lives")
        await client.close_path(target.peer_id, relayed_only=True)
        await echoed(direct, b"and survives it")
        assert client.is_direct(target.peer_id)
        assert paths == [(relay.peer_id, True), (target.peer_id, False), (target.peer_id, True)]


async def test_dead_addresses_do_not_keep_living_circuit_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing ever answers at the dead ones, and no deadline ends that."""
    dial = TCP.dial

    async def never(transport: TCP, addr: Multiaddr) -> Any:
        if "/192.0.2.1/" in str(addr):
            await trio.sleep_forever()
        return await dial(transport, addr)

    monkeypatch.setattr(TCP, "dial", never)
    monkeypatch.setattr(connections, "DIALING", replace(connections.DIALING, directly=1e6, by_circuit=1e6))
    async with relay_here() as (relay, _), host_here() as target, host_here() as client:
        dead = [f"/ip4/127.0.0.1/tcp/1/p2p/{target.peer_id}", f"/ip4/192.0.2.1/tcp/9/p2p/{target.peer_id}"]
        circuits = await reserve(target, relay)
        dead.append(f"/ip4/192.0.2.1/tcp/9/p2p/{relay.peer_id}/p2p-circuit/p2p/{target.peer_id}")
        client.remember(target.peer_id, [*dead, *circuits])
        for _ in range(2):
            with trio.fail_after(60):
                stream = await client.open_stream(target.peer_id, ECHO)
                await echoed(stream, b"here")
            await client.disconnect(target.peer_id)


async def test_both_ends_of_circuit_hear_of_others_end():
    send, arrived = trio.open_memory_channel[StreamBytes](8)
    async with relay_here() as (relay, service), host_here() as target, host_here() as client:
        await raw_target(target, relay, send)
        client.remember(relay.peer_id, relay.addrs())
        here = await client.circuits.open(relay.peer_id, target.peer_id)
        there = await arrived.receive()
        with trio.fail_after(60):
            # Closed in one direction, the other goes on.
            await here.write(b"all I have to say")
            await here.close_write()
            assert await received(there, 17) == b"all I have to say"
            assert await there.read(1) == b""
            await there.write(b"and my answer")
            assert await received(here, 13) == b"and my answer"
            await there.close_write()
            assert await here.read(1) == b""
            await until(lambda: service.stats.circuits == 0, "a circuit that both have closed is gone")
            # What was said before a reset arrives, then the reset.
            here = await client.circuits.open(relay.peer_id, target.peer_id)
            there = await arrived.receive()
            await there.write(b"mind")
            assert await received(here, 4) == b"mind"
            await here.reset()
            with pytest.raises(ConnectionResetError):
                await there.read(1)
            await until(lambda: service.stats.circuits == 0, "a circuit that was reset is gone")


async def test_unreading_peer_holds_up_itself_only():
    send, arrived = trio.open_memory_channel[StreamBytes](8)
    async with relay_here() as (relay, _), host_here() as target, host_here() as client:
        await raw_target(target, relay, send)
        client.remember(relay.peer_id, relay.addrs())
        stuck = await client.circuits.open(relay.peer_id, target.peer_id)
        unread = await arrived.receive()
        sent = 0
        with contextlib.suppress(trio.TooSlowError):
            while True:
                with trio.fail_after(1.5 if sent > MIB else 60):  # so much surely finds room
                    await stuck.write(bytes(65507))
                sent += 65507
        # The target's window, the relay's, and what waits for sockets; not the sender's patience.
        assert MIB < sent < 8 * MIB
        other = await client.circuits.open(relay.peer_id, target.peer_id)
        there = await arrived.receive()
        with trio.fail_after(60):
            await other.write(b"this one is read")
            assert await received(there, 16) == b"this one is read"
            assert await received(unread, sent) == bytes(sent)


async def refused(asking: object) -> int:
    with pytest.raises(RelayRefused) as caught:
        await asking
    return caught.value.status


async def test_disallowed_is_refused_with_the_right_status():
    limits = {"reservations": 1, "circuits_per_peer": 2}
    async with relay_here(**limits) as (relay, service), host_here() as target, host_here() as client:
        target_addrs = await reserve(target, relay)
        client.remember(relay.peer_id, relay.addrs())
        assert await refused(client.circuits.reserve(relay.peer_id)) == pb.RESERVATION_REFUSED
        assert (await target.circuits.reserve(relay.peer_id)).addrs  # who has one, renews it

        with pytest.raises(ConnectionError, match="no reservation there"):
            await client.circuits.open(relay.peer_id, client.peer_id)
        for _ in range(2):
            await client.circuits.dial(relay.peer_id, target.peer_id)
        with pytest.raises(ConnectionError, match="as much as it allows"):
            await client.circuits.dial(relay.peer_id, target.peer_id)
        client.remember(target.peer_id, target_addrs)
        await client.disconnect(target.peer_id)
        await until(lambda: service.stats.circuits == 0, "the places are free")

        # Over a connection that is relayed itself, nothing is relayed.
        relay_at(service, target, HOP)
        stream = DelimitedStream(await client.open_stream(target.peer_id, HOP), target.peer_id)
        assert await refused(ask_reservation(stream, timeout=60)) == pb.PERMISSION_DENIED
        await client.disconnect(target.peer_id)

        target.remove_stream_handler(STOP)
        with pytest.raises(ConnectionError, match="cannot reach the peer"):
            await client.circuits.dial(relay.peer_id, target.peer_id)
        assert isinstance(service.stats, RelayStats)
        assert service.stats.refused == 5
        service.stop()
        with pytest.raises(ConnectionError, match="does not speak"):
            await client.circuits.dial(relay.peer_id, target.peer_id)


async def test_circuit_ends_at_its_limits():
    send, arrived = trio.open_memory_channel[StreamBytes](8)
    async with relay_here(circuit_bytes=MIB) as (relay, service), host_here() as target, host_here() as client:
        await raw_target(target, relay, send)
        client.remember(relay.peer_id, relay.addrs())
        here = await client.circuits.open(relay.peer_id, target.peer_id)
        there = await arrived.receive()
        with trio.fail_after(60):
            await here.write(bytes(MIB))
            assert len(await received(there, MIB)) == MIB
            with contextlib.suppress(ConnectionResetError):
                await here.write(b"one more")
            with pytest.raises(ConnectionResetError):
                await there.read(1)
        await until(lambda: service.stats.circuits == 0, "its place is free")
    async with relay_here(circuit_seconds=1) as (relay, service), host_here() as target, host_here() as client:
        client.remember(target.peer_id, await reserve(target, relay))
        stream = await client.open_stream(target.peer_id, ECHO)
        with trio.fail_after(60):
            await stream.wait_lost()
        await until(lambda: service.stats.circuits == 0, "its place is free")


async def test_a_reservation_ends_with_its_connection():
    async with relay_here() as (relay, service), host_here() as target, host_here() as client:
        client.remember(target.peer_id, await reserve(target, relay))
        assert service.stats.reservations == 1
        await target.disconnect(relay.peer_id)
        await until(lambda: service.stats.reservations == 0, "the reservation is gone")
        with pytest.raises(ConnectionError, match="no reservation there"):
            await client.connect(target.peer_id)
        await reserve(target, relay)
        await client.connect(target.peer_id)


async def test_relay_cannot_pass_one_peer_off_as_another():
    async with relay_here() as (relay, _), host_here() as target, host_here() as client:
        await reserve(target, relay)
        client.remember(relay.peer_id, relay.addrs())
        await client.connect(relay.peer_id)
        (connection,) = relay.connections(target.peer_id)
        lie = DelimitedStream(await connection.open_stream(STOP), target.peer_id)
        await ask_stop(lie, client.peer_id, CircuitLimit(), timeout=60)
        with contextlib.suppress(ConnectionError):  # the relay itself, in the client's name
            await relay.adopt(raw_of(lie), peer_id=target.peer_id, initiator=True, relay=relay.peer_id)
        await until(lambda: len(relay.paths(target.peer_id)) == 1, "the target has ended it")
        assert not target.is_connected(client.peer_id)
        assert [path.direct for path in target.paths(relay.peer_id)] == [True]


async def test_nobody_takes_all_of_a_relays_bandwidth() -> None:
    """One peer with many circuits and one with a single one: both have their turn, so both get about the same."""
    carried = {"greedy": 0, "modest": 0}
    send, arrived = trio.open_memory_channel[StreamBytes](16)
    async with (
        relay_here(bytes_per_second=MIB) as (relay, _),
        host_here() as target,
        host_here() as greedy,
        host_here() as modest,
        trio.open_nursery() as nursery,
    ):
        await raw_target(target, relay, send)

        async def flood(host: Host, name: str, task_status: trio.TaskStatus[None]) -> None:
            stream = await host.circuits.open(relay.peer_id, target.peer_id)
            nursery.start_soon(count, await arrived.receive(), name)
            task_status.started()
            while True:
                await stream.write(bytes(65507))

        async def count(stream: StreamBytes, name: str) -> None:
            while True:
                size = len(await stream.read(MIB))
                carried[name] += size

        for host in (greedy, modest):
            host.remember(relay.peer_id, relay.addrs())
        for _ in range(6):
            await nursery.start(flood, greedy, "greedy")
        await until(lambda: carried["greedy"] > MIB, "the greedy one has begun")
        before = carried["greedy"]
        await nursery.start(flood, modest, "modest")
        await until(lambda: carried["modest"] > 3 * MIB, "the modest one is served")
        taken = carried["greedy"] - before
        print(f"greedy with 6 circuits: {taken / MIB:.1f} MiB, modest with one: {carried['modest'] / MIB:.1f} MiB")
        assert taken < 2 * carried["modest"]
        nursery.cancel_scope.cancel()
