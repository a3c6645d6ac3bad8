"""Sixty nodes and five servers, as real processes on hosts of their own: what the directory costs, and whether chains
stay found while the network is cut in two, all bootstrap nodes die, and somebody floods the directory.

    sudo python benchmarks/sixty_nodes.py [--json] [--lights 57] [--seconds 60] [--keys 5000]

Every node is a process with a libp2p host in a network namespace, with an address of its own: three `petalnode
bootstrap`, 57 light nodes that announce blocks of made-up models and import no torch, and five `petalnode serve` of a
random Llama with 6 blocks. A client generates all the time; each answer is compared with plain transformers.

    quiet       nothing happens
    partition   the network is cut: 2 bootstrap nodes, 2 servers with all blocks and half of the light nodes on one side
    healed      the cut is gone; until every node knows all servers again (`known_after_s`)
    replaced    all bootstrap nodes are killed, and three new ones with new keys and addresses join at light nodes
    flood       a node hands out announcements of many keys, all of the model that is served, quick and not there

In each phase but the first new clients join: one on each side of the cut, one through a new bootstrap node, one in the
flood. `first_s` is from their start to their first token. `up` and `down` are KB/s of a node's sockets and `cpu` is
percent of a core, by the node's own counters (`--metrics-port`): the mean of a kind of node, and the most of one node.
A *pass* is what an event loop runs between two looks at what is ready (watched.py): `pass` is the longest in
milliseconds of processor time, `late` on the clock, which has the waiting for a core in it; `held` counts those above
100 ms of processor time.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.request import urlopen

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from petalnode.node.models import compute_manifest, resolve
from tests.nat.clients import PROMPT, Client
from tests.nat.lab import Host, Lab, open_lab, why_not
from tests.nat.nodes import LISTEN, LabNodes, LightNode, lab_nodes
from tests.swarm.processes import Running
from tests.tiny_models import NUM_BLOCKS, load_whole, save_tiny

TOKENS: Final = 24
SPANS: Final = ("0:3", "3:6", "0:2", "2:4", "4:6")  # the first two are on one side of the cut
BOOTSTRAPS: Final = 3
TOGETHER: Final = 6  # light nodes that start at once
HELD: Final = 0.1  # seconds
PATIENCE: Final = 300.0  # seconds for what has to come about
KINDS: Final = ("light", "server", "bootstrap")
_CLONE_NEWNET: Final = 0x40000000
_COUNTERS: Final = {
    "petalnode_socket_sent_bytes_total": "sent",
    "petalnode_socket_received_bytes_total": "received",
    "process_cpu_seconds_total": "cpu",
    "process_resident_memory_bytes": "rss",
    "petalnode_known_servers": "known",
}


@dataclass
class Node:
    """A process that is measured; `long_passes` is the file that watched.py writes."""

    kind: str
    host: Host
    process: Running
    long_passes: Path
    metrics: str = ""
    peer_id: str = ""
    address: str = ""

    def figures(self) -> dict[str, float]:
        """By its own counters."""
        if isinstance(self.process, LightNode):
            found: dict[str, float] = self.process.ask("figures", patience=PATIENCE)
            return found
        lines = inside(self.host, lambda: urlopen(self.metrics, timeout=PATIENCE).read().decode()).splitlines()
        values = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {_COUNTERS[name]: float(value) for name, value in values if name in _COUNTERS}

    def passes(self, start: float, end: float) -> list[dict[str, Any]]:
        """Its long passes between two times."""
        lines = self.long_passes.read_text().splitlines() if self.long_passes.exists() else []
        return [found for line in lines if start <= (found := json.loads(line))["at"] <= end]


def inside(host: Host, function: Callable[[], Any]) -> Any:
    """What `function` returns in a thread that is in the host's network."""
    found: list[Any] = []

    def run() -> None:
        with open(f"/run/netns/{host.namespace}") as namespace:
            assert ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET) == 0
        found.append(function())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


class Talker:
    """A client that asks again and again, and compares every answer with `expected`."""

    def __init__(self, client: Client, expected: list[int]) -> None:
        self._client = client
        self._expected = expected
        self._stop = threading.Event()
        self.answers: list[tuple[float, str]] = []  # when, and what went wrong
        self._thread = threading.Thread(target=self._talk, daemon=True)
        self._thread.start()

    def _talk(self) -> None:
        while not self._stop.wait(1.0):
            self.answers.append((time.time(), answer(self._client, self._expected)[1]))

    def between(self, start: float, end: float) -> list[str]:
        return [wrong for at, wrong in self.answers if start <= at <= end]

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(PATIENCE)  # an answer that hangs must not keep the figures from being printed


