"""Upgrades of relayed connections between hosts of this process: the parts that need no NAT."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

from petalnode.node.network.host import Host
from petalnode.node.network.nat import hole_punching
from petalnode.node.network.nat.autonat import local_endpoints
from petalnode.node.network.nat.hole_punching import HolePuncher
from petalnode.protocols.delimited import DelimitedStream
from petalnode.protocols.framing import StreamClosed
from petalnode.protocols.nat_traversal import PUNCH, exchange_first, exchange_second
from tests.swarm.relay_node import ECHO
from tests.swarm.relays import echoed, host_here, relay_here, reserve, until


def punches(host: Host, nursery: trio.Nursery) -> HolePuncher:
    return HolePuncher(
        host, nursery, local=lambda: local_endpoints(host.libp2p.get_transport_addrs()), reached=lambda: ()
    )


@asynccontextmanager
async def met_at_a_relay(*, listens: bool = False) -> AsyncIterator[tuple[Host, Host, trio.Nursery]]:
    """A host that was reached through a relay and punches, and the one that reached it, which need not."""
    async with (
        relay_here() as (relay, _),
        host_here() as target,
        host_here(listens=listens) as client,
        trio.open_nursery() as nursery,
    ):
        punches(target, nursery)
        client.remember(target.peer_id, await reserve(target, relay))
        await client.connect(target.peer_id)
        yield target, client, nursery
        nursery.cancel_scope.cancel()


def test_who_listens_where_it_can_be_dialed_is_dialed():
    async def main() -> None:
        async with met_at_a_relay(listens=True) as (target, client, _):
            await until(lambda: client.is_direct(target.peer_id), "a direct connection")
            stream = await client.open_stream(target.peer_id, ECHO)
            assert stream.path.direct
            await echoed(stream, bytes(100_000))

    trio.run(main)


def test_who_does_not_speak_the_protocol_stays_on_the_relay():
    async def main() -> None:
        async with met_at_a_relay() as (target, client, _):
            stream = await client.open_stream(target.peer_id, ECHO)
            for _ in range(3):
                await echoed(stream, bytes(1000))
            assert not client.is_direct(target.peer_id)

    trio.run(main)


def test_addresses_are_exchanged_through_a_relay_only():
    """Over a direct connection there is nothing to punch, and strangers shall not make us dial."""

    async def main() -> None:
        async with host_here(listens=True) as one, host_here() as other, trio.open_nursery() as nursery:
            punches(one, nursery)
            other.remember(one.peer_id, one.addrs())
            stream = DelimitedStream(await other.open_stream(one.peer_id, PUNCH), one.peer_id)
            with pytest.raises(StreamClosed, match="closed the stream"):
                await exchange_first(stream, ["/ip4/203.0.113.5/tcp/1"], timeout=60)
            nursery.cancel_scope.cancel()

    trio.run(main)


def test_a_peer_that_never_gives_the_sign_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    # All of them are asked while the first ones are still waited for.
    monkeypatch.setattr(hole_punching, "_MESSAGE", 300.0)

    async def main() -> None:
        async with (
            relay_here() as (relay, _),
            host_here() as target,
            host_here() as client,
            trio.open_nursery() as nursery,
        ):
            punches(client, nursery)
            client.remember(target.peer_id, await reserve(target, relay))
            await client.connect(target.peer_id)
            await until(lambda: target.is_connected(client.peer_id), "the relayed connection")
            answers = 0
            for _ in range(20):  # a peer has one place
                stream = DelimitedStream(await target.open_stream(client.peer_id, PUNCH), client.peer_id)
                with contextlib.suppress(StreamClosed):
                    await exchange_first(stream, [], timeout=60)
                    answers += 1
            assert answers == 1
            nursery.cancel_scope.cancel()

    trio.run(main)


def test_a_sign_without_addresses_is_answered_by_dialing_nobody():
    async def main() -> None:
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

    trio.run(main)
