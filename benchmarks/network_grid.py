"""The network grids of the Petals papers on a local swarm: bandwidth, round trip, sequence length, clients.

    sudo python benchmarks/network_grid.py [--json] [--rows 0 1 2 3 4] [--model h512] [--steps 16] [--batch 16]

Tables 2 and 3 of "Distributed Inference and Fine-tuning of LLMs Over The Internet" (NeurIPS 2023) and table 3 of
"Petals" (ACL demo 2023) have steps/s of one session and tokens/s of forward passes, for each client, in networks of
several bandwidths and round trips, and offloading as the baseline. Here servers and clients are processes on hosts of
their own, whose lines have that bandwidth each way and that round trip between any two (`delay_bridge.py`, needs root).
All share this machine's processor, so what can be compared are ratios to the first row of as many servers: `ratio`, and
`paper` beside it (table 2, three T4 with Llama 2; in brackets table 3 with BLOOM: three A100, ten RTX 3090, twelve
virtual servers). Steps there took 0.44 to 0.8 s, so a round trip of 100 ms counts for less than here; the milliseconds
that it adds to a step stand below the table.

Rows 0 to 4 are three servers, with the baselines behind them; 5 to 9 ten servers and up to ten clients; 10 to 14 twelve
servers, of which 14 has the eight clients of the ACL paper's text ("each gets about a 20 % slowdown" of row 12). With
more than eight servers `h512` has 12 blocks. A row takes one to five minutes, most of which processes start; with
`--json` it is printed as soon as it is measured, one object in a line.

`steps/s` are decode steps behind a prompt, up to a sequence of 128 and of 2,048 tokens; `tokens/s` forward passes of
1 and `--batch` rows of 128 tokens (64 in the papers). Neither has the client's embeddings and head. `planned` is the
cost model: of `petalnode plan` and the router for steps, of what cuts batches for forward passes, with these round
trips, this bandwidth and what servers announce or have said in replies; the other clients are
waiting steps, and passes that take turns with its own.
`computed` is the same with what the servers say that these steps and passes took them, so what it is off by is not the
announcement's fault. Servers measure their speed when they start (their cache is a new one), without other load.

Offloading holds one block: the weights of each block are copied over it, from RAM or from the disk (whose cache is told
to forget the file before each pass), for every step or forward pass. `local` is the whole model in one process. One
thread each, as every server has.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from chain import h512
from delay_bridge import delay_network
from plain import plain_model, quiet_torch
from rich.console import Console
from rich.table import Table
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, DynamicCache
from wan import ClientProcess, servers_of

from petalnode import AutoDistributedModelForCausalLM
from petalnode.node.client.batch.chains import Stage, stages_of
from petalnode.node.models import resolve
from petalnode.node.swarm.routing import Demand, Hop, RouteCandidate, chain_seconds
from petalnode.protocols.ids import Span

LENGTHS = (128, 2048)
ROW_TOKENS = 128
COLUMNS = ("128", "2048", "1", "batch")
"""Steps/s at these sequence lengths, and tokens/s of these numbers of rows."""


@dataclass(frozen=True)
class Network:
    """`mbit` of each line, each way; `rtt_ms` between any two hosts; how many clients work at once, on which servers.

    The papers' figures by `COLUMNS`: `llama` of table 2, `bloom` of table 3."""

    mbit: float
    rtt_ms: float
    clients: int
    llama: tuple[float, ...] = ()
    bloom: tuple[float, ...] = ()
    servers: int = 3


GRID = (
    Network(1000, 4, 1, (2.29, 2.02, 45.4, 155.1), (1.71, 1.54, 70.0, 253.6)),
    Network(100, 4, 1, (2.29, 2.01, 37.5, 140.2), (1.66, 1.49, 56.4, 182.0)),
    Network(100, 100, 1, (1.57, 1.44, 23.7, 128.7), (1.23, 1.11, 19.7, 112.2)),
    Network(1000, 4, 3, (2.02, 1.74, 21.2, 124.2), (1.65, 1.49)),
    Network(100, 100, 3),
    Network(1000, 4, 1, (), (1.65, 1.54, 59.1, 230.1), servers=10),
    Network(1000, 4, 3, (), (1.65, 1.54, 54.7, 221.4), servers=10),
    Network(1000, 4, 10, (), (1.17, 1.01, 31.0, 131.0), servers=10),
    Network(100, 4, 10, (), (1.05, 0.99, 20.1, 28.1), servers=10),
    Network(100, 100, 10, (), (0.34, 0.33, 6.5, 16.8), servers=10),
    Network(1000, 4, 1, (), (1.24, 1.06, 37.9, 180.0), servers=12),
    Network(100, 4, 1, (), (1.24, 1.05, 25.6, 66.0), servers=12),
    Network(100, 100, 1, (), (0.57, 0.53, 5.8, 44.3), servers=12),
    Network(1000, 4, 12, (), (0.90, 0.86), servers=12),
    Network(100, 100, 8, (), (0.8 * 0.57, 0.8 * 0.53), servers=12),
)
BASELINES = {
    "offloading, RAM": ((0.139, 0.139, 18.0, 139.9), (0.0495, 0.0495, 2.5, 152.4)),
    "offloading, disk": ((), ()),
    "local": ((), (2.46, 2.28, 98.4, 279.5)),
}


