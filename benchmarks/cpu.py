"""What a decode step and a prompt cost on a CPU, by torch and by the compiled kernels, for each form of weights.

    python benchmarks/cpu.py [--json] [--models smollm2 1.1b 7b] [--rows 1 4 8 16 32] [--threads 1 2] [--rounds 3]
        [--perplexity 2048] [--isa avx2] [--llama-cpp FOLDER --gguf FILE]

It prints the tables of benchmarks/RESULTS.md. On a quiet machine, for these (no more than 8 minutes on two cores):

    nice -n -5 python benchmarks/cpu.py --llama-cpp FOLDER --gguf FILE

Models: smollm2 is the default model with all its blocks; 1.1b and 7b are a few blocks with random weights in the shapes
of TinyLlama and of Mistral 7B, made in a temporary folder (4 GB). All forms of one model take turns, round by round, so
that they see the same noise; times are the best of the rounds, of the wall clock and (in brackets) of the processor.
Sessions hold 128 tokens. GB/s is the weights' bytes in the time of a step of one row, beside what reading a large array
takes. `error` is the relative rms difference of hidden states from torch with the same weights in float32, for random
input; 16 bits are weights of the same model rounded to bfloat16. "transformers" is the whole model with its head, one
token at a time. llama.cpp, with its head too, is run by node-llama-cpp, if FOLDER is one in which `npm install
node-llama-cpp` was run; it takes turns as well, a process for each round, and the ratios are to it. Perplexity is that
of English Wikipedia (see perplexity.py), token by token in rows of 16 by the kernels, in windows by torch. For a
processor without AVX-512: ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 python benchmarks/cpu.py --isa avx2.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import perplexity
import torch
from plain import plain_model, quiet_torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from petalnode.node.blocks.cache import SpanCache
from petalnode.node.blocks.client_part import ClientModel, load_client
from petalnode.node.blocks.kernels.library import ISA_VARIABLE, library
from petalnode.node.blocks.span import BlockSpan, load_span
from petalnode.node.models import resolve
from petalnode.node.models.checkpoint import write_gguf_note
from petalnode.node.server.lifecycle.speed import cpu_name
from petalnode.protocols.ids import Span

HELD, PROMPT = 128, 256
BANDWIDTH_BYTES = 256 << 20
TORCH = (("torch, float32", "none", "torch"), ("torch, int8", "int8", "torch"), ("torch, nf4", "nf4", "torch"))
KERNELS = (
    ("kernels, 4 bits as stored", "none", "native"),
    ("kernels, 16 bits as stored", "none", "native"),
    ("kernels, int8", "int8", "native"),
    ("kernels, nf4", "nf4", "native"),
    ("kernels, 4 bits, int8 activations", "none/activations=int8", "native"),
    ("kernels, int8, int8 activations", "int8/activations=int8", "native"),
)
LLAMA_CPP = """
import {getLlama} from "node-llama-cpp";
const [file, threads, tokens, prompt] = [process.argv[2], ...process.argv.slice(3).map(Number)];
const llama = await getLlama({gpu: false, build: "never", logLevel: "error", maxThreads: threads});
const model = await llama.loadModel({modelPath: file});
const context = await model.createContext({contextSize: 1024, threads, batchSize: 512, sequences: 1});
const sequence = context.getSequence();
const busy = () => { const used = process.cpuUsage(); return (used.user + used.system) / 1000; };
const one = async (ids) => {
    const begun = performance.now(), before = busy();
    let next = null;
    for await (const token of sequence.evaluate(ids, {temperature: 0})) { next = token; break; }
    return [performance.now() - begun, busy() - before, next];
};
const loaded = performance.now(), loading = busy();
const first = await one(Array.from({length: prompt}, (_, index) => 1000 + index * 7));
const steps = [];
let next = 2000;
for (let step = 0; step < tokens; step++) { steps.push(await one([next])); next = steps[step][2]; }
const least = (place) => Math.min(...steps.map((step) => step[place]));
const all = steps.map((step) => step[0]), spent = steps.map((step) => step[1]);
console.log(JSON.stringify({prompt: first.slice(0, 2), step: [least(0), least(1)], all, spent, loaded, loading}));
process.exit(0);
"""


@dataclass(frozen=True)
class Random:
    """Some blocks with random weights in the shape of a known model."""

    blocks: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int

    def save(self, folder: Path) -> Path:
        """A model folder over a GGUF file in Q4_0."""
        config = LlamaConfig(
            vocab_size=64, hidden_size=self.hidden, intermediate_size=self.inner, num_hidden_layers=self.blocks,
            num_attention_heads=self.heads, num_key_value_heads=self.kv_heads, tie_word_embeddings=False,
        )  # fmt: skip
        config.save_pretrained(folder)
        narrow = self.hidden // self.heads * self.kv_heads
        shapes = {
            "attn_q": (self.hidden, self.hidden), "attn_k": (narrow, self.hidden),
            "attn_v": (narrow, self.hidden), "attn_output": (self.hidden, self.hidden),
            "ffn_gate": (self.inner, self.hidden), "ffn_up": (self.inner, self.hidden),
            "ffn_down": (self.hidden, self.inner),
        }  # fmt: skip
        random = np.random.default_rng(0)
        writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
        for name in ("output.weight", "token_embd.weight"):
            writer.add_tensor(name, random.standard_normal((64, self.hidden), np.float32))
        writer.add_tensor("output_norm.weight", np.ones(self.hidden, np.float32))
        for number in range(self.blocks):
            for name, shape in shapes.items():
                blocks = random.integers(0, 256, (shape[0], shape[1] // 32, 18), dtype=np.uint8)
                unit = 0.2 / math.sqrt(shape[1]) * (0.5 + random.random((*blocks.shape[:2], 1)))
                blocks[..., :2] = unit.astype(np.float16).view(np.uint8)
                rows = blocks.reshape(shape[0], -1)
                writer.add_tensor(f"blk.{number}.{name}.weight", rows, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
            for name in ("attn_norm", "ffn_norm"):
                writer.add_tensor(f"blk.{number}.{name}.weight", np.ones(self.hidden, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        write_gguf_note(folder, ["model.gguf"])
        return folder


RANDOM: Final = {"1.1b": Random(4, 2048, 5632, 32, 4), "7b": Random(2, 4096, 14336, 32, 8)}


@dataclass
class Way:
    """One kind of computation. `best`: the least milliseconds of the wall clock and of the processor, by what was
    measured ("1 row", "prompt").
    """

    name: str
    threads: int
    weight_bytes: int = 0
    error: float | None = None
    best: dict[str, tuple[float, float]] = field(default_factory=dict)

    def note(self, what: str, wall: float, busy: float) -> None:
        before = self.best.get(what, (wall, busy))
        self.best[what] = min(wall, before[0]), min(busy, before[1])

    def gigabytes(self) -> float | None:
        """Per second, that a step of one row reads of the weights."""
        step = self.best.get("1 row")
        return round(self.weight_bytes / step[0] / 1e6, 1) if step and self.weight_bytes else None

    def as_json(self) -> dict[str, Any]:
        return {
            "way": self.name,
            "threads": self.threads,
            "milliseconds": {what: round(wall, 2) for what, (wall, _) in self.best.items()},
            "processor_milliseconds": {what: round(busy, 2) for what, (_, busy) in self.best.items()},
            "weight_mib": round(self.weight_bytes / 2**20, 1),
            "gigabytes_per_second": self.gigabytes(),
            "error": self.error,
        }


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Milliseconds of the wall clock, and of the processor by all threads."""
    begun, before = time.perf_counter(), time.process_time()
    work()
    return 1000 * (time.perf_counter() - begun), 1000 * (time.process_time() - before)


