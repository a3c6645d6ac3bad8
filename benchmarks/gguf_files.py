"""What serving a GGUF file takes: disk beside the file, memory, seconds until ready, a prompt's and a token's time.

    python benchmarks/gguf_files.py FILE... [--json] [--servers 1 2] [--rounds 3] [--tokens 32] [--threads N]
                                    [--prompt 256] [--llama-cpp FOLDER] [--memory-mb N ...] [--check] [--once] [--apart]

The file is in the page cache. For each number of servers these are started on loopback, with an empty cache and
again; a client in this process asks for `--tokens` tokens behind a prompt of `--prompt` as chat does. `ready` is from
the start of a process to its ready event, the longest of all; `over` the most that a server ever had resident beyond
its blocks' bytes and the attention cache that it may have kept: of all prompts and answers, as far as `--cache-tokens`
goes. llama.cpp is run by node-llama-cpp in turns with it, if FOLDER is one where
`npm install node-llama-cpp` was run, or behind it with `--apart`, where memory has no room for both; its load is from
the start of the process. All of these use `--threads`
threads. Seconds: of the clock and of the processor. Times of prompts and tokens: least and median, of tokens by the
processor (client and servers) of the means of rounds; on a busy machine the latter alone can be compared, with one
thread. `--memory-mb`, one for each of `--servers` (0: no limit), puts each server into a control group (version 1, as
root) of so much memory; `group` is the most of it that was no page of a file. With `--check` this process computes the
first answer again, with a few blocks in memory at a time, and says whether its tokens are the same. Of mixtures: how
many experts a token used in all blocks, and how many of them were read from the disk. Whether all numbers of servers
gave the same tokens is said at the end of a file's rows.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import torch
from chain import spans_of
from cpu import LLAMA_CPP
from local_swarm import ServerProcess

from petalnode import AutoDistributedModelForCausalLM
from petalnode.node.blocks.architecture import block_sizes
from petalnode.node.blocks.client_part import load_client
from petalnode.node.blocks.span import load_span
from petalnode.node.client.core import SwarmClient
from petalnode.node.client.generation.conversation import Conversation, Sampling
from petalnode.node.models import ModelFolder, resolve
from petalnode.node.server.lifecycle.memory import cache_bytes_per_block
from petalnode.node.server.lifecycle.speed import cpu_name
from petalnode.protocols.ids import Span

CACHE_TOKENS: Final = 2048
GROUPS: Final = Path("/sys/fs/cgroup/memory")


def control_group(name: str, memory_mb: float) -> list[str]:
    """What runs a command in a control group of so much memory; nothing for 0."""
    if not memory_mb:
        return []
    group = GROUPS / f"petalnode-bench-{os.getpid()}-{name}"
    group.mkdir(exist_ok=True)
    (group / "memory.limit_in_bytes").write_text(str(int(memory_mb * 1_000_000)))
    return ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]


@contextmanager
def swarm(
    file: Path, spans: Sequence[tuple[int, int]], memory_mb: float, options: argparse.Namespace
) -> Iterator[list[ServerProcess]]:
    """Servers of the file's blocks, started one after the other, each with the threads it would take by itself."""
    servers: list[ServerProcess] = []
    with tempfile.TemporaryDirectory(prefix="petalnode-bench-") as scratch:
        try:
            peer = ["--new-swarm"]
            for index, (start, end) in enumerate(spans):
                folder = Path(scratch) / str(index)
                folder.mkdir()
                wanted = [str(file), "--blocks", f"{start}:{end}", "--cache-tokens", str(CACHE_TOKENS)]
                wanted += ["--metrics-port", "0"]
                prefix = control_group(f"{len(spans)}-{index}", memory_mb)
                servers.append(ServerProcess([*wanted, *peer], folder, prefix=prefix, threads=options.threads))
                addrs = servers[-1].wait_ready()["addrs"]
                assert isinstance(addrs, list)
                peer = ["--peer", addrs[0]]
            yield servers
        finally:
            for server in servers:
                server.stop()
            for group in GROUPS.glob(f"petalnode-bench-{os.getpid()}-*"):
                group.rmdir()


def group_memory(server: ServerProcess) -> int:
    """Bytes of the server's control group that are no pages of files, now."""
    (own,) = re.findall(r"^\d+:memory:(.*)$", Path(f"/proc/{server.process.pid}/cgroup").read_text(), re.MULTILINE)
    stat = (GROUPS / own.lstrip("/") / "memory.stat").read_text()
    return int(re.findall(r"^total_rss (\d+)$", stat, re.MULTILINE)[0])


def most_memory(server: ServerProcess) -> int:
    """The most bytes that the process ever had resident."""
    most = re.search(r"VmHWM:\s*(\d+)", Path(f"/proc/{server.process.pid}/status").read_text())
    assert most is not None
    return int(most[1]) * 1024


