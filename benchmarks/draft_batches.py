"""Milliseconds a token of every row of a batch over a wide area, in one batch and with drafts, each row by itself.

    sudo python benchmarks/draft_batches.py [--json] [--model smollm2] [--rtts 100] [--servers 3] [--rows 4]
        [--tokens 60]

The network is that of `drafts.py`, and so are the texts: `re-emitted`, where each row writes a file of its prompt with
another small edit, and `ordinary`, where each answers another question. Prompts differ in length, so rows are padded at
the left. Each text is answered greedily in one batch, with drafts that are looked up, and in one batch again; the first
tokens, with the prompt, are left out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from delay_bridge import delay_network
from drafts import TEXTS
from wan import ClientProcess, servers_of

from petalnode import AutoDistributedModelForCausalLM
from petalnode.node.client.chat import ChatMessage, Text
from petalnode.node.client.session.stream import SessionSpec
from petalnode.node.models.sources.resolve import resolve

LEVELS = ("debug", "warning", "error", "trace", "critical", "notice", "everything", "almost nothing")
QUESTIONS = (
    TEXTS["ordinary"],
    "What is a hash table?",
    "Why do leaves change their colour in autumn?",
    "How does a bicycle stay upright?",
    "What is the difference between weather and climate?",
    "Who invented the printing press, and why did it matter?",
    "How is bread made?",
    "Why is the sea salty?",
)


class Times:
    """A streamer that notes when it was shown a token of every row."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        del self.times[0]  # the prompt


def client(model: str, addr: str, rows: int) -> None:
    """The process on the client's host: answers what each line asks for, and prints how that went."""
    torch.set_num_threads(1)
    text = Text(resolve(model, need="client", offline=True))
    texts = {
        "re-emitted": [TEXTS["re-emitted"].replace("debug", level) for level in LEVELS[:rows]],
        "ordinary": list(QUESTIONS[:rows]),
    }
    with AutoDistributedModelForCausalLM.from_pretrained(model, initial_peers=[addr]) as opened:

        def answer(prompts: Sequence[list[int]], tokens: int, **options: Any) -> dict[str, Any]:
            longest, seen = max(map(len, prompts)), Times()
            ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
            mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
            given = {"attention_mask": mask, "max_new_tokens": tokens, "min_new_tokens": tokens, "pad_token_id": 0}
            said = opened.generate(ids, do_sample=False, streamer=seen, **given, **options)[:, longest:].tolist()
            ms = 1000 * (seen.times[-1] - seen.times[0]) / (len(seen.times) - 1)
            return {"answer": said, "ms": ms, **opened.drafts}

        answer([[1, 2, 3]] * 2, 4)  # which measures the way
        print(json.dumps({"ready": True}), flush=True)
        while line := sys.stdin.readline():
            kind, tokens, plain_tokens = json.loads(line)
            prompts = [text.tokenize([ChatMessage("user", one)]) for one in texts[kind]]
            found: dict[str, Any] = {"before": answer(prompts, plain_tokens)}
            found["drafted"] = answer(prompts, tokens, prompt_lookup_num_tokens=10)
            found["after"] = answer(prompts, plain_tokens)
            spec = SessionSpec(b"", opened.remote_blocks.span, 1, 64)
            _, found["stages"], found["trip"] = opened._runtime.call(opened._runtime.value.stages, spec)
            print(json.dumps(found), flush=True)


def run(model: str, rtts: Sequence[float], count: int, rows: int, tokens: int) -> Iterator[dict[str, Any]]:
    """The figures of both texts at each of the round trips, in seconds."""
    with delay_network(count + 1, rtts[0] / 2) as network, servers_of(network, model, count, 30) as servers:
        arguments = ("--rows", str(rows))
        process = ClientProcess(network, model, servers[0].ready["addrs"][0], tokens, *arguments, script=__file__)
        try:
            process.read()
            for rtt, kind in itertools.product(rtts, ("re-emitted", "ordinary")):
                print(f"{count} servers, {1000 * rtt:g} ms apart, {kind} ...", file=sys.stderr, flush=True)
                network.set_delay(rtt / 2)
                found = process.ask(json.dumps([kind, tokens, max(4, tokens // 4)]))
                assert len(found["stages"]) == count, "the route leaves a server out"
                before, drafted, after = (found[name] for name in ("before", "drafted", "after"))
                batch = (before["ms"] + after["ms"]) / 2
                parts = [zip(drafted["answer"], one["answer"], strict=True) for one in (before, after)]
                yield {
                    "rtt_ms": 1000 * rtt,
                    "servers": count,
                    "rows": rows,
                    "text": kind,
                    "batch_ms_per_token": batch,
                    "drafted_ms_per_token": drafted["ms"],
                    "times": batch / drafted["ms"],
                    "by_row": drafted.get("rows"),
                    "step_seconds": found["stages"],
                    "trip_seconds": found["trip"],
                    **{name: drafted[name] for name in ("drafted", "accepted", "gained_seconds")},
                    "same": all(row[: len(plain)] == plain for part in parts for row, plain in part),
                }
        finally:
            process.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table in Markdown")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rtts", nargs="+", type=float, default=[100], help="milliseconds")
    parser.add_argument("--servers", type=int, default=3)
    parser.add_argument("--rows", type=int, default=4, choices=range(2, len(LEVELS) + 1))
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--client", nargs=2, metavar=("MODEL", "PEER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        client(*options.client, options.rows)
        return
    rtts = [rtt / 1000 for rtt in options.rtts]
    results = list(run(options.model, rtts, options.servers, options.rows, options.tokens))
    if options.json:
        print(json.dumps({"draft_batches": results}))
        return
    print("| RTT | servers | rows | text | ms per token as one | with drafts | times as quick | right | same answers |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in results:
        cells = (
            f"{row['rtt_ms']:g} ms",
            row["servers"],
            row["rows"],
            row["text"],
            f"{row['batch_ms_per_token']:.0f}",
            f"{row['drafted_ms_per_token']:.0f}",
            f"{row['times']:.2f}",
            f"{row['accepted']} of {row['drafted']}" if row["by_row"] else "one batch",
            "yes" if row["same"] else "NO",
        )
        print("|", " | ".join(map(str, cells)), "|")


if __name__ == "__main__":
    main()
