"""How long a generation stalls when one of its servers is told to stop, is killed or freezes.

    python benchmarks/drain.py [--json] [--rounds 3] [--only frozen]

Real processes on loopback, one thread each: four servers hold the random Llama of 27.8M parameters twice, and one of
those in use is ended in the middle of 120 tokens. The client moves to a standby (told to stop), recovers by replay
(killed), or both races (frozen: the first server of the chain, or the second). The tokens are compared with plain
transformers'. Each round starts its servers anew, twelve times in all: minutes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from chain import h512
from local_swarm import local_swarm
from plain import plain_model, quiet_torch
from rich.console import Console
from rich.table import Table

from petalnode import AutoDistributedModelForCausalLM

TOKENS, END_AT = 120, 40
ENDS = {
    "told to stop": (signal.SIGTERM, 0),
    "killed": (signal.SIGKILL, 0),
    "frozen": (signal.SIGSTOP, 0),
    "frozen, the second": (signal.SIGSTOP, 1),
}
"""The signal that ends a server, and where in the chain that server is."""


class _Clock:
    """A transformers streamer that notes when each token comes, and acts at one of them."""

    def __init__(self, act: Any) -> None:
        self.times: list[float] = []
        self._act = act

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())
        if len(self.times) == END_AT:
            self._act()

    def end(self) -> None:
        pass


def run(folder: Path, how: str, expected: torch.Tensor, prompt: torch.Tensor) -> dict[str, float]:
    """One generation; milliseconds of the usual step and of the longest after the event."""
    sent, place = ENDS[how]
    with local_swarm(str(folder), [(0, 4), (4, 8), (0, 4), (4, 8)]) as servers:
        by_peer = {server.ready["peer_id"]: server.process for server in servers}
        with (
            AutoDistributedModelForCausalLM.from_pretrained(folder, initial_peers=servers[-1].ready["addrs"]) as model,
            model.inference_session(prompt.shape[1] + TOKENS) as session,
        ):
            model.generate(prompt, session=session, max_new_tokens=2, do_sample=False, pad_token_id=0)
            chosen = by_peer[session.route[place][0]]
            clock = _Clock(lambda: os.kill(chosen.pid, sent))
            options = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0}
            output = model.generate(prompt, session=session, streamer=clock, **options)
            assert torch.equal(output, expected), "the tokens differ from plain transformers'"
            assert session.recoveries == 1, f"{session.recoveries} servers were replaced"
        if sent == signal.SIGSTOP:
            os.kill(chosen.pid, signal.SIGCONT)
    steps = [1000 * (after - before) for before, after in itertools.pairwise(clock.times[1:])]
    before, after = steps[: END_AT - 2], steps[END_AT - 2 :]
    return {"usual_ms": statistics.median(before), "longest_before_ms": max(before), "longest_after_ms": max(after)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="only servers that end in ways whose names begin with this")
    options = parser.parse_args()
    quiet_torch()
    results = {}
    with tempfile.TemporaryDirectory(prefix="petalnode-bench-") as scratch:
        folder = h512(Path(scratch) / "h512")
        plain = plain_model(folder)
        prompt = torch.randint(5, 2000, (1, 64))
        expected = plain.generate(prompt, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False, pad_token_id=0)
        for how in (name for name in ENDS if name.startswith(options.only)):
            rounds = []
            for number in range(options.rounds):
                print(f"{how}, round {number + 1} of {options.rounds} ...", file=sys.stderr)
                rounds.append(run(folder, how, expected, prompt))
            results[how] = {name: statistics.median(times[name] for times in rounds) for name in rounds[0]}
    if options.json:
        print(json.dumps({"drain": results}))
        return
    table = Table(title="milliseconds of a step, medians")
    for column in ("server", "usual", "longest before", "longest after"):
        table.add_column(column, justify="right")
    for how, values in results.items():
        table.add_row(how, *(f"{value:.0f}" for value in values.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
