"""Tokens a second of 1 to 32 clients on one server at once, and how it is shared.

    python benchmarks/concurrency.py [--json] [--clients 1 4 8 16 32] [--tokens 72] [--processes 2] [--hidden 2048]
                                     [--quant nf4] [--at-once]

The model has random weights: 4 blocks of Llama in float32 (700 MB at hidden size 2048), so that compute is the limit.
Servers are processes with one compute thread, one that batches decode steps and one that computes them one by one; they
get the same rounds in turn; with `--at-once` the other one batches, too, but never waits for sessions that are about to
come back (`node/server/gathering.py`). Clients have identities, connections and sessions of their own, several in a
process (`--processes`, which share what cores the servers leave; 32 Python processes do not fit two cores), and send
hidden states without embeddings or head, the next one when the answer to the one before is there. `transformers` is the
same model's own batch in this process, of as many rows, between the rounds. Times are from sending a token's hidden
states to having the last server's, of all clients together.

`prompt`: what a prompt of 4,096 tokens that comes amid eight clients does to their tokens; a chunk is a 16th of the
time that it takes alone. `fairness`: two clients, one of which has 16 sessions, each alone and both at once: the share
of its tokens a second alone that each keeps; with `--at-once`, of both servers. Needs 5 GiB of memory
and some four minutes on two quiet cores.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import trio
from local_swarm import ServerProcess
from plain import quiet_torch
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from petalnode.crypto.identity import Identity
from petalnode.node.client.chunks import to_chunks
from petalnode.node.client.core import SwarmClient, open_client
from petalnode.node.client.session.stream import SessionSpec
from petalnode.node.client.swarm_model import identify_model
from petalnode.node.models.sources.resolve import resolve
from petalnode.node.server import turns
from petalnode.node.server.gathering import Gathering
from petalnode.node.swarm.config import SwarmConfig
from petalnode.node.swarm.swarm import open_swarm
from petalnode.protocols.ids import Span

BLOCKS = 4
PROMPT = 16
LONG_PROMPT = 4096
CHUNKS = LONG_PROMPT // 256
MANY = 16


def model(folder: Path, hidden: int) -> LlamaForCausalLM:
    """Random weights in `folder`, and the model that has them."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=BLOCKS,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 512),
        max_position_embeddings=8192,
    )
    made = LlamaForCausalLM(config).eval()
    made.save_pretrained(folder)
    return made


# --- the processes of clients


def clients(folder: str, peer: str) -> None:
    """A process of clients: does what each line says, and prints how it went."""
    torch.set_num_threads(1)
    trio.run(_clients, folder, peer)


async def _clients(folder: str, peer: str) -> None:
    opened: list[SwarmClient] = []
    async with AsyncExitStack() as stack:
        while line := await trio.to_thread.run_sync(sys.stdin.readline):
            asked = json.loads(line)
            while len(opened) < len(asked["sessions"]):
                opened.append(await _client(stack, folder, peer))
            found: list[dict[str, Any]] = []
            ready = [trio.Event() for sessions in asked["sessions"] for _ in range(sessions)]
            go = trio.Event()
            async with trio.open_nursery() as nursery:
                left = iter(ready)
                for client, sessions in zip(opened, asked["sessions"], strict=False):
                    for _ in range(sessions):
                        nursery.start_soon(_session, client, asked, next(left), go, found)
                for event in ready:
                    await event.wait()
                print("ready", flush=True)
                await trio.to_thread.run_sync(sys.stdin.readline)
                go.set()
            print(json.dumps(found), flush=True)


async def _client(stack: AsyncExitStack, folder: str, peer: str) -> SwarmClient:
    config = SwarmConfig(identity=Identity.generate(), listen=(), peers=(peer,), serve_dht=False)
    swarm = await stack.enter_async_context(open_swarm(config))
    await swarm.refresh(timeout=30)
    found = resolve(folder, need="client", offline=True)
    return await stack.enter_async_context(open_client(swarm, await identify_model(swarm, found)))


async def _session(
    client: SwarmClient, asked: dict[str, Any], ready: trio.Event, go: trio.Event, found: list[dict[str, Any]]
) -> None:
    """A prompt, and tokens one after the other, until there are enough or the time is over."""
    prompt, tokens, seconds = asked["prompt"], asked["tokens"], asked.get("seconds", math.inf)
    spec = SessionSpec(model_version=b"", span=Span(0, BLOCKS), batch=1, max_length=prompt + (tokens or 2000))
    values = torch.randn(1, prompt, asked["hidden"]) / 10
    async with client.session(spec, wait=True) as session:
        if prompt == PROMPT:
            await session.step(to_chunks(values, "none", session.max_step_tokens))
        ready.set()
        await go.wait()
        if prompt != PROMPT:
            begun = time.monotonic()
            await session.step(to_chunks(values, "none", session.max_step_tokens))
            found.append({"client": client.swarm.peer_id, "times": [], "begun": begun, "ended": time.monotonic()})
            return
        times: list[float] = []
        begun = time.monotonic()
        token = to_chunks(values[:, :1], "none", 1)
        while len(times) < (tokens or 1900) and time.monotonic() - begun < seconds:
            asking = time.monotonic()
            await session.step(token)
            times.append(time.monotonic() - asking)
        found.append({"client": client.swarm.peer_id, "times": times, "begun": begun, "ended": time.monotonic()})


