"""Servers come, die, freeze and leave at random while clients generate; what was wrong, hung or left over is told.

Every block keeps at least one server that is well; more is promised to nobody. `test_chaos.py` does this for some
seconds, `benchmarks/chaos.py` for as long as one likes and beside other work.
"""

from __future__ import annotations

import math
import random
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import psutil
import torch

from petalnode.node.client.api.causal_lm import AutoDistributedModelForCausalLM
from petalnode.node.client.core import SwarmClient
from petalnode.node.client.deadlines import Waits
from tests.inspection import client_of
from tests.slowness import Slowness
from tests.swarm.generating import Generating, tasks
from tests.swarm.left_over import (
    GROWTH,
    check_files,
    check_nobody_is_banned,
    check_nothing_is_left,
    check_tasks,
    files,
    memory,
    open_streams,
    tasks_beside_connections,
)
from tests.swarm.mishaps import CUT, Mishaps
from tests.swarm.moved_clock import DAY
from tests.swarm.processes import until
from tests.swarm.server_pool import PooledServer, ServerPool
from tests.tiny_models import HIDDEN, NUM_BLOCKS, load_whole

CACHE_TOKENS = 20000
SPANS = ("0:2", "2:4", "4:6", "0:3", "3:6", "1:5", "0:6")
MOST_SERVERS = 11
CALM = (0.2, 1.5)
"""Seconds between two events."""
FROZEN = (0.5, 7.0)
"""Seconds that a server stays frozen: less and more than what it takes to be given up."""

FULL = (5.0, 20.0)
"""Seconds that a disk stays full."""
WRONG = (5.0, 30.0)
"""Seconds that a clock stays wrong."""
MENDED = 20.0
"""Seconds until a server counts as well whose network or clock has been put right: it has announced itself by then."""
HUNG = 60.0
"""Seconds without any step of an answer after which it counts as hung: many times what the worst recovery takes."""
LEVEL_AFTER = 300.0
"""Seconds after which the clients' memory stays level, and"""
LEVEL = 24 * 2**20
"""bytes that it may grow by from then on, whatever the length of the run."""
SAMPLES = 5.0
"""Seconds between two looks at how much memory the processes use."""


class Chaos:
    """Decides what happens next, so that each block keeps a server that is well."""

    def __init__(self, pool: ServerPool, rng: random.Random, mishaps: Mishaps | None = None) -> None:
        self.events: Counter[str] = Counter()
        self.clients: Sequence[Generating] = ()
        self.files: dict[int, int] = {}
        self._pool = pool
        self._random = rng
        self._mishaps = mishaps
        self._due: list[tuple[float, Callable[[], None]]] = []
        self._ill: set[PooledServer] = set()
        self._servers = [self._start(blocks) for blocks in (*SPANS[:3], *SPANS[:5])]

    def _start(self, blocks: str) -> PooledServer:
        options = ("--cache-tokens", str(CACHE_TOKENS))
        return (
            self._pool.start(blocks, *options)
            if self._mishaps is None
            else self._mishaps.start(self._pool, blocks, *options)
        )

    @property
    def servers(self) -> list[PooledServer]:
        return list(self._servers)

    def _well(self) -> list[PooledServer]:
        """Those that work, and that all clients have heard of: nobody can be served by others."""
        heard_of = [{known.peer_id for known in client_of(client.model).servers()} for client in self.clients]
        return [
            server
            for server in self._servers
            if server.is_ready and server not in self._ill and all(server.peer_id in known for known in heard_of)
        ]

    def state(self) -> str:
        """Which servers there are, how they are, and how many of them each client knows."""
        well = self._well()
        of = {True: "well", False: "ill or unheard of"}
        servers = [f"{server.arguments[5:7]} {of[server in well]}" for server in self._servers]
        known = [self._known(client_of(client.model)) for client in self.clients]
        return f"servers: {servers}; known to each client, and of these with a round trip: {known}"

    def _known(self, client: SwarmClient) -> tuple[int, int]:
        known = client.servers()
        return len(known), sum(client.round_trip(server.peer_id) is not None for server in known)

    def _spare(self) -> list[PooledServer]:
        """Those without which every block still has a server that is well."""
        well = self._well()
        return [
            server
            for server in well
            if all(
                any(other.span[0] <= block < other.span[1] for other in well if other is not server)
                for block in range(NUM_BLOCKS)
            )
        ]

    def one_event(self) -> None:
        self._put_right(monotonic())
        self._miss()
        spare = self._spare()
        options: list[tuple[str, Callable[[], None]]] = []
        if len(self._servers) < MOST_SERVERS:
            options.append(("join", self._join))
        if spare:
            options += [
                ("kill", lambda: self._leave(PooledServer.kill)),
                ("freeze", self._freeze),
                ("drain", lambda: self._leave(PooledServer.terminate)),
            ]
        if self._mishaps is not None:
            options += [] if self._mishaps.disk_is_full else [("disk", self._fill_disk)]
            options += [("cut", self._cut), ("clock", self._move_clock)] if spare else []
        if options:
            name, act = self._random.choice(options)
            act()
            self.events[name] += 1

    def _join(self) -> None:
        self._servers.append(self._start(self._random.choice(SPANS)))

    def _leave(self, how: Callable[[PooledServer], None]) -> None:
        server = self._random.choice(self._spare())
        self._servers.remove(server)
        how(server)

    def _miss(self) -> None:
        """Takes note of servers that could not start, for want of a disk; for no other reason does one end."""
        for server in [server for server in self._servers if server.process.poll() is not None]:
            full = self._mishaps is not None and server in self._mishaps.full_since_start
            assert full, f"{server.arguments} has ended by itself: {server.errors[-3000:]}"
            self._servers.remove(server)
            self.events["ended without a disk"] += 1

    def _befall(
        self, what: Callable[[PooledServer], None], cure: Callable[[PooledServer], None], *seconds: float
    ) -> None:
        """Does it to a server, and cures it after the first of `seconds`; after the second it is well."""
        server = self._random.choice(self._spare())
        self._ill.add(server)
        what(server)
        now = monotonic()
        self._due += [(now + seconds[0], lambda: cure(server)), (now + seconds[1], lambda: self._ill.discard(server))]

    def _freeze(self) -> None:
        seconds = self._random.uniform(*FROZEN)
        self._befall(PooledServer.freeze, PooledServer.thaw, seconds, seconds)

    def _cut(self) -> None:
        assert self._mishaps is not None
        self._befall(self._mishaps.cut, self._mishaps.mend, CUT, CUT + MENDED)

    def _move_clock(self) -> None:
        mishaps, seconds, by = self._mishaps, self._random.uniform(*WRONG), self._random.choice((-DAY, DAY))
        assert mishaps is not None
        right, wrong = partial(mishaps.move_clock, seconds=0.0), partial(mishaps.move_clock, seconds=by)
        self._befall(wrong, right, seconds, seconds + MENDED)

    def _fill_disk(self) -> None:
        assert self._mishaps is not None
        self._mishaps.fill_disk(self._servers)
        self._due.append((monotonic() + self._random.uniform(*FULL), self._mishaps.free_disk))

    def _put_right(self, now: float) -> None:
        for due in [due for due in self._due if due[0] <= now]:
            self._due.remove(due)
            due[1]()

    def calm(self) -> None:
        self._put_right(math.inf)

    def settle(self) -> None:
        """Waits until all servers are ready, but for those that end for want of a disk."""

        def settled() -> bool:
            self._miss()
            return all(server.is_ready for server in self._servers)

        until(settled, "all servers are ready")


