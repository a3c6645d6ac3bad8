"""How much honest servers differ: measures it and writes the table by which validators judge.

    python benchmarks/calibration.py [--json] [--write node/validator/tolerances.json] [--samples 6] [--device cpu]
        [--models smollm2 ...] [--add]

Each kind of server (dtype and quantisation) answers the same requests in every way that an honest one may: with one
and two threads, step by step and all at once, its decode steps in one batch with those of others, rows together and
alone, with other attention kernels, with other products of quantised weights, by the compiled kernels, and on older
kinds of processors (no AVX-512, no vector instructions beyond SSE), which are this one with its newer instructions
switched off, in a process of its own.
The truth is what a validator computes: block by block, one thread, the steps as they were sent. `worst` is the worst
token of any sample, `mean` the largest root mean square over the tokens of a sample.

With `--device cuda` the servers are those of that device, and the truth is computed on the CPU. Random models of other
shapes are measured beside the real one (`--models`), because tolerances must hold for them, too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from plain import quiet_torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[1]))

from petalnode.node.blocks.batch_request import gradient_of
from petalnode.node.blocks.client_part import ClientModel, load_client
from petalnode.node.blocks.kernels.library import library
from petalnode.node.blocks.passes import Batch, SpanPasses, run_through
from petalnode.node.blocks.quantisation.matrix import QuantisedMatrix
from petalnode.node.blocks.span import BlockSpan, load_span
from petalnode.node.models import resolve
from petalnode.node.validator.probe_inputs import draw_kept_tensors
from petalnode.node.validator.probe_plan import Kind
from petalnode.node.verification.judging import COARSER, distance, kept_distances, share_of
from petalnode.node.verification.recomputation import Recomputation, RecordedStep, SessionQuestion
from petalnode.node.verification.tolerances import Calibration, to_json
from petalnode.protocols.ids import Span
from petalnode.protocols.training import PROMPTS, LoraName
from tests.tiny_models import save_tiny

DTYPES = ("float32", "bfloat16", "float16")
QUANTISATIONS = ("none", "int8", "nf4")
DECODED = 10
PROCESSORS = {"avx2": ("avx2", "AVX2"), "sse": ("default", "SSE41")}
"""Per name, what ATen and oneDNN are told."""
RANDOM: dict[str, dict[str, Any]] = {
    "tiny-llama": {"architecture": "llama"},
    "tiny-gpt2": {"architecture": "gpt2"},
    "tiny-gemma3": {"architecture": "gemma3"},
    "tiny-qwen3": {"architecture": "qwen3"},
}
"""Models with random weights: (architecture, fields of its configuration)."""


@dataclass(frozen=True)
class Case:
    """One request: a prompt and what is decoded after it, hidden states [1, tokens, hidden]; gradients in training."""

    prompt: torch.Tensor
    decoded: torch.Tensor
    gradient: torch.Tensor

    @property
    def steps(self) -> tuple[RecordedStep, ...]:
        first = self.prompt.shape[1]
        ones = (RecordedStep(first + index, token) for index, token in enumerate(self.decoded.split(1, dim=1)))
        return (RecordedStep(0, self.prompt), *ones)


def cases(folder: Path, samples: int) -> list[Case]:
    """Requests with real embeddings of tokens, all of one length, so that they can be put in one batch."""
    client = load_client(folder, device="cpu", dtype="float32")
    generator = torch.Generator().manual_seed(0)
    vocabulary = int(client.model.config.get_text_config().vocab_size)
    found = []
    for _ in range(samples):
        length = 40
        ids = torch.randint(3, vocabulary, (1, length + DECODED), generator=generator)
        hidden = client.embed(ids)
        gradient = torch.randn(hidden.shape, generator=generator) * 1e-3
        found.append(Case(hidden[:, :length], hidden[:, length:], gradient))
    return found


# --- the ways in which an honest server may answer


def as_sent(blocks: BlockSpan, every: Sequence[Case]) -> list[torch.Tensor]:
    answers = []
    for case in every:
        cache = blocks.make_cache(1, 64)
        out = [blocks.forward(case.prompt, cache)]
        out += [blocks.decode([(step, cache)])[0] for step in case.decoded.split(1, dim=1)]
        answers.append(torch.cat(out, dim=1))
    return answers


def in_one_batch(blocks: BlockSpan, every: Sequence[Case]) -> list[torch.Tensor]:
    """Eight sessions whose decode steps run together."""
    answers: list[torch.Tensor] = []
    for start in range(0, len(every), 8):
        group = every[start : start + 8]
        caches = [blocks.make_cache(1, 64) for _ in range(8)]
        outs = [[blocks.forward(group[i % len(group)].prompt, cache)] for i, cache in enumerate(caches)]
        for index in range(DECODED):
            steps = [(group[i % len(group)].decoded[:, index : index + 1], cache) for i, cache in enumerate(caches)]
            for out, answer in zip(outs, blocks.decode(steps), strict=True):
                out.append(answer)
        answers += [torch.cat(out, dim=1) for out in outs[: len(group)]]
    return answers


def rows_together(blocks: BlockSpan, every: Sequence[Case]) -> list[torch.Tensor]:
    """One session of as many rows as there are cases."""
    cache = blocks.make_cache(len(every), 64)
    out = [blocks.forward(torch.cat([case.prompt for case in every]), cache)]
    for index in range(DECODED):
        step = torch.cat([case.decoded[:, index : index + 1] for case in every])
        out.append(blocks.decode([(step, cache)])[0])
    return list(torch.cat(out, dim=1).split(1))


def at_once(blocks: BlockSpan, every: Sequence[Case]) -> list[torch.Tensor]:
    """Prompt and answer as one prefill, as after a recovery."""
    return [blocks.forward(torch.cat([case.prompt, case.decoded], dim=1), blocks.make_cache(1, 64)) for case in every]


def one_by_one(blocks: BlockSpan, every: Sequence[Case]) -> list[torch.Tensor]:
    answers = []
    for case in every:
        cache = blocks.make_cache(1, 64)
        tokens = torch.cat([case.prompt, case.decoded], dim=1).split(1, dim=1)
        answers.append(torch.cat([blocks.decode([(token, cache)])[0] for token in tokens], dim=1))
    return answers


def in_chunks(blocks: BlockSpan, every: Sequence[Case]) -> list[torch.Tensor]:
    answers = []
    for case in every:
        cache = blocks.make_cache(1, 64)
        pieces = torch.cat([case.prompt, case.decoded], dim=1).split(7, dim=1)
        answers.append(torch.cat([blocks.forward(piece, cache) for piece in pieces], dim=1))
    return answers


def gradients(blocks: BlockSpan, every: Sequence[Case]) -> list[torch.Tensor]:
    passes = SpanPasses(blocks, 1 << 40)
    return [run_through(passes.backward(_batch(blocks.span, case), case.gradient)).hidden for case in every]


def gradients_together(blocks: BlockSpan, every: Sequence[Case]) -> list[torch.Tensor]:
    hidden = torch.cat([_batch(blocks.span, case).hidden for case in every])
    together = Batch(blocks.span, hidden)
    found = run_through(SpanPasses(blocks, 1 << 40).backward(together, torch.cat([case.gradient for case in every])))
    return list(found.hidden.split(1))


def _batch(span: Span, case: Case) -> Batch:
    return Batch(span, torch.cat([case.prompt, case.decoded], dim=1))


def kept_tensors(client: ClientModel) -> dict[str, torch.Tensor]:
    """What a fine-tuning lets servers keep, deep prompts and low-rank changes at once."""
    random = Random(3)  # of which both are some way off zero
    kinds: tuple[Kind, ...] = ("deep-prompt", "lora")
    found = [draw_kept_tensors(kind, client.linears, client.hidden_size, random, 16) for kind in kinds]
    return {name: tensor for tensors in found for name, tensor in tensors.items()}


def kept_gradients(
    blocks: BlockSpan, every: Sequence[Case], kept: Mapping[str, torch.Tensor]
) -> list[dict[str, torch.Tensor]]:
    """Of each case, the gradients of what is kept, by its name."""
    passes = SpanPasses(blocks, 1 << 40)
    answers = []
    for case in every:
        found = run_through(passes.backward(_batch_with(blocks.span, case, kept), case.gradient))
        answers.append({name: gradient_of(found, name) for name in kept})
    return answers


def _batch_with(span: Span, case: Case, kept: Mapping[str, torch.Tensor]) -> Batch:
    lora = {parsed: tensor for name, tensor in kept.items() if (parsed := LoraName.parse(name)) is not None}
    return replace(_batch(span, case), prompts=kept[PROMPTS], lora=lora)


FORWARD = {
    "as sent": as_sent,
    "decode steps of 8 sessions": in_one_batch,
    "rows together": rows_together,
    "all at once": at_once,
    "token by token": one_by_one,
    "chunks of 7": in_chunks,
}
BACKWARD = {"alone": gradients, "rows together": gradients_together}
KEPT = "kept tensors"
"""The way of the gradients of deep prompts and low-rank changes."""


def answers(folder: Path, dtype: str, quantisation: str, device: str, every: Sequence[Case]) -> Iterator[Any]:
    """(direction, way, answers) of one server in this process."""
    span = Span(0, _blocks(folder))
    blocks = load_span(folder, span, device=device, dtype=dtype, quantisation=quantisation)
    kept = kept_tensors(load_client(folder, device="cpu", dtype="float32"))
    for direction, ways in (("forward", FORWARD), ("backward", BACKWARD)):
        for way, answer in ways.items():
            yield direction, way, [tensor.float().cpu() for tensor in answer(blocks, every)]
    yield "backward", KEPT, kept_gradients(blocks, every, kept)
    torch.set_num_threads(2)
    for direction, ways in (("forward", {"as sent": as_sent}), ("backward", {"alone": gradients})):
        for way, answer in ways.items():
            yield direction, f"{way}, 2 threads", [tensor.float().cpu() for tensor in answer(blocks, every)]
    yield "backward", f"{KEPT}, 2 threads", kept_gradients(blocks, every, kept)
    torch.set_num_threads(1)
    if quantisation != "none":
        for module in (module for block in blocks.stack.blocks for module in block.modules()):
            for value in vars(module).values():
                if isinstance(value, QuantisedMatrix):
                    value.product = value.product_in_pieces  # type: ignore[method-assign]
        yield "forward", "other products", [tensor.float().cpu() for tensor in as_sent(blocks, every)]
    if device == "cpu" and dtype == "float32" and library() is not None:
        native = load_span(folder, span, device=device, dtype=dtype, quantisation=quantisation, kernels="native")
        for way, answer in FORWARD.items():
            yield "forward", f"compiled kernels, {way}", [tensor.float().cpu() for tensor in answer(native, every)]
        given = gradients(native, every)
        yield "backward", "compiled kernels", [tensor.float().cpu() for tensor in given]
    config = blocks.stack._decoder.config
    if config._attn_implementation == "sdpa":
        config._attn_implementation = blocks.stack._implementation = "eager"
        yield "forward", "eager attention", [tensor.float().cpu() for tensor in at_once(blocks, every)]


def _blocks(folder: Path) -> int:
    from petalnode.node.models import num_blocks

    return num_blocks(json.loads((folder / "config.json").read_text()))


def worker(folder: Path, dtype: str, quantisation: str, samples: int, output: Path) -> None:
    """What another kind of processor answers: in a process that was told to be one."""
    found = {}
    for direction, way, given in answers(folder, dtype, quantisation, "cpu", cases(folder, samples)):
        for index, value in enumerate(given):
            if way in ("as sent", "alone"):
                found[f"{direction}/{index}"] = value.contiguous()
            if way == KEPT:
                found.update({f"{KEPT}/{index}/{name}": tensor.contiguous() for name, tensor in value.items()})
    save_file(found, output)


def as_processor(name: str) -> dict[str, str]:
    """The environment in which a process that starts computes as on such a processor."""
    aten, onednn = PROCESSORS[name]
    return {"ATEN_CPU_CAPABILITY": aten, "ONEDNN_MAX_CPU_ISA": onednn}


def on_processor(name: str, folder: Path, dtype: str, quantisation: str, samples: int) -> dict[str, torch.Tensor]:
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / "answers.safetensors"
        command = [sys.executable, __file__, "--worker", str(folder), dtype, quantisation, str(samples), str(output)]
        env = os.environ | as_processor(name) | {"OMP_NUM_THREADS": "1"}
        env["PETALNODE_CACHE"] = scratch  # its quantised blocks may be laid out otherwise
        subprocess.run(command, env=env, check=True)
        return load_file(output)


def measure(
    name: str, folder: Path, dtype: str, quantisation: str, device: str, samples: int
) -> Iterator[dict[str, Any]]:
    """Per direction and way, the distances from the truth, and the share on the way to coarser weights."""
    every = cases(folder, samples)
    span = Span(0, _blocks(folder))
    questions: list[Any] = [SessionQuestion(span, case.steps) for case in every]
    questions += [replace(_batch(span, case), gradient=case.gradient) for case in every]
    kept = kept_tensors(load_client(folder, device="cpu", dtype="float32"))
    questions += [replace(_batch_with(span, case, kept), gradient=case.gradient) for case in every]
    truths: dict[str, dict[str, list[torch.Tensor]]] = {}
    for held in (quantisation, *COARSER.get(quantisation, ())):
        found = Recomputation(folder, dtype, held).answer(questions)
        truths[held] = {
            "forward": [torch.cat(result.outputs, dim=1) for result in found[:samples]],  # type: ignore[union-attr]
            "backward": [result.gradients.hidden for result in found[samples : 2 * samples]],  # type: ignore[union-attr]
            KEPT: [{name: gradient_of(result.gradients, name) for name in kept} for result in found[2 * samples :]],
        }
    own = truths.pop(quantisation)

    def compared(direction: str, way: str, given: Sequence[torch.Tensor]) -> dict[str, Any]:
        shares = {}
        if way.startswith(KEPT):
            far = [
                error
                for claimed, truth in zip(given, own[KEPT], strict=True)
                for error in kept_distances(claimed, truth).values()
            ]
        else:
            pairs = list(zip(given, own[direction], strict=True))
            far = [distance(claimed, truth) for claimed, truth in pairs]
            shares = {
                other: max(share_of(*pair, third).share for pair, third in zip(pairs, wanted[direction], strict=True))
                for other, wanted in truths.items()
            }
        return {
            "model": name,
            "dtype": dtype,
            "quantisation": quantisation,
            "device": device,
            "direction": direction,
            "way": way,
            "blocks": len(span),
            "worst": max(error.worst for error in far),
            "mean": max(error.mean for error in far),
            "samples": len(given),
            "largest_share": shares,
        }

    for direction, way, given in answers(folder, dtype, quantisation, device, every):
        yield compared(direction, way, given)
    for other, held in truths.items():  # what a cheat with these weights looks like
        for direction in ("forward", "backward"):
            yield compared(direction, f"FALSE: {other} weights", held[direction])
    if device == "cpu":
        for processor in PROCESSORS:
            there = on_processor(processor, folder, dtype, quantisation, samples)
            for direction in ("forward", "backward"):
                yield compared(direction, processor, [there[f"{direction}/{index}"] for index in range(samples)])
            gradients_there = [{name: there[f"{KEPT}/{index}/{name}"] for name in kept} for index in range(samples)]
            yield compared("backward", f"{KEPT}, {processor}", gradients_there)


def rows_of(measured: Sequence[Mapping[str, Any]], command: str) -> list[Calibration]:
    """The table: of each kind the worst of all ways and models."""
    rows = []
    kinds = dict.fromkeys(
        (figures["dtype"], figures["quantisation"], figures["device"], figures["direction"]) for figures in measured
    )
    for kind in kinds:
        own = [
            figures
            for figures in measured
            if (figures["dtype"], figures["quantisation"], figures["device"], figures["direction"]) == kind
            and not figures["way"].startswith("FALSE")
        ]
        dtype, quantisation, device, direction = kind
        widest = max(own, key=lambda figures: figures["worst"])
        rows.append(
            Calibration(
                dtype=dtype,
                quantisation=quantisation,
                server_device=device,
                own_device="cpu",
                direction=direction,
                blocks=widest["blocks"],
                worst=float(f"{widest['worst']:.2g}"),
                mean=float(f"{max(figures['mean'] for figures in own):.2g}"),
                samples=sum(figures["samples"] for figures in own),
                source=command,
            )
        )
    return rows


def merged(before: Sequence[Calibration], rows: Sequence[Calibration]) -> list[Calibration]:
    """Per kind the wider of two rows."""
    table = {_kind(row): row for row in before}
    for row in rows:
        old = table.get(_kind(row))
        if old is None:
            table[_kind(row)] = row
            continue
        widest = max(old, row, key=lambda tolerance: tolerance.worst)
        mean, samples = max(old.mean, row.mean), old.samples + row.samples
        table[_kind(row)] = replace(widest, mean=mean, samples=samples)
    return sorted(table.values(), key=_kind)


def _kind(row: Calibration) -> tuple[str, ...]:
    return (row.dtype, row.quantisation, row.server_device, row.own_device, row.direction)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--write", type=Path, help="where to keep the table")
    parser.add_argument("--add", action="store_true", help="add to the table that is there: the wider one counts")
    parser.add_argument("--samples", type=int, default=6)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--models", nargs="*", default=["smollm2", *RANDOM])
    parser.add_argument("--dtypes", nargs="*", default=list(DTYPES))
    parser.add_argument("--quantisations", nargs="*", default=list(QUANTISATIONS), help="and `none/activations=int8`")
    parser.add_argument("--worker", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    quiet_torch()
    if options.worker:
        folder, dtype, quantisation, samples, output = options.worker
        worker(Path(folder), dtype, quantisation, int(samples), Path(output))
        return
    measured = []
    with tempfile.TemporaryDirectory(prefix="petalnode-bench-") as scratch:
        for name in options.models:
            if name in RANDOM:
                fields = dict(RANDOM[name])
                spread = Path(scratch) / name
                folder = save_tiny(fields.pop("architecture"), spread, **fields)
            else:
                folder = resolve(name, need="all").path
            for dtype in options.dtypes:
                for quantisation in options.quantisations:
                    print(f"{name} in {dtype}, {quantisation} ...", file=sys.stderr)
                    try:
                        measured += measure(name, folder, dtype, quantisation, options.device, options.samples)
                    except RuntimeError as error:
                        print(f"left out: {error}", file=sys.stderr)
    rows = rows_of(measured, "python benchmarks/calibration.py")
    if options.write:
        # Models and kinds that were not measured this time keep what was found before; nothing becomes narrower.
        before = [Calibration(**row) for row in json.loads(options.write.read_text())] if options.add else []
        options.write.write_text(to_json(merged(before, rows)))
    if options.json:
        print(json.dumps({"calibration": {"rows": [vars(row) for row in rows], "measured": measured}}))
    else:
        show(measured, rows)


def show(measured: Sequence[Mapping[str, Any]], rows: Sequence[Calibration]) -> None:
    console = Console(width=140)
    table = Table(title="honest servers against the truth, and coarser weights (FALSE)")
    for column in ("model", "dtype", "weights", "direction", "way", "mean", "worst token", "share of coarser weights"):
        table.add_column(column)
    for figures in measured:
        shares = ", ".join(f"{name} {share:.2f}" for name, share in figures["largest_share"].items())
        table.add_row(
            *(str(figures[name]) for name in ("model", "dtype", "quantisation", "direction", "way")),
            f"{figures['mean']:.1e}",
            f"{figures['worst']:.1e}",
            shares,
        )
    console.print(table)
    for row in rows:
        console.print(row)


if __name__ == "__main__":
    main()
