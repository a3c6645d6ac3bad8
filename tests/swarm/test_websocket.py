"""WebSocket below the same Noise, Yamux, swarm keys, limits of bytes and relays as TCP."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import pytest
import trio
from multiaddr import Multiaddr

from petalnode.node.errors import BadInput
from petalnode.node.network.transport.websocket import Certificate
from tests.swarm.certificates import certificate
from tests.swarm.processes import TLS, WS
from tests.swarm.relay_node import ECHO
from tests.swarm.relays import echoed, host_here, relay_here, reserve

SIZES = (1, 16 * 1024, 5_000_000)


@pytest.mark.parametrize("psk", [None, "1a" * 32])
@pytest.mark.parametrize("at", [WS, TLS])
async def test_messages_of_all_sizes_pass(at: str, psk: str | None, tmp_path: Path) -> None:
    tls = Certificate(*certificate(tmp_path)) if at == TLS else None
    async with host_here(listens=True, psk=psk, at=at, certificate=tls) as server, host_here(psk=psk) as client:
        assert at.split("/tcp/0")[1] in server.addrs()[0]
        client.remember(server.peer_id, server.addrs())
        stream = await client.open_stream(server.peer_id, ECHO)
        for size in SIZES:
            await echoed(stream, secrets.token_bytes(size))
        [path] = client.paths(server.peer_id)
        assert path.remote_addr == server.addrs()[0].partition("/p2p/")[0]
        [path] = server.paths(client.peer_id)
        assert (
            path.endpoint is not None
            and path.endpoint.ip.is_loopback
            and server.origin_of(client.peer_id) == "127.0.0.1"
        )


@pytest.mark.parametrize("at", [WS, TLS])
async def test_a_limit_of_bytes_holds(at: str, tmp_path: Path) -> None:
    tls = Certificate(*certificate(tmp_path)) if at == TLS else None
    async with (
        host_here(listens=True, at=at, certificate=tls, max_download=1_000_000) as server,
        host_here(max_upload=4_000_000) as client,
    ):
        client.remember(server.peer_id, server.addrs())
        stream = await client.open_stream(server.peer_id, ECHO)
        begun = trio.current_time()
        await echoed(stream, secrets.token_bytes(2_000_000))
        assert trio.current_time() - begun > 1.5


async def test_a_relay_that_is_reached_by_websocket_alone() -> None:
    async with relay_here(at=WS) as (relay, _), host_here() as target, host_here() as client:
        addrs = await reserve(target, relay)
        assert addrs and all("/ws/p2p/" in addr for addr in addrs)
        client.remember(target.peer_id, addrs)
        stream = await client.open_stream(target.peer_id, ECHO)
        assert not stream.direct
        for size in SIZES:
            await echoed(stream, secrets.token_bytes(size))


async def test_plain_tcp_is_told_at_once_what_arrived() -> None:
    async with host_here(listens=True, at=WS) as server, host_here(listens=True) as plain, host_here() as client:
        for host, suffix in ((server, ""), (plain, "/ws")):
            bare = host.addrs()[0].partition("/p2p/")[0].removesuffix("/ws")
            with trio.fail_after(30), pytest.raises(ConnectionError):
                await client.dial_fresh(host.peer_id, [Multiaddr(bare + suffix)], timeout=30)


async def test_renewed_certificate_is_shown_to_next_one(tmp_path: Path) -> None:
    certificate(tmp_path, days=-1)
    own = Certificate(tmp_path / "cert.pem", tmp_path / "key.pem")
    assert own.ended is not None
    async with host_here(listens=True, at=TLS, certificate=own) as server, host_here() as client:
        client.remember(server.peer_id, server.addrs())
        await client.connect(server.peer_id)
        (tmp_path / "key.pem").write_text("not yet written")
        assert own.context() is own.context()
        certificate(tmp_path)
        os.utime(tmp_path / "key.pem", (1, 2_000_000_000))
        assert own.context() and own.ended is None
        await client.disconnect(server.peer_id)
        await client.connect(server.peer_id)


def test_files_that_are_no_certificate_are_named(tmp_path: Path) -> None:
    files = certificate(tmp_path)
    with pytest.raises(BadInput, match="No such file"):
        Certificate(tmp_path / "none.pem", files[1])
    with pytest.raises(BadInput, match="cannot be used"):
        Certificate(files[1], files[0])
