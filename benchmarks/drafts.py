"""Milliseconds a token over a wide area with and without drafts, on three kinds of text.

    sudo python benchmarks/drafts.py [--json] [--model smollm2] [--rtts 20 50 100 200] [--servers 2 3 4] [--tokens 40]
        [--draft MODEL] [--texts ordinary ...] [--minutes 14]

Every server and the client is a process on a host of its own (`delay_bridge.py`), with the same round trip between
any two. The texts: `re-emitted`, a file of the prompt that is to be written once more with a small edit; `ordinary`, an
answer to a question; `random`, sampled at a temperature at which nothing repeats itself. All greedy but the last, which
has a seed.

Each cell answers its text without drafts, with tokens that are looked up in the text, with those of the model of
`--draft` too if one is given, and without drafts again. `--tokens` are drafted in each answer, two and a half times
as many of the re-emitted text, and a quarter of them without drafts, before and after; the first token, with the
prompt, is left out. Tokens without drafts have to be those with drafts. Where `--minutes` have passed no further cell
is begun, and what is missing is said.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from typing import Any

import torch
import trio
from delay_bridge import delay_network
from wan import ClientProcess, servers_of

from petalnode.crypto.identity import Identity
from petalnode.node.blocks.client_part import load_client
from petalnode.node.client.chat import ChatMessage, Text
from petalnode.node.client.core import open_client
from petalnode.node.client.generation.conversation import Conversation
from petalnode.node.client.generation.draft_model import load_draft_model
from petalnode.node.client.generation.sampling import Sampling
from petalnode.node.client.swarm_model import identify_model
from petalnode.node.models.sources.resolve import resolve
from petalnode.node.swarm.config import SwarmConfig
from petalnode.node.swarm.swarm import open_swarm

FILE = """# Settings of the server.
[server]
name = "library-east"
model = "smollm2"
blocks = "0:15"
cache_tokens = 65536
listen = "/ip4/0.0.0.0/tcp/31337"

[limits]
sessions_per_client = 4
tokens_per_session = 8192
idle_seconds = 1800

[log]
level = "info"
file = "/var/log/petalnode.log"
keep_days = 14
"""
EDIT = 'Repeat this file word for word, without any comment, but with the level "debug" instead of "info":'
TEXTS = {
    "re-emitted": f"{EDIT}\n\n{FILE}",
    "ordinary": "Explain in a few sentences why the sky is blue and why sunsets are red.",
    "random": "Write down some words.",
}


MODES = ("none", "lookup", "model")


def client(model: str, addr: str, draft: str | None) -> None:
    """The process on the client's host: answers what each line asks for, and prints how that went."""
    torch.set_num_threads(1)
    trio.run(_client, model, addr, draft)


async def _client(model: str, addr: str, draft: str | None) -> None:
    config = SwarmConfig(identity=Identity.generate(), listen=(), peers=(addr,), serve_dht=False)
    folder = resolve(model, need="client", offline=True)
    local, text = load_client(folder.path), Text(folder)
    guesser = load_draft_model(resolve(draft, offline=True), text) if draft else None
    async with open_swarm(config) as swarm:
        await swarm.refresh(timeout=30)
        async with open_client(swarm, await identify_model(swarm, folder)) as opened:

            def conversation(kind: str, mode: str) -> Conversation:
                return Conversation(
                    opened,
                    local,
                    max_length=1024,
                    stop_tokens=() if kind == "random" else text.stop_tokens,
                    drafts=guesser if mode == "model" and guesser else mode != "none",
                )

            async def answer(talk: Conversation, kind: str, tokens: int) -> dict[str, Any]:
                prompt = text.tokenize([ChatMessage("user", TEXTS[kind])])
                sampling = Sampling(tokens) if kind != "random" else Sampling(tokens, 8.0, seed=1)
                times: list[float] = []
                said = await talk.answer(prompt, sampling, lambda _: times.append(trio.current_time()))
                counts = talk.drafting.counts.fields()
                return {"answer": said, "ms": 1000 * (times[-1] - times[0]) / (len(times) - 1), **counts}

            print(json.dumps({"ready": True}), flush=True)
            while line := await trio.to_thread.run_sync(sys.stdin.readline):
                kind, tokens, plain_tokens = json.loads(line)
                found: dict[str, Any] = {}
                async with aclosing(conversation(kind, "none")) as plain:
                    found["before"] = await answer(plain, kind, plain_tokens)
                    for mode in MODES[1:] if guesser is not None else MODES[1:2]:
                        async with aclosing(conversation(kind, mode)) as drafting:
                            found[mode] = await answer(drafting, kind, tokens)
                    found["after"] = await answer(plain, kind, plain_tokens)
                    found["servers"] = len(plain.route)
                print(json.dumps(found), flush=True)