# --- one client


def client(folder: str, addr: str, steps: int) -> None:
    """The process of a client: runs the measurement of each line that it reads, as soon as another line comes."""
    quiet_torch()
    with AutoDistributedModelForCausalLM.from_pretrained(folder, initial_peers=[addr]) as model, torch.no_grad():
        for line in sys.stdin:
            wanted = json.loads(line)
            run = _session(model, wanted, steps) if "length" in wanted else _forward(model, wanted)
            with run as measure:
                print(json.dumps({"ready": True}), flush=True)
                sys.stdin.readline()
                print(json.dumps(measure()), flush=True)


def _embedded(model: Any, rows: int, tokens: int) -> torch.Tensor:
    hidden: torch.Tensor = model._local.embed(torch.randint(5, 2000, (rows, tokens)))
    return hidden


def _candidates(model: Any, wanted: dict[str, Any]) -> list[RouteCandidate]:
    """The servers as the cost model shall see them: announced computing, and the network that is asked for."""
    servers = model._runtime.call(model._runtime.value.candidates)
    return [
        replace(
            server,
            penalty_seconds=0.0,
            rtt=wanted["rtt_ms"] / 1000,
            rtts=dict.fromkeys((other.peer_id for other in servers), wanted["rtt_ms"] / 1000),
            seconds_per_byte=8e-6 / wanted["mbit"],
            queue_depth=wanted["clients"] - 1,
        )
        for server in servers
    ]


@contextlib.contextmanager
def _session(model: Any, wanted: dict[str, Any], steps: int) -> Iterator[Callable[[], dict[str, float]]]:
    with model.inference_session(wanted["length"]) as session:
        token = session.step(_embedded(model, 1, wanted["length"] - steps))[:, -1:]

        def measure() -> dict[str, float]:
            chain = [Hop(peer_id, Span(*blocks)) for peer_id, blocks in session.route]
            candidates = _candidates(model, wanted)
            last, begun = token, time.perf_counter()
            computed: dict[str, list[float]] = {hop.peer_id: [] for hop in chain}
            for _ in range(steps):
                last = session.step(last)
                for timing in session._session.timings:
                    computed[timing.peer_id].append(timing.queue + timing.compute)
            seconds = (time.perf_counter() - begun) / steps

            def expected(servers: Sequence[RouteCandidate]) -> float:
                return 1 / chain_seconds(chain, servers, Demand(token_bytes=4 * last.shape[2], pushed=True))

            said = [
                replace(server, step_seconds=statistics.mean(computed[server.peer_id]), queue_depth=0)
                for server in candidates
            ]
            return {
                "measured": 1 / seconds,
                "planned": expected(candidates),
                "computed": expected(said),
                "servers": len(chain),
            }

        yield measure


@contextlib.contextmanager
def _forward(model: Any, wanted: dict[str, Any]) -> Iterator[Callable[[], dict[str, float]]]:
    rows, repeats = wanted["rows"], wanted["repeats"]
    hidden = _embedded(model, rows, ROW_TOKENS)
    model.remote_blocks(hidden[:1])

    def measure() -> dict[str, float]:
        planned = _planned(model, hidden, wanted)
        begun = time.perf_counter()
        for _ in range(repeats):
            model.remote_blocks(hidden)
        seconds = (time.perf_counter() - begun) / repeats
        computed = _planned(model, hidden, wanted)  # by what these replies said
        return {"measured": hidden[..., 0].numel() / seconds, "planned": planned, "computed": computed}

    yield measure


def _pass_seconds(micro_batches: Sequence[Sequence[Stage]]) -> float:
    """Until all, which set out in this order at once, are through their chains; a server does one at a time."""
    free: dict[str, float] = {}
    ended = 0.0
    for stages in micro_batches:
        now = 0.0
        for stage in stages:
            now = free[stage.peer_id] = max(now + stage.way, free.get(stage.peer_id, 0.0)) + stage.work
        ended = max(ended, now)
    return ended


