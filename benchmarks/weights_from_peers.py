"""Share of the line's speed at which nodes that have nothing fetch a model from peers, in network namespaces.

    sudo python benchmarks/weights_from_peers.py [--json] [--rates 50 1000] [--megabytes 48 384] [--empty 2]
        [--killed] [--liar]

One node has the model, `--empty` others have nothing and fetch all of it at the same time; they hand on what they have
by then. Each is a process on a host of its own, whose line carries a number of Mbit/s each way (`tc`, token bucket).
`share` is the model's size through the time from the first question to the last part on the disk, against the line.
With `--killed` a second node that has the model is killed when half of it has come; with `--liar` one more hands on
false pieces.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import trio
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from petalnode.crypto.identity import Identity
from petalnode.node.models import compute_manifest
from petalnode.node.models.folder import open_folder
from petalnode.node.swarm.config import SwarmConfig
from petalnode.node.swarm.swarm import Swarm, open_swarm
from petalnode.node.weights.holder import hand_on
from petalnode.node.weights.remote_model import find_remote_model
from petalnode.protocols.announcement import Announcement, ServerState
from petalnode.protocols.ids import Span

NAME = "benchmark"
BLOCKS = 24


def write_model(folder: Path, megabytes: int) -> None:
    """A Llama of random bytes: nothing loads it here."""
    hidden = 512
    width = max(256, megabytes * (1 << 20) // BLOCKS // 4 // (3 * hidden))
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "intermediate_size": width,
        "num_hidden_layers": BLOCKS, "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 512,
    }  # fmt: skip
    shapes = {"model.embed_tokens.weight": [512, hidden], "model.norm.weight": [hidden]}
    for block in range(BLOCKS):
        shapes |= {f"model.layers.{block}.mlp.{name}_proj.weight": [width, hidden] for name in ("gate", "up", "down")}
    entries, end = {}, 0
    for key, shape in shapes.items():
        start, end = end, end + 4 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        entries[key] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    header = json.dumps(entries).encode()
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        for start in range(0, end, 1 << 20):
            stream.write(os.urandom(min(1 << 20, end - start)))


# --- the processes


def announce(swarm: Swarm, version: bytes, state: ServerState) -> None:
    swarm.announce(Announcement(swarm.peer_id, version, NAME, BLOCKS, Span(0, BLOCKS), state))


async def hold(folder: Path, address: str, peer: str | None, *, lies: bool) -> None:
    if lies:
        from tests.swarm import false_weights

        false_weights.install()
    model = open_folder(folder, NAME)
    manifest = compute_manifest(model)
    config = SwarmConfig(Identity.generate(), listen=(f"/ip4/{address}/tcp/0",), peers=(peer,) if peer else ())
    async with open_swarm(config) as swarm:
        hand_on(swarm, manifest, model, "on")
        swarm.serve_manifest(manifest.version, manifest.to_wire())
        announce(swarm, manifest.version, ServerState.ONLINE)
        print(json.dumps({"addr": swarm.addrs[0]}), flush=True)
        await trio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)


async def fetch(address: str, peer: str) -> None:
    done = [0]

    def progress(what: str, now: int, total: int | None) -> None:
        if total and now * 2 >= total > done[0] * 2:
            print(json.dumps({"half": True}), flush=True)
        done[0] = now

    config = SwarmConfig(Identity.generate(), listen=(f"/ip4/{address}/tcp/0",), peers=(peer,))
    async with open_swarm(config) as swarm:
        remote = await find_remote_model(swarm, NAME, lambda *_: None)
        hand_on(swarm, remote.manifest, remote.stored.model_folder(), "on")
        swarm.serve_manifest(remote.version, remote.manifest.to_wire())
        announce(swarm, remote.version, ServerState.JOINING)
        print(json.dumps({"found": True}), flush=True)
        await trio.to_thread.run_sync(sys.stdin.readline)
        processor, begun = time.process_time(), time.perf_counter()
        nbytes = remote.missing("all")
        await remote.fetch("all", progress)
        seconds = time.perf_counter() - begun
        print(json.dumps({"bytes": nbytes, "seconds": seconds, "cpu": time.process_time() - processor}), flush=True)
        await trio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)


# --- the network


class Process:
    """One of these processes on a host of the lab, whose cache is its own."""

    def __init__(self, host: Any, home: Path, *arguments: str) -> None:
        home.mkdir(parents=True, exist_ok=True)
        kept = {**os.environ, "PETALNODE_CACHE": str(home / "cache"), "HOME": str(home), "PETALNODE_MDNS": "0"}
        self.process = subprocess.Popen(
            host.command([sys.executable, "-W", "ignore", __file__, *arguments, "--address", host.address]),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=kept,
        )  # fmt: skip

    def said(self, name: str) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            found: dict[str, Any] = json.loads(line)
            if name in found:
                return found
        raise RuntimeError(f"a process ended before it said {name!r}")

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def shape(lab: Any, host: Any, megabits: float) -> None:
    """Both ends of the host's cable: what it sends, and what it gets."""
    burst = max(32_000, int(megabits * 1000))  # bytes: 8 ms
    rule = f"root tbf rate {megabits}mbit burst {burst} latency 50ms".split()
    for command in (
        host.command(["tc", "qdisc", "add", "dev", "eth0", *rule]),
        lab.internet.at.command(["tc", "qdisc", "add", "dev", host.plug.socket, *rule]),
    ):
        subprocess.run(command, check=True)


