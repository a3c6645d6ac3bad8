"""Time to the first token of a long prompt over servers that are far apart, against what computing and the way allow.

    sudo python benchmarks/prefill.py [--json] [--rtts 50] [--servers 3] [--prompt 2048] [--pace 0.3] [--rounds 3]
        [--rate 100 --hidden 512]

Every server and the client is a process on a host of its own (`delay_bridge.py`), with the same round trip between any
two. The session is open, and the servers have their streams to each other. `before` is one step at a time to each
server, through the client, in chunks of 256 tokens, as servers that grant no `bytes_in_flight` are asked; `after` is
pushed, with several chunks under way; of the last server only receipts travel, but of the chunk with the last token.
`outputs` is the same with all of the last server's outputs. All in turn, the median of the rounds.

`--rate` gives every host a line of this many Mbit/s each way; with a larger `--hidden` more has to travel.

`bound` is the computing of the server that takes longest, as the servers report it for this prompt, and one trip: n + 1
half round trips. Processes share the cores of this machine: `bound here` has the computing of all servers divided by
the cores in its place where that is longer. `--pace MS` has servers sleep until they have taken MS milliseconds
for each token, as servers on machines of their own would take without taking anything from each other; 0: they compute
as fast as they can.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from delay_bridge import delay_network
from plain import quiet_torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM
from wan import ClientProcess, servers_of

from petalnode import AutoDistributedModelForCausalLM

NUM_BLOCKS = 4
MODES = ("before", "outputs", "after")


def small_llama(folder: Path, tokens: int, hidden: int) -> Path:
    """Four blocks of random weights; with hidden size 128, 1 MiB between two servers for 2,048 tokens."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=NUM_BLOCKS,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=tokens + 64,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def server(pace: float, arguments: Sequence[str]) -> None:
    """`petalnode serve`, whose blocks take at least `pace` seconds for a token of a prompt."""
    from petalnode.node.blocks.span import BlockSpan
    from petalnode.node.cli.app import main

    forward = BlockSpan.forward

    def paced(self: BlockSpan, hidden: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        begun = time.perf_counter()
        output = forward(self, hidden, *rest, **options)
        time.sleep(max(0.0, pace * hidden.shape[0] * hidden.shape[1] + begun - time.perf_counter()))
        return output

    BlockSpan.forward = paced  # type: ignore[method-assign]
    sys.argv = ["petalnode", *arguments]
    main()


def client(folder: str, addr: str, tokens: int) -> None:
    """The process on the client's host: sends the prompt in the mode that each line names, and prints how it went."""
    from petalnode.node.client.session.link import ServerLink
    from petalnode.node.client.session.session import ClientSession
    from petalnode.node.client.session.stream import SessionStream

    quiet_torch()
    torch.manual_seed(1)
    prompt = torch.randint(5, 2000, (1, tokens))
    computing: Counter[str] = Counter()
    sizes: list[int] = []
    count = ServerLink.count

    def counted(link: ServerLink, some: int) -> None:
        count(link, some)
        computing[link.server.hop.peer_id] += link.server.timing.compute
        sizes.append(some)

    ServerLink.count = counted  # type: ignore[method-assign]
    in_flight = SessionStream.bytes_in_flight
    chosen, step = ClientSession.chunk_tokens, ClientSession.step

    async def asking_for_all(session: ClientSession, *arguments: Any, **options: Any) -> Any:
        return await step(session, *arguments, **options | {"outputs": None})

    generate: dict[str, Any] = {"min_new_tokens": 1, "max_new_tokens": 1, "do_sample": False, "pad_token_id": 0}
    with (
        AutoDistributedModelForCausalLM.from_pretrained(folder, initial_peers=[addr]) as model,
        model.inference_session(tokens + 32) as session,
    ):
        for length in (8, 9, 10, 11):
            model.generate(prompt[:, :length], **generate)
            time.sleep(0.5)  # streams between servers are opened meanwhile
        print(json.dumps({"servers": len(session.route)}), flush=True)
        for line in sys.stdin:
            before, after = line.strip() == "before", line.strip() == "after"
            ClientSession.step = step if after else asking_for_all  # type: ignore[method-assign]
            SessionStream.bytes_in_flight = property(lambda _: 0) if before else in_flight  # type: ignore[method-assign]
            ClientSession.chunk_tokens = (lambda *_: 256) if before else chosen  # type: ignore[assignment, method-assign]
            session.position, session.tokens = 0, None
            computing.clear()
            sizes.clear()
            pushed, traffic = session._session.pushed_steps, session._session.traffic
            begun = time.perf_counter()
            out = model.generate(prompt, **generate)
            seconds = time.perf_counter() - begun
            result = {
                "seconds": seconds,
                "chunk": max(sizes),
                "computing": list(computing.values()),
                "pushed": session._session.pushed_steps - pushed,
                "received": sum(two[1] - one[1] for one, two in zip(traffic, session._session.traffic, strict=True)),
                "token": int(out[0, -1]),
                "recoveries": session.recoveries,
            }
            print(json.dumps(result), flush=True)


def run(
    rtt: float, count: int, tokens: int, pace: float, rounds: int, rate: float, hidden: int
) -> Iterator[dict[str, Any]]:
    """The figures of each mode; `rtt` and `pace` in seconds, `rate` in Mbit/s."""
    program = [__file__, "--pace", str(1000 * pace), "--server"] if pace else ["-m", "petalnode"]
    with (
        tempfile.TemporaryDirectory(prefix="petalnode-bench-") as scratch,
        delay_network(count + 1, rtt / 2, rate) as network,
        servers_of(
            network, model := small_llama(Path(scratch) / "model", tokens, hidden), count, NUM_BLOCKS, program
        ) as servers,
    ):
        process = ClientProcess(network, model, servers[0].ready["addrs"][0], tokens, script=__file__)
        try:
            assert process.read()["servers"] == count, "the route leaves a server out"
            found: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
            for _, mode in itertools.product(range(rounds), MODES):
                found[mode].append(process.ask(mode))
        finally:
            process.stop()
    assert len({one["token"] for mode in MODES for one in found[mode]}) == 1, "the answers differ"
    cores = os.cpu_count() or 1
    for mode in MODES:
        middle = sorted(found[mode], key=lambda one: one["seconds"])[len(found[mode]) // 2]
        assert middle["recoveries"] == 0, "a server was replaced"
        trip = (count + 1) * rtt / 2
        longest, together = max(middle["computing"]), sum(middle["computing"]) / cores
        here = longest if pace else max(longest, together)
        yield {
            "rtt_ms": 1000 * rtt,
            "servers": count,
            "prompt_tokens": tokens,
            "pace_ms": 1000 * pace,
            "rate_mbit": rate,
            "hidden_size": hidden,
            "received_mib": middle["received"] / (1 << 20),
            "mode": mode,
            "chunk": middle["chunk"],
            "first_token_s": middle["seconds"],
            "all_s": [one["seconds"] for one in found[mode]],
            "longest_stage_s": longest,
            "computing_s": middle["computing"],
            "bound_s": longest + trip,
            "bound_here_s": here + trip,
            "times_bound": middle["seconds"] / (longest + trip),
            "times_bound_here": middle["seconds"] / (here + trip),
            "pushed_steps": middle["pushed"],
            "of_before": middle["seconds"] / statistics.median(one["seconds"] for one in found["before"]),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--rtts", nargs="+", type=float, default=[50], help="milliseconds")
    parser.add_argument("--servers", nargs="+", type=int, default=[3])
    parser.add_argument("--prompt", type=int, default=2048, help="tokens")
    parser.add_argument(
        "--pace", type=float, default=0.3, help="milliseconds that a server takes for a token, at least"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=0.0, help="Mbit/s of each host's line, each way; 0: no limit")
    parser.add_argument("--hidden", type=int, default=128, help="hidden size of the model, a multiple of 64")
    parser.add_argument("--tokens", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--client", nargs=2, metavar=("MODEL", "PEER"), help=argparse.SUPPRESS)
    parser.add_argument("--server", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        client(*options.client, options.tokens)
        return
    if options.server is not None:
        server(options.pace / 1000, options.server)
        return
    results: list[dict[str, Any]] = []
    for rtt, servers in itertools.product(options.rtts, options.servers):
        print(f"{servers} servers, {rtt:g} ms apart ...", file=sys.stderr, flush=True)
        pace = options.pace / 1000
        results += run(rtt / 1000, servers, options.prompt, pace, options.rounds, options.rate, options.hidden)
    if options.json:
        print(json.dumps({"prefill": results}))
    else:
        show(results)


def show(results: Sequence[dict[str, Any]]) -> None:
    table = Table(title="first token of a long prompt over a wide area")
    columns = ("RTT ms", "servers", "prompt", "mode", "chunk", "MiB down", "first token s", "of before", "longest s")
    for column in (*columns, "bound s", "times", "bound here s", "times here"):
        table.add_column(column, justify="right")
    for result in results:
        table.add_row(
            f"{result['rtt_ms']:g}",
            str(result["servers"]),
            str(result["prompt_tokens"]),
            result["mode"],
            str(result["chunk"]),
            f"{result['received_mib']:.1f}",
            f"{result['first_token_s']:.2f}",
            f"{result['of_before']:.2f}",
            *(f"{result[name]:.2f}" for name in ("longest_stage_s", "bound_s", "times_bound")),
            *(f"{result[name]:.2f}" for name in ("bound_here_s", "times_bound_here")),
        )
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
