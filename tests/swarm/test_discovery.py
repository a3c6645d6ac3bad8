"""Finding servers, with real processes and real sockets on loopback. No model, no torch."""

from __future__ import annotations

import random
import signal
import socket
import time
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import pytest
import trio

from petalnode.crypto.identity import Identity
from petalnode.node.errors import BadInput, MachineError, SwarmError
from petalnode.node.swarm.config import SwarmConfig
from petalnode.node.swarm.swarm import Swarm, open_swarm
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.announcement import counts_until
from petalnode.protocols.directory import DIRECTORY
from petalnode.protocols.framing import PeerError
from petalnode.protocols.ids import Span
from tests.announcements import plain, signed
from tests.node_inspection import forget_servers, table_of
from tests.patience import eventually
from tests.slowness import Slowness
from tests.swarm.announcers import Node, Nodes

SERVERS = 20
LOOPBACK = "/ip4/127.0.0.1/tcp/0"


def config(*peers: str, **options) -> SwarmConfig:
    return SwarmConfig(identity=Identity.generate(), peers=peers, **options)


def seen(swarm: Swarm, now: float | None = None) -> set[str]:
    return {content.peer_id for content in swarm.view.servers(now=time.time() if now is None else now)}


@asynccontextmanager
async def joined(*peers: str) -> AsyncIterator[Swarm]:
    """Tries again where a busy machine has not answered in time: 20 processes join through one peer."""
    async with AsyncExitStack() as stack:
        swarm = None
        for _ in range(10):
            with suppress(SwarmError):
                swarm = await stack.enter_async_context(open_swarm(config(*peers)))
                break
        assert swarm is not None, "no peer has answered"
        yield swarm


async def seen_at_once(peers: Collection[str], wanted: set[str]) -> None:
    """A new client has seen all of `wanted` as soon as it has joined, no round of looks later. It is tried again: the
    swarm has to settle, and a busy machine leaves some unanswered."""
    for _ in range(20):
        async with joined(*peers) as swarm:
            missing = wanted - seen(swarm)
        if not missing:
            return
        await trio.sleep(0.5)
    raise AssertionError(f"{len(missing)} servers are not seen")


async def test_table_knows_servers_models_and_whom_to_ask(slowness: Slowness) -> None:
    """Without what the directory adds: a client that has spoken to one node of the table only."""

    options = {"listen": (LOOPBACK,), "announcement_ttl": 3 * slowness()}
    async with (
        open_swarm(config(**options)) as bootstrap,
        open_swarm(config(*bootstrap.addrs, **options)) as server,
        open_swarm(config(*bootstrap.addrs, **options)) as another,
        open_swarm(config(*bootstrap.addrs)) as client,
    ):
        server.announce(plain(server.peer_id))
        another.announce(plain(another.peer_id, public_name="another"))
        table = table_of(client)

        async def servers_in_table() -> bool:
            records = [await table.get_announcement(one.peer_id, timeout=60) for one in (server, another)]
            return [record and record.content.public_name for record in records] == ["", "another"]

        async def models_in_table() -> bool:
            records = await table.get_models(timeout=60)
            return {record.content.model_name for record in records} == {"model"}

        async def guide_in_table() -> bool:
            return (server.peer_id, server.addrs) in await table.find_providers(3, timeout=60)

        await eventually(servers_in_table, "the table has both servers")
        await eventually(models_in_table, "the table lists the model")
        await table_of(server).provide(3, timeout=60)
        await eventually(guide_in_table, "the table leads to the server")


async def test_unknown_server_is_looked_up_in_kademlia(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"listen": (LOOPBACK,)}
    async with (
        open_swarm(config(**options)) as bootstrap,
        open_swarm(config(*bootstrap.addrs, **options)) as server,
        open_swarm(config(*bootstrap.addrs)) as client,
    ):
        server.announce(plain(server.peer_id))
        await eventually(lambda: server.peer_id in server.view.records, "it is announced")

        async def server_in_table() -> bool:  # where it would put itself within a third of its lifetime
            await table_of(server).put_announcement(server.view.records[server.peer_id], timeout=60)
            return await table_of(client).get_announcement(server.peer_id, timeout=60) is not None

        await eventually(server_in_table, "the table has the server")
        forget_servers(client)
        monkeypatch.setattr(client.host, "knows", lambda _: False)
        await client.measure_rtt(server.peer_id, timeout=60)
        assert client.view.get(server.peer_id, time.time()) is not None