def measured(rate: float, megabytes: int, empty: int, *, killed: bool, liar: bool) -> dict[str, Any]:
    from tests.nat.lab import open_lab

    started: list[Process] = []
    with tempfile.TemporaryDirectory() as root, open_lab() as lab:
        home = Path(root)
        write_model(home / NAME, megabytes)

        def start(name: str, *arguments: str) -> Process:
            host = lab.host(name)
            shape(lab, host, rate)
            started.append(Process(host, home / name, *arguments))
            return started[-1]

        try:
            source = start("source", "--hold", str(home / NAME))
            peer = source.said("addr")["addr"]
            extra = {}
            for name, wanted in (("killed", killed), ("liar", liar)):
                if wanted:
                    lies = ["--lies"] if name == "liar" else []
                    extra[name] = start(name, "--hold", str(home / NAME), "--peer", peer, *lies)
                    extra[name].said("addr")
            fetching = [start(f"empty{number}", "--fetch", "--peer", peer) for number in range(empty)]
            for process in fetching:
                process.said("found")
            for process in fetching:
                process.go()
            if killed:
                fetching[0].said("half")
                extra["killed"].end()
            results = [process.said("seconds") for process in fetching]
        finally:
            for process in started:
                process.end()
    line = rate * 1e6 / 8
    shares = [result["bytes"] / result["seconds"] / line for result in results]
    return {
        "rate": rate, "bytes": results[0]["bytes"], "empty": empty, "killed": killed, "liar": liar,
        "seconds": [round(result["seconds"], 2) for result in results],
        "cpu": [round(result["cpu"], 2) for result in results],
        "share": round(min(shares), 3),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rates", type=float, nargs="+", default=[50, 1000])
    parser.add_argument("--megabytes", type=int, nargs="+", default=[48, 384])
    parser.add_argument("--empty", type=int, default=2)
    parser.add_argument("--killed", action="store_true")
    parser.add_argument("--liar", action="store_true")
    for name in ("--hold", "--peer", "--address"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    for name in ("--fetch", "--lies"):
        parser.add_argument(name, action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.hold:
        trio.run(lambda: hold(Path(given.hold), given.address, given.peer, lies=given.lies))
        return
    if given.fetch:
        trio.run(fetch, given.address, given.peer)
        return
    results = [
        measured(rate, megabytes, given.empty, killed=given.killed, liar=given.liar)
        for rate, megabytes in zip(given.rates, given.megabytes, strict=True)
    ]
    if given.json:
        print(json.dumps({"weights_from_peers": results}))
        return
    table = Table("Mbit/s", "MB", "empty nodes", "seconds", "processor s", "share of the line")
    for one in results:
        table.add_row(
            f"{one['rate']:g}", f"{one['bytes'] / 1e6:.0f}", str(one["empty"]), str(one["seconds"]), str(one["cpu"]),
            f"{one['share']:.2f}",
        )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    main()
