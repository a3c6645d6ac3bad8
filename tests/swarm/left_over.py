"""What may be left over of the work of clients and servers: cache tokens, streams, tasks, memory, open files, bans."""

from __future__ import annotations

import gc
import sys
import threading
from collections import Counter
from collections.abc import Sequence

import psutil

from petalnode.node.client.api.causal_lm import DistributedModelForCausalLM
from petalnode.node.network.transport.yamux import Muxer
from tests.inspection import call, client_of, loop_tasks
from tests.swarm.server_pool import PooledServer

STREAMS_PER_CONNECTION = 4
"""Open on a client's connection to a server when no session is: directory, and what is being closed."""
TASKS_PER_CONNECTION = 6
"""Of the multiplexer and of libp2p, for as long as it is open."""
MORE_TASKS = 4
"""That a client may have begun for good since the start, such as what keeps reservations at relays."""
GROWTH = 80 * 2**20
"""Bytes by which a server or the clients may have grown at the end, whatever the length of the run."""
MORE_FILES = 64
"""That a server may have open beyond those that it began with: connections to others, of which some are gone."""
LOOKS = 120
"""Taken at least a second apart, until what sessions held is given back: a slow machine slows them, too. Servers that
come back from a cut network announce themselves within 15 s."""


def open_streams() -> tuple[int, int]:
    """(streams, connections) of all clients of this process."""
    muxers = [found for found in gc.get_objects() if isinstance(found, Muxer) and not found.is_closed]
    return sum(muxer.open_streams for muxer in muxers), len(muxers)


def tasks_beside_connections(models: Sequence[DistributedModelForCausalLM]) -> int:
    """How many trio tasks there are for these models, which are all of this process, without those of connections."""
    return sum(sum(loop_tasks(model).values()) for model in models) - TASKS_PER_CONNECTION * open_streams()[1]


def check_tasks(models: Sequence[DistributedModelForCausalLM], before: int) -> None:
    """The trio tasks of the models are those of `before`: what served sessions has ended."""
    pause, look = threading.Event(), 0
    while (now := tasks_beside_connections(models)) > before + MORE_TASKS * len(models):
        look += 1
        names = sum(map(loop_tasks, models), Counter[str]())
        assert look < LOOKS, f"{now} tasks beside those of connections, {before} at the start; of all: {names}"
        pause.wait(1.0)
    print(f"{now} tasks beside those of connections, {before} at the start", file=sys.stderr, flush=True)


def memory(servers: Sequence[PooledServer]) -> dict[int, int]:
    return {server.pid: psutil.Process(server.pid).memory_info().rss for server in servers}


def files(servers: Sequence[PooledServer]) -> dict[int, int]:
    """How many files and sockets each has open."""
    return {server.pid: psutil.Process(server.pid).num_fds() for server in servers}


def check_files(servers: Sequence[PooledServer], before: dict[int, int]) -> list[int]:
    """How many each has open now, not many more than `before`."""
    now = files(servers)
    more = {pid: (before[pid], count) for pid, count in now.items() if count > before.get(pid, count) + MORE_FILES}
    assert not more, f"files that servers have not closed, by process: {more}"
    return list(now.values())


def check_nobody_is_banned(model: DistributedModelForCausalLM, servers: Sequence[PooledServer]) -> None:
    """All servers are honest, whatever befalls their machines."""
    trust = client_of(model).swarm.trust
    bans = {str(server.span): ban.reason for server in servers if (ban := trust.ban_of(server.peer_id)) is not None}
    assert not bans, f"honest servers are banned: {bans}"


def check_nothing_is_left(
    model: DistributedModelForCausalLM, servers: Sequence[PooledServer], before: dict[int, int], cache_tokens: int
) -> None:
    """All cache tokens are free, streams are closed, and memory is what it was."""
    client = client_of(model)

    def missing() -> dict[str, str]:
        call(model, client.refresh)
        known = {server.peer_id: server.cache_tokens_free for server in client.servers()}
        return {
            f"{server.arguments[5:7]} {server.peer_id}": "not known to the client"
            if server.peer_id not in known
            else f"{cache_tokens - known[server.peer_id]} tokens are held"
            for server in servers
            if known.get(server.peer_id) != cache_tokens
        }

    pause, look = threading.Event(), 0
    while left := missing():
        look += 1
        assert look < LOOKS, f"not given back after {look} looks: {left}"
        pause.wait(1.0)
    print(f"all cache tokens are free after {look} looks", file=sys.stderr, flush=True)
    streams, connections = open_streams()
    print(f"{streams} streams on {connections} connections are open", file=sys.stderr, flush=True)
    assert streams <= STREAMS_PER_CONNECTION * connections
    for server in servers:
        if server.pid in before:
            grown = psutil.Process(server.pid).memory_info().rss - before[server.pid]
            print(f"server {server.pid} grew by {grown / 2**20:.0f} MiB", file=sys.stderr, flush=True)
            assert grown < GROWTH
