"""Upgrades of relayed connections between hosts of this process: the parts that need no NAT."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import replace
from ipaddress import ip_address
from typing import Any

import pytest
import trio

from petalnode.node.network.addresses import Endpoint
from petalnode.node.network.host import Host
from petalnode.node.network.nat import hole_punching
from petalnode.protocols.delimited import DelimitedStream
from petalnode.protocols.framing import PeerError, StreamClosed
from petalnode.protocols.nat_traversal import PUNCH, exchange_first, exchange_second, give_sign
from tests.connections import free_port
from tests.swarm.met_at_a_relay import met_at_a_relay, punches
from tests.swarm.relay_node import ECHO
from tests.swarm.relays import echoed, host_here, relay_here, reserve, until


@pytest.mark.parametrize(("version", "address"), [(4, "127.0.0.1"), (6, "::1")])
async def test_port_is_dialed_from_until_other_side_opens(version: int, address: str) -> None:
    if version == 6 and not has_ipv6():
        pytest.skip("no IPv6 here")
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


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


async def test_who_listens_dialably_is_dialed(monkeypatch: pytest.MonkeyPatch) -> None:
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


async def test_who_does_not_speak_protocol_stays_on_relay():
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


async def test_peer_that_never_gives_sign_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
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


async def test_sign_without_addresses_is_answered_by_dialing_nobody():
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


# --- two that dial each other: one of them by hand, and on loopback

SEEN = "203.0.113.9"


@pytest.fixture
def views(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The relays that were asked where they see us come from: from beyond this machine, as they never do here."""
    asked: list[str] = []

    async def observed(host: Host, relay: str, *, timeout: float) -> Endpoint:
        asked.append(relay)
        return Endpoint(ip_address(SEEN), 1)

    monkeypatch.setattr(hole_punching, "observed_by", observed)
    policy = replace(hole_punching.PUNCHING, view_lasts=1e9, first_pause=1e9, longest_pause=1e9, window=60.0)
    monkeypatch.setattr(hole_punching, "PUNCHING", policy)
    return asked


def addr_of(listener: trio.SocketListener) -> str:
    host, port = listener.socket.getsockname()
    return f"/ip4/{host}/tcp/{port}"


class ByHand:
    """The side that does not start: answers with `addr`, and takes the connection when it has `listener`."""

    def __init__(self, host: Host, addr: str, listener: trio.SocketListener | None = None) -> None:
        self.host, self.addr, self.listener = host, addr, listener
        self.asked = self.signs = 0
        self.told: tuple[str, ...] = ()
        host.set_stream_handler(PUNCH, self.answer)

    async def answer(self, raw: Any, peer_id: str) -> None:
        self.asked += 1
        with contextlib.suppress(PeerError):
            self.told = await exchange_second(DelimitedStream(raw, peer_id), [self.addr], timeout=600)
            self.signs += 1
            if self.listener is not None:
                stream = await self.listener.accept()
                assert f"/ip4/{SEEN}/tcp/{stream.socket.getpeername()[1]}" == self.told[0]
                await self.host.adopt(stream, peer_id=peer_id, initiator=True)
        await raw.close()


async def meet_again(client: Host, target: Host) -> None:
    await client.close_path(target.peer_id, relayed_only=False)
    await until(lambda: not target.is_connected(client.peer_id), "the end of the connection")
    await client.connect(target.peer_id)


async def test_who_was_reached_dials_back_from_its_port(views: list[str]) -> None:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener, met_at_a_relay(meet=False) as (target, client, _):
        other = ByHand(client, addr_of(listener), listener)
        await client.connect(target.peer_id)
        await until(lambda: target.is_direct(client.peer_id), "a direct connection")
        stream = await target.open_stream(client.peer_id, ECHO)
        assert stream.path.direct
        await echoed(stream, bytes(100_000))
        assert other.asked == other.signs == len(views) == 1


async def test_both_sides_dial_and_the_unused_relay_ends(views: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hole_punching, "PUNCHING", replace(hole_punching.PUNCHING, look=0.02, retired_after=0.5))
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener, met_at_a_relay(dialer_punches=True) as (target, client, puncher):
        await until(lambda: bool(views), "the question to the relay")  # before the other side asks
        held = await client.open_stream(target.peer_id, ECHO)
        stream = DelimitedStream(await target.open_stream(client.peer_id, PUNCH), client.peer_id)
        told, _ = await exchange_first(stream, [addr_of(listener)], timeout=600)
        await give_sign(stream, timeout=600)
        await stream.close()
        came = await listener.accept()
        assert [f"/ip4/{SEEN}/tcp/{came.socket.getpeername()[1]}"] == list(told)
        await target.adopt(came, peer_id=client.peer_id, initiator=False)
        await until(lambda: client.is_direct(target.peer_id), "a direct connection")
        assert target.peer_id in puncher.punched and len(views) == 1
        closed: list[float] = []
        close_path = client.close_path

        async def counted(peer_id: str, **options: bool) -> None:
            closed.append(trio.current_time())
            await close_path(peer_id, **options)

        monkeypatch.setattr(client, "close_path", counted)
        for _ in range(4):
            await echoed(held, b"still here")
            await trio.sleep(0.25)
        assert not closed
        unused = trio.current_time()
        await held.close()
        await until(lambda: all(path.direct for path in client.paths(target.peer_id)), "the end of what is relayed")
        await trio.sleep(0.2)
        assert len(closed) == 1 and closed[0] - unused > 0.25
        await echoed(await client.open_stream(target.peer_id, ECHO), b"x")


async def test_failed_punch_is_tried_for_new_addresses_only(
    views: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(hole_punching, "PUNCHING", replace(hole_punching.PUNCHING, window=0.1))
    async with met_at_a_relay(meet=False) as (target, client, puncher):
        other = ByHand(client, f"/ip4/127.0.0.1/tcp/{free_port()}")
        await client.connect(target.peer_id)
        await until(lambda: other.signs == 3, "three tries")
        for asked in (4, 5):
            await meet_again(client, target)
            await until(lambda asked=asked: other.asked == asked, "an exchange of addresses")
        assert other.signs == 3
        puncher.moved()  # we are elsewhere now
        await meet_again(client, target)
        await until(lambda: other.signs == 6, "three more tries")
        assert len(views) == 2
        monkeypatch.setattr(hole_punching, "PUNCHING", replace(hole_punching.PUNCHING, window=60.0))
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.2")
        async with listener:
            other.addr, other.listener = addr_of(listener), listener
            await meet_again(client, target)
            await until(lambda: "punched through to" in caplog.text, "a direct connection")
        assert target.is_direct(client.peer_id) and other.signs == 7
        other.addr, other.listener = f"/ip4/127.0.0.1/tcp/{free_port()}", None
        await meet_again(client, target)
        await until(lambda: other.signs == 8, "another try, since the last one was no failure")


async def test_no_more_than_few_start_at_time(views: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hole_punching, "PUNCHING", replace(hole_punching.PUNCHING, at_once=1, message=600.0, whole=600))
    async with (
        met_at_a_relay(dialer_punches=True) as (first, client, _),
        relay_here() as (relay, _),
        host_here() as second,
    ):
        client.remember(second.peer_id, await reserve(second, relay))
        await client.connect(second.peer_id)
        stream = DelimitedStream(await first.open_stream(client.peer_id, PUNCH), client.peer_id)
        await exchange_first(stream, [], timeout=600)
        refused = DelimitedStream(await second.open_stream(client.peer_id, PUNCH), client.peer_id)
        with pytest.raises(StreamClosed, match="closed the stream"):
            await exchange_first(refused, [], timeout=600)