def answer(client: Client, expected: list[int]) -> tuple[float, str]:
    """Has it answer once: (seconds until the first token, what went wrong)."""
    try:
        client.order(TOKENS)
        first = client.first()
        ids = client.done()["ids"]
    except AssertionError as error:
        return float("nan"), str(error)
    return first, "" if ids == expected else f"wrong tokens: {ids}"


@dataclass
class Phase:
    """What came of one; `figures` are by node, before and after."""

    name: str
    start: float
    end: float = 0.0
    figures: list[tuple[Node, dict[str, float], dict[str, float]]] = field(default_factory=list)
    told: dict[str, Any] = field(default_factory=dict)


def _hardware_address(host: Host) -> str:
    return f"02:00:00:00:00:{host.plug.number:02x}"


def _neighbour(host: Host) -> str:
    return f"neigh replace {host.address} lladdr {_hardware_address(host)} nud permanent dev eth0"


class Sixty:
    """The nodes, and the phases that they have gone through."""

    def __init__(self, lab: Lab, nodes: LabNodes, scratch: Path, folder: Path, seconds: float) -> None:
        self.phases: list[Phase] = []
        self.nodes: list[Node] = []
        self._lab, self._started, self._scratch, self._folder = lab, nodes, scratch, folder
        self._seconds = seconds
        self._clients = 0
        self._hosts: list[Host] = []
        self.version = compute_manifest(resolve(str(folder))).version.hex()
        ids = torch.tensor([PROMPT])
        whole = load_whole(folder)
        self.expected = whole.generate(ids, max_new_tokens=TOKENS, do_sample=False, pad_token_id=0)[0].tolist()

    def of(self, kind: str) -> list[Node]:
        return [node for node in self.nodes if node.kind == kind]

    # --- starting

    def command(self, kind: str, name: str, *arguments: str) -> Node:
        """A `petalnode` command on a host of its own; `ready` waits for it."""
        host, passes = self._host(name), self._scratch / f"{name}.jsonl"
        options = ("--listen", LISTEN, "--metrics-port", "0", "--no-mdns", "--no-remember", "--json")
        program = [sys.executable, "-m", "benchmarks.watched", str(passes), *arguments, *options]
        node = Node(kind, host, self._started.program(host, program), passes)
        self.nodes.append(node)
        return node

    def ready(self, node: Node) -> Node:
        if not isinstance(node.process, LightNode):
            node.metrics = node.process.event("metrics")["url"]
        event = node.process.event("ready", PATIENCE)
        node.peer_id, node.address = event["peer_id"], event["addrs"][0]
        return node

    def light(self, name: str, peers: Sequence[str], **options: Any) -> Node:
        host, passes = self._host(name), self._scratch / f"{name}.jsonl"
        process = LightNode(
            host,
            self._started.home(host),
            {"listen": [LISTEN], "peers": list(peers), **options},
            ("benchmarks.light_node", str(passes)),
        )
        node = Node("light", host, self._started.kept(process), passes)
        self.nodes.append(node)
        return node

    def start(self, lights: int) -> None:
        first = self.ready(self.command("bootstrap", "boot0", "bootstrap", "--new-swarm"))
        others = [
            self.command("bootstrap", f"boot{number}", "bootstrap", "--peer", first.address)
            for number in range(1, BOOTSTRAPS)
        ]
        peers = [first.address, *(self.ready(node).address for node in others)]
        joins = [part for peer in peers for part in ("--peer", peer)]
        servers = [
            self.command("server", f"server{number}", "serve", str(self._folder), "--blocks", span, *joins)
            for number, span in enumerate(SPANS)
        ]
        for server in servers:
            self.ready(server)
        for begin in range(0, lights, TOGETHER):
            group = [
                self.light(
                    f"light{number}", peers, blocks=[number % 8, number % 8 + 2], model_version=f"{number % 3:064x}"
                )
                for number in range(begin, min(begin + TOGETHER, lights))
            ]
            for node in group:
                self.ready(node)
            say(f"{begin + len(group)} light nodes")

    def client(self, host: Host, *peers: str) -> Client:
        return Client(self._started, host, self._folder, *peers)

    def host(self) -> Host:
        """A machine for a client."""
        self._clients += 1
        return self._host(f"client{self._clients}")

    def _host(self, name: str) -> Host:
        """A machine that knows the hardware addresses of all others, and they its own: of those that a kernel looks up
        it keeps 1,024 at most, for all namespaces together, and sends nothing to the others."""
        host = self._lab.host(name)
        host.ip(f"link set eth0 address {_hardware_address(host)}", *map(_neighbour, self._hosts))
        for other in self._hosts:
            other.ip(_neighbour(host))
        self._hosts.append(host)
        return host

    # --- phases

    @contextmanager
    def phase(self, name: str, talker: Talker) -> Iterator[Phase]:
        say(name)
        watched = list(self.nodes)
        found = Phase(name, time.time())
        before = [node.figures() for node in watched]
        found.start = time.time()
        yield found
        found.end = time.time()
        alive = [(node, figures) for node, figures in zip(watched, before, strict=True) if node in self.nodes]
        found.figures = [(node, figures, node.figures()) for node, figures in alive]
        answers = talker.between(found.start, found.end)
        found.told |= {"answers": len(answers), "failed": [wrong for wrong in answers if wrong]}
        self.phases.append(found)
        say(json.dumps(summary(found)))

    def wait(self, seconds: float | None = None) -> None:
        time.sleep(self._seconds if seconds is None else seconds)

    def until_known(self, asked: Sequence[Node], servers: Sequence[Node]) -> float:
        """Seconds until all these light nodes know all these servers."""
        begun, peers = time.perf_counter(), [server.peer_id for server in servers]
        left, told = list(asked), len(asked)
        while left:
            if time.perf_counter() - begun > PATIENCE:
                raise SystemExit(f"{len(left)} nodes do not know all servers after {PATIENCE:.0f} s")
            numbers = [(node, node.process.tell("known", peers=peers)) for node in left]  # type: ignore[attr-defined]
            known = [node.process.answer(number, patience=PATIENCE) for node, number in numbers]  # type: ignore[attr-defined]
            left = [node for (node, _), count in zip(numbers, known, strict=True) if count < len(peers)]
            if len(left) != told:
                told = len(left)
                say(f"{told} nodes do not know all yet")
            time.sleep(0.25)
        return time.perf_counter() - begun

    def joining(self, told: dict[str, Any], name: str, host: Host, *peers: str) -> None:
        """A new client that knows these addresses and nothing else."""
        first, wrong = answer(self.client(host, *peers), self.expected)
        told.setdefault("joined", {})[name] = {"first_s": round(first, 2), "wrong": wrong}
        say(f"a client joins, {name}: first token after {first:.1f} s {wrong}")

    def partition(self, talker: Talker, cut: Sequence[Host]) -> None:
        """`cut` are hosts for clients, one of which is on the side that is cut off."""
        lights, servers, boots = self.of("light"), self.of("server"), self.of("bootstrap")
        here = [*lights[::2], *servers[:2], *boots[:2]]
        there = [node for node in self.nodes if node not in here]
        with self.phase("partition", talker) as phase, self._lab.split([*(node.host for node in there), cut[1]]):
            self.wait()
            self.joining(phase.told, "on this side", cut[0], boots[0].address)
            self.joining(phase.told, "on the other side", cut[1], boots[2].address)
            healed = time.perf_counter()
        with self.phase("healed", talker) as phase:
            self.until_known(lights, servers)
            phase.told["known_after_s"] = round(time.perf_counter() - healed, 1)
            say(f"all know all servers {phase.told['known_after_s']} s after the cut was gone")
            self.joining(phase.told, "after the cut", self.host(), boots[1].address)
            self.wait(self._seconds / 2)

    def replacing(self, talker: Talker) -> None:
        lights, servers = self.of("light"), self.of("server")
        with self.phase("replaced", talker) as phase:
            for node in self.of("bootstrap"):
                node.process.signal(signal.SIGKILL)
                node.process.wait()
                self.nodes.remove(node)
            new = [
                self.command("bootstrap", f"new{number}", "bootstrap", "--peer", lights[number].address)
                for number in range(BOOTSTRAPS)
            ]
            for node in new:
                self.ready(node)
            self.joining(phase.told, "through a new bootstrap node", self.host(), new[0].address)
            begun = time.perf_counter()
            late = self.ready(self.light("late", [node.address for node in new], blocks=[0, 1]))
            self.until_known([late], servers)
            self.until_known(lights, [late])
            phase.told["newcomer_known_after_s"] = round(time.perf_counter() - begun, 1)
            self.wait()

    def flood(self, talker: Talker, keys: int) -> None:
        boots = self.of("bootstrap")
        hostile = self.ready(self.light("hostile", [node.address for node in boots], blocks=[0, 1]))
        self.nodes.remove(hostile)
        with self.phase("flood", talker) as phase:
            hostile.process.ask("flood", patience=PATIENCE, keys=keys, version=self.version, num_blocks=NUM_BLOCKS)  # type: ignore[attr-defined]
            self.wait()
            self.joining(phase.told, "in the flood", self.host(), boots[0].address)
            self.wait()
            phase.told["most_known"] = max(node.figures()["known"] for node in self.nodes)  # announcements at one node


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def summary(phase: Phase) -> dict[str, Any]:
    """The figures of a phase, by kind of node."""
    seconds = phase.end - phase.start
    found: dict[str, Any] = {"phase": phase.name, "seconds": round(seconds, 1), **phase.told}
    for kind in KINDS:
        of_kind = [(node, before, after) for node, before, after in phase.figures if node.kind == kind]
        if not of_kind:
            continue
        rates = {
            name: [scale * (after[key] - before[key]) / seconds for _, before, after in of_kind]
            for name, key, scale in (("up", "sent", 1e-3), ("down", "received", 1e-3), ("cpu", "cpu", 100.0))
        }
        passes = [long for node, *_ in of_kind for long in node.passes(phase.start, phase.end)]
        longest = max(passes, key=lambda one: one["cpu"], default={"cpu": 0.0, "task": ""})
        found[kind] = {
            "nodes": len(of_kind),
            **{name: [round(statistics.mean(values), 2), round(max(values), 2)] for name, values in rates.items()},
            "pass_ms": round(1000 * longest["cpu"]),
            "late_ms": round(1000 * max((one["wall"] for one in passes), default=0.0)),
            "held": sum(one["cpu"] > HELD for one in passes),
            "longest": longest["task"],
            "torch": sum(after.get("torch", 0.0) for _, _, after in of_kind),
            "rss_mb": round(max(after["rss"] for _, _, after in of_kind) / 1e6),
        }
    return found


