"""Milliseconds per token through 1, 2 and 3 servers on loopback, against plain transformers in the same minutes.

    python benchmarks/chain.py [--json] [--models h512 smollm2] [--tokens 64] [--rounds 5]
        [--threads 1] [--llama-cpp FOLDER --gguf FILE]

Servers are real processes with one compute thread each; the client and plain transformers run in this process with
one thread too (`--threads`), in turns, so that both see the same noise. `h512` is a random Llama of 27.8M parameters
(hidden 512, 8 blocks), the one that Petals' figures are for. The parts of a hop are medians: `queue` and `compute` as
the server reports them, `wire` what is left of the time between sending a step and having its reply, `serialise`
tensors to bytes and back in the client. `receipt` is what the client takes to check the receipt of one reply to a
decode step (hashes, fields, signature, chain), a part of `wire`.

`generate` is transformers' loop with the client's part of the model, `chat` the one of `petalnode chat` and the HTTP
APIs, both greedy. `turn` is the part of a token that is the client's alone: from the last server's answer at its socket
until the bytes of the next step are handed to the socket. `generate` is called without a streamer; its tokens, as those
of `chat`, are timed at the socket, from one answer of the last server to the next.

With `--llama-cpp FOLDER --gguf FILE` (see cpu.py) llama.cpp takes turns with both in each round: one thread, the same
file, as many tokens behind a prompt of as many, its model loaded before; the first decode step of each is left out.
`of_llama_cpp` is median over median of all tokens of all rounds, `mean_of_llama_cpp` mean over mean, and
`least_of_llama_cpp` the least time of a token over its least.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from cpu import run_llama_cpp
from local_swarm import local_swarm
from plain import plain_model, quiet_torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from petalnode import AutoDistributedModelForCausalLM
from petalnode.node.client.chunks import from_chunks, to_chunks
from petalnode.node.client.core import SwarmClient
from petalnode.node.client.generation.conversation import Conversation, Sampling
from petalnode.node.client.session.answers import AnswerChecks
from petalnode.node.models import resolve
from petalnode.node.network.transport.raw_connection import SocketConnection

HIDDEN_BYTES = 1500
"""Less than the hidden states of one token, and more than any other message of a session."""


class _Clock:
    """A transformers streamer that notes when each token comes."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass

    def milliseconds(self) -> list[float]:
        # The first put is the prompt, the second the token of the prefill: neither is a decode step.
        return [1000 * (after - before) for before, after in itertools.pairwise(self.times[1:])]


def h512(folder: Path, blocks: int = 8) -> Path:
    """The 27.8M-parameter Llama of Petals' figures, with random weights; or one with another number of blocks."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=blocks,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=2048,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def spans_of(num_blocks: int, servers: int) -> list[tuple[int, int]]:
    edges = [round(index * num_blocks / servers) for index in range(servers + 1)]
    return list(itertools.pairwise(edges))


def generate(model: Any, prompt: torch.Tensor, tokens: int) -> torch.Tensor:
    return model.generate(prompt, max_new_tokens=tokens, eos_token_id=None, do_sample=False, pad_token_id=0)  # type: ignore[no-any-return]


def timed_generate(model: Any, prompt: torch.Tensor, tokens: int) -> tuple[list[float], torch.Tensor]:
    """Of plain transformers, whose tokens come one at a time."""
    clock = _Clock()
    output = model.generate(  # no token ends it
        prompt, max_new_tokens=tokens, eos_token_id=None, do_sample=False, streamer=clock, pad_token_id=0
    )
    return clock.milliseconds(), output


def chat(model: Any, prompt: torch.Tensor, tokens: int) -> list[int]:
    """The same by what chat and the HTTP APIs use."""

    async def answer(client: SwarmClient) -> list[int]:
        conversation = Conversation(client, model._local, max_length=prompt.shape[1] + tokens, stop_tokens=())
        try:
            wanted = Sampling(max_new_tokens=tokens)
            return await conversation.answer(prompt[0].tolist(), wanted, lambda _: None)
        finally:
            await conversation.aclose()

    made: list[int] = model._runtime.call(answer, model._runtime.value)
    return made


@dataclass
class Marks:
    """Milliseconds at this process's sockets: of the `turns`, and, `asked`, when steps were sent (the clock's)."""

    turns: list[float] = field(default_factory=list)
    asked: list[float] = field(default_factory=list)

    def tokens(self) -> list[float]:
        """Milliseconds from one step to the next, without the prompt's, and the first behind it."""
        return [after - before for before, after in itertools.pairwise(self.asked[1:])][1:]