def run(
    model: str, rtts: Sequence[float], count: int, tokens: int, draft: str | None, texts: Sequence[str], end: float
) -> Iterator[dict[str, Any]]:
    """The figures of each text at each of the round trips, in seconds; until the time is `end`."""
    with delay_network(count + 1, rtts[0] / 2) as network, servers_of(network, model, count, 30) as servers:
        more = ("--draft", draft) if draft else ()
        process = ClientProcess(network, model, servers[0].ready["addrs"][0], tokens, *more, script=__file__)
        try:
            process.read()
            for rtt, kind in itertools.product(rtts, texts):
                if time.monotonic() > end:
                    print(f"no time for {count} servers, {1000 * rtt:g} ms, {kind}", file=sys.stderr, flush=True)
                    continue
                print(f"{count} servers, {1000 * rtt:g} ms apart, {kind} ...", file=sys.stderr, flush=True)
                network.set_delay(rtt / 2)
                many = tokens * 5 // 2 if kind == "re-emitted" else tokens
                found = process.ask(json.dumps([kind, many, max(4, tokens // 4)]))
                assert found["servers"] == count, "the route leaves a server out"
                yield from _results(found, {"rtt_ms": 1000 * rtt, "servers": count, "text": kind})
        finally:
            process.stop()


def _results(found: dict[str, Any], cell: dict[str, Any]) -> Iterator[dict[str, Any]]:
    before, after = found["before"], found["after"]
    plain = (before["ms"] + after["ms"]) / 2
    for mode in MODES[1:]:
        if (drafted := found.get(mode)) is not None:
            yield {
                **cell,
                "drafts": mode,
                "plain_ms_per_token": plain,
                "drafted_ms_per_token": drafted["ms"],
                "times": plain / drafted["ms"],
                **{name: drafted[name] for name in ("drafted", "accepted", "gained_seconds")},
                "same": all(drafted["answer"][: len(one["answer"])] == one["answer"] for one in (before, after)),
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table in Markdown")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rtts", nargs="+", type=float, default=[20, 50, 100, 200], help="milliseconds")
    parser.add_argument("--servers", nargs="+", type=int, default=[2, 3, 4])
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--draft", metavar="MODEL", help="guesses tokens at the client, too")
    parser.add_argument("--texts", nargs="+", choices=[*TEXTS], default=[*TEXTS])
    parser.add_argument("--minutes", type=float, default=14, help="after which no further cell is begun")
    parser.add_argument("--client", nargs=2, metavar=("MODEL", "PEER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        client(*options.client, options.draft)
        return
    end = time.monotonic() + 60 * options.minutes
    rtts = sorted(rtt / 1000 for rtt in options.rtts)
    results: list[dict[str, Any]] = []
    for servers in options.servers:
        results += run(options.model, rtts, servers, options.tokens, options.draft, options.texts, end)
    results.sort(key=lambda row: (row["rtt_ms"], row["servers"]))
    if options.json:
        print(json.dumps({"drafts": results}))
    else:
        show(results)


def show(results: Sequence[dict[str, Any]]) -> None:
    print("| RTT | servers | text | drafts | ms per token | with drafts | times as quick | right | same answer |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in results:
        cells = (
            f"{row['rtt_ms']:g} ms",
            row["servers"],
            row["text"],
            row["drafts"],
            f"{row['plain_ms_per_token']:.0f}",
            f"{row['drafted_ms_per_token']:.0f}",
            f"{row['times']:.2f}",
            f"{row['accepted']} of {row['drafted']}" if row["drafted"] else "none drafted",
            "yes" if row["same"] else "NO",
        )
        print("|", " | ".join(map(str, cells)), "|")


if __name__ == "__main__":
    main()
