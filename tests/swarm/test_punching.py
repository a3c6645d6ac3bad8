"""Upgrades of relayed connections between hosts of this process: the parts that need no NAT."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from ipaddress import ip_address
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from petalnode.node.network.addresses import Endpoint
from petalnode.node.network.host import Host
from petalnode.node.network.nat import hole_punching
from petalnode.node.network.nat.autonat import local_endpoints
from petalnode.node.network.nat.hole_punching import HolePuncher
from petalnode.protocols.delimited import DelimitedStream
from petalnode.protocols.framing import StreamClosed
from petalnode.protocols.nat_traversal import PUNCH, exchange_first, exchange_second
from tests.connections import free_port
from tests.swarm.relay_node import ECHO
from tests.swarm.relays import echoed, host_here, relay_here, reserve, until


def punches(host: Host, nursery: trio.Nursery) -> HolePuncher:
    node: Any = SimpleNamespace(local=local_endpoints(host.libp2p.get_transport_addrs()), reached=())
    return HolePuncher(host, nursery, node)


@asynccontextmanager
async def met_at_a_relay(
    *, listens: bool = False, dialer_punches: bool = False
) -> AsyncIterator[tuple[Host, Host, trio.Nursery]]:
    """A host that was reached through a relay and the one that reached it; one of them punches, the other need not."""
    async with (
        relay_here() as (relay, _),
        host_here() as target,
        host_here(listens=listens) as client,
        trio.open_nursery() as nursery,
    ):
        punches(client if dialer_punches else target, nursery)
        client.remember(target.peer_id, await reserve(target, relay))
        await client.connect(target.peer_id)
        yield target, client, nursery
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(("version", "address"), [(4, "127.0.0.1"), (6, "::1")])
def test_a_port_is_dialed_from_until_the_other_side_opens(version: int, address: str) -> None:
    async def main() -> None:
        theirs = free_port()
        async with trio.open_nursery() as nursery, hole_punching.own_port(version, None) as port:
            reached: list[trio.SocketStream] = []

            async def dial() -> None:
                reached.append(await hole_punching.dial_from(port, Endpoint(ip_address(address), theirs)))

            nursery.start_soon(dial)
            await trio.sleep(0.2)
            assert not reached
            (listener,) = await trio.open_tcp_listeners(theirs, host=address)
            with trio.fail_after(60):
                stream = await listener.accept()
            assert stream.socket.getpeername()[1] == port
            await stream.aclose()
            await listener.aclose()
        await reached[0].aclose()
        async with hole_punching.own_port(version, 31330) as listened_on:
            assert listened_on == 31330
        family = socket.AF_INET6 if version == 6 else socket.AF_INET
        with (
            socket.create_server((address, 0), family=family) as taken,
            trio.fail_after(60),
            pytest.raises(OSError, match="in use"),  # which no repetition changes
        ):
            await hole_punching.dial_from(taken.getsockname()[1], Endpoint(ip_address(address), theirs))

    if version == 6 and not has_ipv6():
        pytest.skip("no IPv6 here")
    trio.run(main)


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


async def test_who_listens_where_it_can_be_dialed_is_dialed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hole_punching, "PUNCHING", replace(hole_punching.PUNCHING, look=0.05, retired_after=0.1))
    async with met_at_a_relay(listens=True) as (target, client, _):
        assert not any(path.direct for path in client.paths(target.peer_id))
        await until(lambda: client.is_direct(target.peer_id), "a direct connection")
        stream = await client.open_stream(target.peer_id, ECHO)
        assert stream.path.direct
        await echoed(stream, bytes(100_000))
        await until(
            lambda: all(path.direct for path in target.paths(client.peer_id)),
            "the end of what runs through a relay",
        )
        await echoed(stream, b"still here")


async def test_who_does_not_speak_the_protocol_stays_on_the_relay():
    async with met_at_a_relay() as (target, client, _):
        stream = await client.open_stream(target.peer_id, ECHO)
        for _ in range(3):
            await echoed(stream, bytes(1000))
        assert not client.is_direct(target.peer_id)


async def test_addresses_are_exchanged_through_a_relay_only():
    """Over a direct connection there is nothing to punch, and strangers shall not make us dial."""
    async with host_here(listens=True) as one, host_here() as other, trio.open_nursery() as nursery:
        punches(one, nursery)
        other.remember(one.peer_id, one.addrs())
        stream = DelimitedStream(await other.open_stream(one.peer_id, PUNCH), one.peer_id)
        with pytest.raises(StreamClosed, match="closed the stream"):
            await exchange_first(stream, ["/ip4/203.0.113.5/tcp/1"], timeout=60)
        nursery.cancel_scope.cancel()


async def test_a_peer_that_never_gives_the_sign_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    # All of them are asked while the first ones are still waited for.
    monkeypatch.setattr(hole_punching, "PUNCHING", replace(hole_punching.PUNCHING, message=300.0))
    async with met_at_a_relay(dialer_punches=True) as (target, client, _):
        await until(lambda: target.is_connected(client.peer_id), "the relayed connection")
        answers = 0
        for _ in range(20):  # a peer has one place
            stream = DelimitedStream(await target.open_stream(client.peer_id, PUNCH), client.peer_id)
            with contextlib.suppress(StreamClosed):
                await exchange_first(stream, [], timeout=60)
                answers += 1
        assert answers == 1


async def test_a_sign_without_addresses_is_answered_by_dialing_nobody():
    async with met_at_a_relay() as (target, client, _):
        heard = trio.Event()

        async def answer(raw, peer_id) -> None:
            stream = DelimitedStream(raw, peer_id)
            try:
                await exchange_second(stream, [], timeout=60)
            finally:
                heard.set()

        client.set_stream_handler(PUNCH, answer)
        await client.close_path(target.peer_id)
        await client.connect(target.peer_id)
        with trio.fail_after(60):
            await heard.wait()
        await echoed(await client.open_stream(target.peer_id, ECHO), b"x")