@contextmanager
def client_turns() -> Iterator[Marks]:
    """Within it, marks of what comes to this process's sockets and of the next step that it sends."""
    receive, send = SocketConnection.receive, SocketConnection.send_nowait
    came = 0.0
    marks = Marks()

    async def noting_receive(self: Any, *arguments: Any) -> bytes:
        nonlocal came
        data = await receive(self, *arguments)
        if len(data) > HIDDEN_BYTES:
            came = 1000 * time.perf_counter()
        return data

    def noting_send(self: Any, data: bytes) -> int:
        nonlocal came
        if len(data) > HIDDEN_BYTES:
            marks.asked.append(1000 * time.perf_counter())
            if came:
                marks.turns.append(marks.asked[-1] - came)
            came = 0.0
        return send(self, data)

    SocketConnection.receive, SocketConnection.send_nowait = noting_receive, noting_send  # type: ignore[method-assign]
    try:
        yield marks
    finally:
        SocketConnection.receive, SocketConnection.send_nowait = receive, send  # type: ignore[method-assign]


@contextmanager
def receipt_checks() -> Iterator[list[float]]:
    """Within it, the milliseconds of computing that each check of a reply's receipt takes in this process."""
    check = AnswerChecks._verify
    taken: list[float] = []

    async def timed(*arguments: Any) -> Any:
        begun = time.thread_time()  # other processes do not count
        receipt = await check(*arguments)
        taken.append(1000 * (time.thread_time() - begun))
        return receipt

    AnswerChecks._verify = timed
    try:
        yield taken
    finally:
        AnswerChecks._verify = check


def receipts(model: Any, prompt: torch.Tensor, steps: int) -> dict[str, float]:
    """What checking a receipt takes in decode steps, in milliseconds."""
    with receipt_checks() as taken, model.inference_session(prompt.shape[1] + steps) as session, torch.inference_mode():
        output = session.step(model._local.embed(prompt))
        taken.clear()
        for _ in range(steps):
            output = session.step(output[:, -1:])
        return _percentiles(taken)


def hop_parts(model: Any, prompt: torch.Tensor, steps: int) -> dict[str, float]:
    """Medians, in milliseconds, over decode steps through a session."""
    hidden = model._local.embed(prompt)
    rows: dict[str, list[float]] = {"compute": [], "queue": [], "wire": [], "serialise": [], "hand_over": []}
    with model.inference_session(prompt.shape[1] + steps) as session, torch.inference_mode():
        output = session.step(hidden)
        for _ in range(steps):
            token = output[:, -1:]
            begun = time.perf_counter()
            output = session.step(token)
            total = time.perf_counter() - begun
            timings = session._session.timings
            begun = time.perf_counter()
            from_chunks(to_chunks(token, "none", 1))
            serialise = time.perf_counter() - begun
            hops = sum(timing.total for timing in timings)
            rows["compute"].append(sum(timing.compute for timing in timings))
            rows["queue"].append(sum(timing.queue for timing in timings))
            rows["wire"].append(sum(timing.total - timing.queue - timing.compute for timing in timings))
            rows["serialise"].append(serialise)
            rows["hand_over"].append(total - hops - serialise)
    return {name: 1000 * statistics.median(values) for name, values in rows.items()}


def bulk(model: Any, plain: Any, batch: int, tokens: int) -> dict[str, float]:
    """Forward tokens/s of all blocks, without a cache, as a ratio to the same blocks in this process."""
    hidden = torch.randn(batch, tokens, plain.config.hidden_size)
    ids = torch.randint(0, plain.config.vocab_size, (batch, tokens))
    chain_times, plain_times = [], []
    with torch.inference_mode():
        for _ in range(12):  # the first few are cold
            begun = time.perf_counter()
            model.remote_blocks(hidden)
            chain_times.append(time.perf_counter() - begun)
            begun = time.perf_counter()
            plain.model(ids, use_cache=False)
            plain_times.append(time.perf_counter() - begun)
    count = batch * tokens
    return {
        "tokens_per_s": count / min(chain_times),
        "plain_tokens_per_s": count / min(plain_times),
        "ratio": min(plain_times) / min(chain_times),
    }