async def test_killed_server_vanishes_at_expiry_and_others_stay(slowness: Slowness) -> None:
    ttl = 3 * slowness()
    with Nodes() as nodes:
        bootstrap = nodes.start(ttl=ttl).ready()
        dying = nodes.start(blocks=[0, 4], peers=[bootstrap.addr], ttl=ttl).ready()
        staying = nodes.start(blocks=[4, 8], peers=[bootstrap.addr], ttl=ttl).ready()
        async with open_swarm(config(bootstrap.addr, announcement_ttl=ttl)) as swarm:
            await eventually(lambda: seen(swarm) == {dying.peer_id, staying.peer_id}, "both are known")
            dying.kill()
            expires = swarm.view.records[dying.peer_id].content.expires
            until = [counts_until(swarm.view.records[dying.peer_id].content)]

            def gone() -> bool:
                record = swarm.view.records.get(dying.peer_id)
                until.append(until[-1] if record is None else counts_until(record.content))
                return seen(swarm) == {staying.peer_id}

            await eventually(gone, "the dead one has gone", ttl + 20)
            # It said so shortly before it died, and no one else may lengthen that.
            assert until[-1] <= until[0] + ttl and seen(swarm, until[-1] + 0.1) <= {staying.peer_id}
            # A newcomer does not hear of it from anyone either.
            async with open_swarm(config(bootstrap.addr, staying.addr)) as newcomer:
                assert dying.peer_id not in seen(newcomer)

            def stays() -> bool:
                (server,) = swarm.view.servers(now=time.time()) or [None]
                return server is not None and (server.peer_id, server.expires > expires) == (staying.peer_id, True)

            # The other one renewed its announcement meanwhile.
            await eventually(stays, "renewed", ttl + 20)


async def test_server_that_stops_says_goodbye_and_exits_cleanly():
    with Nodes() as nodes:
        bootstrap = nodes.start().ready()
        server = nodes.start(blocks=[0, 4], peers=[bootstrap.addr]).ready()
        async with open_swarm(config(bootstrap.addr, server.addr, listen=(LOOPBACK,))) as swarm:
            await eventually(lambda: seen(swarm) == {server.peer_id}, "the server is known")
            server.signal(signal.SIGTERM)
            code = await trio.to_thread.run_sync(server.wait)
            assert (code, server.events_so_far(), server.errors) == (0, [{"event": "stopped"}], "")
            # Long before its expiry, 45 s away.
            await eventually(lambda: not seen(swarm), "the goodbye has come")
        async with open_swarm(config(bootstrap.addr)) as newcomer:
            assert not seen(newcomer)
        bootstrap.signal(signal.SIGTERM)
        assert bootstrap.wait() == 0


async def test_a_server_that_changes_is_seen_changed():
    async with (
        open_swarm(config(listen=(LOOPBACK,))) as server,
        open_swarm(config(*server.addrs, listen=(LOOPBACK,))) as other,
    ):
        for depth in (1, 2):
            server.announce(plain(server.peer_id, queue_depth=depth))

            def depth_is_seen(depth: int = depth) -> bool:
                content = other.view.get(server.peer_id, time.time())
                return content is not None and content.queue_depth == depth

            await eventually(depth_is_seen, "the announcement is seen")
        (content,) = other.view.servers(now=time.time())
        assert [f"{addr}/p2p/{server.peer_id}" for addr in content.addrs] == server.addrs


async def publish(swarm: Swarm, to: str, record: wire.SignedAnnouncement) -> bool:
    """Pushes a record; whether the peer went on talking."""
    async with swarm.open_stream(to, DIRECTORY, timeout=60) as stream:
        await stream.send(wire.DirectoryFrame(publish=record), timeout=60)
        await stream.send(wire.DirectoryFrame(ping=wire.Ping(payload=b"x")), timeout=60)
        try:
            reply, _ = await stream.receive(timeout=60)
        except PeerError:
            return False
        return reply.HasField("ping")


