"""What serving a GGUF file takes: disk beside the file, memory, seconds until ready, and a token's time.

    python benchmarks/gguf_files.py FILE... [--json] [--rounds 3] [--tokens 32] [--llama-cpp FOLDER]

For each file a server of all blocks with one thread is started twice on loopback, with an empty cache and again; the
file is in the page cache. `ready` is from the start of the process to its ready event, `memory` the most that it ever
had resident. A token's time is that of blocks and head in one process with as many threads as are quicker, least and
median of the steps after a prompt of 256. llama.cpp is run by node-llama-cpp in turns with it, with a thread for each
core, if FOLDER is one in which `npm install node-llama-cpp` was run; its load is from the start of the process.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from cpu import LLAMA_CPP
from local_swarm import ServerProcess

from petalnode.node.blocks.client_part import load_client
from petalnode.node.blocks.span import load_span
from petalnode.node.models import resolve
from petalnode.node.server.lifecycle.speed import cpu_name
from petalnode.protocols.ids import Span

PROMPT = 256


def served(file: Path, blocks: int) -> dict[str, float]:
    """Seconds until a server is ready, and its most memory in MB."""
    with tempfile.TemporaryDirectory(prefix="petalnode-bench-") as scratch:
        server = ServerProcess(
            [str(file), "--blocks", f"0:{blocks}", "--new-swarm", "--cache-tokens", "2048"], Path(scratch)
        )
        try:
            server.wait_ready()
            status = Path(f"/proc/{server.process.pid}/status").read_text()
            most = re.search(r"VmHWM:\s*(\d+)", status)
            assert most is not None
            return {"ready_seconds": server.ready_seconds, "memory_mb": int(most[1]) * 1024 / 1e6}
        finally:
            server.stop()


@torch.inference_mode()
def token_times(file: Path, tokens: int) -> list[float]:
    """Milliseconds of each step of blocks and head."""
    folder = resolve(file)
    client = load_client(folder.path, device="cpu")
    blocks = load_span(folder.path, Span(0, folder.num_blocks), device="cpu", kernels="auto")
    cache = blocks.make_cache(1, PROMPT + tokens + 1)
    hidden = blocks.forward(client.embed(torch.arange(1000, 1000 + 7 * PROMPT, 7)[None]), cache)
    found, token = [], client.head(hidden[:, -1:]).argmax(-1)
    for _ in range(tokens):
        begun = time.perf_counter()
        token = client.head(blocks.decode([(client.embed(token, cache.length), cache)])[0]).argmax(-1)
        found.append(1000 * (time.perf_counter() - begun))
    return found


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
    return {"steps": said["all"], "load_seconds": time.perf_counter() - begun - spent}


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def measure(file: Path, options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="petalnode-bench-") as cache:
        os.environ["PETALNODE_CACHE"] = cache
        blocks = resolve(file).num_blocks
        for folder in (Path(cache) / "models").iterdir():
            subprocess.run(["rm", "-r", str(folder)], check=True)
        subprocess.run(["cp", str(file), "/dev/null"], check=True)  # into the page cache
        first, again = served(file, blocks), served(file, blocks)
        found: dict[str, Any] = {
            "file": file.name, "file_mb": round(file.stat().st_size / 1e6), "blocks": blocks,
            "disk_mb": round(size_of(Path(cache)) / 1e6, 1), "first_seconds": round(first["ready_seconds"], 1),
            "again_seconds": round(again["ready_seconds"], 1), "memory_mb": round(first["memory_mb"]),
            "memory_again_mb": round(again["memory_mb"]),
        }  # fmt: skip
        own: list[float] = []
        theirs: list[float] = []
        for _ in range(options.rounds):
            own += token_times(file, options.tokens)
            if options.llama_cpp:
                said = llama_cpp(options.llama_cpp, file, options.tokens)
                theirs += said["steps"]
                found["llama_load_seconds"] = min(found.get("llama_load_seconds", 1e9), round(said["load_seconds"], 1))
        for name, steps in (("token_ms", own), ("llama_token_ms", theirs)):
            if steps:
                found[name] = [round(min(steps), 1), round(statistics.median(steps), 1)]
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--llama-cpp", type=Path)
    options = parser.parse_args()
    results = []
    for file in options.files:
        print(f"measuring {file.name}", file=sys.stderr)
        results.append(measure(file.resolve(), options))
    if options.json:
        print(json.dumps({"processor": cpu_name(), "files": results}))
        return
    print(
        "| file | MB | beside it, MB | ready, s | again, s | memory, MB | a token, ms | llama.cpp: load, s "
        "| a token, ms |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for found in results:
        token = "{} / {}".format(*found["token_ms"])
        other = "{} / {}".format(*found["llama_token_ms"]) if "llama_token_ms" in found else ""
        parts = ("file", "file_mb", "disk_mb", "first_seconds", "again_seconds", "memory_mb")
        print(
            "|", *(f"{found[part]} |" for part in parts), f"{token} | {found.get('llama_load_seconds', '')} | {other} |"
        )


if __name__ == "__main__":
    main()