@dataclass
class Memory:
    """How much memory processes use, looked at again and again."""

    samples: dict[int, list[tuple[float, int]]] = field(default_factory=dict)
    _looked: float = 0.0

    def look(self, pids: Sequence[int]) -> None:
        if monotonic() < self._looked + SAMPLES:
            return
        self._looked = monotonic()
        for pid in pids:
            try:
                rss = psutil.Process(pid).memory_info().rss
            except psutil.NoSuchProcess:
                continue
            self.samples.setdefault(pid, []).append((self._looked, rss))

    def growth(self, pid: int) -> float | None:
        """MiB since the memory has to be level; None if the run was too short to tell."""
        samples = self.samples[pid]
        level = [rss for seconds, rss in samples if LEVEL_AFTER <= seconds - samples[0][0] < LEVEL_AFTER + 60]
        last = [rss for _, rss in samples[-len(level) :]]
        return (float(np.median(last)) - float(np.median(level))) / 2**20 if len(samples) > 2 * len(level) > 0 else None

    def slope(self, pid: int) -> float | None:
        """MiB a minute, the first fifth of the time left out; None if there are too few samples."""
        samples = self.samples.get(pid, [])
        samples = samples[len(samples) // 5 :]
        if len(samples) < 10:
            return None
        seconds, rss = np.array(samples).T
        return float(np.polyfit(seconds - seconds[0], rss, 1)[0] * 60 / 2**20)


@dataclass
class ChaosReport:
    """What came of a run: `waits` of all sessions together, growth in MiB a minute, files that servers have open at the
    end, and what is left when all clients are closed."""

    events: dict[str, int]
    answers: int
    recoveries: int
    slowest_answer: float
    waits: Waits
    client_slope: float | None
    client_growth: float | None
    server_slopes: list[float]
    server_files: list[int]
    longest_standstill: float = 0.0
    left: dict[str, int] = field(default_factory=dict)

    @property
    def longest_step(self) -> float:
        return self.waits.by_cause["step"].longest

    def fields(self) -> dict[str, Any]:
        return {
            "events": self.events,
            "answers": self.answers,
            "recoveries": self.recoveries,
            "slowest_answer_s": round(self.slowest_answer, 2),
            "longest_step_s": round(self.longest_step, 2),
            "waits": self.waits.fields(),
            "longest_standstill_s": round(self.longest_standstill, 2),
            "client_mib_after_5_minutes": None if self.client_growth is None else round(self.client_growth, 1),
            "client_mib_per_minute": None if self.client_slope is None else round(self.client_slope, 3),
            "server_mib_per_minute": [round(slope, 3) for slope in self.server_slopes],
            "server_files": self.server_files,
            "left": self.left,
        }


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """So many processes that want a core each; they end with this one, however it ends."""
    code = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"
    loops = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
        for loop in loops:
            loop.wait()


def run_chaos(
    pool: ServerPool,
    folder: Path,
    *,
    seconds: float,
    seed: int,
    clients: int,
    mishaps: Mishaps | None = None,
    hung: float = HUNG,
) -> ChaosReport:
    """With `mishaps` networks are cut, disks full and clocks wrong, too. `hung` is in seconds of a quiet machine.

    Raises:
        AssertionError: a token was wrong, an answer hung, or something was left over.
    """
    slowness = Slowness()
    rng = random.Random(seed)
    chaos = Chaos(pool, rng, mishaps)
    todo = tasks(load_whole(folder))
    for server in chaos.servers:
        server.ready  # noqa: B018  (waits)
    stop = threading.Event()
    here = psutil.Process()
    threads_before, sockets_before = threading.active_count(), len(here.net_connections())
    files_before = {file.path for file in here.open_files()}
    generating = [
        Generating(
            AutoDistributedModelForCausalLM.from_pretrained(folder, initial_peers=[pool.peer]),
            todo,
            random.Random(seed + index + 1),
            stop,
        )
        for index in range(clients)
    ]
    try:
        report = _under_chaos(chaos, generating, seconds, rng, slowness, hung)
    finally:
        stop.set()
        chaos.calm()
        for client in generating:
            client.model.close()
    until(lambda: threading.active_count() <= threads_before, "the clients' threads have ended")
    until(lambda: len(here.net_connections()) <= sockets_before, "the clients' connections are closed")
    report.server_files = check_files(chaos.servers, chaos.files)
    # Fewer than before is not left over: threads and connections of whatever ran before may end in the meantime.
    report.left |= {"threads": max(0, threading.active_count() - threads_before)}
    report.left |= {"files": len({file.path for file in here.open_files()} - files_before)}
    report.left |= {"sockets": max(0, len(here.net_connections()) - sockets_before)}
    return report


def _under_chaos(
    chaos: Chaos, clients: Sequence[Generating], seconds: float, rng: random.Random, slowness: Slowness, hung: float
) -> ChaosReport:
    stop, chaos.clients = clients[0].stop, clients
    threads = [threading.Thread(target=client.run, daemon=True) for client in clients]
    for client in clients:
        client.answer(clients[0].tasks[0])  # so that memory is measured when everything has been used once
    with clients[0].model.inference_session(max_length=1) as session:
        session.step(torch.zeros(1, 1, HIDDEN))
        assert open_streams()[0] >= len(session.route), "open streams are not counted"
    models = [client.model for client in clients]
    before, tasks_before = memory(chaos.servers), tasks_beside_connections(models)
    chaos.files = files(chaos.servers)
    own, memories = psutil.Process(), Memory()
    own_before, longest = own.memory_info().rss, 0.0
    for thread in threads:
        thread.start()

    def check() -> None:
        memories.look([own.pid, *(server.pid for server in chaos.servers if server.is_ready)])
        nonlocal longest
        for client in clients:
            longest = max(longest, client.stands_still)
            if client.stands_still > hung:
                # Measured when it matters: a machine that others use makes no step hang.
                assert client.stands_still < hung * slowness(), f"an answer hangs: {told(clients)}"

    end = monotonic() + seconds
    pause = threading.Event()
    while monotonic() < end and not any(client.failures for client in clients):
        pause.wait(rng.uniform(*CALM))
        chaos.one_event()
        for server in chaos.servers:
            if server.pid not in before and server.is_ready:
                before |= memory([server])
                chaos.files |= files([server])
        check()
    state = chaos.state()
    chaos.calm()
    stop.set()
    while any(thread.is_alive() for thread in threads):
        pause.wait(0.2)
        check()
    failures = [failure for client in clients for failure in client.failures]
    assert not failures, f"{failures} after {monotonic() - end + seconds:.0f} s with {dict(chaos.events)}; {state}"
    assert all(client.answers for client in clients)
    for client in clients:
        check_nobody_is_banned(client.model, chaos.servers)
    report = ChaosReport(
        dict(chaos.events),
        sum(client.answers for client in clients),
        sum(client.recoveries for client in clients),
        max(client.slowest for client in clients),
        Waits.of(*(client.waits for client in clients)),
        memories.slope(own.pid),
        memories.growth(own.pid),
        [slope for server in chaos.servers if (slope := memories.slope(server.pid)) is not None],
        [],
        longest,
    )
    chaos.settle()
    check_nothing_is_left(clients[0].model, chaos.servers, before, CACHE_TOKENS)
    check_tasks(models, tasks_before)
    grown = own.memory_info().rss - own_before
    print(f"the clients grew by {grown / 2**20:.0f} MiB", file=sys.stderr, flush=True)
    assert grown < GROWTH
    assert report.client_growth is None or report.client_growth * 2**20 < LEVEL, "the clients' memory is not level"
    return report


def told(clients: Sequence[Generating]) -> str:
    return f"{[round(client.stands_still, 1) for client in clients]} s without a step"