def run(lights: int, seconds: float, keys: int, phases: Sequence[str]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="petalnode-bench-") as temporary, open_lab() as lab:
        scratch = Path(temporary)
        folder = save_tiny("llama", scratch / "tiny-llama")
        with lab_nodes(scratch / "homes") as nodes:
            sixty = Sixty(lab, nodes, scratch, folder, seconds)
            sixty.start(lights)
            sixty.until_known(sixty.of("light"), sixty.of("server"))
            client = sixty.client(sixty.host(), *(node.address for node in sixty.of("bootstrap")[:2]))
            talker = Talker(client, sixty.expected)
            cut = [sixty.host(), sixty.host()]
            if "quiet" in phases:
                with sixty.phase("quiet", talker):
                    sixty.wait()
            if "partition" in phases:
                sixty.partition(talker, cut)
            if "replaced" in phases:
                sixty.replacing(talker)
            if "flood" in phases:
                sixty.flood(talker, keys)
            talker.stop()
            return [summary(phase) for phase in sixty.phases]


def show(results: Sequence[dict[str, Any]]) -> None:
    console = Console(width=160)
    table = Table()
    for column in ("phase", "node", "up", "down", "cpu %", "pass ms", "late ms", "held", "longest pass"):
        table.add_column(column, overflow="fold")
    for result in results:
        for kind in KINDS:
            if kind in result:
                of_kind = result[kind]
                pairs = [f"{mean} ({most})" for mean, most in (of_kind[name] for name in ("up", "down", "cpu"))]
                rest = [str(of_kind[name]) for name in ("pass_ms", "late_ms", "held", "longest")]
                table.add_row(result["phase"], f"{of_kind['nodes']} {kind}", *pairs, *rest)
    console.print(table)
    for result in results:
        told = {name: value for name, value in result.items() if name not in KINDS}
        console.print(told)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--lights", type=int, default=60 - BOOTSTRAPS)
    parser.add_argument("--seconds", type=float, default=60.0, help="that a phase takes at least")
    parser.add_argument("--keys", type=int, default=5000)
    parser.add_argument("--phases", nargs="+", default=["quiet", "partition", "replaced", "flood"])
    options = parser.parse_args()
    if reason := why_not():
        sys.exit(reason)
    os.environ["OMP_NUM_THREADS"] = "1"
    results = run(options.lights, options.seconds, options.keys, options.phases)
    if options.json:
        print(json.dumps({"sixty_nodes": results}))
    else:
        show(results)


if __name__ == "__main__":
    main()
