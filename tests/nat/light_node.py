"""A node without a model that does what it is told, for the tests with networks.

Its argument is one JSON object: the fields of SwarmConfig by name (`seed`, 64 hexadecimal digits, for the identity),
and `blocks` for a made-up announcement. On standard input it takes one JSON object per line, {"number": n, "do":
name, "with": {arguments}}, for the methods of `Commands`, each of which runs in a task of its own; its results are
{"number": n, "result": ...} or {"number": n, "error": text}. Events come between them. Answers /echo/1 streams with
what they send. Stops in order at the end of its input, and on SIGTERM and SIGINT.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import trio
from multiaddr import Multiaddr

from petalnode.crypto.identity import Identity
from petalnode.node.network.addresses import circuit_of, parse_peer
from petalnode.node.swarm.config import SwarmConfig
from petalnode.node.swarm.swarm import Swarm, open_swarm
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.framing import MessageStream
from petalnode.protocols.ids import StreamProtocol
from tests.connections import connection_lost
from tests.swarm.announcer import ECHO, echo, made_up

Frame = wire.InferenceFrame


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


class Commands:
    """What a test may ask of a node. All times are seconds; `peer` is an address with /p2p, or a peer id.

    What waits does so for ever: who asks gives up once this process has made no progress for long (`Patience`).
    """

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm
        self._streams: list[MessageStream[Frame]] = []

    def _found(self, peer: str) -> tuple[str, tuple[str, ...]]:
        if not peer.startswith("/"):
            return peer, ()
        peer_id, _ = parse_peer(peer)
        return peer_id, (peer,)

    async def addrs(self) -> list[str]:
        return self._swarm.addrs

    async def connected(self) -> list[str]:
        return self._swarm.connected()

    async def paths(self, peer: str) -> list[dict[str, Any]]:
        """The live connections to a peer."""
        return [dataclasses.asdict(path) for path in self._swarm.host.paths(self._found(peer)[0])]

    async def wait_paths(self, peer: str, number: int) -> None:
        """Until there are just `count` connections to a peer."""
        while len(self._swarm.host.paths(self._found(peer)[0])) != number:  # noqa: ASYNC110 (nothing tells)
            await trio.sleep(0.05)

    async def is_direct(self, peer: str) -> bool:
        return self._swarm.is_direct(self._found(peer)[0])

    async def wait_direct(self, peer: str) -> float:
        """Seconds until there is a direct connection."""
        start = time.perf_counter()
        await self._swarm.watch_direct(self._found(peer)[0]).wait()
        return time.perf_counter() - start

    async def wait_lost(self, peer: str) -> float:
        """Seconds until there is no connection any more."""
        start = time.perf_counter()
        await connection_lost(self._swarm.host, self._found(peer)[0]).wait()
        return time.perf_counter() - start

    async def open(self, peer: str, timeout: float = 60.0, protocol: str = ECHO.id) -> int:
        """A stream, by a number that `echo` and `close` take."""
        peer_id, addrs = self._found(peer)
        self._swarm.host.remember(peer_id, addrs)
        self._streams.append(await self._swarm.new_stream(peer_id, StreamProtocol(protocol, Frame), timeout=timeout))
        return len(self._streams) - 1

    async def echo(self, stream: int, size: int = 16, times: int = 1, timeout: float = 60.0) -> list[float]:
        """Seconds that each of `times` messages of `size` bytes took there and back."""
        payload = os.urandom(size)
        tensor = wire.Tensor(shape=[size], dtype="int8", codec="none")
        took = []
        for sequence in range(times):
            start = time.perf_counter()
            frame = Frame(step=wire.Step(sequence=sequence), tensors=[tensor])
            await self._streams[stream].send(frame, [payload], timeout=timeout)
            _, payloads = await self._streams[stream].receive(timeout=timeout)
            if payloads != [payload]:
                raise AssertionError("the echo is not what was sent")
            took.append(time.perf_counter() - start)
        return took

    async def close(self, stream: int) -> None:
        await self._streams[stream].close()

    async def reach(self, peer: str, timeout: float = 110.0) -> float:
        """Seconds until an echo came back over a new stream, tried again and again."""
        peer_id, addrs = self._found(peer)
        self._swarm.host.remember(peer_id, addrs)
        start = time.perf_counter()
        error: Exception | None = None
        with trio.move_on_after(timeout):
            while True:
                try:
                    async with self._swarm.open_stream(peer_id, ECHO, timeout=timeout) as stream:
                        await stream.send(Frame(step=wire.Step(sequence=1)), timeout=4)
                        await stream.receive(timeout=4)
                    return time.perf_counter() - start
                except Exception as failed:
                    error = failed
                    await trio.sleep(0.05)
        raise TimeoutError(f"{peer} not reached within {timeout:g} s: {error}")

    async def rtt(self, peer: str, timeout: float = 60.0) -> float:
        return await self._swarm.measure_rtt(self._found(peer)[0], timeout=timeout)

    async def servers(self) -> dict[str, list[str]]:
        """peer id -> announced addresses of the servers known now."""
        return {server.peer_id: list(server.addrs) for server in self._swarm.view.servers(now=time.time())}

    async def wait_server(self, peer: str) -> float:
        """Seconds until this server's announcement is known."""
        start = time.perf_counter()
        while self._swarm.view.get(peer, time.time()) is None:
            await self._swarm.wait_changed()
        return time.perf_counter() - start

    async def announce(self, blocks: list[int], **options: Any) -> None:
        self._swarm.announce(made_up(self._swarm, {"blocks": blocks, **options}))

    async def reachability(self) -> dict[str, Any]:
        return dataclasses.asdict(self._swarm.reachability)

    async def wait_reachability(self, kind: str) -> dict[str, Any]:
        while self._swarm.reachability.kind != kind:
            await self._swarm.wait_reachability_changed()
        return dataclasses.asdict(self._swarm.reachability)

    async def wait_relays(self, relays: list[str]) -> float:
        """Seconds until it holds places at just these relays (peer ids)."""
        start = time.perf_counter()
        while set(self._swarm.reachability.relays) != set(relays):
            await self._swarm.wait_reachability_changed()
        return time.perf_counter() - start

    async def wait_announced(self, peer: str, with_relays: list[str]) -> float:
        """Seconds until this server is known to be announced with just these relays."""
        start = time.perf_counter()
        while self._relays_of(peer) != set(with_relays):
            await self._swarm.wait_changed()
        return time.perf_counter() - start

    def _relays_of(self, peer: str) -> set[str] | None:
        content = self._swarm.view.get(peer, time.time())
        if content is None:
            return None
        circuits = [circuit_of(Multiaddr(addr)) for addr in content.addrs]
        return {circuit.relay_id for circuit in circuits if circuit is not None}

    async def about(self, peer: str, timeout: float = 60.0) -> dict[str, Any]:
        """What a peer says of itself."""
        return dataclasses.asdict(await self._swarm.ask_node(self._found(peer)[0], timeout=timeout))

    async def disconnect(self, peer: str) -> None:
        await self._swarm.host.disconnect(self._found(peer)[0])


