"""What a stranger on the network can do to three servers and their client, with one core, 20 keys and 5 addresses.

    sudo python benchmarks/under_attack.py [--json] [--minutes 30] [--attacks NAME ...] [--model smollm2] [--seed 1]

Three `petalnode serve` of a third of the model each, and a client that generates all the time, whose answers are
compared with those of plain transformers. The attacker is one process on a core of its own, at 127.0.0.2 to 127.0.0.6;
the swarm has the other cores, with and without attack, so that its speed says what it has to do for the attacker, not
what the attacker does. Phases: quiet; all attacks at once, for a quarter of the time; each by itself (`alone`), for the
rest; a minute of rest; quiet again.

    memory    most MiB that a node had more than at the start (resident, without pages of files), when each kind of
              request had been served once, since that loads what torch needs for it
    cache     most MiB that its sessions had reserved of the attention cache, which its owner has set aside
    pass      longest time for which a node's event loop was held, in ms of its own processor time (watched.py)
    speed     the client's tokens a second, and as a part of the mean of both quiet phases
    wait      the longest that it waited for a token, in seconds
    answers   those that were right, and all

To reach: all answers right, at most 64 MiB more at each node beside that cache, no pass of 100 ms, half of the speed,
and all as at the start a minute after the end: memory, connections, streams, sessions and cache. Exit code
1 if something is not reached.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.request import urlopen

import torch
from plain import plain_model, quiet_torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from petalnode.node.models import resolve
from tests.attacks.stranger.catalogue import ATTACKS
from tests.swarm.processes import Running, environment
from tests.tiny_models import save_tiny

ROOT: Final = Path(__file__).parents[1]
SOURCES: Final = tuple(f"127.0.0.{number}" for number in range(2, 7))
KEYS: Final = 20
TOKENS: Final = 32
PROMPTS: Final = ([5, 6, 7, 8, 9], [30, 17, 42, 9, 3, 25, 11, 12], [7] * 12)
SERVERS: Final = 3
MAX_GROWTH: Final = 64.0  # MiB
MAX_PASS: Final = 0.1  # seconds of processor time
LEAST_SPEED: Final = 0.5
REST: Final = 60.0  # seconds
WARMING: Final = ("abandoned prompts", "batches and adapters")
LEFT: Final = {
    "petalnode_connections": "connections",
    "petalnode_message_memory_bytes": "message bytes",
    "petalnode_server_sessions": "sessions",
    "petalnode_server_batch_streams": "batch streams",
    "petalnode_server_queue_length": "queue",
    "petalnode_server_cache_waiting_sessions": "waiting sessions",
    "petalnode_server_cache_used_tokens": "cache tokens",
}
IN_BYTES: Final = ("message bytes", "cache tokens")
MESSAGES: Final = 1 << 20  # bytes, of the client's own
SLACK: Final = 3.0
"""What may be there more than at the start: the client has one session, and a connection, more or less."""


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


@dataclass
class Node:
    """A server that is measured; `long_passes` is the file that watched.py writes."""

    process: Running
    long_passes: Path
    ready: dict[str, Any] = field(default_factory=dict)
    metrics: str = ""

    def memory(self) -> float:
        """MiB of resident memory that are no pages of files."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        fields = {name: rest for name, _, rest in (line.partition(":") for line in lines)}
        return (int(fields["VmRSS"].split()[0]) - int(fields["RssFile"].split()[0])) / 1024

    def passes(self, start: float, end: float) -> list[dict[str, Any]]:
        lines = self.long_passes.read_text().splitlines() if self.long_passes.exists() else []
        return [found for line in lines if start <= (found := json.loads(line))["at"] <= end]

    def held(self) -> dict[str, float]:
        """What it holds of its peers, by its own counters."""
        found = dict.fromkeys(LEFT.values(), 0.0)
        for line in urlopen(self.metrics, timeout=REST).read().decode().splitlines():
            name = line.partition("{")[0].partition(" ")[0]
            if name in LEFT:
                found[LEFT[name]] += float(line.rsplit(" ", 1)[1])
        return found

    def reserved(self) -> float:
        """MiB of the attention cache that sessions have."""
        return self.held()["cache tokens"] * float(self.ready["cache_bytes_per_token"]) / 2**20