def _planned(model: Any, hidden: torch.Tensor, wanted: dict[str, Any]) -> float:
    """Tokens/s of a forward pass: its micro-batches through the stages of their chains, each server one at a time; all
    clients' take turns."""
    rows, tokens, values = hidden.shape
    by_peer = {server.peer_id: server for server in _candidates(model, wanted | {"clients": 1})}
    batches, span = model._runtime.value.batches, Span(0, model.num_blocks)

    async def plan() -> Any:
        return await batches.plan(span, rows, tokens, 4 * values, gradients=False, wait=False)

    planned = model._runtime.call(plan)
    stages = [
        stages_of(chain, by_peer, batches.speeds, tokens=part * tokens, token_bytes=4 * values)
        for part, chain in zip(planned.rows, planned.chains, strict=True)
        for _ in range(wanted["clients"])
    ]
    return rows * tokens / _pass_seconds(stages)


# --- one network


def cells(model: Path, num_blocks: int, wanted: Network, options: argparse.Namespace) -> dict[str, Any]:
    """The four cells of a row, each the mean of its clients, which begin together."""
    hosts = wanted.servers + wanted.clients
    with (
        delay_network(hosts, wanted.rtt_ms / 2000, wanted.mbit) as network,
        servers_of(network, model, wanted.servers, num_blocks) as servers,
        contextlib.ExitStack() as stack,
    ):
        places = [0, *range(wanted.servers + 1, hosts)]
        arguments = (network, model, servers[0].ready["addrs"][0], options.steps)
        clients = [ClientProcess(*arguments, script=__file__, host=place) for place in places]
        for process in clients:
            stack.callback(process.stop)
        terms = {"mbit": wanted.mbit, "rtt_ms": wanted.rtt_ms, "clients": wanted.clients, "servers": wanted.servers}
        questions = [{"length": length} for length in LENGTHS]
        questions += [{"rows": 1, "repeats": 4}, {"rows": options.batch, "repeats": 1}]
        found: dict[str, Any] = {}
        for column, question in zip(COLUMNS, questions, strict=True):
            for process in clients:
                process.ask(json.dumps(terms | question))
            for process in clients:
                process.tell("go")
            answers = [process.read() for process in clients]
            assert all(answer.get("servers", wanted.servers) == wanted.servers for answer in answers)
            found[column] = {
                name: statistics.mean(answer[name] for answer in answers)
                for name in ("measured", "planned", "computed")
            }
    return {"network": terms, "cells": found}


# --- the baselines


class _Offloaded:
    """The blocks of a model over whose weights those of the next block are copied before it runs."""

    def __init__(self, model: Any, folder: Path, *, disk: bool) -> None:
        self.layers = model.model.layers
        self._file = folder / "model.safetensors"
        self._disk = disk
        names = [[name for name, _ in layer.named_parameters()] for layer in self.layers]
        self._kept = [{name: weight.data for name, weight in layer.named_parameters()} for layer in self.layers]
        room = {name: torch.empty_like(weight) for name, weight in self._kept[0].items()}
        for index, layer in enumerate(self.layers):
            for name, weight in layer.named_parameters():
                weight.data = room[name]
            layer.register_forward_pre_hook(lambda *_, index=index: self._bring(index, names[index], room))
        if disk:
            if not self._file.is_file():  # of a GGUF file
                self._file = folder / "opened.safetensors"
                kept = enumerate(self._kept)
                save_file(
                    {f"model.layers.{number}.{n}": v for number, held in kept for n, v in held.items()}, self._file
                )
            self._kept.clear()

    def _bring(self, index: int, names: Sequence[str], room: dict[str, torch.Tensor]) -> None:
        if not self._disk:
            for name in names:
                room[name].copy_(self._kept[index][name])
            return
        if index == 0:
            with self._file.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with safe_open(self._file, "pt") as weights:
            for name in names:
                room[name].copy_(weights.get_tensor(f"model.layers.{index}.{name}"))


