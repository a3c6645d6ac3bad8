"""A host of py-libp2p as it comes, with its own relay service, for the tests of how ours gets on with it.

Takes one JSON object as its argument: its "role" is "relay", "target" (reserves at the "relay", a multiaddr), "client"
(dials the peer "target" through the "relay" and has bytes echoed), "asker" (of what the "peer" says) or "table" (a node
of Kademlia, which knows "peers").
Prints a JSON object when that is done.
"""

from __future__ import annotations

import json
import logging
import sys
from contextlib import AsyncExitStack, suppress

import libp2p.network.swarm
import trio
from libp2p import new_host
from libp2p.abc import IHost, INetStream
from libp2p.crypto import rsa, secp256k1
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
from libp2p.kad_dht.kad_dht import DHTMode, KadDHT
from libp2p.network.stream.exceptions import StreamEOF
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import info_from_p2p_addr
from libp2p.relay.circuit_v2.config import RelayConfig, RelayRole
from libp2p.relay.circuit_v2.protocol import PROTOCOL_ID, CircuitV2Protocol
from libp2p.relay.circuit_v2.resources import RelayLimits
from libp2p.relay.circuit_v2.transport import CircuitV2Transport
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
from libp2p.security.noise.transport import Transport as Noise
from libp2p.tools.anyio_service import background_trio_service
from multiaddr import Multiaddr

ECHO = "/echo/1"
PAYLOAD = bytes(range(256)) * 1024
KEYS = {
    "ed25519": create_new_key_pair,
    "rsa": lambda: rsa.create_new_key_pair(2048),
    "secp256k1": secp256k1.create_new_key_pair,
}
LIMITS = RelayLimits(duration=3600, data=1 << 30, max_circuit_conns=8, max_reservations=8)


async def echo(stream: INetStream) -> None:
    while data := await stream.read(65536):
        await stream.write(data)


async def reserve(host: IHost, transport: CircuitV2Transport, relay: str, nursery: trio.Nursery) -> list[str]:
    info = info_from_p2p_addr(Multiaddr(relay))
    await host.connect(info)
    stream = await host.new_stream(info.peer_id, [PROTOCOL_ID])
    assert await transport.reserve(stream, info.peer_id, nursery)
    return [f"{relay}/p2p-circuit/p2p/{host.get_id()}"]


async def dial(host: IHost, transport: CircuitV2Transport, relay: str, target: str) -> int:
    """Echoes PAYLOAD through the relay; returns how many bytes came back right."""
    await host.connect(info_from_p2p_addr(Multiaddr(relay)))
    await transport.dial(Multiaddr(f"{relay}/p2p-circuit/p2p/{target}"))
    stream = await host.new_stream(ID.from_string(target), [ECHO])
    received = b""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stream.write, PAYLOAD)
        while len(received) < len(PAYLOAD):
            received += await stream.read(65536)
    assert received == PAYLOAD
    return len(received)


async def asked(host: IHost, peer: str) -> str:
    """What a node says on a stream of petalnode, before it was asked anything."""
    info = info_from_p2p_addr(Multiaddr(peer))
    await host.connect(info)
    stream = await host.new_stream(info.peer_id, ["/petalnode/directory/1"])
    said = b""
    with suppress(StreamEOF):
        while part := await stream.read(4096):
            said += part
    return said.decode(errors="replace")


async def serve_table(host: IHost, peers: list[str], stack: AsyncExitStack) -> None:
    kad = KadDHT(host, DHTMode.SERVER)
    await stack.enter_async_context(background_trio_service(kad))
    for peer in map(info_from_p2p_addr, map(Multiaddr, peers)):
        await host.connect(peer)
        await kad.routing_table.add_peer(peer, skip_server_mode_check=True)
    await kad.refresh_routing_table()


async def main(options: dict) -> None:
    libp2p.network.swarm._HAPPY_EYEBALLS_DELAY = 0.02
    keys = KEYS[options.get("key", "ed25519")]()
    noise = Noise(keys, noise_privkey=create_noise_key_pair().private_key)
    host = new_host(key_pair=keys, muxer_preference="YAMUX", sec_opt={NOISE: noise}, psk=options.get("psk"))
    is_relay = options["role"] == "relay"
    protocol = CircuitV2Protocol(host, limits=LIMITS, allow_hop=is_relay)
    roles = RelayRole.HOP if is_relay else RelayRole.STOP
    if options["role"] == "target":
        roles |= RelayRole.CLIENT
    transport = CircuitV2Transport(host, protocol, RelayConfig(roles=roles, limits=LIMITS))
    async with (
        host.run(listen_addrs=[Multiaddr("/ip4/127.0.0.1/tcp/0")]),
        background_trio_service(protocol),
        trio.open_nursery() as nursery,
        AsyncExitStack() as stack,
    ):
        await protocol.event_started.wait()
        host.set_stream_handler(ECHO, echo)
        ready = {"event": "ready", "peer_id": str(host.get_id()), "addrs": [str(addr) for addr in host.get_addrs()]}
        if options["role"] == "target":
            ready["addrs"] = await reserve(host, transport, options["relay"], nursery)
        if options["role"] == "client":
            ready["echoed"] = await dial(host, transport, options["relay"], options["target"])
        if options["role"] == "asker":
            ready["said"] = await asked(host, options["peer"])
        if options["role"] == "table":
            await serve_table(host, options["peers"], stack)
        print(json.dumps(ready), flush=True)
        await trio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    logging.getLogger("libp2p").setLevel(logging.CRITICAL)
    trio.run(main, json.loads(sys.argv[1]))