class Sampler:
    """Notes each node's memory twice a second."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = nodes
        self.samples: list[tuple[float, list[float]]] = []
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                self.samples.append((time.time(), [node.memory() for node in self._nodes]))
            except (OSError, KeyError):  # a node has ended
                self.samples.append((time.time(), [float("inf")] * len(self._nodes)))
                return
            time.sleep(0.5)

    def most(self, start: float, end: float) -> list[float]:
        within = [values for at, values in self.samples if start <= at <= end] or [self.samples[-1][1]]
        return [max(column) for column in zip(*within, strict=True)]


class Answers:
    """What the client has told so far."""

    def __init__(self, client: Running) -> None:
        self._client = client
        self._tokens: list[float] = []
        self._answers: list[tuple[float, str]] = []

    def between(self, start: float, end: float) -> tuple[float, float, list[str]]:
        """Tokens a second, the longest that a token was waited for, in seconds, and what was wrong with each answer."""
        for told in self._client.events_so_far():
            if told["event"] == "token":
                self._tokens.append(told["at"])
            elif told["event"] == "answer":
                self._answers.append((told["at"], told["wrong"]))
        times = [at for at in self._tokens if start <= at <= end]
        longest = max(map(float.__sub__, [*times, end], [start, *times]))
        return len(times) / (end - start), longest, [wrong for at, wrong in self._answers if start <= at <= end]


class Swarm:
    """The processes, and the phases that they have gone through."""

    def __init__(self, nodes: Sequence[Node], client: Running, attacker: Running) -> None:
        self.nodes = nodes
        self._answers = Answers(client)
        self._attacker = attacker
        self._sampler = Sampler(nodes)
        self.phases: list[dict[str, Any]] = []
        self._order(WARMING)
        time.sleep(REST / 4)
        self._order([])
        time.sleep(REST / 2)
        self.start_memory = [node.memory() for node in nodes]
        self.start_held = [node.held() for node in nodes]

    def _order(self, names: Sequence[str]) -> dict[str, Any]:
        """Has the attacker do this from now on; returns what it did before."""
        assert self._attacker.process.stdin is not None
        self._attacker.process.stdin.write(json.dumps(list(names)) + "\n")
        self._attacker.process.stdin.flush()
        return self._attacker.event("done")

    def phase(self, name: str, attacks: Sequence[str], seconds: float) -> dict[str, Any]:
        self._order(attacks)
        start = time.time()
        reserved = [0.0] * len(self.nodes)
        while (end := time.time()) < start + seconds:
            time.sleep(min(start + seconds - end, REST / 12))
            reserved = [max(before, node.reserved()) for before, node in zip(reserved, self.nodes, strict=True)]
        done = self._order([])
        speed, wait, answers = self._answers.between(start, end)
        passes = [long for node in self.nodes for long in node.passes(start, end)]
        longest = max(passes, key=lambda one: one["cpu"], default={"cpu": 0.0, "task": ""})
        most = self._sampler.most(start, end)
        found = {
            "phase": name,
            "seconds": round(end - start, 1),
            "growth_mib": [round(now - begun, 1) for now, begun in zip(most, self.start_memory, strict=True)],
            "cache_mib": [round(size, 1) for size in reserved],
            "pass_ms": round(1000 * longest["cpu"]),
            "held": sum(one["cpu"] > MAX_PASS for one in passes),
            "longest": longest["task"],
            "tokens_per_s": round(speed, 2),
            "wait_s": round(wait, 1),
            "answers": len(answers),
            "failed": [wrong for wrong in answers if wrong],
            "attacker_sent_mb": round(done["sent"] / 1e6, 1),
            "attacker_cores": round(done["cpu"] / (end - start), 2),
        }
        self.phases.append(found)
        say(json.dumps(found))
        return found

    def left(self) -> list[dict[str, float]]:
        """What each node has more than at the start."""
        found = []
        for node, memory, held in zip(self.nodes, self.start_memory, self.start_held, strict=True):
            more = {name: value - held[name] for name, value in node.held().items()}
            found.append({"memory_mib": round(node.memory() - memory, 1), **more})
        return found


def expected(model: str) -> list[tuple[list[int], list[int]]]:
    """By plain transformers, for each prompt."""
    plain = plain_model(model, "float32")
    made = [
        plain.generate(
            torch.tensor([prompt]), max_new_tokens=TOKENS, eos_token_id=None, do_sample=False, pad_token_id=0
        )[0].tolist()
        for prompt in PROMPTS
    ]
    return list(zip(PROMPTS, made, strict=True))


def start_servers(start: Callable[..., Running], model: str, blocks: int, scratch: Path) -> list[Node]:
    """Servers of a part of the model each; `start` has the arguments of `python -m`."""
    nodes: list[Node] = []
    peers = ["--new-swarm"]
    for number in range(SERVERS):
        span = f"{blocks * number // SERVERS}:{blocks * (number + 1) // SERVERS}"
        passes = scratch / f"{number}.jsonl"
        options = ("--identity", str(scratch / f"key{number}"), "--listen", "/ip4/127.0.0.1/tcp/0")
        shown = ("--metrics-port", "0", "--no-mdns", "--no-remember", "--json", "--until-eof")
        command = ("benchmarks.watched", str(passes), "serve", model, "--blocks", span, *peers, *options, *shown)
        node = Node(start(*command), passes)
        node.metrics = node.process.event("metrics")["url"]
        node.ready = node.process.event("ready")
        peers = ["--peer", node.ready["addrs"][0]]
        nodes.append(node)
        say(f"server {number + 1} is ready")
    return nodes


@contextmanager
def swarm_of(model: str, blocks: int, hidden: int, scratch: Path, seed: int, ours: str, core: str) -> Iterator[Swarm]:
    env = environment(scratch / "home") | {"PYTHONPATH": str(ROOT)}
    answers = scratch / "answers.json"
    answers.write_text(json.dumps({"model": model, "answers": expected(model)}))
    with ExitStack() as stack:

        def start(cpus: str, *command: str) -> Running:
            process = Running(["taskset", "-c", cpus, sys.executable, "-m", *command], env, ROOT)
            stack.callback(process.kill)
            return process

        nodes = start_servers(partial(start, ours), model, blocks, scratch)
        client = start(ours, "benchmarks.attacked_client", str(answers), *(node.ready["addrs"][0] for node in nodes))
        client.event("ready")
        victims = [{"address": node.ready["addrs"][0], "served": node.ready, "hidden": hidden} for node in nodes]
        told = {"victims": victims, "keys": KEYS, "sources": SOURCES, "seed": seed}
        attacker = start(core, "benchmarks.attacker", json.dumps(told))
        attacker.event("ready")
        for _ in PROMPTS:  # each once, so that what is kept for it is there
            client.event("answer")
        yield Swarm(nodes, client, attacker)


def run(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    if options.model == "tiny":
        model, blocks, hidden = str(save_tiny("llama", scratch / "tiny-llama")), 6, 64
    else:
        folder = resolve(options.model)
        model, blocks, hidden = str(folder.path), folder.num_blocks, folder.hidden_size
    cores = sorted(os.sched_getaffinity(0))
    ours, core = ",".join(map(str, cores[:-1] or cores)), str(cores[-1])
    seconds = 60 * options.minutes
    with swarm_of(model, blocks, hidden, scratch, options.seed, ours, core) as swarm:
        quiet = min(60.0, seconds / 4)
        swarm.phase("quiet", [], quiet)
        if len(options.attacks) > 1:
            swarm.phase("all at once", options.attacks, seconds / 4)
            seconds *= 3 / 4
        for name in options.attacks:
            swarm.phase(name, [name], seconds / len(options.attacks))
        say("a minute of rest")
        time.sleep(REST)
        left = swarm.left()
        swarm.phase("quiet again", [], quiet)
        return judged(swarm.phases, left) | {"cores": len(cores), "model": options.model, "seed": options.seed}


def judged(phases: list[dict[str, Any]], left: list[dict[str, float]]) -> dict[str, Any]:
    """The figures with what was reached."""
    quiet = (phases[0]["tokens_per_s"] + phases[-1]["tokens_per_s"]) / 2
    attacked = phases[1:-1]
    for phase in phases:
        phase["speed"] = round(phase["tokens_per_s"] / max(quiet, 1e-9), 2)
    streams = [node[name] for node in left for name in LEFT.values() if name not in IN_BYTES]
    grown = [max(map(float.__sub__, one["growth_mib"], one["cache_mib"])) for one in phases]
    back = {
        "memory": all(node["memory_mib"] <= MAX_GROWTH for node in left),
        "connections, streams, sessions": max(streams) <= SLACK,
        "bytes of messages": all(node["message bytes"] <= MESSAGES for node in left),
        "speed": phases[-1]["speed"] >= 0.8,
    }
    reached = {
        "all answers right": not any(phase["failed"] for phase in phases),
        f"at most {MAX_GROWTH:.0f} MiB more at each node beside the cache": max(grown) <= MAX_GROWTH,
        f"no loop held for {1000 * MAX_PASS:.0f} ms": all(phase["pass_ms"] < 1000 * MAX_PASS for phase in attacked),
        "half of the speed": all(phase["speed"] >= LEAST_SPEED for phase in attacked),
        f"as at the start after {REST:.0f} s": all(back.values()),
    }
    return {"phases": phases, "left": left, "back": back, "reached": reached}


def show(found: dict[str, Any]) -> None:
    console = Console(width=160)
    table = Table()
    columns = (
        "attack",
        "memory, MiB",
        "cache, MiB",
        "pass, ms",
        "held",
        "tokens/s",
        "speed",
        "wait, s",
        "answers",
        "longest pass",
    )
    for column in columns:
        table.add_column(column, overflow="fold")
    for phase in found["phases"]:
        right = phase["answers"] - len(phase["failed"])
        table.add_row(
            phase["phase"],
            " ".join(f"{value:+.0f}" for value in phase["growth_mib"]),
            " ".join(f"{value:.0f}" for value in phase["cache_mib"]),
            str(phase["pass_ms"]),
            str(phase["held"]),
            f"{phase['tokens_per_s']:.1f}",
            f"{phase['speed']:.2f}",
            f"{phase['wait_s']:.1f}",
            f"{right} of {phase['answers']}",
            phase["longest"],
        )
    console.print(table)
    console.print("left after a minute:", found["left"])
    show_reached(console, found)


def show_reached(console: Console, found: dict[str, Any]) -> None:
    for name, reached in found["reached"].items():
        console.print(f"{'reached' if reached else 'NOT reached'}: {name}")


def command(
    name: str,
    description: str | None,
    attacks: Sequence[str],
    minutes: float,
    run: Callable[[argparse.Namespace, Path], dict[str, Any]],
    show: Callable[[dict[str, Any]], None],
) -> None:
    """Reads the options, runs the attacks and shows what came of them; exit code 1 if an aim was not reached."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--minutes", type=float, default=minutes)
    parser.add_argument("--attacks", nargs="+", default=list(attacks), choices=list(attacks), metavar="NAME")
    parser.add_argument("--model", default="smollm2", help="with a tokenizer; or tiny, made up (under_attack.py)")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="petalnode-bench-") as scratch:
        found = run(options, Path(scratch))
    print(json.dumps({name: found})) if options.json else show(found)
    sys.exit(not all(found["reached"].values()))


if __name__ == "__main__":
    quiet_torch(None)
    command("under_attack", __doc__, list(ATTACKS), 30.0, run, show)
