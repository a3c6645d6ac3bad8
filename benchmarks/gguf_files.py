"""What serving a GGUF file takes: disk beside the file, memory, seconds until ready, a prompt's and a token's time.

    python benchmarks/gguf_files.py FILE... [--json] [--servers 1 2] [--rounds 3] [--tokens 32] [--llama-cpp FOLDER]
                                    [--memory-mb N]

The file is in the page cache. For each number of servers these are started on loopback, with an empty cache and
again, with as many threads as they would take by themselves; a client in this process asks for `--tokens` tokens
behind a prompt of 256 as chat does. `ready` is from the start of a process to its ready event, the longest of all;
`over` the most that a server ever had resident, beyond its blocks' bytes and its attention cache. llama.cpp is run by
node-llama-cpp in turns with it, with a thread for each core, if FOLDER is one in which `npm install node-llama-cpp`
was run; its load is from the start of the process. Times of prompts and tokens: least and median. `--memory-mb` puts
each server into a control group (version 1, as root) of so much memory, page cache included.
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
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import torch
from chain import spans_of
from cpu import LLAMA_CPP
from local_swarm import ServerProcess

from petalnode import AutoDistributedModelForCausalLM
from petalnode.node.blocks.architecture import block_sizes
from petalnode.node.client.core import SwarmClient
from petalnode.node.client.generation.conversation import Conversation, Sampling
from petalnode.node.models import ModelFolder, resolve
from petalnode.node.server.lifecycle.memory import cache_bytes_per_block
from petalnode.node.server.lifecycle.speed import cpu_name

PROMPT: Final = 256
CACHE_TOKENS: Final = 2048
GROUPS: Final = Path("/sys/fs/cgroup/memory")


def control_group(name: str, memory_mb: int) -> list[str]:
    """What runs a command in a control group of so much memory; nothing for 0."""
    if not memory_mb:
        return []
    group = GROUPS / f"petalnode-bench-{os.getpid()}-{name}"
    group.mkdir(exist_ok=True)
    (group / "memory.limit_in_bytes").write_text(str(memory_mb * 1_000_000))
    return ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]


@contextmanager
def swarm(file: Path, spans: Sequence[tuple[int, int]], memory_mb: int) -> Iterator[list[ServerProcess]]:
    """Servers of the file's blocks, started one after the other, each with the threads it would take by itself."""
    servers: list[ServerProcess] = []
    with tempfile.TemporaryDirectory(prefix="petalnode-bench-") as scratch:
        try:
            peer = ["--new-swarm"]
            for index, (start, end) in enumerate(spans):
                folder = Path(scratch) / str(index)
                folder.mkdir()
                wanted = [str(file), "--blocks", f"{start}:{end}", "--cache-tokens", str(CACHE_TOKENS)]
                prefix = control_group(str(index), memory_mb)
                servers.append(ServerProcess([*wanted, *peer], folder, prefix=prefix, threads=os.cpu_count() or 1))
                addrs = servers[-1].wait_ready()["addrs"]
                assert isinstance(addrs, list)
                peer = ["--peer", addrs[0]]
            yield servers
        finally:
            for server in servers:
                server.stop()


def most_memory(server: ServerProcess) -> int:
    """The most bytes that the process ever had resident."""
    most = re.search(r"VmHWM:\s*(\d+)", Path(f"/proc/{server.process.pid}/status").read_text())
    assert most is not None
    return int(most[1]) * 1024


def answer_times(model: Any, prompt: list[int], tokens: int) -> tuple[float, list[float]]:
    """Milliseconds until the first token, and of each token behind it, as chat asks for them."""
    came = [time.perf_counter()]

    async def answer(client: SwarmClient) -> None:
        conversation = Conversation(client, model._local, max_length=len(prompt) + tokens, stop_tokens=())
        try:
            came[0] = time.perf_counter()
            wanted = Sampling(max_new_tokens=tokens)
            await conversation.answer(prompt, wanted, lambda _: came.append(time.perf_counter()))
        finally:
            await conversation.aclose()

    model._runtime.call(answer, model._runtime.value)
    first, *others = [1000 * (after - before) for before, after in pairwise(came)]
    return first, others


