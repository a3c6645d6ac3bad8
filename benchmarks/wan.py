"""Milliseconds per token through 2 to 4 servers that are 10, 50 and 100 ms apart, against what the delays allow.

    sudo python benchmarks/wan.py [--json] [--rtts 10 50 100] [--servers 2 3 4] [--tokens 24] [--rounds 2]

Every server and the client is a process on a host of its own (`delay_bridge.py`), with the same round trip between
any two. A token takes at least n round trips through the client, and n + 1 half ones when servers push to each other,
plus the computing: what the servers report for their blocks and what the client needs for embeddings and head. `share`
is that bound divided by the measured time. `bytes/token` are the frames on the wire with all their headers, and what
servers tell each other besides: from the client / between servers / to the client. `open s` is `from_pretrained`,
`first s` a session with its first token after it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from chain import h512, spans_of
from delay_bridge import DelayNetwork, delay_network
from local_swarm import ServerProcess
from plain import quiet_torch
from rich.console import Console
from rich.table import Table

from petalnode import AutoDistributedModelForCausalLM

NUM_BLOCKS = 8
PROMPT_TOKENS = 16
MODES = ("relayed", "pushed")


class _Steps:
    """A transformers streamer that takes apart the time of every decode step, in seconds."""

    def __init__(self, session: Any) -> None:
        self.totals: list[float] = []
        self.computing: list[float] = []
        self._session = session
        self._in_step = 0.0
        self._before = 0.0
        inner = session.step

        def step(*args: Any, **kwargs: Any) -> torch.Tensor:
            begun = time.perf_counter()
            output: torch.Tensor = inner(*args, **kwargs)
            self._in_step = time.perf_counter() - begun
            return output

        session.step = step

    def put(self, value: Any) -> None:
        now = time.perf_counter()
        self.totals.append(now - self._before)
        if self._session._session is not None:
            client = self.totals[-1] - self._in_step
            self.computing.append(client + sum(hop.compute for hop in self._session._session.timings))
        self._before = now

    def end(self) -> None:
        # The first put is the prompt, the second the token of the prefill: neither is a decode step.
        del self.totals[:2], self.computing[:1]


def client(folder: str, addr: str, tokens: int) -> None:
    """The process on the client's host: does a round for every mode it reads, and prints how it went."""
    quiet_torch()
    torch.manual_seed(1)
    prompt = torch.randint(5, 2000, (1, PROMPT_TOKENS))
    begun = time.perf_counter()
    with AutoDistributedModelForCausalLM.from_pretrained(folder, initial_peers=[addr]) as model:
        opened = time.perf_counter()
        model.generate(prompt, max_new_tokens=1, pad_token_id=0)
        print(json.dumps({"open": opened - begun, "first": time.perf_counter() - opened}), flush=True)
        for line in sys.stdin:
            with model.inference_session(PROMPT_TOKENS + 2 * tokens) as session:
                first = model.generate(prompt, max_new_tokens=1, do_sample=False, pad_token_id=0)
                inner = session._session
                inner.spec = replace(inner.spec, push=line.strip() == "pushed")
                print(json.dumps({"servers": len(session.route)}), flush=True)
                sys.stdin.readline()  # the bytes are counted from here on
                steps = _Steps(session)
                model.generate(
                    first, min_new_tokens=tokens, max_new_tokens=tokens, do_sample=False, streamer=steps, pad_token_id=0
                )
                result = {"totals": steps.totals, "computing": steps.computing, "pushed_steps": inner.pushed_steps}
                print(json.dumps(result), flush=True)


