"""Swarm keys on single connections: who is let in, and what is told to who is not."""

from __future__ import annotations

import itertools
import secrets
import socket
from dataclasses import replace

import pytest
import trio
from multiaddr import Multiaddr

from petalnode.crypto.identity import Identity
from petalnode.node.network.host import Host
from petalnode.node.network.transport import connections
from tests.node_inspection import use_swarm_key
from tests.swarm.relay_node import ECHO
from tests.swarm.relays import echoed, host_here, relay_here, reserve

KEY, OTHER_KEY = "1a" * 32, "2b" * 32
WORDS = {
    (KEY, OTHER_KEY): "it has another swarm key",
    (KEY, None): "it has no swarm key",
    (None, KEY): "--swarm-key",
}


@pytest.fixture(autouse=True)
def no_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is not told at once waits for ever."""
    monkeypatch.setattr(connections, "DIALING", replace(connections.DIALING, directly=1e6, by_circuit=1e6))
    monkeypatch.setattr(connections, "LIMITS", replace(connections.LIMITS, patience=1e6))


async def told(client: Host, peer_id: str) -> str:
    """What the client is told."""
    with trio.fail_after(60), pytest.raises(ConnectionError) as caught:
        await client.connect(peer_id)
    return str(caught.value)


async def test_one_key_lets_in_and_large_messages_pass():
    async with host_here(listens=True, psk=KEY) as server, host_here(psk=KEY) as client:
        client.remember(server.peer_id, server.addrs())
        stream = await client.open_stream(server.peer_id, ECHO)
        for size in (1, 16 * 1024, 5_000_000):
            await echoed(stream, secrets.token_bytes(size))


@pytest.mark.parametrize(("mine", "theirs"), WORDS)
async def test_another_swarm_is_told_in_words_at_once(mine, theirs):
    async with host_here(listens=True, psk=theirs) as server, host_here(psk=mine) as client:
        client.remember(server.peer_id, server.addrs())
        assert WORDS[mine, theirs] in await told(client, server.peer_id)
        assert not server.connected()
        with pytest.raises(ConnectionError, match=WORDS[mine, theirs]):
            await client.dial_fresh(server.peer_id, [Multiaddr(server.addrs()[0])], timeout=1e6)


@pytest.mark.parametrize("psk", [None, KEY])
async def test_stranger_that_says_otherwise_is_dropped(psk):
    async with host_here(listens=True, psk=psk) as server:
        port = server.listen_ports()[0][1]
        for said in (b"GET / HTTP/1.0\r\n\r\n" + bytes(64), b"\xff" * 64, b"\x13/multistream/9.9.9\n" + bytes(64)):
            stranger = await trio.open_tcp_stream("127.0.0.1", port)
            with trio.fail_after(60):
                await stranger.send_all(said)
                while await stranger.receive_some(4096):  # its own first words, then the end
                    pass
            await stranger.aclose()
        assert server.listen_ports()[0][0] == socket.AF_INET


async def test_a_circuit_is_under_the_key_as_well():
    """The peers inside have keys of their own here, and a relay that has theirs would not help a stranger."""
    seeds = [Identity.generate() for _ in range(2)]
    for inside in itertools.product((KEY, OTHER_KEY), repeat=2):
        async with (
            relay_here(psk=KEY) as (relay, _),
            host_here(psk=KEY, identity=seeds[0]) as target,
            host_here(psk=KEY, identity=seeds[1]) as client,
        ):
            client.remember(target.peer_id, await reserve(target, relay))
            client.remember(relay.peer_id, relay.addrs())
            await client.connect(relay.peer_id)  # from here on only the circuit is still to be made
            for host, psk in zip((target, client), inside, strict=True):
                use_swarm_key(host, psk)
            if inside[0] == inside[1]:
                await echoed(await client.open_stream(target.peer_id, ECHO), b"among ourselves")
            else:
                assert "it has another swarm key" in await told(client, target.peer_id)


async def test_a_stranger_does_not_even_reach_the_relay():
    async with (
        relay_here(psk=KEY) as (relay, service),
        host_here(psk=KEY) as target,
        host_here(psk=OTHER_KEY) as client,
    ):
        client.remember(target.peer_id, await reserve(target, relay))
        assert "it has another swarm key" in await told(client, target.peer_id)
        assert service.stats.circuits == 0
