"""What a decode step and a prompt cost on a CPU, by torch and by the compiled kernels, for each form of weights.

    python benchmarks/cpu.py [--json] [--model smollm2] [--blocks 0:30] [--rows 1 4 8 16 32] [--threads 1 2]
        [--rounds 5] [--isa avx2] [--llama-cpp FOLDER --gguf FILE]

All take turns, round by round, so that they see the same noise; times are the best of the rounds, of the wall clock.
Sessions hold 128 tokens. Bandwidth is the weights' bytes in the time of a step, beside what reading a large array
takes. `error` is the relative rms difference of hidden states from torch in float32. "transformers" is the whole model
with its head, one token at a time. llama.cpp, with its head too, is run by node-llama-cpp, if FOLDER is one in which
`npm install node-llama-cpp` was run; it takes turns as well, a process for each round. For a processor without AVX-512:
ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 python benchmarks/cpu.py --isa avx2.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from petalnode.node.blocks.kernels.library import ISA_VARIABLE, library
from petalnode.node.blocks.span import BlockSpan, load_span
from petalnode.node.models import resolve
from petalnode.node.server.lifecycle.speed import cpu_name
from petalnode.protocols.ids import Span

HELD, PROMPT = 128, 256
STEPS = 4
FORMS = (
    ("none", "torch"),
    ("int8", "torch"),
    ("nf4", "torch"),
    ("none", "native"),
    ("int8", "native"),
    ("nf4", "native"),
)
BANDWIDTH_BYTES = 256 << 20
LLAMA_CPP = """
import {getLlama} from "node-llama-cpp";
const [file, threads, tokens, prompt] = [process.argv[2], ...process.argv.slice(3).map(Number)];
const llama = await getLlama({gpu: false, build: "never", logLevel: "error", maxThreads: threads});
const model = await llama.loadModel({modelPath: file});
const context = await model.createContext({contextSize: 1024, threads, batchSize: 512, sequences: 1});
const sequence = context.getSequence();
const ids = Array.from({length: prompt}, (_, index) => 1000 + index * 7);
let begun = performance.now();
for await (const token of sequence.evaluate(ids, {temperature: 0})) break;
const first = performance.now() - begun;
const times = [];
let next = [2000];
for (let step = 0; step < tokens; step++) {
    begun = performance.now();
    for await (const token of sequence.evaluate(next, {temperature: 0})) { next = [token]; break; }
    times.push(performance.now() - begun);
}
console.log(JSON.stringify({prompt: first, step: Math.min(...times)}));
process.exit(0);
"""


@dataclass
class Way:
    """One kind of computation. `best`: the least milliseconds, by what was measured ("1 row", "prompt")."""

    name: str
    threads: int
    weight_bytes: int = 0
    error: float = 0.0
    best: dict[str, float] = field(default_factory=dict)

    def note(self, what: str, milliseconds: float) -> None:
        self.best[what] = min(milliseconds, self.best.get(what, milliseconds))

    def as_json(self) -> dict[str, Any]:
        step = self.best.get("1 row")
        return {
            "way": self.name,
            "threads": self.threads,
            "milliseconds": {what: round(value, 2) for what, value in self.best.items()},
            "weight_mib": round(self.weight_bytes / 2**20, 1),
            "gigabytes_per_second": round(self.weight_bytes / step / 1e6, 2) if step and self.weight_bytes else None,
            "error": self.error,
        }


def timed(work: Callable[[], object]) -> float:
    """Milliseconds."""
    begun = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - begun)


def bandwidth() -> float:
    """GB/s at which one thread reads an array that is larger than its caches."""
    numbers = np.ones(BANDWIDTH_BYTES // 8)
    return BANDWIDTH_BYTES / min(timed(lambda: np.dot(numbers, numbers)) for _ in range(5)) / 1e6


@torch.inference_mode()
def measure(blocks: BlockSpan, way: Way, rows: list[int]) -> None:
    hidden = torch.randn(1, PROMPT, blocks.hidden_size, generator=torch.Generator().manual_seed(0))
    for count in rows:
        caches = [blocks.make_cache(1, HELD + 1) for _ in range(count)]
        for cache in caches:
            cache.memory.normal_(generator=torch.Generator().manual_seed(1))
            cache.advance(HELD)
        steps = [(hidden[:, index : index + 1], cache) for index, cache in enumerate(caches)]
        for _ in range(STEPS):
            way.note(f"{count} row{'s' if count > 1 else ''}", timed(lambda s=steps: blocks.decode(s)))  # type: ignore[misc]
            for cache in caches:
                cache.rollback(HELD)
    cache = blocks.make_cache(1, PROMPT)
    way.note("prompt", timed(lambda: blocks.forward(hidden, cache)))


def answer(blocks: BlockSpan) -> torch.Tensor:
    """Hidden states of a prompt and of some decode steps behind it."""
    hidden = torch.randn(1, 40, blocks.hidden_size, generator=torch.Generator().manual_seed(2))
    cache = blocks.make_cache(1, 40)
    parts = [blocks.forward(hidden[:, :32], cache)]
    parts += [blocks.decode([(hidden[:, index : index + 1], cache)])[0] for index in range(32, 40)]
    return torch.cat(parts, 1)


@torch.inference_mode()
def measure_transformers(model: Any, way: Way) -> None:
    ids = torch.arange(1000, 1000 + PROMPT).unsqueeze(0)
    way.note("prompt", timed(lambda: model(ids, use_cache=True)))
    held = model(ids[:, :HELD], use_cache=True).past_key_values
    for step in range(STEPS):
        way.note("1 row", timed(lambda s=step: model(ids[:, s : s + 1], past_key_values=held, use_cache=True)))  # type: ignore[misc]


def measure_llama_cpp(folder: Path, gguf: Path, way: Way) -> None:
    script = folder / "petalnode_benchmark.mjs"
    script.write_text(LLAMA_CPP)
    command = ["node", script.name, str(gguf.resolve()), str(way.threads), "8", str(HELD)]
    found = json.loads(subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout)
    way.note("1 row", found["step"])
    command[-1] = str(PROMPT)
    found = json.loads(subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout)
    way.note("prompt", found["prompt"])


def run(options: argparse.Namespace) -> dict[str, Any]:
    folder, span = resolve(options.model, need="all").path, Span.parse(options.blocks)
    found = library()
    forms = [form for form in FORMS if form[1] == "torch" or found is not None]
    torch.set_num_threads(1)
    spans: dict[str, BlockSpan] = {}
    for quantisation, kernels in forms:
        name = f"{kernels}, {'as stored' if quantisation == 'none' else quantisation}"
        print(f"loading: {name}", file=sys.stderr)
        spans[name] = load_span(folder, span, dtype="float32", quantisation=quantisation, kernels=kernels)  # type: ignore[arg-type]
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    truth = answer(next(iter(spans.values())))
    ways: list[Way] = []
    for threads in options.threads:
        ways += [Way(name, threads, blocks.weight_bytes) for name, blocks in spans.items()]
        ways.append(Way("transformers", threads))
        if options.llama_cpp:
            ways.append(Way("llama.cpp", threads))
    for way in ways:
        if way.name in spans:
            way.error = float(f"{float((answer(spans[way.name]) - truth).norm() / truth.norm()):.2g}")
    for number in range(options.rounds):
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr)
        for way in ways:
            torch.set_num_threads(way.threads)
            if way.name in spans:
                measure(spans[way.name], way, options.rows)
            elif way.name == "transformers":
                measure_transformers(whole, way)
            else:
                measure_llama_cpp(options.llama_cpp, options.gguf, way)
    return {
        "processor": cpu_name(),
        "isa": found.isa if found is not None else None,
        "aten": torch.backends.cpu.get_cpu_capability(),
        "bandwidth_gigabytes_per_second": round(bandwidth(), 1),
        "model": options.model,
        "blocks": options.blocks,
        "ways": [way.as_json() for way in ways],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--blocks", default="0:30")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 4, 8, 16, 32])
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--isa", help="instruction set of the compiled kernels: plain, avx2, avx512, neon")
    parser.add_argument("--llama-cpp", type=Path, help="folder in which node-llama-cpp is installed")
    parser.add_argument("--gguf", type=Path, help="the file for llama.cpp")
    options = parser.parse_args()
    if bool(options.llama_cpp) != bool(options.gguf):
        parser.error("--llama-cpp and --gguf go together")
    if options.isa:
        os.environ[ISA_VARIABLE] = options.isa
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    results = run(options)
    if options.json:
        print(json.dumps({"cpu": results}))
    else:
        show(results)


def show(results: dict[str, Any]) -> None:
    head = f"{results['processor']}, {results['isa']}, reads {results['bandwidth_gigabytes_per_second']} GB/s; ms"
    table = Table(title=head)
    measured = list(results["ways"][0]["milliseconds"])
    for column in ("way", "threads", *measured, "weights MiB", "GB/s", "error"):
        table.add_column(column, justify="right")
    for way in results["ways"]:
        times = [str(way["milliseconds"].get(what, "")) for what in measured]
        figures = (way["weight_mib"] or "", way["gigabytes_per_second"] or "", way["error"])
        table.add_row(way["way"], str(way["threads"]), *times, *map(str, figures))
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
