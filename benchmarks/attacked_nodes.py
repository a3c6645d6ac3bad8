"""What a stranger can do to `petalnode api` by HTTP, and to a validator over the network, as under_attack.py has it.

    sudo python benchmarks/attacked_nodes.py [--json] [--minutes 12] [--attacks NAME ...] [--model smollm2] [--seed 1]

Three servers, an API and a validator have one core together, the attacker another one, with 20 keys at 5 addresses and
a key of the API's own. Somebody with another key asks the API all the time, a token after the other, with the same
prompts; the validator probes the servers. The columns are those of under_attack.py, of the API and of the validator;
`answers` are those that are as before the attack, `verdicts` those that say ok, and all.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.request import Request, urlopen

import under_attack
from rich.console import Console
from rich.table import Table
from under_attack import KEYS, MAX_PASS, PROMPTS, REST, ROOT, SOURCES, TOKENS, Node, Sampler, say, start_servers

sys.path.insert(0, str(ROOT))

from petalnode.node.api.http.admission import hash_of_key
from petalnode.node.models import resolve
from tests.attacks.stranger.http_requests import HTTP_ATTACKS
from tests.swarm.processes import Running, environment

OWN, OTHER = "pn-honest", "pn-attacker"
HEARD: Final = ("gossip", "evidence, receipts, points", "frames", "garbage", "announcements")
"""What a validator hears of strangers."""
ALL: Final = (*HTTP_ATTACKS, *HEARD)


class Asker:
    """Asks the API without end; notes when each token came, and the text of each answer."""

    def __init__(self, url: str, model: str) -> None:
        self._url, self._model = url, model
        self.tokens: list[float] = []
        self.answers: list[tuple[float, int, str]] = []
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        number = 0
        while True:
            place = number % len(PROMPTS)
            number += 1
            try:
                text = "".join(self._ask(PROMPTS[place]))
            except OSError as error:
                text = f"{type(error).__name__}: {error}"
                time.sleep(0.1)
            self.answers.append((time.time(), place, text))

    def _ask(self, prompt: Sequence[int]) -> Iterator[str]:
        asked = {"model": self._model, "prompt": list(prompt), "max_tokens": TOKENS, "temperature": 0, "stream": True}
        headers = {"Authorization": f"Bearer {OWN}", "Content-Type": "application/json"}
        request = Request(f"{self._url}/v1/completions", json.dumps(asked).encode(), headers)
        with urlopen(request, timeout=REST) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    self.tokens.append(time.time())
                    yield "".join(choice["text"] for choice in json.loads(line[6:]).get("choices", ()))

    def between(self, start: float, end: float) -> tuple[float, int, int]:
        """Parts of answers a second, answers that are the first to their prompt, and all."""
        first: dict[int, str] = {}
        for _, place, text in self.answers:
            first.setdefault(place, text)
        within = [first[place] == text for at, place, text in self.answers if start <= at <= end]
        return sum(start <= at <= end for at in self.tokens) / (end - start), sum(within), len(within)


class Doors:
    """The processes, and the phases that they have gone through."""

    def __init__(self, api: Node, validator: Node, attacker: Running, asker: Asker) -> None:
        self._nodes = (api, validator)
        self._attacker, self._asker = attacker, asker
        self._sampler = Sampler(self._nodes)
        self._order([])
        while len(asker.answers) < 2 * len(PROMPTS):
            time.sleep(0.5)
        self._memory = [node.memory() for node in self._nodes]

    def _order(self, names: Sequence[str]) -> None:
        assert self._attacker.process.stdin is not None
        self._attacker.process.stdin.write(json.dumps(list(names)) + "\n")
        self._attacker.process.stdin.flush()
        self._attacker.event("done")

    def phase(self, name: str, attacks: Sequence[str], seconds: float) -> dict[str, Any]:
        self._order(attacks)
        start, told = time.time(), self._nodes[1].process.events_so_far
        told()
        time.sleep(seconds)
        end = time.time()
        self._order([])
        speed, right, answers = self._asker.between(start, end)
        verdicts = [event["verdict"] for event in told() if event["event"] == "verdict"]
        most = self._sampler.most(start, end)
        passes = [[one["cpu"] for one in node.passes(start, end)] for node in self._nodes]
        found = {
            "phase": name,
            "growth_mib": [round(now - begun, 1) for now, begun in zip(most, self._memory, strict=True)],
            "pass_ms": [round(1000 * max(of_node, default=0.0)) for of_node in passes],
            "tokens_per_s": round(speed, 2),
            "answers": [right, answers],
            "verdicts": [verdicts.count("ok"), len(verdicts)],
        }
        say(json.dumps(found))
        return found


@contextmanager
def doors_of(model: str, blocks: int, scratch: Path, seed: int, ours: str, core: str) -> Iterator[Doors]:
    env = environment(scratch / "home") | {"PYTHONPATH": str(ROOT)}
    keys = scratch / "keys"
    keys.write_text(f"sha256:{hash_of_key(OWN)} honest\nsha256:{hash_of_key(OTHER)} attacker\n")
    keys.chmod(0o600)
    with ExitStack() as stack:

        def start(cpus: str, *command: str) -> Running:
            process = Running(["taskset", "-c", cpus, sys.executable, "-m", *command], env, ROOT)
            stack.callback(process.kill)
            return process

        servers = start_servers(partial(start, ours), model, blocks, scratch)
        joined = [argument for node in servers for argument in ("--peer", node.ready["addrs"][0])]
        usual = (*joined, "--no-mdns", "--no-remember", "--json")

        def watched(name: str, *command: str) -> Node:
            passes = scratch / f"{name}.jsonl"
            node = Node(start(ours, "benchmarks.watched", str(passes), name, model, *command, *usual), passes)
            node.ready = node.process.event("ready")
            say(f"{name} is ready")
            return node

        api = watched("api", "--http-port", "0", "--api-key-file", str(keys))
        listen = ("--listen", "/ip4/127.0.0.1/tcp/0", "--identity", str(scratch / "key-validator"))
        validator = watched("validate", "--interval", "5", *listen)
        url = api.ready["url"]
        door = {"http": ["127.0.0.1", int(url.rpartition(":")[2])], "api_key": OTHER, "model": api.ready["models"][0]}
        victims = [{"address": validator.ready["addrs"][0], "served": door}]
        told = {"victims": victims, "keys": KEYS, "sources": SOURCES, "seed": seed}
        attacker = start(core, "benchmarks.attacker", json.dumps(told))
        attacker.event("ready")
        yield Doors(api, validator, attacker, Asker(url, api.ready["models"][0]))


def run(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    folder = resolve(options.model)
    model, blocks = str(folder.path), folder.num_blocks
    cores = sorted(os.sched_getaffinity(0))
    ours, core = ",".join(map(str, cores[:-1] or cores)), str(cores[-1])
    seconds = 60 * options.minutes / (len(options.attacks) + 2)
    with doors_of(model, blocks, scratch, options.seed, ours, core) as doors:
        phases = [doors.phase("quiet", [], seconds)]
        phases += [doors.phase(name, [name], seconds) for name in options.attacks]
        time.sleep(REST)
        phases.append(doors.phase("quiet again", [], seconds))
    quiet = (phases[0]["tokens_per_s"] + phases[-1]["tokens_per_s"]) / 2
    for phase in phases:
        phase["speed"] = round(phase["tokens_per_s"] / max(quiet, 1e-9), 2)
    reached = {
        "all answers right": all(phase["answers"][0] == phase["answers"][1] for phase in phases),
        "all verdicts ok": all(phase["verdicts"][0] == phase["verdicts"][1] for phase in phases),
        f"at most {under_attack.MAX_GROWTH:.0f} MiB more": all(
            max(phase["growth_mib"]) <= under_attack.MAX_GROWTH for phase in phases
        ),
        f"no loop held for {1000 * MAX_PASS:.0f} ms": all(
            max(phase["pass_ms"]) < 1000 * MAX_PASS for phase in phases[1:-1]
        ),
        "half of the speed": all(phase["speed"] >= under_attack.LEAST_SPEED for phase in phases[1:-1]),
    }
    return {"phases": phases, "reached": reached, "model": options.model, "seed": options.seed}


def show(found: dict[str, Any]) -> None:
    console = Console(width=140)
    table = Table("attack", "memory, MiB", "pass, ms", "tokens/s", "speed", "answers", "verdicts")
    for phase in found["phases"]:
        pairs = [" of ".join(map(str, phase[name])) for name in ("answers", "verdicts")]
        figures = (f"{phase['tokens_per_s']:.1f}", f"{phase['speed']:.2f}")
        both = [", ".join(f"{value:.0f}" for value in phase[name]) for name in ("growth_mib", "pass_ms")]
        table.add_row(phase["phase"], *both, *figures, *pairs)
    console.print(table)
    under_attack.show_reached(console, found)


if __name__ == "__main__":
    under_attack.command("attacked_nodes", __doc__, list(ALL), 12.0, run, show)
