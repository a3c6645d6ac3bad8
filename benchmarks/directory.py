"""What the directory costs and who is found, in swarms of up to 10,000 servers, on simulated time and links.

    python benchmarks/directory.py [--json] [--servers 100 1000 10000] [--models 1 100] [--hostile 0 1 10 100]
                                   [--addresses 1 16 256] [--nodes 6] [--lifetimes 1.5] [--everything] [--seed 1]

No sockets and no keys: announcements are of their real size and merged, kept, chosen from and put into pages by the
product's own functions (`refresh_rate`, `SwarmView.merge`, `sampled`, `known_well`, `records_page`); signatures are not
checked. Some nodes are simulated in full and stand for all others, as in a mean-field model: whoever is asked is one of
them, or the attacker, as `in_turn` chooses from the asking node's view. What a simulated server of a large swarm
answers is of other servers than it knows, as old: each server that it stands for knows others. Numbers of peers are the
constants of `node/swarm`; lifetimes, rounds and renewals are what `refresh_rate` says for what a node knows.

- A server has a tenth to a third of its model's 30 blocks, and leaves with 10 % an hour without a word; another comes
  for it. It has an address of its own. A simulated server begins with what a newcomer is given at nine peers.
- The attacker has a multiple of the servers' number of keys, at a number of addresses. It announces half of them for
  honest models and half for versions that it makes up, for an hour each, at every simulated node, 20 a second from each
  address, and again within the hour; to each of them at most twice as many as a view holds, others to each. Whoever
  asks one of its keys gets as many of them, and as many bytes, as it takes. Nobody is there.
- A client joins at one node, 100 ms a round trip away, with 10 Mbit/s: a connection takes three round trips, a stream
  one, a page one and its bytes. It looks twice: as it joins, and for the servers of its model.

`up`, `down`: KB/s of an idle server's announcements, queries, answers, pings and measured transfers, with 40 bytes of
frame and stream for each message, signs of life on all connections (of which a node has 4,096 at most, and closes none
before), and 2 KB each way for each new one; Kademlia and hostile announcements are not in it. `bootstrap`: what the
node takes in that all servers were told of. `stale_s`: mean age of the announcements that a server has; `gone`: share
of the honest servers it knows that have left. `known`: the share of its model's honest servers that a server knows;
`honest`: the share of those among all of its model; `blocks`: the share of blocks for which it knows an honest server
that is there, and `least`: for the worst block, how many. For a client that asks for samples (`sample_`), and with
`--everything` for one that asks for all (`all_`): seconds and KiB until its look returns; `blocks`, the share of blocks
for which it then knows an honest server that is there; `honest`, the share of those among the servers that it knows.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from itertools import product
from typing import Any

from directory_world import Outcome, Setting, Traffic, World
from rich.console import Console
from rich.table import Table

from petalnode.node.swarm.config import DEFAULT_TTL
from petalnode.node.swarm.sample import refresh_rate


def simulate(setting: Setting, nodes: int, lifetimes: float, seed: int, *, everything: bool) -> Outcome:
    """So many lifetimes of an announcement, and a third of one to measure; seconds are of simulated time."""
    world = World(setting, min(nodes, setting.servers // 2), seed)
    world.settle()
    lifetime = refresh_rate(setting.servers * (1 + setting.hostile), DEFAULT_TTL).lifetime
    step = max(min(lifetime / 120, 30.0), 1.0)
    world.run(lifetimes * lifetime, step)
    world.traffic = [Traffic() for _ in world.nodes]
    seconds = max(lifetime / 3, 60.0)
    world.run(seconds, step)
    return world.outcome(seconds, everything=everything)


def settings(args: argparse.Namespace) -> Iterator[Setting]:
    for servers, models, hostile in product(args.servers, args.models, args.hostile):
        for addresses in args.addresses if hostile else [0]:
            yield Setting(servers, models, hostile, addresses)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--servers", type=int, nargs="+", default=[100, 1000, 10_000])
    parser.add_argument("--models", type=int, nargs="+", default=[1, 100])
    parser.add_argument("--hostile", type=int, nargs="+", default=[0, 1, 10, 100], help="times as many keys as servers")
    parser.add_argument("--addresses", type=int, nargs="+", default=[1, 16, 256])
    parser.add_argument("--nodes", type=int, default=6, help="simulated in full")
    parser.add_argument("--lifetimes", type=float, default=1.5, help="of an announcement, before anything is measured")
    parser.add_argument("--everything", action="store_true", help="also a client that asks for all announcements")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    rows = []
    console = Console(stderr=args.json, width=200 if args.json else None)
    for setting in settings(args):
        outcome = simulate(setting, args.nodes, args.lifetimes, args.seed, everything=args.everything)
        rows.append({**asdict(setting), **_flat(asdict(outcome))})
        if args.json:
            console.print(rows[-1])
    if args.json:
        print(json.dumps({"rows": rows}))
        return
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*(f"{value:g}" for value in row.values()))
    console.print(table)


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, float]:
    flat: dict[str, float] = {}
    for name, value in values.items():
        if value is None:
            continue
        flat |= _flat(value, f"{name}_") if isinstance(value, dict) else {prefix + name: float(f"{value:.3g}")}
    return flat


if __name__ == "__main__":
    main()
