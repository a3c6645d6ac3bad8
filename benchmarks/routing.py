"""Milliseconds to find the cheapest chain in a made-up swarm.

    python benchmarks/routing.py [--json] [--servers 1000] [--blocks 126] [--longest 20] [--rounds 50]

Servers lie at random in a square that light in fibre takes 100 ms to cross (there and back), the client among them;
spans have 1 to `--longest` blocks and begin anywhere, steps take 2 to 20 ms per block. With measured pairs, each server
knows its round trips to `measured` that can follow it (64 is all that an announcement carries). `standby` is the
second-best for every hop of the chain together. What goes in is built beforehand; every call starts from nothing.
`cpu` is processor time, which other processes on the machine disturb less than the clock. `step` is how long a decode
step takes over the chain that was found, with the true round trips, also those that nobody measured.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table

from petalnode.node.swarm.cost import COST
from petalnode.node.swarm.routing import Demand, Hop, RouteCandidate, cheapest_chain, second_best
from petalnode.protocols.ids import Span

CROSSING = 0.1  # seconds
TOKEN_BYTES = 2 * 8192

Place = tuple[float, float]


def round_trip(one: Place, other: Place) -> float:
    return 0.001 + CROSSING * math.dist(one, other)


def made_up_swarm(
    servers: int, blocks: int, longest: int, measured: int, seed: int
) -> tuple[list[RouteCandidate], dict[str, Place]]:
    """The servers, and where they are; the client is "client"."""
    chance = random.Random(seed)
    client = (chance.random(), chance.random())
    spans, places = [], []
    for number in range(servers):
        length = min(chance.randint(1, longest), blocks)
        # The first ones cover the model, so that there is a chain.
        start = number if number < blocks else chance.randint(0, blocks - length)
        spans.append(Span(start, min(start + length, blocks)))
        places.append((chance.random(), chance.random()))
    following: list[list[int]] = [[] for _ in range(blocks + 1)]
    for number, span in enumerate(spans):
        for block in range(span.start, span.end):
            following[block].append(number)
    found = []
    for number, span in enumerate(spans):
        likely = following[span.end] if span.end < blocks else following[span.start]
        nearest = sorted(likely, key=lambda other: math.dist(places[number], places[other]))[:measured]
        found.append(
            RouteCandidate(
                f"peer-{number:06}",
                span,
                rtt=round_trip(client, places[number]),
                step_seconds=chance.uniform(0.002, 0.02) * len(span),
                cache_tokens_free=chance.choice([0, 4096, 65536]),
                queue_depth=chance.choice([0, 0, 0, 1, 4]),
                seconds_per_byte=chance.uniform(1e-8, 1e-6),
                rtts={
                    f"peer-{other:06}": round_trip(places[number], places[other])
                    for other in nearest
                    if other != number
                },
            )
        )
    return found, {"client": client, **{server.peer_id: place for server, place in zip(found, places, strict=True)}}


def true_step_seconds(
    chain: Sequence[Hop], swarm: Sequence[RouteCandidate], places: dict[str, Place], pushed: bool
) -> float:
    by_peer = {server.peer_id: server for server in swarm}
    stops = ["client"]
    total = 0.0
    for hop in chain:
        server = by_peer[hop.peer_id]
        load = 1 + COST.load_per_waiting * server.queue_depth
        total += (
            server.step_seconds * load * len(hop.span) / len(server.span) + 2 * TOKEN_BYTES * server.seconds_per_byte
        )
        stops += [hop.peer_id] if pushed else [hop.peer_id, "client"]
    stops += ["client"] if pushed else []
    return total + sum(round_trip(places[one], places[other]) / 2 for one, other in itertools.pairwise(stops))


def milliseconds(call: Callable[[], object], rounds: int) -> tuple[list[float], list[float]]:
    """Of each round, by the clock and of the processor."""
    call()
    wall, cpu = [], []
    for _ in range(rounds):
        wall_before, cpu_before = time.perf_counter(), time.process_time()
        call()
        cpu.append(1000 * (time.process_time() - cpu_before))
        wall.append(1000 * (time.perf_counter() - wall_before))
    return wall, cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--servers", type=int, default=1000)
    parser.add_argument("--blocks", type=int, default=126)
    parser.add_argument("--longest", type=int, default=20, help="blocks of the longest span")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    wanted = Span(0, options.blocks)
    rows = []
    for pushed, measured in [(False, 0), (True, 0), (True, 4), (True, 16), (True, 64)]:
        swarm, places = made_up_swarm(options.servers, options.blocks, options.longest, measured, options.seed)

        def route(swarm: list[RouteCandidate] = swarm, pushed: bool = pushed) -> tuple:
            return cheapest_chain(swarm, wanted, Demand(cache_tokens=2048, token_bytes=TOKEN_BYTES, pushed=pushed))

        chain = route()

        def standby(swarm: list[RouteCandidate] = swarm, pushed: bool = pushed, chain: tuple = chain) -> None:
            for index in range(len(chain)):
                second_best(chain, index, swarm, Demand(cache_tokens=2048, token_bytes=TOKEN_BYTES, pushed=pushed))

        wall, cpu = milliseconds(route, options.rounds)
        standby_wall, _ = milliseconds(standby, max(1, options.rounds // 10))
        rows.append(
            {
                "mode": "pushed" if pushed else "relayed",
                "measured_pairs_per_server": measured,
                "hops": len(chain),
                "step_ms": 1000 * true_step_seconds(chain, swarm, places, pushed),
                "p50_ms": statistics.median(wall),
                "p95_ms": sorted(wall)[int(0.95 * (len(wall) - 1))],
                "max_ms": max(wall),
                "cpu_p50_ms": statistics.median(cpu),
                "standby_p50_ms": statistics.median(standby_wall),
            }
        )
    if options.json:
        print(json.dumps({**vars(options), "runs": rows}))
        return
    table = Table(
        title=f"{options.servers} servers, {options.blocks} blocks, spans of 1 to {options.longest}, ms per route"
    )
    for column in rows[0]:
        table.add_column(column.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(f"{value:.1f}" if isinstance(value, float) else str(value) for value in row.values()))
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
