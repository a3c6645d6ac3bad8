"""Milliseconds to the first token of a prompt whose beginning the servers have computed before, and of a new one.

    python benchmarks/prefix.py [--json] [--model smollm2] [--servers 1 2 3] [--prefix 1024] [--rest 16] [--rounds 3]

Servers are real processes on loopback with one compute thread each. In each round a client asks twice, in a
conversation of its own each time: first about a new random text of `--prefix` tokens with a question of `--rest` tokens
(cold), then about the same text with another question (warm). Then the first question is asked again under a salt of
its own, so that nothing is shared: the tokens have to be those of the first answer. `share` is the median of warm over
that of cold; `opening` is the part of warm from the first Open to the last Granted, in which servers copy keys and
values.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from contextlib import aclosing
from typing import Any

import torch
from local_swarm import local_swarm
from plain import quiet_torch
from rich.console import Console
from rich.table import Table

from petalnode import AutoDistributedModelForCausalLM
from petalnode.node.client.core import SwarmClient
from petalnode.node.client.generation.conversation import Conversation, Sampling
from petalnode.node.models import resolve

TOKENS = 4


def first_token(model: Any, prompt: list[int], salt: bytes) -> tuple[float, float, int, list[int]]:
    """Milliseconds to the first token, and to open the session; how many tokens were reused; the first tokens."""
    times: list[float] = []

    async def answer(client: SwarmClient) -> tuple[float, int, list[int]]:
        conversation = Conversation(client, model._local, max_length=len(prompt) + TOKENS, stop_tokens=())
        conversation.prefix_salt = salt
        async with aclosing(conversation):
            made = await conversation.answer(
                prompt, Sampling(max_new_tokens=TOKENS), lambda _: times.append(time.perf_counter())
            )
            opening = conversation.waits.fields()["open"]["total_ms"]
            return opening, conversation.reused, made

    begun = time.perf_counter()
    opening, reused, made = model._runtime.call(answer, model._runtime.value)
    return 1000 * (times[0] - begun), opening, reused, made


def run(name: str, servers: int, options: argparse.Namespace) -> dict[str, Any]:
    path = resolve(name, need="all").path
    count = resolve(name, need="all").num_blocks
    edges = [round(index * count / servers) for index in range(servers + 1)]
    cold: list[float] = []
    warm: list[float] = []
    opening: list[float] = []
    reused = 0
    generator = torch.Generator().manual_seed(0)
    with (
        local_swarm(str(path), list(itertools.pairwise(edges))) as processes,
        AutoDistributedModelForCausalLM.from_pretrained(
            path,
            initial_peers=[str(processes[0].ready["addrs"][0])],  # type: ignore[index]
        ) as model,
    ):
        vocabulary = model._local.model.get_input_embeddings().weight.shape[0]

        def text(tokens: int) -> list[int]:
            return torch.randint(3, vocabulary, (tokens,), generator=generator).tolist()

        first_token(model, text(options.rest), b"")  # connections, and what is made at the first step
        for number in range(options.rounds):
            prefix, one, other = text(options.prefix), text(options.rest), text(options.rest)
            milliseconds, _, _, made = first_token(model, prefix + one, b"")
            cold.append(milliseconds)
            milliseconds, opened, reused, _ = first_token(model, prefix + other, b"")
            warm.append(milliseconds)
            opening.append(opened)
            again = first_token(model, prefix + one, f"alone {number}".encode())
            assert again[2:] == (0, made), "the tokens differ"
    return {
        "model": name,
        "servers": servers,
        "prefix": options.prefix,
        "rest": options.rest,
        "reused": reused,
        "cold_ms": cold,
        "warm_ms": warm,
        "open_ms": opening,
        "share": statistics.median(warm) / statistics.median(cold),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--servers", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--prefix", type=int, default=1024)
    parser.add_argument("--rest", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    quiet_torch()
    results = []
    for servers in options.servers:
        print(f"{options.model} on {servers} servers ...", file=sys.stderr)
        results.append(run(options.model, servers, options))
    if options.json:
        print(json.dumps({"prefix": results}))
        return
    table = Table(title=f"first token behind {options.prefix} tokens, milliseconds (medians)")
    for column in ("servers", "reused", "cold", "warm", "of it opening", "share"):
        table.add_column(column, justify="right")
    for result in results:
        medians = (statistics.median(result[name]) for name in ("cold_ms", "warm_ms", "open_ms"))
        numbers = [f"{value:.0f}" for value in medians]
        table.add_row(str(result["servers"]), str(result["reused"]), *numbers, f"{result['share']:.3f}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
