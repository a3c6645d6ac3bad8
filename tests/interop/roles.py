"""petalnode in the roles of libp2p/unified-testing: transport, hole punching, Kademlia; by their environment variables.

    REDIS_ADDR=127.0.0.1:6379 TEST_KEY=a5b50d5e TRANSPORT=ws IS_DIALER=true python -m tests.interop.roles

There each program runs in a container, and all of them tell each other addresses through a Redis server
(https://github.com/libp2p/unified-testing/blob/master/docs/write-a-transport-test-app.md). The dialer and the querier
print what they have measured as YAML and end; the others run until they are stopped.
"""

from __future__ import annotations

import hashlib
import os
import random
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import trio

from petalnode.crypto.identity import Identity
from petalnode.node.network.addresses import parse_peer
from petalnode.node.network.standard_protocols import PING
from petalnode.node.swarm.config import SwarmConfig
from petalnode.node.swarm.swarm import Swarm, open_swarm
from tests.node_inspection import table_of

PORT: Final = 4001  # of peers in hole punching
PROVIDED: Final = b"\x12\x20" + hashlib.sha256(b"interop-test-key").digest()
"""A multihash, since js-libp2p keeps no records of other keys."""
PATIENCE: Final = 180.0  # seconds for another program to start, or for a hole to be punched


class Redis:
    """What the programs tell each other, at HOST:PORT."""

    def __init__(self, addr: str, test: str) -> None:
        host, _, port = addr.partition(":")
        self._host, self._port, self._test = host, int(port or 6379), test

    async def _ask(self, *words: str) -> str | None:
        parts = [f"*{len(words)}", *(part for word in words for part in (f"${len(word.encode())}", word))]
        async with await trio.open_tcp_stream(self._host, self._port) as stream:
            await stream.send_all("".join(f"{part}\r\n" for part in parts).encode())
            said = b""
            while said.count(b"\r\n") < (2 if said[:1] == b"$" and said[:3] != b"$-1" else 1):
                said += await stream.receive_some(4096)
        kind, *value = said.decode().split("\r\n")
        return value[0] if kind[:1] == "$" and kind != "$-1" else None

    async def tell(self, name: str, value: str) -> None:
        await self._ask("SET", f"{self._test}_{name}", value)

    async def wait(self, name: str) -> str:
        with trio.fail_after(PATIENCE):
            while (value := await self._ask("GET", f"{self._test}_{name}")) is None:  # noqa: ASYNC110
                await trio.sleep(0.1)
        return value


def report(**measured: float) -> None:
    print("# Measurements from dialer")
    for name, value in measured.items():
        print(f"{name}: {value:.3f}")
    sys.stdout.flush()


def listening(ip: str, port: int, transport: str, **options: object) -> SwarmConfig:
    """
    Raises:
        SystemExit: another transport than TCP and WebSocket is asked for.
    """
    suffix = {"tcp": "", "ws": "/ws"}.get(transport)
    if suffix is None:
        raise SystemExit(f"no node of petalnode speaks {transport}")
    listen = f"/ip4/{ip}/tcp/{port}{suffix}"
    return SwarmConfig(
        Identity.generate(),
        listen=(listen,),
        bootstrap_deadline=PATIENCE,
        **options,  # type: ignore[arg-type]
    )


def address(swarm: Swarm) -> str:
    """One that others can dial, if there is any."""
    return next((addr for addr in swarm.addrs if not addr.startswith("/ip4/127.")), swarm.addrs[0])


async def ping(swarm: Swarm, peer_id: str) -> None:
    stream, sent = await swarm.host.open_stream(peer_id, PING), os.urandom(32)
    await stream.write(sent)
    back = b""
    while len(back) < len(sent):
        if not (part := await stream.read(len(sent) - len(back))):
            raise ConnectionError("a ping came back cut off")
        back += part
    assert back == sent
    await stream.close()


