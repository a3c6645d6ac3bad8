"""Milliseconds per token as the cost model predicts them, and as they are, on real servers.

    python benchmarks/prediction.py [--json] [--rtts 0 10 50] [--servers 2 3] [--model h512] [--tokens 48] [--rounds 5]

Servers are processes of their own with one compute thread each. With a round trip of 0 they are on loopback; with any
other, each and the client are on hosts of their own that are some milliseconds apart (`delay_bridge.py`, which needs
root). `predicted` is what the router reckons, and `petalnode plan` says: the servers' announced decode steps, the
measured round trips, and a millisecond in which each server handles a step, as they are known before the round.
`measured` is the median of a decode step's time at the client, without embeddings and head, which are the same whatever
the route. Of the rounds, the middle one counts. `announced` and `computed` are the computing in it, as the servers
announced it and as they report it of these steps: other work on the machine drives the two apart, so leave it in peace.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from chain import h512, spans_of
from delay_bridge import delay_network
from local_swarm import ServerProcess
from plain import quiet_torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig

from petalnode import AutoDistributedModelForCausalLM
from petalnode.node.models import resolve
from petalnode.node.swarm.routing import Demand, Hop, chain_seconds
from petalnode.protocols.framing import ITEM_BYTES
from petalnode.protocols.ids import Span

MODES = ("relayed", "pushed")
TIMES = ("predicted", "measured", "p95", "announced", "computed")
PROMPT_TOKENS = 16
PATIENCE = 180  # seconds
CORRECTED = 36  # seconds of steps, after which servers have announced what they take, and the client has heard of it


def client(folder: str, addr: str, tokens: int, rounds: int) -> None:
    """The client's process: prints a prediction and the steps of every mode."""
    quiet_torch()
    torch.manual_seed(1)
    with AutoDistributedModelForCausalLM.from_pretrained(folder, initial_peers=[addr]) as model:
        hidden = model._local.embed(torch.randint(5, 2000, (1, PROMPT_TOKENS)))
        begun = time.monotonic()
        while not (time.monotonic() > begun + CORRECTED and _pairs_known(model)):
            if time.monotonic() > begun + PATIENCE:
                sys.exit("the servers do not announce how far they are from one another")
            for mode in MODES:
                one_session(model, hidden, mode, tokens)
        for _, mode in itertools.product(range(rounds), MODES):
            print(json.dumps(one_session(model, hidden, mode, tokens)), flush=True)


def one_session(model: Any, hidden: torch.Tensor, mode: str, tokens: int) -> dict[str, Any]:
    """What its steps are predicted to take when it begins, and what they take: medians."""
    # Without what only makes a newcomer the second choice, and takes no time.
    candidates = [
        replace(candidate, penalty_seconds=0.0) for candidate in model._runtime.call(model._runtime.value.candidates)
    ]
    steps, computed = [], []
    with model.inference_session(PROMPT_TOKENS + tokens) as session, torch.inference_mode():
        token = session.step(hidden)[:, -1:]
        inner = session._session
        inner.spec = replace(inner.spec, push=mode == "pushed")
        for _ in range(tokens):
            begun = time.perf_counter()
            token = session.step(token)
            steps.append(time.perf_counter() - begun)
            computed.append(sum(hop.compute for hop in inner.timings))
        chain = [Hop(peer_id, Span(*blocks)) for peer_id, blocks in session.route]
        token_bytes = hidden.shape[2] * ITEM_BYTES[inner.spec.dtype]
    return {
        "mode": mode,
        "servers": len(chain),
        "announced": sum(candidate.step_seconds for candidate in candidates),
        "predicted": chain_seconds(chain, candidates, Demand(token_bytes=token_bytes, pushed=mode == "pushed")),
        "computed": statistics.median(computed),
        "measured": statistics.median(steps),
        "p95": statistics.quantiles(steps, n=20)[-1],
    }


def _pairs_known(model: Any) -> bool:
    """Whether every server but the last has announced how far the next one is; they look for it once a minute."""
    servers = sorted(model._runtime.call(model._runtime.value.candidates), key=lambda candidate: candidate.span)
    return all(after.peer_id in before.rtts for before, after in itertools.pairwise(servers))


def run(folder: Path, num_blocks: int, rtt: float, count: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Both modes over `count` servers; `rtt` in milliseconds."""
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(delay_network(count + 1, rtt / 2000)) if rtt else None
        servers = stack.enter_context(_servers(network, folder, num_blocks, count))
        arguments = [sys.executable, __file__, "--client", str(folder), str(servers[-1].ready["addrs"][0])]
        arguments += ["--tokens", str(options.tokens), "--rounds", str(options.rounds)]
        command = arguments if network is None else network.command(0, arguments)
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    results = [json.loads(line) for line in done.stdout.splitlines()]
    found = []
    for mode in MODES:
        rounds = [result for result in results if result["mode"] == mode]
        times = {f"{name}_ms": 1000 * statistics.median(figures[name] for figures in rounds) for name in TIMES}
        error = times["predicted_ms"] / times["measured_ms"] - 1
        found.append({"rtt_ms": rtt, "servers": count, "mode": mode, **times, "error": error})
    return found


@contextlib.contextmanager
def _servers(network: Any, folder: Path, num_blocks: int, count: int) -> Iterator[list[ServerProcess]]:
    servers: list[ServerProcess] = []
    with tempfile.TemporaryDirectory(prefix="petalnode-bench-") as scratch:
        try:
            peer: Sequence[str] = ("--new-swarm",)
            for number, (start, end) in enumerate(spans_of(num_blocks, count), start=1):
                own = Path(scratch) / str(number)
                own.mkdir()
                place: dict[str, Any] = {}
                if network is not None:
                    place = {"host": network.address(number), "prefix": network.command(number, [])}
                servers.append(ServerProcess([str(folder), "--blocks", f"{start}:{end}", *peer], own, **place))
                peer = ("--peer", str(servers[-1].wait_ready()["addrs"][0]))
            yield servers
        finally:
            for server in servers:
                server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--rtts", nargs="+", type=float, default=[0, 10, 50], help="milliseconds; 0 is loopback")
    parser.add_argument("--servers", nargs="+", type=int, default=[2, 3])
    parser.add_argument("--model", default="h512", help="h512 (random weights) or any model")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--client", nargs=2, metavar=("MODEL", "PEER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        client(*options.client, options.tokens, options.rounds)
        return
    results = []
    with tempfile.TemporaryDirectory(prefix="petalnode-bench-") as scratch:
        made_here = options.model == "h512"
        folder = h512(Path(scratch) / "h512") if made_here else resolve(options.model, need="all").path
        num_blocks = AutoConfig.from_pretrained(folder).num_hidden_layers
        for rtt, count in itertools.product(options.rtts, options.servers):
            print(f"{count} servers, {rtt:g} ms apart ...", file=sys.stderr)
            results += run(folder, num_blocks, rtt, count, options)
    if options.json:
        print(json.dumps({"model": options.model, "prediction": results}))
        return
    table = Table(title=f"time of a decode step of {options.model}, ms")
    for column in ("RTT ms", "servers", "mode", *TIMES, "error"):
        table.add_column(column, justify="right")
    for result in results:
        table.add_row(
            f"{result['rtt_ms']:g}",
            str(result["servers"]),
            result["mode"],
            *(f"{result[f'{name}_ms']:.1f}" for name in TIMES),
            f"{result['error']:+.0%}",
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
