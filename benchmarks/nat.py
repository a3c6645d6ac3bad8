"""What NATs, relays and punched connections cost a session, in network namespaces of this machine.

    sudo python benchmarks/nat.py [--json] [--delays 0 25 50] [--tokens 60] [--rounds 3]

A client behind one NAT, a server behind another, a relay on the internet; all are processes of their own, the model is
a random Llama of 27.8M parameters on one thread. `delay` is one way, in milliseconds, on the line of each NAT: four of
them lie on the relayed round trip, and as many on a punched one.

    step         a decode step, median; `wire` is what is left of it without the server's and the client's computing
    round trip   of 2 KiB (the size of a hidden state) over a plain stream of the same kind between two idle nodes on
                 the same two machines; `over` is wire divided by that
    first        a client that knows the relay's address and nothing else asks for the model: until its first token
    moved        a session that begins through the relay and goes on over the punched connection, with 50 ms per line:
                 from the start of the punching to the first token there, and the longest token meanwhile
    drills       the longest time without a token, and of the relay's death the time after its return: until a node
                 behind a NAT has its place there again, and until the session has gone on
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chain import h512
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.nat.clients import Client
from tests.nat.lab import Host, Kind, Nat, open_lab, why_no_delay, why_not
from tests.nat.nodes import LISTEN, LabNodes, LightNode, lab_nodes
from tests.swarm.processes import Node

RELAY = ("bootstrap", "--new-swarm", "--listen", LISTEN)
ECHO_PORT = "/ip4/0.0.0.0/tcp/31331"
STATE_BYTES = 2048
ENDLESS = 1900
"""Tokens that are generated at most until a drill is over."""


@dataclass(frozen=True)
class Place:
    """A lab with everything running, and nothing warmed up. `server` is a peer id; it punches once `go` is there."""

    nodes: LabNodes
    relay_host: Host
    relay: Node
    home: Nat
    laptop: Host
    office_host: Host
    server: str
    go: Path
    client: Client


@contextmanager
def place(folder: Path, kind: Kind, delay: float) -> Iterator[Place]:
    """`delay` in seconds."""
    with (
        tempfile.TemporaryDirectory(prefix="petalnode-bench-") as scratch,
        open_lab() as lab,
        lab_nodes(Path(scratch)) as nodes,
    ):
        relay_host = lab.host("relay")
        home, office = lab.nat("home", kind, delay=delay), lab.nat("office", kind, delay=delay)
        laptop, machine = home.host("laptop"), office.host("server")
        relay = nodes.command(relay_host, *RELAY)
        go = nodes.home(machine) / "go"
        serve = ("serve", str(folder), "--blocks", "0:8", "--peer", relay.address, "--listen", LISTEN, "--json")
        server = nodes.program(machine, [sys.executable, "-m", "tests.nat.held_server", str(go), *serve])
        client = Client(nodes, laptop, folder, relay.address)
        peer_id = server.event("ready")["peer_id"]
        yield Place(nodes, relay_host, relay, home, laptop, machine, peer_id, go, client)


def steps(folder: Path, kind: Kind, delay: float, tokens: int, rounds: int) -> dict[str, Any]:
    """One row of the first table. Times in milliseconds, `first_s` in seconds."""
    with place(folder, kind, delay) as here:
        here.go.touch()
        here.client.order(tokens, allowed=[here.server])
        first = here.client.first()
        here.client.done()
        if kind is Kind.DROPS:  # the punch may come in the course of an answer
            here.client.order(ENDLESS, allowed=[here.server], until={"direct": 1}, more=5)
            here.client.done()
        echoing = here.nodes.light(here.office_host, listen=[ECHO_PORT], peers=[here.relay.address], blocks=[0, 1])
        calling = here.nodes.light(here.laptop, peers=[here.relay.address])
        trips: list[float] = []
        wires: list[float] = []
        totals: list[float] = []
        stream = _echo_stream(calling, echoing, direct=kind is Kind.DROPS)
        for _ in range(rounds):
            trips += calling.ask("echo", stream=stream, size=STATE_BYTES, times=tokens)[5:]
            here.client.order(tokens, allowed=[here.server])
            seen = [here.client.token() for _ in range(tokens)][5:]
            directs = here.client.done()["direct"]
            totals += [token["seconds"] for token in seen]
            wires += [token["wire"] for token in seen]
    step, wire, trip = (1000 * statistics.median(values) for values in (totals, wires, trips))
    return {
        "delay_ms": 1000 * delay,
        "path": "punched" if all(directs) else "relayed",
        "step_ms": step,
        "wire_ms": wire,
        "round_trip_ms": trip,
        "over": wire / trip,
        "first_s": first,
    }


def _echo_stream(calling: LightNode, echoing: LightNode, *, direct: bool) -> int:
    calling.ask("wait_server", peer=echoing.peer_id)
    calling.ask("reach", peer=echoing.peer_id)
    if direct:
        calling.ask("wait_direct", peer=echoing.peer_id)
    number: int = calling.ask("open", peer=echoing.peer_id)
    return number


def drills(folder: Path) -> dict[str, dict[str, float]]:
    """What happens to a session when its way is lost; seconds."""
    found: dict[str, dict[str, float]] = {}
    with place(folder, Kind.SYMMETRIC, 0.0) as here:
        for name, act in (("NAT forgets", here.home.forget_mappings), ("new address", here.home.change_address)):
            _generating(here, until="rejoined")
            act()
            found[name] = {"longest_s": max(token["seconds"] for token in here.client.rest())}
        neighbour = here.nodes.light(here.office_host, listen=[ECHO_PORT], peers=[here.relay.address])
        neighbour.ask("wait_relays", relays=[here.relay.peer_id])
        _generating(here, until="changed")
        here.relay.signal(signal.SIGKILL)
        here.relay.wait()
        back = here.nodes.command(here.relay_host, *RELAY)
        reserving = neighbour.tell("wait_relays", relays=[back.peer_id])
        returned = time.perf_counter()
        longest = max(token["seconds"] for token in here.client.rest())
        session = time.perf_counter() - returned
        found["relay killed"] = {
            "longest_s": longest,
            "session_after_return_s": session,
            "reservation_after_return_s": neighbour.answer(reserving),
        }
    return found


def moving(folder: Path) -> dict[str, float]:
    """A session that begins through the relay and moves. Milliseconds."""
    with place(folder, Kind.DROPS, 0.05) as here:
        here.client.order(ENDLESS, allowed=[here.server], until={"moved": 1}, more=20)
        tokens = [here.client.token() for _ in range(20)]
        here.go.touch()
        begun = time.perf_counter()
        while not all(tokens[-1]["direct"]):
            tokens.append(here.client.token())
        seconds = time.perf_counter() - begun
        direct = list(here.client.rest())
    relayed = [token["seconds"] for token in tokens[1:20]]
    return {
        "moved_after_s": seconds,
        "relayed_ms": 1000 * statistics.median(relayed),
        "direct_ms": 1000 * statistics.median(token["seconds"] for token in direct[-15:]),
        "longest_ms": 1000 * max(token["seconds"] for token in tokens[20:]),
    }


def _generating(here: Place, *, until: str) -> None:
    """Begins an answer that ends soon after the path has changed; returns when it is well under way."""
    here.client.order(ENDLESS, allowed=[here.server], until={until: 1}, more=5)
    for _ in range(20):
        here.client.token()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.add_argument("--delays", nargs="+", type=float, default=[0, 25, 50], help="one way, milliseconds")
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if reason := why_not() or (why_no_delay() if any(options.delays) else ""):
        sys.exit(reason)
    rows = []
    with tempfile.TemporaryDirectory(prefix="petalnode-bench-") as scratch:
        model = h512(Path(scratch) / "h512")
        for delay in options.delays:
            for kind in (Kind.SYMMETRIC, Kind.DROPS):
                print(f"{delay:g} ms, NATs with {kind.value} ...", file=sys.stderr)
                rows.append(steps(model, kind, delay / 1000, options.tokens, options.rounds))
        print("moving, and drills ...", file=sys.stderr)
        results = {"steps": rows, "moving": moving(model), "drills": drills(model)}
    if options.json:
        print(json.dumps({"nat": results}))
    else:
        show(results)


def show(results: dict[str, Any]) -> None:
    console = Console(width=120)
    table = Table(title="one token behind two NATs")
    for column in ("delay ms", "path", "step ms", "wire ms", "round trip ms", "over", "first s"):
        table.add_column(column, justify="right")
    for result in results["steps"]:
        numbers = (f"{result[name]:.1f}" for name in ("step_ms", "wire_ms", "round_trip_ms"))
        over, first = f"{result['over']:.2f}", f"{result['first_s']:.2f}"
        table.add_row(f"{result['delay_ms']:g}", result["path"], *numbers, over, first)
    console.print(table)
    moved = results["moving"]
    console.print(
        f"moved, at 50 ms: {moved['moved_after_s']:.1f} s after the punching began; {moved['relayed_ms']:.0f} ms a "
        f"token before, {moved['direct_ms']:.0f} ms after, {moved['longest_ms']:.0f} ms the longest meanwhile"
    )
    for name, figures in results["drills"].items():
        told = (f"{key.removesuffix('_s').replace('_', ' ')} {value:.1f} s" for key, value in figures.items())
        console.print(f"{name}: {', '.join(told)}")


if __name__ == "__main__":
    main()