async def transport(env: Mapping[str, str], redis: Redis) -> None:
    kind = env.get("TRANSPORT", "tcp")
    if (env.get("SECURE_CHANNEL", "noise"), env.get("MUXER", "yamux")) != ("noise", "yamux"):
        raise SystemExit("nodes of petalnode speak Noise and Yamux")
    if env.get("IS_DIALER") != "true":
        async with open_swarm(listening(env.get("LISTENER_IP", "0.0.0.0"), 0, kind)) as swarm:
            await redis.tell("listener_multiaddr", address(swarm))
            await trio.sleep_forever()
    addr = await redis.wait("listener_multiaddr")
    peer_id, at = parse_peer(addr)
    async with open_swarm(SwarmConfig(Identity.generate())) as swarm:
        swarm.host.remember(peer_id, [at])
        begun = time.perf_counter()
        await swarm.host.connect(peer_id)
        await ping(swarm, peer_id)
        connected = time.perf_counter()
        await ping(swarm, peer_id)
        rtt = time.perf_counter() - connected
    print("latency:")
    print(f"  handshake_plus_one_rtt: {1000 * (connected - begun):.3f}")
    print(f"  ping_rtt: {1000 * rtt:.3f}")
    print("  unit: ms", flush=True)


async def hole_punching(env: Mapping[str, str], redis: Redis) -> None:
    kind = env.get("TRANSPORT", "tcp")
    if env.get("IS_RELAY") == "true":
        async with open_swarm(listening(env.get("RELAY_IP", "0.0.0.0"), PORT, kind)) as swarm:
            await redis.tell("relay_multiaddr", address(swarm))
            await trio.sleep_forever()
    relay = await redis.wait("relay_multiaddr")
    async with open_swarm(listening(env.get("PEER_IP", "0.0.0.0"), PORT, kind, relay=relay)) as swarm:
        await swarm.host.connect(parse_peer(relay)[0])
        if env.get("IS_DIALER") != "true":
            while not any("/p2p-circuit" in addr for addr in swarm.addrs):
                await swarm.wait_reachability_changed()
            await redis.tell("listener_peer_id", swarm.peer_id)
            await trio.sleep_forever()
        peer_id = await redis.wait("listener_peer_id")
        begun = time.perf_counter()
        swarm.host.remember(peer_id, [f"{relay}/p2p-circuit"])
        await swarm.host.connect(peer_id)
        with trio.fail_after(PATIENCE):
            while not swarm.is_direct(peer_id):
                await swarm.watch_direct(peer_id).wait()
        report(handshakeTime=1000 * (time.perf_counter() - begun))
        print("unit: ms", flush=True)


async def kademlia(env: Mapping[str, str], redis: Redis) -> None:
    role, ip = env["ROLE"], env.get("LISTENER_IP", "0.0.0.0")
    if role == "bootstrap":
        async with open_swarm(listening(ip, 0, "tcp")) as swarm:
            await redis.tell("bootstrap_addr", address(swarm))
            await trio.sleep_forever()
    if role == "querier":
        await redis.wait("provider_done")
    async with open_swarm(listening(ip, 0, "tcp", peers=(await redis.wait("bootstrap_addr"),))) as swarm:
        table = table_of(swarm)
        if role == "provider":
            with trio.fail_after(PATIENCE):
                while not await table.provide_key(PROVIDED, timeout=PATIENCE):  # noqa: ASYNC110
                    await trio.sleep(1)  # who is busy confirms none
            await redis.tell("provider_done", "done")
            await trio.sleep_forever()
        begun = time.perf_counter()
        found = await table.look_up(PROVIDED, timeout=PATIENCE)
        if not list(found.providers(random.Random())):
            raise SystemExit("no provider was found")
        print("status: pass")
        report(lookupTime=1000 * (time.perf_counter() - begun))


def main(env: Mapping[str, str]) -> None:
    role: Callable[[Mapping[str, str], Redis], Awaitable[None]] = transport
    if "ROLE" in env:
        role = kademlia
    elif {"IS_RELAY", "RELAY_IP", "PEER_IP"} & env.keys():
        role = hole_punching
    trio.run(role, env, Redis(env["REDIS_ADDR"], env["TEST_KEY"]))


if __name__ == "__main__":
    main(os.environ)