async def test_forged_expired_foreign_announcements_are_never_shown():
    liar, stranger = Identity.generate(), Identity.generate()
    now = time.time()
    fresh = signed(liar, now=now, queue_depth=2).to_wire()
    older = signed(liar, now=now - 5, queue_depth=1).to_wire()
    expired = signed(liar, now=now - 500).to_wire()
    forged = wire.SignedAnnouncement(announcement=fresh.announcement, signature=bytes(64))
    foreign = signed(stranger, now=now).to_wire()
    async with (
        open_swarm(config(listen=(LOOPBACK,))) as server,
        open_swarm(SwarmConfig(identity=liar, peers=tuple(server.addrs))) as swarm,
    ):
        for bad in (forged, expired, foreign):
            assert not await publish(swarm, server.peer_id, bad)
            assert not server.view.records
        assert await publish(swarm, server.peer_id, fresh)
        assert await publish(swarm, server.peer_id, older)
        assert [content.queue_depth for content in server.view.servers(now=time.time())] == [2]


async def test_peer_that_asks_too_much_is_told():
    async with (
        open_swarm(config(listen=(LOOPBACK,))) as server,
        open_swarm(config(*server.addrs)) as swarm,
    ):
        async with swarm.open_stream(server.peer_id, DIRECTORY, timeout=60) as stream:
            for _ in range(200):
                await stream.send(wire.DirectoryFrame(query=wire.DirectoryQuery()), timeout=60)
                reply, _ = await stream.receive(timeout=60)
                if reply.error.code == wire.ERROR_BUSY:
                    break
            else:
                raise AssertionError("nobody minded 200 queries")
        await swarm.measure_rtt(server.peer_id, timeout=60)


async def test_manifests_travel():
    manifest = wire.Manifest(config=b"{}", embeddings=b"e" * 32, blocks=[b"b" * 32] * 4000, head=b"h" * 32)
    async with (
        open_swarm(config(listen=(LOOPBACK,))) as server,
        open_swarm(config(*server.addrs)) as swarm,
    ):
        server.serve_manifest(b"v" * 32, manifest.SerializeToString())
        fetched = await swarm.fetch_manifest(server.peer_id, b"v" * 32, timeout=60)
        assert fetched == manifest.SerializeToString()
        assert await swarm.fetch_manifest(server.peer_id, b"w" * 32, timeout=60) is None


async def join(options: SwarmConfig) -> None:
    async with open_swarm(options):
        pass


async def test_silent_peers_are_an_error_naming_them():
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.create_server(("127.0.0.1", 0)) as other:
        refusing = other.getsockname()[1]
        other.close()
        silent_peer, refusing_peer = Identity.generate().peer_id, Identity.generate().peer_id
        peers = (
            f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}/p2p/{silent_peer}",
            f"/ip4/127.0.0.1/tcp/{refusing}/p2p/{refusing_peer}",
        )
        with pytest.raises(SwarmError, match=r"no peer has answered \(2 asked\)") as caught:
            await join(config(*peers, bootstrap_deadline=1.0))
        assert silent_peer in str(caught.value)
        assert refusing_peer in str(caught.value)


async def test_one_peer_that_answers_is_enough() -> None:
    async with open_swarm(config(listen=(LOOPBACK,))) as server:
        dead = f"/ip4/127.0.0.1/tcp/1/p2p/{Identity.generate().peer_id}"
        with trio.fail_after(120):
            await join(config(dead, *server.addrs, bootstrap_deadline=600.0))


@pytest.mark.parametrize("keys", [("aa" * 32, "bb" * 32), ("aa" * 32, None), (None, "aa" * 32)])
async def test_another_swarm_key_is_an_error(keys: tuple[str | None, str | None]) -> None:
    async with open_swarm(config(listen=(LOOPBACK,), psk=keys[0])) as server:
        with trio.fail_after(120), pytest.raises(SwarmError, match="key"):
            await join(config(*server.addrs, psk=keys[1], bootstrap_deadline=600.0))


