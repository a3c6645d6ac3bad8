"""A node of sixty_nodes.py: a libp2p host with a directory, announcements and nothing to compute. Imports no torch.

    python -m benchmarks.light_node FILE OPTIONS

`OPTIONS` are those of tests/nat/light_node.py, whose commands it takes, with those below; `FILE` is where long passes
of its event loop are written down.
"""

from __future__ import annotations

import gc
import json
import os
import random
import resource
import sys
import time
from contextlib import suppress
from pathlib import Path

import trio

from benchmarks.watched import LoopWatch
from petalnode.crypto.identity import Identity
from petalnode.protocols.announcement import ANNOUNCEMENT, Announcement, ServerState, freshened, sign_announcement
from petalnode.protocols.ids import Span
from tests.nat import light_node


class Commands(light_node.Commands):
    """What the benchmark asks of a node, besides."""

    async def figures(self) -> dict[str, float]:
        """What its own counters have: bytes on its sockets, seconds of processor time, bytes of memory."""
        used, sockets = resource.getrusage(resource.RUSAGE_SELF), self._swarm.host.socket_bytes
        return {
            "sent": sockets.sent,
            "received": sockets.received,
            "cpu": used.ru_utime + used.ru_stime,
            "rss": 1024 * used.ru_maxrss,
            "torch": float("torch" in sys.modules),
            "known": len(self._swarm.view.records),
        }

    async def known(self, peers: list[str]) -> int:
        """How many of these servers it knows."""
        now = time.time()
        return sum(self._swarm.view.get(peer, now) is not None for peer in peers)

    async def flood(self, keys: int, version: str, num_blocks: int) -> float:
        """Signs announcements of many keys, all of them of this model and quick, and hands them to whoever asks for
        what it knows; returns the seconds that took. It pays for nothing else."""
        begun = time.perf_counter()
        host = self._swarm.addrs[0].split("/")[2]
        records = []
        for number in range(keys):
            identity = Identity.generate()
            start = random.randrange(num_blocks)
            content = Announcement(
                identity.peer_id,
                bytes.fromhex(version),
                "tiny-llama",
                num_blocks,
                Span(start, random.randint(start + 1, num_blocks)),
                ServerState.ONLINE,
                step_seconds=0.0005,
                cache_tokens_free=100_000,
                cache_tokens=100_000,
                dtype="float32",
                addrs=(f"/ip4/{host}/tcp/{1024 + number % 60_000}",),
            )
            fresh = freshened(content, now=time.time(), lifetime=ANNOUNCEMENT.max_lifetime - 60)
            records.append(sign_announcement(identity, fresh))
            if number % 50 == 0:
                await trio.lowlevel.checkpoint()
        self._swarm._directory.merge(records)
        return time.perf_counter() - begun


def main() -> None:
    # The scheduler of Linux shares cores among sessions first: beside other work, nodes of one would starve together.
    with suppress(PermissionError):
        os.setsid()
    light_node.Commands = Commands  # type: ignore[misc]
    gc.freeze()  # as the command line does
    trio.run(light_node.main, json.loads(sys.argv[2]), instruments=[LoopWatch(Path(sys.argv[1]))])


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
