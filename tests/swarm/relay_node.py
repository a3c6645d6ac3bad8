"""A bare host for the tests of relays: a relay, a peer that is reached through one, or a client of such a peer.

Takes one JSON object as its argument, prints one when it is ready, and stops in order on SIGTERM, SIGINT or at the
end of its standard input. `/echo/1` streams are answered with what they send, `/stall/1` streams are never read, and
a `/stats/1` stream gets a JSON object.
"""

from __future__ import annotations

import dataclasses
import json
import sys

import trio
from multiaddr import Multiaddr

from petalnode.crypto.identity import Identity
from petalnode.node.network.addresses import parse_peer
from petalnode.node.network.host import Host, open_host
from petalnode.node.network.nat.circuits import Circuits
from petalnode.node.network.nat.relay import RelayLimits, RelayService
from petalnode.node.network.transport.stream_bytes import StreamBytes
from tests.swarm.announcer import wait_for_stop

ECHO = "/echo/1"
STALL = "/stall/1"
STATS = "/stats/1"


async def echo(stream: StreamBytes, peer_id: str) -> None:
    try:
        while data := await stream.read(1 << 20):
            await stream.write(data)
        await stream.close()
    except OSError:
        await stream.reset()


async def stall(stream: StreamBytes, peer_id: str) -> None:
    await stream.wait_lost()


def serve_stats(host: Host, relay: RelayService) -> None:
    async def serve(stream: StreamBytes, peer_id: str) -> None:
        stats = dataclasses.asdict(relay.stats) | {"connected": host.connected()}
        await stream.write(json.dumps(stats).encode())
        await stream.close()

    host.set_stream_handler(STATS, serve)


async def main(options: dict) -> None:
    identity = Identity.from_seed(bytes.fromhex(options["seed"])) if "seed" in options else Identity.generate()
    listen = [] if {"relay", "dial"} & set(options) else [Multiaddr("/ip4/127.0.0.1/tcp/0")]
    bandwidth = {name: options[name] for name in ("max_upload", "max_download") if name in options}
    async with open_host(identity, listen=listen, announce=[], psk=options.get("psk"), **bandwidth) as host:
        relay = RelayService(host, RelayLimits(**options.get("limits", {})))
        circuits = Circuits(host)
        host.set_stream_handler(ECHO, echo)
        host.set_stream_handler(STALL, stall)
        serve_stats(host, relay)
        addrs = host.addrs()
        if "relay" in options:
            relay_id, addr = parse_peer(options["relay"])
            host.remember(relay_id, [addr])
            reservation = await circuits.reserve(relay_id)
            addrs = [f"{addr}/p2p/{host.peer_id}" for addr in reservation.addrs]
        elif "dial" in options:
            peer_id, addr = parse_peer(options["dial"])
            host.remember(peer_id, [addr])
            held = await host.open_stream(peer_id, ECHO)
            await held.write(b"held open")
        else:
            relay.start()
        print(json.dumps({"event": "ready", "peer_id": host.peer_id, "addrs": addrs}), flush=True)
        await wait_for_stop()


if __name__ == "__main__":
    trio.run(main, json.loads(sys.argv[1]))