def bandwidth(threads: int) -> float:
    """GB/s at which an array that is larger than the processor's caches is read."""
    torch.set_num_threads(threads)
    numbers = torch.ones(BANDWIDTH_BYTES // 4)
    return BANDWIDTH_BYTES / min(timed(numbers.sum)[0] for _ in range(7)) / 1e6


def use_threads(blocks: BlockSpan, threads: int) -> None:
    torch.set_num_threads(threads)
    if blocks.step is not None:
        blocks.step.threads = threads


def fill(cache: SpanCache, tokens: int) -> None:
    """Random keys and values for some tokens."""
    random = torch.Generator().manual_seed(1)
    for block, spec in enumerate(cache.specs, cache.first):
        keys = torch.randn(cache.batch, spec.heads, tokens, spec.key_dim, generator=random)
        cache.write(block, keys, torch.randn(*keys.shape[:3], spec.value_dim, generator=random))
    cache.advance(tokens)


@torch.inference_mode()
def measure(blocks: BlockSpan, way: Way, rows: Sequence[int], prompt: bool) -> None:
    hidden = torch.randn(1, PROMPT, blocks.hidden_size, generator=torch.Generator().manual_seed(0))
    for count in rows:
        caches = [blocks.make_cache(1, HELD + 1) for _ in range(count)]
        for cache in caches:
            fill(cache, HELD)
        steps = [(hidden[:, index : index + 1], cache) for index, cache in enumerate(caches)]
        for _ in range(6 if count == 1 else 3):
            way.note(f"{count} row{'s' if count > 1 else ''}", *timed(lambda s=steps: blocks.decode(s)))  # type: ignore[misc]
            for cache in caches:
                cache.rollback(HELD)
    if prompt:
        cache = blocks.make_cache(1, PROMPT)
        way.note("prompt", *timed(lambda: blocks.forward(hidden, cache)))


@torch.inference_mode()
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
    way.note("prompt", *timed(lambda: model(ids, use_cache=True)))
    held = model(ids[:, :HELD], use_cache=True).past_key_values
    for step in range(4):
        way.note("1 row", *timed(lambda s=step: model(ids[:, s : s + 1], past_key_values=held, use_cache=True)))  # type: ignore[misc]


def run_llama_cpp(folder: Path, gguf: Path, threads: int, tokens: int, prompt: int) -> dict[str, list[float]]:
    """Milliseconds (of the wall clock, of the processor) of a `prompt` of that length, the least of those of a
    `step` behind it, and, of the wall clock, of `all` steps in order. In its own process, the model loaded."""
    script = folder / "petalnode_benchmark.mjs"
    script.write_text(LLAMA_CPP)
    command = ["node", script.name, str(gguf.resolve()), str(threads), str(tokens), str(prompt)]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    found: dict[str, list[float]] = json.loads(run.stdout)
    return found


def measure_llama_cpp(folder: Path, gguf: Path, way: Way) -> None:
    for held, what, asked in ((HELD, "1 row", "step"), (PROMPT, "prompt", "prompt")):
        way.note(what, *run_llama_cpp(folder, gguf, way.threads, 24, held)[asked])


@torch.inference_mode()
def perplexity_by_steps(client: ClientModel, blocks: BlockSpan, texts: list[torch.Tensor]) -> float:
    """All windows side by side, token by token."""
    caches = [blocks.make_cache(1, text.shape[1]) for text in texts]
    loss = count = 0.0
    for place in range(texts[0].shape[1] - 1):
        steps = [
            (client.embed(text[:, place : place + 1], place), cache) for text, cache in zip(texts, caches, strict=True)
        ]
        logits = client.head(torch.cat(blocks.decode(steps)))[:, 0].float()
        targets = torch.cat([text[:, place + 1] for text in texts])
        loss += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
        count += len(texts)
    return math.exp(loss / count)


def in_sixteen_bits(folder: Path, target: Path) -> Path:
    """The model with its weights rounded to bfloat16."""
    target.mkdir()
    (target / "config.json").write_text((folder / "config.json").read_text())
    whole = plain_model(folder, "float32")
    tied = getattr(whole, "all_tied_weights_keys", None) or {}
    tensors = {name: value.bfloat16() for name, value in whole.state_dict().items() if name not in tied}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def load_ways(name: str, folder: Path, halves: Path, span: Span) -> dict[str, BlockSpan]:
    torchs = TORCH if name == "smollm2" else TORCH[:2]
    forms = (*torchs, *(KERNELS if library() is not None else ()))
    spans: dict[str, BlockSpan] = {}
    for form, quantisation, kernels in forms:
        print(f"loading {name}: {form}", file=sys.stderr)
        source = halves if "16 bits" in form else folder
        options = {"quantisation": quantisation, "kernels": kernels}
        spans[form] = load_span(source, span, dtype="float32", device="cpu", **options)  # type: ignore[arg-type]
    return spans


def run_model(name: str, folder: Path, scratch: Path, options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(max(options.threads))
    halves = in_sixteen_bits(folder, scratch / "halves")
    config = json.loads((folder / "config.json").read_text())
    spans = load_ways(name, folder, halves, Span(0, config["num_hidden_layers"]))
    real = name == "smollm2"
    whole = plain_model(folder, "float32") if real else None
    truth = answer(spans[TORCH[0][0]])
    errors = {
        form: float(f"{float((answer(blocks) - truth).norm() / truth.norm()):.2g}") for form, blocks in spans.items()
    }
    ways: list[Way] = []
    for threads in options.threads:
        ways += [Way(form, threads, blocks.weight_bytes, errors[form]) for form, blocks in spans.items()]
        if real:
            ways.append(Way("transformers", threads))
            ways += [Way("llama.cpp", threads)] if options.llama_cpp else []
    for number in range(options.rounds):
        print(f"{name}: round {number + 1} of {options.rounds}", file=sys.stderr)
        for way in ways:
            if way.name in spans:
                use_threads(spans[way.name], way.threads)
                measure(spans[way.name], way, options.rows, prompt=real or not number)
            elif way.name == "transformers":
                torch.set_num_threads(way.threads)
                measure_transformers(whole, way)
            else:
                measure_llama_cpp(options.llama_cpp, options.gguf, way)
    found = {"model": name, "blocks": config["num_hidden_layers"], "ways": [way.as_json() for way in ways]}
    if real and options.perplexity and KERNELS[0][0] in spans:
        client = load_client(folder, device="cpu", dtype="float32")
        texts = perplexity.windows(folder, perplexity.wikipedia(), options.perplexity, options.perplexity // 16)
        for blocks in spans.values():
            use_threads(blocks, max(options.threads))
        by_torch = perplexity.measure(client, spans[TORCH[0][0]], texts)["perplexity"]
        by_kernels = perplexity_by_steps(client, spans[KERNELS[0][0]], texts)
        found["perplexity"] = {"tokens": options.perplexity, "torch": by_torch, "kernels": by_kernels}
    return found


def run(options: argparse.Namespace) -> dict[str, Any]:
    begun = time.perf_counter()
    results = []
    for name in options.models:
        with tempfile.TemporaryDirectory(prefix="petalnode-cpu-") as scratch:
            if name in RANDOM:
                before = os.environ.get("PETALNODE_CACHE")
                os.environ["PETALNODE_CACHE"] = f"{scratch}/cache"  # quantised blocks of no use to anybody else
                results.append(run_model(name, RANDOM[name].save(Path(scratch) / "model"), Path(scratch), options))
                os.environ.pop("PETALNODE_CACHE") if before is None else os.environ.update(PETALNODE_CACHE=before)
            else:
                results.append(run_model(name, resolve(name, need="all").path, Path(scratch), options))
    found = library()
    return {
        "processor": cpu_name(),
        "isa": found.isa if found is not None else None,
        "aten": torch.backends.cpu.get_cpu_capability(),
        "bandwidth_gigabytes_per_second": {threads: round(bandwidth(threads), 1) for threads in options.threads},
        "models": results,
        "seconds": round(time.perf_counter() - begun),
    }


def show(results: dict[str, Any], rows: Sequence[int]) -> None:
    """The tables as benchmarks/RESULTS.md has them."""
    reads = ", ".join(f"{gb} GB/s" for gb in results["bandwidth_gigabytes_per_second"].values())
    software = f"kernels {results['isa']}, torch {results['aten']}"
    print(f"{results['processor']}, {software}; reads {reads}; {results['seconds']} s\n")
    measured = [f"{count} row{'s' if count > 1 else ''}" for count in rows] + ["prompt"]
    for model in results["models"]:
        print(f"{model['model']}, {model['blocks']} blocks; milliseconds (of the processor):\n")
        print(f"| | threads | {' | '.join(measured)} | MiB | GB/s | error | of llama.cpp's |")
        print(f"|{'---|' * (len(measured) + 6)}")
        for way in model["ways"]:
            times = [_cell(way, what) for what in measured]
            rest = [way["weight_mib"] or "", way["gigabytes_per_second"] or "", way["error"] or "", _ratios(way, model)]
            print(f"| {way['way']} | {way['threads']} | {' | '.join(map(str, (*times, *rest)))} |")
        if "perplexity" in model:
            of = model["perplexity"]
            print(f"\nPerplexity of {of['tokens']} tokens: torch {of['torch']:.5g}, kernels {of['kernels']:.5g}")
        print()


def _cell(way: dict[str, Any], what: str) -> str:
    if what not in way["milliseconds"]:
        return ""
    return f"{way['milliseconds'][what]:.3g} ({way['processor_milliseconds'][what]:.3g})"


def _ratios(way: dict[str, Any], model: dict[str, Any]) -> str:
    """Time of a row and of the prompt, of llama.cpp's with as many threads; the processor's in brackets."""
    same = [one for one in model["ways"] if one["way"] == "llama.cpp" and one["threads"] == way["threads"]]
    if not same or way is same[0]:
        return ""
    kinds = ("milliseconds", "processor_milliseconds")
    of = {what: [way[kind][what] / same[0][kind][what] for kind in kinds] for what in ("1 row", "prompt")}
    return ", ".join(f"{wall:.2f} ({busy:.2f})" for wall, busy in of.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.add_argument("--models", nargs="*", default=["smollm2", *RANDOM], choices=["smollm2", *RANDOM])
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 4, 8, 16, 32])
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--perplexity", type=int, default=2048, help="tokens of text, 0: none")
    parser.add_argument("--isa", help="instruction set of the compiled kernels: plain, avx2, avx512, neon")
    parser.add_argument("--llama-cpp", type=Path, help="folder in which node-llama-cpp is installed")
    parser.add_argument("--gguf", type=Path, help="the file for llama.cpp")
    options = parser.parse_args()
    if bool(options.llama_cpp) != bool(options.gguf):
        parser.error("--llama-cpp and --gguf go together")
    if options.isa:
        os.environ[ISA_VARIABLE] = options.isa
    quiet_torch(None)
    results = run(options)
    if options.json:
        print(json.dumps({"cpu": results}))
    else:
        show(results, options.rows)


if __name__ == "__main__":
    main()
