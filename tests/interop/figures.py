"""How long the JavaScript client's first token and each one after it take, beside Python's, over the same servers.

    python -m tests.interop.figures [--tokens 32] [--rounds 3] [--browser chromium]

Two servers on loopback hold the default model. The Python client, Node and the browser's page take turns; each has
joined and has its weights, and has generated once before. `first` is from the prompt to the first token, in seconds,
and `token` milliseconds of each one after it, without drafts; `processor` is milliseconds of processor time that the
client takes for a token, all its threads and processes together: medians of the rounds. Prints one JSON object. `make
build/interop/.ready` comes before it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from petalnode.node.models import resolve
from tests.interop.built import BUILT, NODE, PAGE, bundle
from tests.nat.nodes import ToldNode
from tests.patience import children
from tests.swarm.processes import Nodes, Running, nodes, until

PROMPT = "The capital of France is"
SPANS = ("0:15", "15:30")
WS = "/ip4/127.0.0.1/tcp/0/ws"


class Python:
    """`generate`, which has the loop of `petalnode chat`."""

    def __init__(self, started: Nodes, model: Path, peer: str, ids: list[int]) -> None:
        self._ids = ids
        command = [sys.executable, "-m", "tests.nat.generating_client", str(model), peer]
        self._process = Running(command, started.env)
        started.running.append(self._process)
        self.pid = self._process.pid

    def round(self, tokens: int) -> tuple[float, float]:
        assert self._process.process.stdin is not None
        self._process.process.stdin.write(json.dumps({"ids": self._ids, "tokens": tokens}) + "\n")
        self._process.process.stdin.flush()
        first, each = float(self._process.event("first")["seconds"]), []
        while (found := json.loads(self._process.line()))["event"] != "done":
            assert found["event"] == "token", found
            each.append(float(found["seconds"]))
        return first, 1000 * statistics.mean(each[1:])


class InNode:
    def __init__(self, started: Nodes, peer: str, ids: list[int]) -> None:
        given = {"peers": [peer], "prompt": ids, "times": 100, "options": {"stopIds": [], "drafts": False}}
        (BUILT / "generate.mjs").write_text(Path(__file__).with_name("generate.mjs").read_text())
        self._process = Running([NODE, "generate.mjs", json.dumps(given)], started.env, BUILT)
        started.running.append(self._process)
        self._process.event("loaded")
        self.pid = self._process.pid

    def round(self, tokens: int) -> tuple[float, float]:
        assert self._process.process.stdin is not None
        self._process.process.stdin.write(f"{tokens}\n")
        self._process.process.stdin.flush()
        at = self._process.event("done")["at"]
        return at[0] / 1000, (at[-1] - at[0]) / (len(at) - 1)


class InTab:
    def __init__(self, started: Nodes, kind: str, peer: str) -> None:
        command = [sys.executable, "-m", "tests.interop.browser", json.dumps({"kind": kind})]
        self._tab = ToldNode(command, started.home)
        started.running.append(self._tab)
        serve = [sys.executable, "-m", "http.server", "0", "--bind", "127.0.0.1", "--directory", str(PAGE)]
        web = Running(serve, started.env)
        started.running.append(web)
        assert self._tab.ready
        self.pid = self._tab.pid
        port = web.line().split(" port ")[1].split()[0]
        self._tab.ask("open", url=f"http://127.0.0.1:{port}/page.html#{peer}")

    def round(self, tokens: int) -> tuple[float, float]:
        for name, value in (("prompt", PROMPT), ("count", str(tokens))):
            self._run(f"document.getElementById('{name}').value = {value!r}")
        self._run("document.getElementById('drafts').checked = false")
        self._run("document.getElementById('go').click()")
        until(lambda: bool(self._said().get("done") or self._said().get("failed")), "the end of the answer")
        said = self._said()
        assert "failed" not in said, said
        return float(said["first"]) / 1000, float(said["rest"]) / (int(said["count"]) - 1)

    def _said(self) -> dict[str, str]:
        found: dict[str, str] = self._run("({...document.getElementById('answer').dataset})")
        return found

    def _run(self, expression: str) -> Any:
        return self._tab.ask("run", expression=expression)


def processor(pid: int) -> float:
    """Seconds of processor time of a process and its descendants."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK") + sum(map(processor, children(pid)))


def main(tokens: int, rounds: int, browser: str) -> None:
    bundle()
    model = resolve("smollm2", need="all").path
    ids = AutoTokenizer.from_pretrained(model.parent if model.is_file() else model)(PROMPT).input_ids
    with tempfile.TemporaryDirectory() as home, nodes(Path(home)) as started:
        at = ("--listen", WS, "--share-weights", "on")
        first = started.server(model, SPANS[0], *at)
        last = started.server(model, SPANS[1], *at, peer=first.address)
        assert last.ready
        clients = {
            "python": Python(started, model, first.address, ids),
            "node": InNode(started, first.address, ids),
            browser: InTab(started, browser, first.address),
        }
        took: dict[str, list[tuple[float, float, float]]] = {name: [] for name in clients}
        for number in range(rounds + 1):
            for name, client in clients.items():
                before = processor(client.pid)
                found = client.round(tokens)
                if number:
                    took[name].append((*found, 1000 * (processor(client.pid) - before) / tokens))
    medians = {
        name: {
            what: round(statistics.median(values), 3)
            for what, values in zip(("first", "token", "processor"), zip(*found, strict=True), strict=True)
        }
        for name, found in took.items()
    }
    python, tab = medians["python"], medians[browser]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    print(
        json.dumps(
            {
                **medians,
                "first_ratio": round(tab["first"] / python["first"], 2),
                "token_more_than_1.2": round(tab["token"] - 1.2 * python["token"], 1),
                "page_bytes": sum(file.stat().st_size for file in PAGE.iterdir()),
                "load": os.getloadavg()[0],
                "commit": commit,
            }
        )
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--browser", choices=["chromium", "firefox"], default="chromium")
    given = parser.parse_args()
    main(given.tokens, given.rounds, given.browser)