def run_model(name: str, folder: Path, servers: int, options: argparse.Namespace) -> dict[str, Any]:
    tokens, rounds = options.tokens, options.rounds
    plain = plain_model(folder)
    prompt = torch.randint(5, min(plain.config.vocab_size, 2000), (1, 16))
    with local_swarm(str(folder), spans_of(plain.config.num_hidden_layers, servers)) as processes:
        addrs = processes[-1].ready["addrs"]
        with AutoDistributedModelForCausalLM.from_pretrained(folder, initial_peers=addrs) as model:
            generate(model, prompt, 8), generate(plain, prompt, 8)
            chat(model, prompt, 8)
            ours: list[float] = []
            chatted: list[float] = []
            plain_ms: list[float] = []
            generate_turns: list[float] = []
            chat_turns: list[float] = []
            llama: list[float] = []
            ratios = []
            for _ in range(rounds):
                with client_turns() as marks:
                    ours_tokens = generate(model, prompt, tokens)
                generate_turns += marks.turns[1:]  # the first is the prompt's
                ours += marks.tokens()
                with client_turns() as chat_marks:
                    chat_tokens = chat(model, prompt, tokens)
                chat_turns += chat_marks.turns[1:]
                chatted += chat_marks.tokens()
                theirs, their_tokens = timed_generate(plain, prompt, tokens)
                assert torch.equal(ours_tokens, their_tokens), "the chain's tokens differ from plain transformers'"
                assert their_tokens[0, prompt.shape[1] :].tolist() == chat_tokens, "chat's tokens differ"
                plain_ms += theirs
                ratios.append(statistics.median(marks.tokens()) / statistics.median(theirs))
                if options.llama_cpp and name == "smollm2":
                    run = run_llama_cpp(options.llama_cpp, options.gguf, 1, tokens, prompt.shape[1])
                    llama += run["all"][1:]
            result = {
                "model": name,
                "servers": servers,
                "plain_ms": _percentiles(plain_ms),
                "chain_ms": _percentiles(ours),
                "chat_ms": _percentiles(chatted),
                "turn_ms": {"generate": _percentiles(generate_turns), "chat": _percentiles(chat_turns)},
                **(_of_llama_cpp({"generate": ours, "chat": chatted}, llama) if llama else {}),
                "ratio": statistics.median(ratios),
                "hop_parts_ms": hop_parts(model, prompt, 32),
                "receipt_ms": receipts(model, prompt, 200),
                "bulk_1x128": bulk(model, plain, 1, 128),
                "bulk_8x128": bulk(model, plain, 8, 128),
                "ready_s": [process.ready_seconds for process in processes],
                "server_rss_mib": [process.memory()["rss"] / 2**20 for process in processes],
                "server_file_mib": [process.memory()["file"] / 2**20 for process in processes],
            }
    return result


def _of_llama_cpp(ways: dict[str, list[float]], llama: list[float]) -> dict[str, Any]:
    found: dict[str, Any] = {"llama_cpp_ms": _percentiles(llama) | {"mean": statistics.fmean(llama)}}
    statistic = {"": statistics.median, "mean_": statistics.fmean, "least_": min}
    for prefix, of in statistic.items():
        found[f"{prefix}of_llama_cpp"] = {name: of(values) / of(llama) for name, values in ways.items()}
    return found


def _percentiles(values: list[float]) -> dict[str, float]:
    return {"min": min(values), "p50": statistics.median(values), "p95": statistics.quantiles(values, n=20)[-1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--models", nargs="+", default=["h512", "smollm2"])
    parser.add_argument("--servers", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of this process: the client's head, plain transformers")
    parser.add_argument("--llama-cpp", type=Path, help="folder in which node-llama-cpp is installed")
    parser.add_argument("--gguf", type=Path, help="the file for llama.cpp")
    options = parser.parse_args()
    if bool(options.llama_cpp) != bool(options.gguf):
        parser.error("--llama-cpp and --gguf go together")
    quiet_torch(options.threads)
    results = []
    with tempfile.TemporaryDirectory(prefix="petalnode-bench-") as scratch:
        for name in options.models:
            folder = h512(Path(scratch) / name) if name == "h512" else resolve(name, need="all").path
            for servers in options.servers:
                print(f"{name} on {servers} servers ...", file=sys.stderr)
                results.append(run_model(name, folder, servers, options))
    if options.json:
        print(json.dumps({"chain": results}))
    else:
        show(results)


def show(results: list[dict[str, Any]]) -> None:
    table = Table(title="milliseconds per token")
    for column in ("model", "servers", "plain p50", "generate p50", "p95", "ratio", "chat p50", "p95"):
        table.add_column(column, justify="right")
    for column in ("turn p50", "p95", "of llama.cpp", "compute", "wire", "queue"):
        table.add_column(column, justify="right")
    for column in ("hand-over", "serialise", "receipt p50", "p95", "bulk 1x128", "8x128", "of plain"):
        table.add_column(column, justify="right")
    for column in ("ready s", "RSS MiB"):
        table.add_column(column, justify="right")
    for result in results:
        parts = result["hop_parts_ms"]
        table.add_row(
            result["model"],
            str(result["servers"]),
            f"{result['plain_ms']['p50']:.1f}",
            f"{result['chain_ms']['p50']:.1f}",
            f"{result['chain_ms']['p95']:.1f}",
            f"{result['ratio']:.2f}",
            *(f"{result['chat_ms'][name]:.1f}" for name in ("p50", "p95")),
            *(f"{result['turn_ms']['chat'][name]:.1f}" for name in ("p50", "p95")),
            f"{result['of_llama_cpp']['chat']:.2f}" if "of_llama_cpp" in result else "",
            *(f"{parts[name]:.2f}" for name in ("compute", "wire", "queue", "hand_over", "serialise")),
            *(f"{result['receipt_ms'][name]:.2f}" for name in ("p50", "p95")),
            f"{result['bulk_1x128']['tokens_per_s']:.0f}",
            f"{result['bulk_8x128']['tokens_per_s']:.0f}",
            f"{result['bulk_8x128']['ratio']:.2f}",
            f"{max(result['ready_s']):.1f}",
            f"{max(result['server_rss_mib']):.0f}",
        )
    Console(width=230).print(table)


if __name__ == "__main__":
    main()
