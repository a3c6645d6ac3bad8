"""How long sessions stand still while servers come, die, freeze and leave, and whether anything is left over.

    python benchmarks/chaos.py --minutes 30 --clients 8 --busy-loops 4 [--seed 7] [--json]
    sudo python benchmarks/chaos.py --soak --minutes 30 [--clients 8] [--seed 7] [--json]

Server processes of a tiny model on loopback, each block always with one that is well, and clients that generate with
greedy search, beams, padded batches and rollbacks; every answer is compared with that of plain transformers. Beside
them processes that only use a core. Exits with an error if a token is wrong, an answer hangs, or a session, a
cache, a stream, a connection, a task, a file or a thread is left, or the clients' memory grows after the first five
minutes.

With --soak each server has a network namespace of its own, and more happens: its network is cut for 40 s, the disk of
all servers is full, its clock is a day off. No answer may then stand still for 30 s (of a quiet machine). All of it
is in namespaces that end with this process, however it ends.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.swarm.chaos import ChaosReport, busy_loops, run_chaos
from tests.swarm.mishaps import isolated, mishaps
from tests.swarm.processes import nodes
from tests.swarm.server_pool import server_pool
from tests.tiny_models import save_tiny

SOAK_HUNG = 30.0
"""Seconds."""


def run(minutes: float, seed: int, clients: int, busy: int, soak: bool) -> ChaosReport:
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    how: dict[str, Any] = {"seconds": 60 * minutes, "seed": seed, "clients": clients}
    with tempfile.TemporaryDirectory() as folder:
        home, model = Path(folder) / "home", Path(folder) / "tiny-llama"
        save_tiny("llama", model, max_position_embeddings=4096, eos_token_id=None)
        with ExitStack() as stack:
            starter = stack.enter_context(nodes(home))
            stack.enter_context(busy_loops(busy))
            chaos = home / "chaos"
            if not soak:
                peer = starter.meeting_point().event("ready")["addrs"][0]
                return run_chaos(stack.enter_context(server_pool(chaos, model, peer)), model, **how)
            befall = stack.enter_context(mishaps(chaos))
            peer = starter.announcer(listen=f"/ip4/{befall.address}/tcp/0").event("ready")["addrs"][0]
            # What they remember is what a full disk keeps them from writing.
            pool = stack.enter_context(server_pool(chaos, model, peer, PETALNODE_REMEMBER="1"))
            return run_chaos(pool, model, mishaps=befall, hung=SOAK_HUNG, **how)


def show(report: ChaosReport) -> None:
    fields = report.fields()
    waits = fields.pop("waits")
    console = Console(width=160)
    for name, value in fields.items():
        console.print(f"{name}: {value}")
    table = Table("waited for", "times", "longest, s", *(f"<= {bound} ms" for bound in waits["step"]["buckets"]))
    for cause, wait in waits.items():
        table.add_row(cause, str(wait["count"]), f"{wait['max_ms'] / 1000:.2f}", *map(str, wait["buckets"].values()))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--busy-loops", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--soak", action="store_true")
    arguments = parser.parse_args()
    if arguments.soak:
        isolated([sys.executable, *sys.argv])
        # What this process has started, mounted and written ends with its namespaces.
        signal.signal(signal.SIGTERM, lambda *_: os._exit(143))
    seed = arguments.seed or random.randrange(1, 2**31)
    print(f"seed {seed}", file=sys.stderr, flush=True)
    report = run(arguments.minutes, seed, arguments.clients, arguments.busy_loops, arguments.soak)
    if arguments.json:
        print(json.dumps({"seed": seed, "minutes": arguments.minutes, "clients": arguments.clients} | report.fields()))
    else:
        show(report)
    if any(report.left.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
