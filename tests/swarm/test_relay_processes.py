"""What a relay, a peer behind it and a client leave behind when one of them dies or stands still: processes."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
import trio

from petalnode.crypto.identity import Identity
from petalnode.node.network.host import Host
from tests.swarm.relay_node import ECHO
from tests.swarm.relays import RelayNode, echoed, host_here, known, stats_of, until


def relay_and_target(start: Callable[..., RelayNode]) -> tuple[RelayNode, RelayNode]:
    relay = start()
    return relay, start(relay=relay.addrs[0])


async def circuits(host: Host, relay: RelayNode) -> int:
    return int((await stats_of(host, relay))["circuits"])


async def test_client_and_relay_notice_each_others_death(start):
    relay, target = relay_and_target(start)
    async with host_here() as client:
        known(client, (relay, target))
        stream = await client.open_stream(target.peer_id, ECHO)
        await echoed(stream, b"alive")
        other = start(dial=target.addrs[0])
        # In a thread: a client that stands still for so long may lose its connections.
        assert await trio.to_thread.run_sync(lambda: other.ready)
        assert await circuits(client, relay) == 2
        other.kill()

        async def only_ours() -> bool:
            return await circuits(client, relay) == 1

        await until(only_ours, "the killed client's place is free")
        await echoed(stream, b"still alive")
        relay.kill()
        with trio.fail_after(60):
            await stream.wait_lost()
        with pytest.raises(ConnectionError):
            await client.connect(target.peer_id)


async def test_dead_or_still_peer_keeps_no_place(start):
    relay, target = relay_and_target(start)
    async with host_here() as client, host_here() as watcher:
        known(client, (relay, target))
        known(watcher, (relay,))
        stream = await client.open_stream(target.peer_id, ECHO)
        await echoed(stream, b"alive")
        assert await circuits(watcher, relay) == 1

        async def is_free() -> bool:
            stats = await stats_of(watcher, relay)
            return stats["circuits"] == 0 and stats["reservations"] == 0

        target.signal(signal.SIGSTOP)
        with trio.fail_after(60):
            await stream.wait_lost()
        await until(is_free, "the frozen peer's places are free")


async def test_client_returns_while_its_old_circuits_die(start):
    relay, target = relay_and_target(start)
    seed = Identity.generate().seed.hex()
    old = start(seed=seed, dial=target.addrs[0])
    async with (
        host_here(identity=Identity.from_seed(bytes.fromhex(seed))) as client,
        host_here() as watcher,
    ):
        known(watcher, (relay,))
        assert old.ready
        assert await circuits(watcher, relay) == 1
        old.signal(signal.SIGSTOP)  # its sockets stay open: nothing tells the relay
        known(client, (relay, target))
        stream = await client.open_stream(target.peer_id, ECHO)
        await echoed(stream, b"as if it had never been away")
        # On a busy machine the old circuit may have gone by now.
        assert (await stats_of(watcher, relay))["circuits_made"] == 2

        async def only_the_new_one() -> bool:
            await echoed(stream, b"still there")
            return await circuits(watcher, relay) == 1

        await until(only_the_new_one, "the old circuit's place is free")
        await echoed(stream, b"and it stays")
        old.kill()
        await echoed(stream, b"whatever becomes of the old one")


async def test_peer_is_reached_by_its_newest_connection(start):
    relay = start()
    seed = Identity.generate().seed.hex()
    old = start(seed=seed, relay=relay.addrs[0])
    async with host_here() as client:
        known(client, (relay, old))
        old.signal(signal.SIGSTOP)
        new = start(seed=seed, relay=relay.addrs[0])
        known(client, (new,))
        with trio.fail_after(60):
            stream = await client.open_stream(new.peer_id, ECHO)
            await echoed(stream, b"not by way of the frozen one")
        new.kill()
        with trio.fail_after(60):
            await stream.wait_lost()

        async def nobody() -> bool:
            stats = await stats_of(client, relay)
            return stats["circuits"] == stats["reservations"] == 0

        await until(nobody, "what the killed peer had is free")
