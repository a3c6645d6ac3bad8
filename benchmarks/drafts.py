"""Tokens a second over a wide area with and without drafts, on three kinds of text.

    sudo python benchmarks/drafts.py [--json] [--model smollm2] [--rtts 20 50 100 200] [--servers 3] [--tokens 140]
        [--draft MODEL]

Every server and the client is a process on a host of its own (`delay_bridge.py`), with the same round trip between
any two. The texts: `re-emitted`, a file of the prompt that is to be written once more with a small edit; `ordinary`, an
answer to a question; `random`, sampled at a temperature at which nothing repeats itself. All greedy but the last, which
has a seed. Each is answered with and without drafts in turn, the first token left out; the answers have to be the same.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from typing import Any

import torch
import trio
from delay_bridge import delay_network
from rich.console import Console
from rich.table import Table
from wan import ClientProcess, servers_of

from petalnode.crypto.identity import Identity
from petalnode.node.blocks.client_part import load_client
from petalnode.node.client.chat import ChatMessage, Text
from petalnode.node.client.core import open_client
from petalnode.node.client.draft_model import load_draft_model
from petalnode.node.client.generation import Conversation
from petalnode.node.client.sampling import Sampling
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


def client(model: str, addr: str, tokens: int, draft: str | None) -> None:
    """The process on the client's host: answers what each line asks for, and prints how that went."""
    torch.set_num_threads(1)
    trio.run(_client, model, addr, tokens, draft)


async def _client(model: str, addr: str, tokens: int, draft: str | None) -> None:
    config = SwarmConfig(identity=Identity.generate(), listen=(), peers=(addr,), serve_dht=False)
    folder = resolve(model, need="client", offline=True)
    local, text = load_client(folder.path), Text(folder)
    guesser = load_draft_model(resolve(draft, offline=True), text) if draft else None
    async with open_swarm(config) as swarm:
        await swarm.refresh(timeout=30)
        async with open_client(swarm, await identify_model(swarm, folder)) as opened:
            print(json.dumps({"ready": True}), flush=True)
            while line := await trio.to_thread.run_sync(sys.stdin.readline):
                kind, drafts = json.loads(line)
                prompt = text.tokenize([ChatMessage("user", TEXTS[kind])])
                sampling = Sampling(tokens) if kind != "random" else Sampling(tokens, 8.0, seed=1)
                times: list[float] = []

                def note(_: int, times: list[float] = times) -> None:
                    times.append(trio.current_time())

                stops = () if kind == "random" else text.stop_tokens
                conversation = Conversation(
                    opened,
                    local,
                    max_length=1024,
                    stop_tokens=stops,
                    drafts=drafts,
                    draft_model=guesser if drafts else None,
                )
                async with aclosing(conversation):
                    answer = await conversation.answer(prompt, sampling, note)
                    counts = conversation.drafting.counts.fields()
                    hops = len(conversation.route)
                seconds = times[-1] - times[0]
                print(json.dumps({"answer": answer, "seconds": seconds, "servers": hops, **counts}), flush=True)


def run(model: str, rtt: float, count: int, tokens: int, rounds: int, draft: str | None) -> Iterator[dict[str, Any]]:
    """The figures of each text; `rtt` in seconds."""
    with delay_network(count + 1, rtt / 2) as network, servers_of(network, model, count, 30) as servers:
        more = ("--draft", draft) if draft else ()
        process = ClientProcess(network, model, servers[0].ready["addrs"][0], tokens, *more, script=__file__)
        try:
            process.read()
            found: dict[tuple[str, bool], list[dict[str, Any]]] = {}
            for kind, _, drafts in itertools.product(TEXTS, range(rounds), (False, True)):
                found.setdefault((kind, drafts), []).append(process.ask(json.dumps([kind, drafts])))
        finally:
            process.stop()
    for kind in TEXTS:
        plain, drafted = (min(found[kind, drafts], key=lambda one: one["seconds"]) for drafts in (False, True))
        assert plain["servers"] == count, "the route leaves a server out"
        yield {
            "rtt_ms": 1000 * rtt,
            "servers": count,
            "text": kind,
            "plain_ms_per_token": 1000 * plain["seconds"] / (len(plain["answer"]) - 1),
            "drafted_ms_per_token": 1000 * drafted["seconds"] / (len(drafted["answer"]) - 1),
            "times": plain["seconds"] / drafted["seconds"],
            "drafted": drafted["drafted"],
            "accepted": drafted["accepted"],
            "same": plain["answer"] == drafted["answer"],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rtts", nargs="+", type=float, default=[20, 50, 100, 200], help="milliseconds")
    parser.add_argument("--servers", nargs="+", type=int, default=[3])
    parser.add_argument("--tokens", type=int, default=140)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--draft", metavar="MODEL", help="guesses tokens at the client, too")
    parser.add_argument("--client", nargs=2, metavar=("MODEL", "PEER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        client(*options.client, options.tokens, options.draft)
        return
    results: list[dict[str, Any]] = []
    for rtt, servers in itertools.product(options.rtts, options.servers):
        print(f"{servers} servers, {rtt:g} ms apart ...", file=sys.stderr, flush=True)
        results += run(options.model, rtt / 1000, servers, options.tokens, options.rounds, options.draft)
    if options.json:
        print(json.dumps({"drafts": results}))
    else:
        show(results)


def show(results: Sequence[dict[str, Any]]) -> None:
    table = Table(title="drafts over a wide area")
    for column in ("RTT ms", "servers", "text", "ms/token", "with drafts", "times", "accepted", "same answer"):
        table.add_column(column, justify="right")
    for result in results:
        table.add_row(
            f"{result['rtt_ms']:g}",
            str(result["servers"]),
            result["text"],
            f"{result['plain_ms_per_token']:.0f}",
            f"{result['drafted_ms_per_token']:.0f}",
            f"{result['times']:.2f}",
            f"{result['accepted']} of {result['drafted']}",
            "yes" if result["same"] else "NO",
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