@dataclass(frozen=True)
class Answer:
    """The tokens. Milliseconds: until the first; of each behind it; of the processor for a token, in the mean. Experts
    of a token, in the mean: that were used, and read."""

    tokens: list[int]
    prompt: float
    steps: list[float]
    spent: float
    experts: tuple[float, float]


def answer(model: Any, servers: Sequence[ServerProcess], prompt: list[int], tokens: int) -> Answer:
    """Asks for tokens as chat does."""
    came = [0.0]
    given: list[int] = []
    used: list[list[float]] = []

    def note(token: int) -> None:
        came.append(time.perf_counter())
        given.append(token)
        if len(came) in (2, tokens + 1):
            spent = time.process_time() + sum(server.processor_seconds() for server in servers)
            names = (f"petalnode_server_experts_{name}_total" for name in ("used", "read"))
            used.append([spent, *(sum(server.metric(name) for server in servers) for name in names)])

    async def ask(client: SwarmClient) -> None:
        conversation = Conversation(client, model._local, max_length=len(prompt) + tokens, stop_tokens=())
        try:
            came[0] = time.perf_counter()
            await conversation.answer(prompt, Sampling(max_new_tokens=tokens), note)
        finally:
            await conversation.aclose()

    model._runtime.call(ask, model._runtime.value)
    first, *others = [1000 * (after - before) for before, after in pairwise(came)]
    spent, experts, read = ((after - before) / max(1, len(others)) for before, after in zip(*used, strict=True))
    return Answer(given, first, others, 1000 * spent, (experts, read))


@torch.inference_mode()
def computed_here(file: Path, tokens: list[int]) -> list[int]:
    """The likeliest token behind each of these, by four blocks at a time, which are the only ones in memory."""
    folder = resolve(file)
    client = load_client(folder.path, device="cpu")
    hidden = client.embed(torch.tensor([tokens]))
    for start in range(0, folder.num_blocks, 4):
        span = load_span(folder.path, Span(start, min(start + 4, folder.num_blocks)), device="cpu", kernels="native")
        hidden = span.forward(hidden, span.make_cache(1, len(tokens)))
    likeliest: list[int] = client.head(hidden)[0].argmax(-1).tolist()
    return likeliest