async def test_a_private_swarm_works():
    async with (
        open_swarm(config(listen=(LOOPBACK,), psk="ab" * 32)) as server,
        open_swarm(config(*server.addrs, psk="ab" * 32, listen=(LOOPBACK,))) as other,
    ):
        server.announce(plain(server.peer_id))
        await eventually(lambda: seen(other) == {server.peer_id}, "the server is known")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"peers": ("nonsense",)}, "nonsense.*looks like"),
        ({"peers": ("/ip4/127.0.0.1/tcp/4001",)}, "lacks the peer's id"),
        ({"peers": ("/ip4/127.0.0.1/tcp/4001/p2p/QmTypo",)}, "QmTypo"),
        ({"peers": ("/ip4/1.2.3/tcp/4001/p2p/12D3KooWBhvxWq5e2WmVvPQE7dMHqkvLTmFqrWSTzBVPa7ZJXBUR",)}, "1.2.3"),
        ({"peers": ("/ip4/1.2.3.4/udp/1/quic-v1/p2p/12D3KooWD54xs4nwB2QxYSRgzwvmSSt7V6M62q7uN66Zrgx837Hw",)}, "TCP"),
        ({"listen": ("/ip4/127.0.0.1/udp/4001",)}, "TCP"),
        ({"listen": ("/dns4/localhost/tcp/0",)}, "needs an IP address"),
        ({"announce": ("/ip4/0.0.0.0/tcp/4001",)}, "none that others could reach"),
        ({"psk": "secret"}, "64 hexadecimal digits"),
    ],
)
async def test_what_a_person_mistyped_is_named(options, message):
    with pytest.raises(BadInput, match=message):
        await join(SwarmConfig(identity=Identity.generate(), **options))


async def test_port_in_use_is_always_an_error():
    async with open_swarm(config(listen=(LOOPBACK,))) as server:
        taken = server.addrs[0].partition("/p2p/")[0]
        with pytest.raises(MachineError, match=f"cannot listen on {taken}"):
            await join(config(listen=(taken,)))


async def test_only_concrete_addresses_are_announced():
    listening = ("/ip4/0.0.0.0/tcp/0",)
    async with open_swarm(config(listen=listening, announce=("/dns4/me.example/tcp/99",))) as swarm:
        assert swarm.addrs[0] == f"/dns4/me.example/tcp/99/p2p/{swarm.peer_id}"
        assert len(swarm.addrs) > 1
        assert not any("0.0.0.0" in addr or "/tcp/0/" in addr for addr in swarm.addrs)
    async with open_swarm(config()) as client:
        assert client.addrs == []


# --- twenty processes; the last tests, so that no other bears what their idling takes


@pytest.fixture(scope="module")
def swarm_of_20() -> Iterator[list[Node]]:
    """A bootstrap node and 20 servers that joined through it."""
    with Nodes() as nodes:
        bootstrap = nodes.start().ready()
        servers: list[Node] = []
        for first in range(0, SERVERS, 5):  # all at once would wait for each other, and ask again
            started = [
                nodes.start(blocks=[block, block + 4], peers=[bootstrap.addr], num_blocks=SERVERS + 4)
                for block in range(first, first + 5)
            ]
            servers += [server.ready() for server in started]
        yield [bootstrap, *servers]


async def test_client_sees_all_20_servers_at_once(swarm_of_20: list[Node]) -> None:
    bootstrap, *servers = swarm_of_20
    for peers in ([bootstrap.addr], [servers[-1].addr], [server.addr for server in servers[:6]]):
        await seen_at_once(peers, {server.peer_id for server in servers})


async def test_the_models_of_the_swarm_can_be_listed(swarm_of_20):
    bootstrap, *_ = swarm_of_20
    async with joined(bootstrap.addr) as swarm:
        assert swarm.view.models(now=time.time()) == {b"\x11" * 32: ("made-up", SERVERS + 4)}
        spans = [content.span for content in swarm.view.servers(b"\x11" * 32, now=time.time())]
        assert Span(0, 4) in spans


async def test_client_sees_all_living_servers_beside_dead_peers(swarm_of_20: list[Node]) -> None:
    """Some killed, some frozen. Comes last."""
    _, *servers = swarm_of_20
    killed, frozen, living = servers[:4], servers[4:7], servers[7:]
    for node in killed:
        node.kill()
    for node in frozen:
        node.freeze()
    peers = [server.addr for server in servers]
    random.shuffle(peers)
    await seen_at_once(peers, {server.peer_id for server in living})