def llama_cpp(folder: Path, file: Path, tokens: int) -> dict[str, Any]:
    script = folder / "petalnode-bench.mjs"
    script.write_text(LLAMA_CPP)
    begun = time.perf_counter()
    threads = str(os.cpu_count())
    done = subprocess.run(
        ["node", str(script), str(file), threads, str(tokens), str(PROMPT)], capture_output=True, text=True, check=True
    )
    said = json.loads(done.stdout.splitlines()[-1])
    spent = (said["prompt"][0] + sum(said["all"])) / 1000
    return {"steps": said["all"], "prompt": said["prompt"][0], "load_seconds": time.perf_counter() - begun - spent}


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def over(servers: Sequence[ServerProcess], spans: Sequence[tuple[int, int]], folder: ModelFolder) -> float:
    """The most MB of a server beyond its blocks and its attention cache."""
    held = block_sizes(folder.path, "auto", "none", "auto").held
    cache = cache_bytes_per_block(folder.config, 4, PROMPT + 1)
    beyond = [
        most_memory(server) - sum(held[start:end]) - cache * (end - start)
        for server, (start, end) in zip(servers, spans, strict=True)
    ]
    return max(beyond) / 1e6


def run(file: Path, count: int, options: argparse.Namespace) -> dict[str, Any]:
    folder = resolve(file)
    for kept in (Path(os.environ["PETALNODE_CACHE"]) / "models").iterdir():
        shutil.rmtree(kept) if kept.is_dir() else kept.unlink()
    spans = spans_of(folder.num_blocks, count)
    with swarm(file, spans, options.memory_mb) as servers:
        first = max(server.ready_seconds for server in servers)
    own: dict[str, list[float]] = {"prompt": [], "token": []}
    theirs: dict[str, list[float]] = {"prompt": [], "token": [], "load": []}
    with swarm(file, spans, options.memory_mb) as servers:
        addrs: Any = servers[-1].ready["addrs"]
        with AutoDistributedModelForCausalLM.from_pretrained(file, initial_peers=addrs) as model:
            answer_times(model, [500] * 16, 4)
            for turn in range(options.rounds):
                prompt, steps = answer_times(model, list(range(1001 + turn, 1000 + 7 * PROMPT, 7)), options.tokens)
                own["prompt"].append(prompt)
                own["token"] += steps
                if options.llama_cpp:
                    said = llama_cpp(options.llama_cpp, file, options.tokens)
                    theirs["prompt"].append(said["prompt"])
                    theirs["token"] += said["steps"]
                    theirs["load"].append(said["load_seconds"])
            beyond = over(servers, spans, folder)
            most = max(most_memory(server) for server in servers) / 1e6
        ready = max(server.ready_seconds for server in servers)
    found = {
        "file": file.name, "file_mb": round(file.stat().st_size / 1e6), "blocks": folder.num_blocks,
        "servers": count, "disk_mb": round(size_of(Path(os.environ["PETALNODE_CACHE"])) / 1e6, 1),
        "first_seconds": round(first, 1), "again_seconds": round(ready, 1), "memory_mb": round(most),
        "over_mb": round(beyond),
    }  # fmt: skip
    for name in ("prompt", "token"):
        found[f"{name}_ms"] = pair(own[name])
        if theirs[name]:
            found[f"llama_{name}_ms"] = pair(theirs[name])
            found[f"{name}_of_llama"] = [round(of(own[name]) / of(theirs[name]), 2) for of in (min, statistics.median)]
    if theirs["load"]:
        found["llama_load_seconds"] = round(min(theirs["load"]), 1)
    return found


def pair(values: list[float]) -> list[float]:
    return [round(min(values), 1), round(statistics.median(values), 1)]


COLUMNS: Final = {
    "file": "file", "MB": "file_mb", "servers": "servers", "beside it, MB": "disk_mb", "ready, s": "first_seconds",
    "again, s": "again_seconds", "llama.cpp loads, s": "llama_load_seconds", "memory, MB": "memory_mb",
    "over, MB": "over_mb", "prompt, ms": "prompt_ms", "llama.cpp's": "llama_prompt_ms", "of it": "prompt_of_llama",
    "a token, ms": "token_ms", "llama.cpp's token": "llama_token_ms", "of its": "token_of_llama",
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--servers", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--llama-cpp", type=Path)
    parser.add_argument("--memory-mb", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(0)
    results = []
    for file in options.files:
        for count in options.servers:
            print(f"measuring {file.name} on {count}, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
            with tempfile.TemporaryDirectory(prefix="petalnode-bench-") as cache:
                os.environ["PETALNODE_CACHE"] = cache
                subprocess.run(["cp", str(file), "/dev/null"], check=True)  # into the page cache
                results.append(run(file.resolve(), count, options) | {"load": round(os.getloadavg()[0], 1)})
    if options.json:
        print(json.dumps({"processor": cpu_name(), "files": results}))
        return
    print("|", " | ".join([*COLUMNS, "load"]), "|")
    print("|---" * (len(COLUMNS) + 1) + "|")
    for found in results:
        cells = [found.get(key, "") for key in (*COLUMNS.values(), "load")]
        print("|", " | ".join(" / ".join(map(str, c)) if isinstance(c, list) else str(c) for c in cells), "|")


if __name__ == "__main__":
    main()
