"""What `petalnode fit` says of models and machines, against what servers on such machines then hold.

    sudo python benchmarks/fit.py [--json] [--tokens N] [--folder DIR] [--machines SET ..] [--models MODEL ..]

A machine is a control group with so much memory; all of them share this machine's processors. The servers start one
after the other, without `--blocks`, and choose what fits. Needs root and 6 GB of disk. With `--folder` the models are
kept there for the next run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from petalnode.node.models import resolve

SETS: Final = {"one of 3 GB": (3.0,), "1, 1 and 2 GB": (1.0, 1.0, 2.0), "one of 1 GB": (1.0,)}
MADE: Final = {
    "llama-1b Q4_0": ("llama-1b", "--kind", "Q4_0"),
    "llama-1b Q4_K": ("llama-1b", "--kind", "Q4_K"),
    "llama-8b Q4_K, 10 blocks": ("llama-8b", "--kind", "Q4_K", "--blocks", "10"),
    "qwen3-30b-a3b Q4_K, 4 blocks": ("qwen3-30b-a3b", "--kind", "Q4_K", "--blocks", "4"),
}
_GROUPS: Final = Path("/sys/fs/cgroup/memory") if Path("/sys/fs/cgroup/memory").is_dir() else Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Outcome:
    """Of one model on one set of machines: blocks that `fit` said would be held, and that servers hold; tokens a second
    that it said, and that a client alone gets (None: blocks are missing)."""

    machines: str
    model: str
    blocks: int
    said: int
    held: int
    said_speed: float
    speed: float | None
    why: str = ""


class Computer:
    """A control group with so much memory, and a home of its own."""

    def __init__(self, name: str, nbytes: int, home: Path) -> None:
        self.home = home
        self.group = _GROUPS / f"frn{os.getpid()}-{name}"
        self.group.mkdir()
        limit = self.group / "memory.limit_in_bytes"
        (limit if limit.exists() else self.group / "memory.max").write_text(str(nbytes))
        self._env = os.environ | {
            "HOME": str(home),
            "XDG_DATA_HOME": str(home / "data"),
            "PETALNODE_CACHE": str(home / "cache"),
            "PETALNODE_MDNS": "0",
            "PETALNODE_REMEMBER": "0",
            "HF_HUB_OFFLINE": "1",
        }

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        inside = f'echo $$ > {self.group}/cgroup.procs; exec "$@"'
        command = ["sh", "-c", inside, "-", sys.executable, "-m", "petalnode", *arguments, "--json"]
        return subprocess.Popen(command, env=self._env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def run(self, *arguments: str) -> list[dict[str, Any]]:
        process = self.start(*arguments)
        out, err = process.communicate()
        if process.returncode:
            raise SystemExit(f"{arguments}: {err}")
        return list(map(json.loads, out.splitlines()))


@contextmanager
def computers(sizes: Sequence[float], folder: Path) -> Iterator[list[Computer]]:
    made: list[Computer] = []
    try:
        for number, size in enumerate(sizes):
            home = Path(tempfile.mkdtemp(dir=folder))
            made.append(Computer(str(number), int(size * 1e9), home))
        yield made
    finally:
        for computer in made:
            computer.group.rmdir()


def fit_says(made: Sequence[Computer], sizes: Sequence[float], model: str, folder: Path) -> dict[str, Any]:
    """The line of `fit` for the weights of this file."""
    if len(made) == 1:
        lines = made[0].run("fit", model)
    else:
        file = folder / "machines.json"
        rows = [{"name": str(n), "device": "cpu", "memory_gb": size, "region": "here"} for n, size in enumerate(sizes)]
        file.write_text(json.dumps({"machines": rows}))
        lines = made[0].run("fit", model, "--machines", str(file))
    return next(line for line in lines if line["weights"] == "as it is")


def blocks_held(made: Sequence[Computer], model: str, tokens: int) -> tuple[set[int], float | None, str]:
    """(blocks that the servers hold, tokens a second, why less than all). The prompt's time is in two answers, of which
    one is four times as long: what it is more says the time of tokens. The first answer of three meets pages that are
    not there yet."""
    running: list[subprocess.Popen[str]] = []
    held, why, peer = set[int](), "", ""
    try:
        for computer in made:
            join = ("--peer", peer) if peer else ("--new-swarm",)
            server = computer.start("serve", model, "--listen", "/ip4/127.0.0.1/tcp/0", *join)
            running.append(server)
            assert server.stdout is not None and server.stderr is not None
            event = next((line for line in map(json.loads, server.stdout) if line.get("event") == "ready"), None)
            if event is None:
                why = (server.stderr.read().strip().splitlines() or [f"killed ({server.wait()})"])[-1]
                continue
            held |= set(range(*event["blocks"]))
            peer = peer or event["addrs"][0]
        if not tokens or len(held) < resolve(model, need="config").num_blocks:
            return held, None, why
        client = Computer("client", 8 << 30, made[0].home)
        try:
            short, long = [_answer(client, model, peer, count) for count in (tokens, tokens, 4 * tokens)][1:]
        finally:
            client.group.rmdir()
        return held, (long["tokens"] - short["tokens"]) / (long["seconds"] - short["seconds"]), why
    finally:
        for server in running:
            server.terminate()
        for server in running:
            server.communicate()


def _answer(client: Computer, model: str, peer: str, tokens: int) -> dict[str, Any]:
    question = ("--prompt", "Tell me a long story", "--max-new-tokens", str(tokens), "--peer", peer, "--draft", "none")
    return client.run("chat", model, *question)[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--tokens", type=int, default=24, help="of the shorter answer; 0: none is asked for")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--machines", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--models", nargs="+", choices=("smollm2", *MADE), default=["smollm2", *MADE])
    asked = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as temporary:
        folder, kept = Path(temporary), asked.folder or Path(temporary)
        models = {"smollm2": str(resolve("smollm2").path)} if "smollm2" in asked.models else {}
        for name in [name for name in MADE if name in asked.models]:
            shape, *options = MADE[name]
            models[name] = str(kept / f"{name.replace(' ', '-')}.gguf")
            made = [sys.executable, str(Path(__file__).with_name("make_gguf.py")), shape, models[name], *options]
            if not Path(models[name]).exists():
                subprocess.run(made, check=True, capture_output=True)
        for where in asked.machines:
            sizes = SETS[where]
            for name, model in models.items():
                with computers(sizes, folder) as machines:
                    said = fit_says(machines, sizes, model, folder)
                    held, speed, why = blocks_held(machines, model, asked.tokens)
                blocks = resolve(model, need="config").num_blocks
                lacking = round(said["missing_bytes"] / said["bytes"] * blocks)
                outcome = Outcome(
                    where, name, blocks, blocks - lacking, len(held), said["tokens_per_second"], speed, why
                )
                found.append(outcome)
                print(outcome, file=sys.stderr, flush=True)
    if asked.json:
        print(json.dumps([asdict(outcome) for outcome in found]))
        return
    print("| machines | model | blocks | fit says | held | tokens/s said | tokens/s |\n|---|---|---|---|---|---|---|")
    for one in found:
        speed = "" if one.speed is None else f"{one.speed:.1f}"
        said_speed = f"{one.said_speed:.1f}" if one.said == one.blocks else ""
        print(f"| {one.machines} | {one.model} | {one.blocks} | {one.said} | {one.held} | {said_speed} | {speed} |")


if __name__ == "__main__":
    main()