def llama_cpp(folder: Path, file: Path, tokens: int, prompt: int, threads: int) -> dict[str, Any]:
    """What it says of a prompt and `all` tokens, and of loading: milliseconds from the start of the process."""
    script = folder / "petalnode-bench.mjs"
    script.write_text(LLAMA_CPP)
    command = ["node", str(script), str(file), str(threads), str(tokens), str(prompt)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


def into_page_cache(file: Path) -> None:
    subprocess.run(["cp", str(file), "/dev/null"], check=True)


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def over(
    servers: Sequence[ServerProcess], spans: Sequence[tuple[int, int]], folder: ModelFolder, cache_tokens: int
) -> float:
    """The most MB of a server beyond its blocks and so much attention cache."""
    held = block_sizes(folder.path, "auto", "none", "auto").held
    cache = cache_bytes_per_block(folder.config, 4, cache_tokens)
    beyond = [
        most_memory(server) - sum(held[start:end]) - cache * (end - start)
        for server, (start, end) in zip(servers, spans, strict=True)
    ]
    return max(beyond) / 1e6


def run(file: Path, count: int, memory_mb: float, options: argparse.Namespace) -> dict[str, Any]:
    folder = resolve(file)
    for kept in (Path(os.environ["PETALNODE_CACHE"]) / "models").iterdir():
        shutil.rmtree(kept) if kept.is_dir() else kept.unlink()
    spans = spans_of(folder.num_blocks, count)
    first = None
    if not options.once:
        with swarm(file, spans, memory_mb, options) as servers:
            first = ready_seconds(servers)
    own: list[Answer] = []
    theirs: list[dict[str, Any]] = []
    with swarm(file, spans, memory_mb, options) as servers:
        again = ready_seconds(servers)
        print(f"ready after {first}, {again}", file=sys.stderr)
        addrs: Any = servers[-1].ready["addrs"]
        with AutoDistributedModelForCausalLM.from_pretrained(file, initial_peers=addrs) as model:
            answer(model, servers, [500] * 16, 4)
            for turn in range(options.rounds):
                prompt = list(range(1001 + turn, 1000 + 7 * options.prompt, 7))  # no server has kept it
                own.append(answer(model, servers, prompt, options.tokens))
                if options.llama_cpp and not options.apart:
                    theirs.append(llama_cpp(options.llama_cpp, file, options.tokens, options.prompt, options.threads))
                print(f"round {turn}: {own[-1]} {theirs[-1:]} load {os.getloadavg()[0]:.1f}", file=sys.stderr)
            # A session, and what is kept of those before it.
            kept = min(CACHE_TOKENS, (options.rounds + 1) * (options.prompt + options.tokens))
            beyond = over(servers, spans, folder, kept)
            most = max(most_memory(server) for server in servers) / 1e6
            group = max(map(group_memory, servers)) / 1e6 if memory_mb else 0
    if options.llama_cpp and options.apart:
        into_page_cache(file)
        for _ in range(options.rounds):
            theirs.append(llama_cpp(options.llama_cpp, file, options.tokens, options.prompt, options.threads))
    found: dict[str, Any] = {
        "file": file.name, "file_mb": round(file.stat().st_size / 1e6), "blocks": folder.num_blocks,
        "servers": count, "memory_mb_each": memory_mb,
        "disk_mb": round(size_of(Path(os.environ["PETALNODE_CACHE"])) / 1e6, 1),
        "first_seconds": first, "again_seconds": again, "memory_mb": round(most), "over_mb": round(beyond),
        "prompt_ms": pair([one.prompt for one in own]), "token_ms": pair([ms for one in own for ms in one.steps]),
        "token_spent_ms": pair([one.spent for one in own]), "tokens": own[0].tokens,
        "group_mb": round(group),
        "experts_used": pair([one.experts[0] for one in own]), "experts_read": pair([one.experts[1] for one in own]),
    }  # fmt: skip
    if options.check:
        print(found, file=sys.stderr)
        prompt, answered = list(range(1001, 1000 + 7 * options.prompt, 7)), own[0].tokens
        found["as_here"] = computed_here(file, [*prompt, *answered[:-1]])[len(prompt) - 1 :] == answered
    if theirs:
        found["llama_load_seconds"] = [
            round(min(one[key] for one in theirs) / 1000, 1) for key in ("loaded", "loading")
        ]
        found["llama_prompt_ms"] = pair([one["prompt"][0] for one in theirs])
        found["llama_token_ms"] = pair([ms for one in theirs for ms in one["all"]])
        found["llama_token_spent_ms"] = pair([statistics.fmean(one["spent"]) for one in theirs])
        for name in ("prompt_ms", "token_ms", "token_spent_ms"):
            found[f"{name}_of_llama"] = [
                round(mine / other, 2) for mine, other in zip(found[name], found[f"llama_{name}"], strict=True)
            ]
    return found


def ready_seconds(servers: Sequence[ServerProcess]) -> list[float]:
    """Until the last one was ready from its start: of the clock, and of the processor."""
    return [
        round(max(server.ready_seconds for server in servers), 1),
        round(max(server.ready_processor for server in servers), 1),
    ]


def pair(values: list[float]) -> list[float]:
    return [round(min(values), 1), round(statistics.median(values), 1)]


COLUMNS: Final = {
    "file": "file", "MB": "file_mb", "servers": "servers", "MB each": "memory_mb_each",
    "beside it, MB": "disk_mb", "ready, s": "first_seconds",
    "again, s": "again_seconds", "llama.cpp loads, s": "llama_load_seconds", "memory, MB": "memory_mb",
    "over, MB": "over_mb", "group, MB": "group_mb", "tokens as here": "as_here",
    "prompt, ms": "prompt_ms", "of llama.cpp's": "prompt_ms_of_llama",
    "a token, ms": "token_ms", "of its": "token_ms_of_llama", "processor, ms": "token_spent_ms",
    "of its processor": "token_spent_ms_of_llama", "experts": "experts_used", "read": "experts_read",
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--servers", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--llama-cpp", type=Path)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--memory-mb", nargs="+", type=float, default=[])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--once", action="store_true", help="start the servers once, and call that again")
    parser.add_argument("--apart", action="store_true", help="run llama.cpp when the servers have ended")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    limits = options.memory_mb or [0.0] * len(options.servers)
    results = []
    for file in options.files:
        answers: set[tuple[int, ...]] = set()
        for count, limit in zip(options.servers, limits, strict=True):
            print(f"measuring {file.name} on {count}, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
            with tempfile.TemporaryDirectory(prefix="petalnode-bench-") as cache:
                os.environ["PETALNODE_CACHE"] = cache
                into_page_cache(file)
                results.append(run(file.resolve(), count, limit, options) | {"load": round(os.getloadavg()[0], 1)})
            answers.add(tuple(results[-1]["tokens"]))
            results[-1]["same_tokens"] = len(answers) == 1
    if options.json:
        print(json.dumps({"processor": cpu_name(), "files": results}))
        return
    print("|", " | ".join([*COLUMNS, "load"]), "|")
    print("|---" * (len(COLUMNS) + 1) + "|")
    for found in results:
        cells = [found.get(key, "") for key in (*COLUMNS.values(), "load")]
        print("|", " | ".join(" / ".join(map(str, c)) if isinstance(c, list) else str(c) for c in cells), "|")
    print("all of a file's rows have the same tokens:", all(found["same_tokens"] for found in results))


if __name__ == "__main__":
    main()