async def carry_out(commands: Commands, number: int, do: str, arguments: dict[str, Any]) -> None:
    try:
        say(number=number, result=await getattr(commands, do)(**arguments))
    except Exception as error:
        say(number=number, error=f"{type(error).__name__}: {error}")


async def serve(swarm: Swarm) -> None:
    """Takes commands until told to stop."""
    commands = Commands(swarm)
    async with trio.open_nursery() as nursery:

        async def take() -> None:
            while line := await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True):
                command = json.loads(line)
                nursery.start_soon(carry_out, commands, command["number"], command["do"], command["with"])
            nursery.cancel_scope.cancel()

        nursery.start_soon(take)
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for _ in signals:
                nursery.cancel_scope.cancel()


def config(options: dict[str, Any]) -> SwarmConfig:
    """Takes the fields of SwarmConfig, and `seed`, out of the options."""
    seed = options.pop("seed", None)
    fields = {field.name for field in dataclasses.fields(SwarmConfig)} & set(options)
    given = {name: _as_in_config(options.pop(name)) for name in fields}
    if "remembered" in given:
        given["remembered"] = Path(given["remembered"])
    return SwarmConfig(identity=Identity.from_seed(bytes.fromhex(seed)) if seed else Identity.generate(), **given)


def _as_in_config(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


async def main(options: dict[str, Any]) -> None:
    if level := options.pop("log_level", None):
        logging.getLogger("petalnode").setLevel(level)
    joining, announced = config(options), options
    async with open_swarm(joining) as swarm:
        swarm.set_handler(ECHO, echo)
        if "blocks" in announced:
            swarm.announce(made_up(swarm, announced))
        say(event="ready", peer_id=swarm.peer_id, addrs=swarm.addrs)
        await serve(swarm)
    say(event="stopped")


if __name__ == "__main__":
    logging.basicConfig(format="%(relativeCreated)d %(levelname)s %(name)s: %(message)s")
    trio.run(main, json.loads(sys.argv[1]))
