"""A node that announces a made-up span and computes nothing: the process under test of test_discovery.py.

Takes one JSON object as its argument, prints one when it is ready, and stops in order on SIGTERM, SIGINT or at
the end of its standard input. With "role": "echo" it also answers /echo/1 streams with what they send.
"""

from __future__ import annotations

import json
import signal
import sys
from contextlib import AsyncExitStack, suppress

import trio

from petalnode.crypto.identity import Identity
from petalnode.node.errors import SwarmError
from petalnode.node.swarm.config import SwarmConfig
from petalnode.node.swarm.swarm import Swarm, open_swarm
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.announcement import Announcement
from petalnode.protocols.framing import MessageStream
from petalnode.protocols.ids import Span, StreamProtocol
from tests.announcements import plain

ECHO = StreamProtocol("/echo/1", wire.InferenceFrame)


async def echo(stream: MessageStream[wire.InferenceFrame]) -> None:
    while True:
        frame, payloads = await stream.receive(timeout=None)
        await stream.send(frame, payloads, timeout=60)


def made_up(swarm: Swarm, options: dict) -> Announcement:
    return plain(
        swarm.peer_id,
        Span(*options["blocks"]),
        model_version=bytes.fromhex(options.get("model_version", "11" * 32)),
        model_name=options.get("model_name", "made-up"),
        num_blocks=options.get("num_blocks", 64),
        step_seconds=options.get("step_seconds", 0.01),
        cache_tokens=4096,
        cache_tokens_free=4096,
        dtype="float32",
        quantisation=options.get("quantisation", "none"),
    )


async def wait_for_stop() -> None:
    async with trio.open_nursery() as nursery:

        async def until_end_of_input() -> None:
            await trio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)
            nursery.cancel_scope.cancel()

        nursery.start_soon(until_end_of_input)
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for _ in signals:
                nursery.cancel_scope.cancel()


async def main(options: dict) -> None:
    identity = Identity.from_seed(bytes.fromhex(options["seed"])) if "seed" in options else Identity.generate()
    config = SwarmConfig(
        identity=identity,
        listen=(options.get("listen", "/ip4/127.0.0.1/tcp/0"),),
        peers=tuple(options.get("peers", ())),
        psk=options.get("psk"),
        announcement_ttl=options.get("ttl", 45.0),
        bootstrap_deadline=100.0,  # twenty may start at once on a busy machine
    )
    async with AsyncExitStack() as stack:
        swarm = None
        for _ in range(10):
            with suppress(SwarmError):
                swarm = await stack.enter_async_context(open_swarm(config))
                break
        assert swarm is not None, "no peer has answered"
        if options.get("role") == "echo":
            swarm.set_handler(ECHO, echo)
        if "blocks" in options:
            swarm.announce(made_up(swarm, options))
        print(json.dumps({"event": "ready", "peer_id": swarm.peer_id, "addrs": swarm.addrs}), flush=True)
        await wait_for_stop()
    print(json.dumps({"event": "stopped"}), flush=True)


if __name__ == "__main__":
    trio.run(main, json.loads(sys.argv[1]))