def baseline(folder: Path, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """The four cells of a model of Llama's shape in this process."""
    model: Any = plain_model(folder, "float32")
    if name != "local":
        _Offloaded(model, folder, disk=name.endswith("disk"))
    found = {}
    with torch.no_grad():
        for length in LENGTHS:
            cache = DynamicCache()
            hidden = model.model.embed_tokens(torch.randint(5, 2000, (1, length)))
            model.model(inputs_embeds=hidden[:, : -options.steps], past_key_values=cache)
            begun = time.perf_counter()
            for position in range(length - options.steps, length):
                model.model(inputs_embeds=hidden[:, position : position + 1], past_key_values=cache)
            found[str(length)] = {"measured": options.steps / (time.perf_counter() - begun)}
        for column, rows, repeats in (("1", 1, 4), ("batch", options.batch, 1)):
            hidden = model.model.embed_tokens(torch.randint(5, 2000, (rows, ROW_TOKENS)))
            begun = time.perf_counter()
            for _ in range(repeats):
                model.model(inputs_embeds=hidden, use_cache=False)
            found[column] = {"measured": repeats * rows * ROW_TOKENS / (time.perf_counter() - begun)}
    return {"baseline": name, "cells": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="a JSON object for each row, instead of a table")
    parser.add_argument("--model", default="h512", help="h512 (random weights), or any of Llama's shape in one file")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--batch", type=int, default=16, help="rows of the larger forward pass")
    parser.add_argument("--rows", type=int, nargs="+", default=list(range(5)), help="of the grid, from 0 to 14")
    parser.add_argument("--client", nargs=2, metavar=("MODEL", "PEER"), help=argparse.SUPPRESS)
    parser.add_argument("--tokens", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.manual_seed(1)
    if options.client:
        client(*options.client, options.tokens)
        return
    quiet_torch()
    results: list[dict[str, Any]] = []

    def add(row: dict[str, Any]) -> None:
        results.append(row)
        if options.json:
            print(json.dumps({"model": options.model} | row), flush=True)

    with tempfile.TemporaryDirectory(prefix="petalnode-bench-") as scratch:
        folder = Path(scratch) / "h512"
        if options.model == "h512":
            h512(folder, 12 if any(GRID[number].servers > 8 for number in options.rows) else 8)
        else:
            folder = resolve(options.model, need="all").path
        num_blocks = AutoConfig.from_pretrained(folder).num_hidden_layers
        os.environ["PETALNODE_CACHE"] = str(Path(scratch) / "cache")  # speeds of other runs are of other loads
        for number in options.rows:
            wanted = GRID[number]
            begun = time.perf_counter()
            shutil.rmtree(os.environ["PETALNODE_CACHE"], ignore_errors=True)
            add(cells(folder, num_blocks, wanted, options))
            said = f"{wanted.mbit:g} Mbit/s, {wanted.rtt_ms:g} ms, {wanted.clients} clients, {wanted.servers} servers"
            print(f"{said}: {time.perf_counter() - begun:.0f} s", file=sys.stderr)
        for name in BASELINES if 0 in options.rows else ():
            add(baseline(folder, name, options))
    if not options.json:
        show(results, options)


def show(results: Sequence[dict[str, Any]], options: argparse.Namespace) -> None:
    table = Table(title=f"{options.model}: measured | planned (computed) | ratio | paper's ratio")
    table.add_column("network, clients, servers")
    for column in ("steps/s at 128", "steps/s at 2,048", "tokens/s, 1 x 128", f"tokens/s, {options.batch} x 128"):
        table.add_column(column, justify="right")
    papers = [((one.llama, one.bloom), _first(one.servers)) for one in (GRID[number] for number in options.rows)]
    papers += [(found, GRID[0]) for found in BASELINES.values()]
    firsts: dict[int, dict[str, Any]] = {}
    for result, (paper, of) in zip(results, papers, strict=False):
        first = firsts.setdefault(of.servers, result["cells"])
        texts = []
        for index, column in enumerate(COLUMNS):
            cell = result["cells"][column]
            planned = f"{cell['planned']:.1f} ({cell['computed']:.1f})" if "planned" in cell else "-"
            ratio = cell["measured"] / first[column]["measured"]
            texts.append(f"{cell['measured']:.1f} | {planned} | {ratio:.2f} | {_paper(paper, of, index)}")
        table.add_row(_name(result), *texts)
    Console(width=200).print(table)
    _show_added(dict(zip(options.rows, results, strict=False)))


def _name(result: dict[str, Any]) -> str:
    network = result.get("network")
    if network is None:
        return str(result["baseline"])
    return f"{network['mbit']:g} Mbit/s, {network['rtt_ms']:g} ms, {network['clients']}, {network['servers']}"


def _first(servers: int) -> Network:
    """The row that those of as many servers are compared with."""
    return next(network for network in GRID if network.servers == servers)


def _show_added(rows: dict[int, dict[str, Any]]) -> None:
    """What a round trip of 100 ms instead of 4 adds to a step, which does not depend on how fast servers compute."""
    if 1 not in rows or 2 not in rows:
        return
    near, far = ({column: rows[row]["cells"][column]["measured"] for column in COLUMNS[:2]} for row in (1, 2))
    ours = " and ".join(f"{1000 / far[column] - 1000 / near[column]:.0f}" for column in COLUMNS[:2])
    llama, bloom = (1000 / there - 1000 / here for here, there in ((2.29, 1.57), (1.66, 1.23)))
    print(f"100 ms of round trip instead of 4 add {ours} ms to a step; in the papers {llama:.0f} and {bloom:.0f}")


def _paper(found: tuple[tuple[float, ...], tuple[float, ...]], first: Network, column: int) -> str:
    ratios = [
        f"{one[column] / whole[column]:.2f}" if column < len(one) else "-"
        for one, whole in zip(found, (first.llama, first.bloom), strict=True)
    ]
    return f"{ratios[0]} ({ratios[1]})"


if __name__ == "__main__":
    main()