class Clients:
    """Processes of clients of one server."""

    def __init__(self, folder: Path, server: ServerProcess, processes: int, hidden: int) -> None:
        self.hidden = hidden
        peer = server.ready["addrs"][0]  # type: ignore[index]
        command = [sys.executable, __file__, "--client", str(folder), peer]
        self.processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=one_thread())
            for _ in range(processes)
        ]

    def run(self, *parts: dict[str, Any]) -> list[list[dict[str, Any]]]:
        """Has the first processes do one of `parts` each, beginning together; what their sessions did."""
        used = self.processes[: len(parts)]
        for process, part in zip(used, parts, strict=True):
            self._tell(process, json.dumps({"hidden": self.hidden, "prompt": PROMPT, "tokens": 0} | part))
        for process in used:
            self._read(process)
        for process, part in zip(used, parts, strict=True):
            time.sleep(part.get("later", 0.0))
            self._tell(process, "go")
        return [json.loads(self._read(process)) for process in used]

    def _tell(self, process: subprocess.Popen[str], line: str) -> None:
        assert process.stdin is not None
        process.stdin.write(f"{line}\n")
        process.stdin.flush()

    def _read(self, process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError("a process of clients ended; what it said is above")
        return line

    def together(self, count: int, tokens: int) -> dict[str, float]:
        """`count` clients at once."""
        each, more = divmod(count, len(self.processes))
        counts = [each + (index < more) for index in range(len(self.processes))]
        parts = [{"sessions": [1] * clients, "tokens": tokens} for clients in counts if clients]
        return summary([session for found in self.run(*parts) for session in found])

    def stop(self) -> None:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()


def one_thread() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"}


def summary(sessions: Sequence[dict[str, Any]]) -> dict[str, float]:
    times = sorted(seconds for session in sessions for seconds in session["times"])
    wall = max(session["ended"] for session in sessions) - min(session["begun"] for session in sessions)
    return {
        "tokens_per_s": len(times) / wall,
        "p50_ms": 1000 * statistics.median(times),
        "p95_ms": 1000 * times[min(len(times) - 1, int(0.95 * len(times)))],
        "longest_ms": 1000 * times[-1],
    }


# --- what is measured


@torch.inference_mode()
def transformers_batch(made: LlamaForCausalLM, rows: int, tokens: int) -> float:
    """Tokens a second of the model's own batch of `rows`."""
    cache = DynamicCache(config=made.config)
    made(torch.ones(rows, PROMPT, dtype=torch.long), past_key_values=cache, use_cache=True)
    token = torch.ones(rows, 1, dtype=torch.long)
    begun = time.perf_counter()
    for _ in range(tokens):
        made(token, past_key_values=cache, use_cache=True)
    return rows * tokens / (time.perf_counter() - begun)


def prompt_among(batched: Clients) -> dict[str, float]:
    """What a long prompt costs eight clients, and alone."""
    [[alone]] = batched.run({"sessions": [1], "prompt": LONG_PROMPT})
    chunk = (alone["ended"] - alone["begun"]) / CHUNKS
    eight = {"sessions": [1] * 8, "seconds": 8 * chunk + 3.0}
    before = summary(batched.run(eight | {"seconds": 3.0})[0])
    found, [prompt] = batched.run(eight, {"sessions": [1], "prompt": LONG_PROMPT, "later": 1.0})
    during = summary(found)
    return {
        "chunk_ms": 1000 * chunk,
        "p50_before_ms": before["p50_ms"],
        "longest_before_ms": before["longest_ms"],
        "p50_during_ms": during["p50_ms"],
        "longest_during_ms": during["longest_ms"],
        "added_chunks": (during["longest_ms"] - before["p50_ms"]) / (1000 * chunk),
        "prompt_alone_s": alone["ended"] - alone["begun"],
        "prompt_among_s": prompt["ended"] - prompt["begun"],
    }


def fairness(batched: Clients, seconds: float) -> list[dict[str, float]]:
    """A client with 16 sessions and one with one."""
    many, one = {"sessions": [MANY], "seconds": seconds}, {"sessions": [1], "seconds": seconds}
    batched.run(many | {"seconds": 1.0})  # the server learns what rows cost
    alone = [summary(batched.run(part)[0]) for part in (many, one)]
    both = [summary(found) for found in batched.run(many, one)]
    return [
        {
            "sessions": sessions,
            "alone_tokens_per_s": before["tokens_per_s"],
            "both_tokens_per_s": now["tokens_per_s"],
            "kept": now["tokens_per_s"] / before["tokens_per_s"],
            "p50_ms": now["p50_ms"],
        }
        for sessions, before, now in zip((MANY, 1), alone, both, strict=True)
    ]


def other_server(command: list[str]) -> None:
    """Runs the `petalnode` that `command` starts with no more than one step in a batch, or with no waits for more."""
    if command[0] == "--serve-at-once":
        Gathering.time = lambda *arguments: 0.0  # type: ignore[method-assign]
    else:
        turns.TURNS = replace(turns.TURNS, max_decode_rows=1)  # type: ignore[misc]
    sys.argv = command[command.index("petalnode") :]
    runpy.run_module("petalnode", run_name="__main__", alter_sys=True)


@contextmanager
def servers_of(folder: Path, scratch: Path, other: str, quant: str) -> Iterator[list[ServerProcess]]:
    """One that batches, and the `other`, in swarms of their own."""
    started: list[ServerProcess] = []
    try:
        for name, prefix in (("batched", ()), (other, (sys.executable, __file__, f"--serve-{other}"))):
            (scratch / name).mkdir()
            arguments = [str(folder), "--blocks", f"0:{BLOCKS}", "--quant", quant, "--new-swarm"]
            arguments += ["--cache-tokens", "60000"]
            started.append(ServerProcess(arguments, scratch / name, prefix=prefix))
            started[-1].wait_ready()
        yield started
    finally:
        for server in started:
            server.stop()


def run(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    folder = scratch / "model"
    made = model(folder, options.hidden)
    results: list[dict[str, Any]] = []
    other = "at-once" if options.at_once else "unbatched"
    with servers_of(folder, scratch, other, options.quant) as servers:
        batched, second = (Clients(folder, server, options.processes, options.hidden) for server in servers)
        try:
            batched.together(2, 4)
            second.together(2, 4)
            for count in options.clients:
                print(f"{count} clients ...", file=sys.stderr, flush=True)
                result: dict[str, Any] = {"clients": count, "batched": batched.together(count, options.tokens)}
                tokens = options.tokens if options.at_once else max(4, options.tokens * 8 // max(count, 8))
                result[other.replace("-", "_")] = second.together(count, tokens)
                result["transformers_tokens_per_s"] = transformers_batch(made, count, max(4, options.tokens // 2))
                result["times_one"] = result["batched"]["tokens_per_s"] / (
                    results[0]["batched"]["tokens_per_s"] if results else result["batched"]["tokens_per_s"]
                )
                results.append(result)
            print("16 sessions beside one ...", file=sys.stderr, flush=True)
            found: dict[str, Any] = {"clients": results, "fairness": fairness(batched, 8.0)}
            if options.at_once:
                found["fairness_at_once"] = fairness(second, 8.0)
            print("a long prompt ...", file=sys.stderr, flush=True)
            return found | {"prompt": prompt_among(batched)}
        finally:
            batched.stop()
            second.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 4, 8, 16, 32])
    parser.add_argument("--tokens", type=int, default=72)
    parser.add_argument("--processes", type=int, default=2, help="of clients; 2 at least")
    parser.add_argument("--hidden", type=int, default=2048, help="hidden size; a multiple of 512")
    parser.add_argument("--quant", default="none", help="as `petalnode serve` has it")
    parser.add_argument("--at-once", action="store_true", help="compare with a server whose batches wait for nobody")
    parser.add_argument("--client", nargs=2, metavar=("MODEL", "PEER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        clients(*options.client)
        return
    quiet_torch()
    with tempfile.TemporaryDirectory(prefix="petalnode-bench-") as scratch:
        found = run(options, Path(scratch))
    if options.json:
        print(json.dumps({"concurrency": found}))
    else:
        show(found)


def show(found: dict[str, Any]) -> None:
    table = Table(title="clients of one server, tokens/s of all together; other: one by one, or at once")
    for column in ("clients", "batched", "times one", "p50 ms", "p95", "other", "p50 ms", "transformers"):
        table.add_column(column, justify="right")
    for row in found["clients"]:
        own, others = row["batched"], row["at_once"] if "at_once" in row else row["unbatched"]
        table.add_row(
            str(row["clients"]),
            f"{own['tokens_per_s']:.0f}",
            f"{row['times_one']:.1f}",
            f"{own['p50_ms']:.0f}",
            f"{own['p95_ms']:.0f}",
            f"{others['tokens_per_s']:.0f}",
            f"{others['p50_ms']:.0f}",
            f"{row['transformers_tokens_per_s']:.0f}",
        )
    console = Console(width=120)
    console.print(table)
    for share in found["fairness"] + found.get("fairness_at_once", []):
        console.print(
            f"{share['sessions']} sessions of a client: {share['alone_tokens_per_s']:.0f} tokens/s alone, "
            f"{share['both_tokens_per_s']:.0f} beside the other ({share['kept']:.0%})"
        )
    prompt = found["prompt"]
    console.print(
        f"a prompt of {LONG_PROMPT} tokens: {prompt['chunk_ms']:.0f} ms a chunk; tokens of eight clients took "
        f"{prompt['p50_before_ms']:.0f} ms before and {prompt['longest_during_ms']:.0f} at most: "
        f"{prompt['added_chunks']:.2f} chunks more"
    )


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].startswith("--serve-"):
        other_server(sys.argv[1:])
    else:
        main()