class ClientProcess:
    """The client's process, as seen from here."""

    def __init__(
        self,
        network: DelayNetwork,
        model: Path | str,
        addr: str,
        tokens: int,
        *more: str,
        script: str = __file__,
        host: int = 0,
    ) -> None:
        arguments = [sys.executable, script, "--client", str(model), addr, "--tokens", str(tokens), *more]
        self.process = subprocess.Popen(
            network.command(host, arguments), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("the client ended; what it said is above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def ask(self, line: str) -> dict[str, Any]:
        self.tell(line)
        return self.read()

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


@contextmanager
def servers_of(
    network: DelayNetwork,
    model: Path | str,
    count: int,
    num_blocks: int = NUM_BLOCKS,
    program: Sequence[str] = ("-m", "petalnode"),
) -> Iterator[list[ServerProcess]]:
    """`count` servers on the hosts behind the client's. Host 1 has the first blocks, and so on."""
    servers: list[ServerProcess] = []
    with tempfile.TemporaryDirectory(prefix="petalnode-bench-") as scratch:
        try:
            peer: Sequence[str] = ("--new-swarm",)
            for host, (start, end) in enumerate(spans_of(num_blocks, count), start=1):
                folder = Path(scratch) / str(host)
                folder.mkdir()
                arguments = [str(model), "--blocks", f"{start}:{end}", *peer]
                prefix = network.command(host, [])
                servers.append(
                    ServerProcess(arguments, folder, host=network.address(host), prefix=prefix, program=program)
                )
                peer = ("--peer", servers[-1].wait_ready()["addrs"][0])
            yield servers
        finally:
            for server in servers:
                server.stop()


def run(model: Path, rtt: float, count: int, tokens: int, rounds: int) -> Iterator[dict[str, Any]]:
    """The results of each mode; `rtt` in seconds."""
    with delay_network(count + 1, rtt / 2) as network, servers_of(network, model, count) as servers:
        process = ClientProcess(network, model, servers[0].ready["addrs"][0], tokens)
        try:
            start = process.read()
            rounds_of: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
            bytes_of = {mode: [0, 0, 0] for mode in MODES}
            for _, mode in itertools.product(range(rounds), MODES):
                assert process.ask(mode)["servers"] == count, "the route leaves a server out"
                before = network.bytes_sent()
                rounds_of[mode].append(process.ask("go"))
                for leg, sent in network.bytes_sent().items():
                    kind = 0 if leg[0] == 0 else 2 if leg[1] == 0 else 1
                    bytes_of[mode][kind] += sent - before[leg]
        finally:
            process.stop()
    for mode in MODES:
        totals = [total for round_ in rounds_of[mode] for total in round_["totals"]]
        computing = statistics.median(part for round_ in rounds_of[mode] for part in round_["computing"])
        delays = count * rtt if mode == "relayed" else (count + 1) * rtt / 2
        measured = statistics.median(totals)
        yield {
            "rtt_ms": 1000 * rtt,
            "servers": count,
            "mode": mode,
            "ms_per_token": 1000 * measured,
            "p95_ms": 1000 * statistics.quantiles(totals, n=20)[-1],
            "computing_ms": 1000 * computing,
            "bound_ms": 1000 * (delays + computing),
            "share": (delays + computing) / measured,
            "pushed_steps": sum(round_["pushed_steps"] for round_ in rounds_of[mode]),
            "bytes_per_token": dict(
                zip(
                    ("from_client", "between_servers", "to_client"),
                    (round(sent / rounds / tokens) for sent in bytes_of[mode]),
                    strict=True,
                )
            ),
            "open_s": start["open"],
            "first_token_s": start["first"],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--rtts", nargs="+", type=float, default=[10, 50, 100], help="milliseconds")
    parser.add_argument("--servers", nargs="+", type=int, default=[2, 3, 4])
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--client", nargs=2, metavar=("MODEL", "PEER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        client(*options.client, options.tokens)
        return
    results = []
    with tempfile.TemporaryDirectory(prefix="petalnode-bench-") as scratch:
        model = h512(Path(scratch) / "h512")
        for rtt, servers in itertools.product(options.rtts, options.servers):
            print(f"{servers} servers, {rtt:g} ms apart ...", file=sys.stderr)
            results += run(model, rtt / 1000, servers, options.tokens, options.rounds)
    if options.json:
        print(json.dumps({"wan": results}))
    else:
        show(results)


def show(results: Sequence[dict[str, Any]]) -> None:
    table = Table(title="one token over a wide area")
    columns = ("RTT ms", "servers", "mode", "ms/token", "p95", "computing", "bound", "share", "bytes/token")
    for column in (*columns, "open s", "first s"):
        table.add_column(column, justify="right")
    for result in results:
        table.add_row(
            f"{result['rtt_ms']:g}",
            str(result["servers"]),
            result["mode"],
            *(f"{result[name]:.1f}" for name in ("ms_per_token", "p95_ms", "computing_ms", "bound_ms")),
            f"{result['share']:.0%}",
            " / ".join(str(sent) for sent in result["bytes_per_token"].values()),
            f"{result['open_s']:.2f}",
            f"{result['first_token_s']:.2f}",
        )
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
