"""How often `petalnode validate` catches servers that compute something else, and whether it ever blames an honest one.

    python benchmarks/detection.py [--json] [--model tiny] [--probes 40] [--honest 10000]

Servers are real processes. The faulty ones are those of the tests (tests/swarm/false_blocks.py); honest ones compute in
float32 and bfloat16, with int8 and nf4 weights, with one and two threads, on this processor and on older ones (this one
with its newer instructions switched off, as in calibration.py), for batches of one and eight.

A probe is one conversation: a prompt of 24 tokens and four decode steps, so five requests. To be quick many of them
share a session, a row each, and are judged row by row; the others are sessions of one row, eight at a time. With
`--model tiny` (random weights, 6 blocks) a probe takes milliseconds; any other model will do, in its time. `--honest`
counts probes of honest servers, all kinds together.

Per fault: the share of probes called faulty, and the share of groups of n probes in which at least one was, beside the
theory 1-(1-pf)^n: f is the share of probes that were answered wrongly, p the chance that a wrong one is recognised.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import torch
import trio
from calibration import PROCESSORS, as_processor
from plain import quiet_torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from petalnode.crypto.identity import Identity
from petalnode.node.blocks.client_part import load_client
from petalnode.node.client.api.remote import SpanTensors
from petalnode.node.client.batch.batch_stream import BatchSpec, micro_batch
from petalnode.node.client.chat import Text
from petalnode.node.client.chunks import to_chunks
from petalnode.node.client.core import SwarmClient, open_client
from petalnode.node.client.request import WireTensor
from petalnode.node.client.session.stream import SessionSpec
from petalnode.node.client.swarm_model import identify_model
from petalnode.node.errors import ModelError
from petalnode.node.models import ModelFolder, resolve
from petalnode.node.swarm.config import SwarmConfig
from petalnode.node.swarm.swarm import open_swarm
from petalnode.node.trust.receipt_log import KEPT_RECEIPTS, ReceiptArchive
from petalnode.node.validator.probe_inputs import ProbeModel, draw_kept_tensors
from petalnode.node.validator.probe_plan import Kind
from petalnode.node.verification.observed import Observed, observed_batch, observed_session
from petalnode.node.verification.recomputation import Question, SessionQuestion
from petalnode.node.verification.tolerances import calibrations
from petalnode.node.verification.verdicts import Compared, Judge, Verdict
from petalnode.protocols.ids import Span
from petalnode.protocols.tensors import dtype_name, encode
from petalnode.protocols.training import BACKWARD
from tests.swarm.faulty_server import order
from tests.tiny_models import save_tiny

ROOT = Path(__file__).parents[1]
PROMPT, DECODED = 24, 4
PIECES = PROMPT * 64 // 256 + DECODED
"""In which a server computes a probe in a session of 64 rows: it takes 256 tokens of a prompt at a time."""
GROUPS = (1, 2, 5, 10, 20)
ROWS = 64
OTHERS = 40
"""Probes of an honest server that are not in sessions of this number of rows."""
FAULTS: tuple[tuple[str, str, float, float], ...] = (
    # name, what the server does, amount, share of probes that it answers wrongly
    ("noise 0.5 %", "noise", 0.005, 1.0),
    ("noise 2 %", "noise", 0.02, 1.0),
    ("noise 10 %", "noise", 0.1, 1.0),
    ("wrong layer", "wrong", 0.0, 1.0),
    ("skipped layer", "skipped", 0.0, 1.0),
    ("int8 weights", "int8", 0.0, 1.0),
    ("nf4 weights", "nf4", 0.0, 1.0),
    ("stale cache", "stale", 0.0, 1.0),
    ("replayed output", "replayed", 0.0, 1.0),
    ("another prompt's output", "another", 0.0, 1.0),
    ("wrong once in 10", "sometimes", 0.1, 1 - 0.9**PIECES),
    ("wrong once in 100", "sometimes", 0.01, 1 - 0.99**PIECES),
    ("honest to unknown keys", "known", 0.0, 0.0),
)


KEPT: tuple[tuple[Kind, str], ...] = (("deep-prompt", "prompts"), ("lora", "lora"))
"""Trainings in which servers keep something, and what a server does that is wrong in its gradients only."""


@dataclass(frozen=True)
class Server:
    """One server process for the whole model; `control` says what it does, if it is one of the faulty kind."""

    address: str
    control: Path


@contextmanager
def server(
    folder: Path, scratch: Path, *options: str, threads: int = 1, processor: str | None = None
) -> Iterator[Server]:
    home = Path(tempfile.mkdtemp(dir=scratch))
    control = home / "control.json"
    command = [sys.executable, "-m", "tests.swarm.false_blocks", str(control), "serve", str(folder), "--new-swarm"]
    command += ["--json", "--until-eof", "--listen", "/ip4/127.0.0.1/tcp/0", "--identity", str(home / "key")]
    command += ["--no-mdns", "--no-remember", "--cache-tokens", "200000", *options]
    env = os.environ | {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive", "MKL_NUM_THREADS": str(threads)}
    if processor is not None:  # its quantised blocks may be laid out otherwise
        env |= as_processor(processor) | {"PETALNODE_CACHE": str(home / "cache")}
    with (home / "log").open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=env, cwd=ROOT
        )
    assert process.stdin is not None and process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"a server ended: {(home / 'log').read_text()[-2000:]}")
        yield Server(json.loads(line)["addrs"][0], control)
    finally:
        process.stdin.close()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@dataclass
class Prober:
    """Makes probes of one server, from one host, and judges them."""

    folder: ModelFolder
    model: Any
    judge: Judge
    random: Random

    @asynccontextmanager
    async def client(self, address: str, identity: Identity | None = None) -> AsyncIterator[SwarmClient]:
        config = SwarmConfig(identity=identity or Identity.generate(), peers=(address,), serve_dht=False)
        async with open_swarm(config) as swarm:
            model = await identify_model(swarm, self.folder)
            if self.model is None:
                try:
                    text = Text(self.folder)
                except ModelError:
                    text = None
                self.model = ProbeModel(model, load_client(self.folder.path, device="cpu"), text)
            async with open_client(swarm, model) as client:
                client.state.receipts = ReceiptArchive(shared_bytes=KEPT_RECEIPTS.shared_bytes)
                yield client

    async def session(self, client: SwarmClient, rows: int) -> None:
        """`rows` conversations in one session."""
        local = self.model.local
        hidden = local.embed(self.model.rows(self.random, rows, PROMPT + DECODED))
        spec = SessionSpec(
            model_version=b"",
            span=Span(0, local.num_blocks),
            batch=rows,
            max_length=PROMPT + DECODED,
            dtype=dtype_name(local.dtype),
        )
        async with client.session(spec) as session:
            for part in (hidden[:, :PROMPT], *hidden[:, PROMPT:].split(1, dim=1)):
                await session.step(to_chunks(part, "none", session.max_step_tokens))

    async def batch(self, client: SwarmClient, rows: int, kind: Kind = "training") -> None:
        """The backward pass of `rows` texts, with what a training of that kind lets servers keep."""
        local = self.model.local
        hidden = local.embed(self.model.rows(self.random, rows, PROMPT))
        generator = torch.Generator().manual_seed(self.random.getrandbits(31))
        gradient = torch.randn(hidden.shape, generator=generator).to(hidden.dtype) * 1e-3
        (hop,) = await client.route(SessionSpec(b"", Span(0, local.num_blocks), 1, PROMPT))
        works = BatchSpec(client.model.version, "none", dtype_name(hidden.dtype))
        tensors = draw_kept_tensors(kind, local.linears, local.hidden_size, self.random, PROMPT)
        kept = SpanTensors(hop.span, tensors)(hop.span, slice(0, 0))
        task = micro_batch([WireTensor(*encode(hidden, "none")), WireTensor(*encode(gradient, "none"))], kept)
        await client.batches.run(BACKWARD, hop, works, task, None)

    def verdicts(self, client: SwarmClient, *, together: bool) -> list[Verdict]:
        """A verdict for each row of what the client has seen; with `together` all rows are recomputed in one batch."""
        seen = [probe for log in client.receipts.sessions if (probe := observed_session(log)) is not None]
        seen += [observed_batch(work) for work in client.receipts.batches]
        if not together:
            seen = [row for probe in seen for row in rows_of(probe)]
        compared = self.judge.compare(seen)
        if together:
            compared = [row for one in compared for row in compared_rows(one)]
        return [self.judge.verdict(one) for one in compared]


def compared_rows(compared: Compared) -> list[Compared]:
    """Every row as an observation of its own, with the whole question and without kept tensors."""
    return [
        Compared(
            replace(compared.observed, claimed=tuple(answer[row : row + 1] for answer in compared.observed.claimed)),
            compared.recomputed[row : row + 1],
            {name: other[row : row + 1] for name, other in compared.others.items()},
            tolerance=compared.tolerance,
            perturbed=compared.perturbed and tuple(answer[row : row + 1] for answer in compared.perturbed),
        )
        for row in range(len(compared.recomputed))
    ]


def rows_of(observed: Observed) -> list[Observed]:
    """Each row as a question of its own."""
    found = []
    for row in range(observed.claimed[0].shape[0]):
        rows = slice(row, row + 1)
        question: Question
        if isinstance(observed.question, SessionQuestion):
            steps = tuple(replace(step, hidden=step.hidden[rows]) for step in observed.question.steps)
            question = replace(observed.question, steps=steps)
        else:
            batch = observed.question
            if observed.kept:  # its gradients are sums over the rows
                return [observed]
            gradient = None if batch.gradient is None else batch.gradient[rows]
            question = replace(batch, hidden=batch.hidden[rows], gradient=gradient)
        found.append(replace(observed, question=question, claimed=tuple(tensor[rows] for tensor in observed.claimed)))
    return found


def summary(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    called = [verdict.verdict == "faulty" for verdict in verdicts]
    return {
        "probes": len(called),
        "faulty": sum(called) / len(called),
        "inconclusive": sum(verdict.verdict == "inconclusive" for verdict in verdicts) / len(called),
        "error": statistics.median(verdict.error or 0.0 for verdict in verdicts),
        "called": called,
    }


def grouped(called: Sequence[bool], size: int) -> float | None:
    """The share of groups of `size` probes with at least one that was called faulty; None without a group."""
    groups = [called[start : start + size] for start in range(0, len(called) - size + 1, size)]
    return sum(any(group) for group in groups) / len(groups) if groups else None


async def caught(prober: Prober, dtype: str, found: Server, probes: int) -> list[dict[str, Any]]:
    """Every fault of one server that says it computes in `dtype`."""
    results = []
    for name, blocks, amount, share in FAULTS:
        print(f"{dtype}: {name} ...", file=sys.stderr)
        order(found.control, blocks=blocks, amount=amount)
        verdicts: list[Verdict] = []
        count = 8 * probes if "once" in name else probes
        if blocks == "known":
            for _ in range(min(probes, 12)):
                async with prober.client(found.address) as client:  # a stranger each time
                    await prober.session(client, 1)
                    verdicts += await trio.to_thread.run_sync(lambda: prober.verdicts(client, together=False))
        else:
            while len(verdicts) < count:
                async with prober.client(found.address) as client:
                    await prober.session(client, min(ROWS, count - len(verdicts)))
                    verdicts += await trio.to_thread.run_sync(lambda: prober.verdicts(client, together=True))
        results.append({"declared": dtype, "fault": name, "share_wrong": share, **summary(verdicts)})
        if blocks == "known":
            # The same server, and receipts of a client that it has met before.
            async with prober.client(found.address) as client:
                await prober.session(client, 1)
                client.state.receipts = ReceiptArchive(shared_bytes=KEPT_RECEIPTS.shared_bytes)
                for _ in range(min(probes, 12)):
                    await prober.session(client, 1)
                verdicts = await trio.to_thread.run_sync(lambda: prober.verdicts(client, together=False))
            audited = {"declared": dtype, "fault": f"{name}, by a client's receipts", "share_wrong": 1.0}
            results.append({**audited, **summary(verdicts)})
    print(f"{dtype}: gradients ...", file=sys.stderr)
    order(found.control, blocks="gradients")
    async with prober.client(found.address) as client:
        await prober.batch(client, min(ROWS, probes))
        verdicts = await trio.to_thread.run_sync(lambda: prober.verdicts(client, together=True))
    results.append({"declared": dtype, "fault": "wrong gradients only", "share_wrong": 1.0, **summary(verdicts)})
    for kind, blocks in KEPT:
        order(found.control, blocks=blocks)
        verdicts = []
        while len(verdicts) < probes:
            async with prober.client(found.address) as client:
                for _ in range(min(KEPT_RECEIPTS.last_batches, probes - len(verdicts))):
                    await prober.batch(client, 1, kind)
                verdicts += await trio.to_thread.run_sync(lambda: prober.verdicts(client, together=False))
        name = (
            "wrong gradients of deep prompts only" if kind == "deep-prompt" else "gradients of LoRA a tenth too large"
        )
        results.append({"declared": dtype, "fault": name, "share_wrong": 1.0, **summary(verdicts)})
    order(found.control)
    return results


async def honest(prober: Prober, found: Server, probes: int) -> list[tuple[str, list[Verdict]]]:
    """Probes of an honest server: (how, verdicts)."""
    results: list[tuple[str, list[Verdict]]] = []
    async with prober.client(found.address) as client:
        async with trio.open_nursery() as nursery:
            for _ in range(8):  # sessions of one row, whose decode steps run together as they happen to meet
                nursery.start_soon(prober.session, client, 1)
        results.append(("batch 1", await trio.to_thread.run_sync(lambda: prober.verdicts(client, together=False))))
    async with prober.client(found.address) as client:
        await prober.session(client, 8)
        results.append(("batch 8", await trio.to_thread.run_sync(lambda: prober.verdicts(client, together=False))))
    async with prober.client(found.address) as client:
        await prober.batch(client, 8)
        results.append(("gradients", await trio.to_thread.run_sync(lambda: prober.verdicts(client, together=False))))
    async with prober.client(found.address) as client:
        for kind, _ in KEPT:
            for _ in range(8):
                await prober.batch(client, 2, kind)
        results.append(("kept", await trio.to_thread.run_sync(lambda: prober.verdicts(client, together=False))))
    done: list[Verdict] = []
    while len(done) + OTHERS < probes:
        async with prober.client(found.address) as client:
            for _ in range(min(8, -(-(probes - OTHERS - len(done)) // ROWS))):
                await prober.session(client, ROWS)
            done += await trio.to_thread.run_sync(lambda: prober.verdicts(client, together=True))
    results.append((f"batch {ROWS}", done))
    return results


HONEST = tuple(product(("float32", "bfloat16"), ("none", "int8", "nf4")))
MACHINES: tuple[tuple[int, str | None], ...] = ((1, None), (2, None), *((1, name) for name in PROCESSORS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.add_argument("--model", default="tiny", help="tiny (random weights), or a model as for petalnode serve")
    parser.add_argument("--probes", type=int, default=40, help="of each fault")
    parser.add_argument("--honest", type=int, default=10_000, help="probes of honest servers")
    options = parser.parse_args()
    quiet_torch()
    with tempfile.TemporaryDirectory(prefix="petalnode-bench-") as name:
        scratch = Path(name)
        os.environ.setdefault("PETALNODE_CACHE", str(scratch / "cache"))
        tiny = options.model == "tiny"
        folder = resolve(str(save_tiny("llama", scratch / "tiny-llama")) if tiny else options.model, need="all")
        prober = Prober(folder, None, Judge(folder.path), Random(0))
        faults: list[dict[str, Any]] = []
        if options.probes:
            for dtype in ("float32", "bfloat16"):
                with server(folder.path, scratch, "--dtype", dtype) as found:
                    faults += trio.run(caught, prober, dtype, found, options.probes)
        harmless: list[dict[str, Any]] = []
        if options.honest:
            for dtype, quantisation in HONEST:
                for threads, processor in MACHINES:
                    machine = {"threads": threads, "processor": processor or "this one"}
                    print(f"honest: {dtype}, {quantisation} weights, {machine} ...", file=sys.stderr)
                    kind = ("--dtype", dtype, "--quant", quantisation)
                    with server(folder.path, scratch, *kind, threads=threads, processor=processor) as found:
                        count = options.honest // (len(MACHINES) * len(HONEST))
                        results = trio.run(honest, prober, found, count)
                    for how, verdicts in results:
                        if verdicts:
                            entry = {"dtype": dtype, "quantisation": quantisation, **machine, "how": how}
                            harmless.append({**entry, **summary(verdicts)})
    report(options, faults, harmless)


def report(options: argparse.Namespace, faults: list[dict[str, Any]], harmless: list[dict[str, Any]]) -> None:
    sensitivity = {fault["declared"]: fault["faulty"] for fault in faults if fault["fault"] == "noise 10 %"}
    for fault in faults:
        called = fault.pop("called")
        p = sensitivity[fault["declared"]] if "once" in fault["fault"] else fault["faulty"]
        f = fault["share_wrong"]
        fault["after"] = {
            n: {"measured": grouped(called, n), "theory": 1 - (1 - p * f) ** n}
            for n in GROUPS
            if grouped(called, n) is not None
        }
    for server in harmless:
        del server["called"]
    total = sum(server["probes"] for server in harmless)
    wrong = round(sum(server["probes"] * server["faulty"] for server in harmless))
    found = {
        "model": options.model,
        "faults": faults,
        "honest": harmless,
        "honest_probes": total,
        "honest_called_faulty": wrong,
        "calibration": [vars(row) for row in calibrations()],
    }
    if options.json:
        print(json.dumps({"detection": found}))
        return
    console = Console(width=150)
    table = Table(title="faulty servers: share of probes called faulty, and of groups of n with one (theory)")
    for column in ("declared", "fault", "probes", "error", "faulty", "inconclusive", *(f"n={n}" for n in GROUPS)):
        table.add_column(column, justify="right")
    for fault in faults:
        after = fault["after"]
        cells = [f"{after[n]['measured']:.2f} ({after[n]['theory']:.2f})" if n in after else "" for n in GROUPS]
        shares = (f"{fault['faulty']:.3f}", f"{fault['inconclusive']:.3f}")
        table.add_row(fault["declared"], fault["fault"], str(fault["probes"]), f"{fault['error']:.1e}", *shares, *cells)
    console.print(table)
    table = Table(title=f"honest servers: {wrong} of {total} probes called faulty")
    for column in ("dtype", "weights", "threads", "processor", "how", "probes", "error", "faulty", "inconclusive"):
        table.add_column(column, justify="right")
    for server in harmless:
        machine = (str(server["threads"]), server["processor"])
        kind = (server["dtype"], server["quantisation"], *machine, server["how"], str(server["probes"]))
        table.add_row(*kind, f"{server['error']:.1e}", f"{server['faulty']:.4f}", f"{server['inconclusive']:.4f}")
    console.print(table)
    table = Table(title="calibration: how far honest answers are from the truth")
    for column in ("dtype", "weights", "devices", "direction", "worst token", "mean", "blocks", "samples"):
        table.add_column(column, justify="right")
    for row in calibrations():
        devices = f"{row.server_device}/{row.own_device}"
        errors = (f"{row.worst:.1e}", f"{row.mean:.1e}", str(row.blocks), str(row.samples))
        table.add_row(row.dtype, row.quantisation, devices, row.direction, *errors)
    console.print(table)


if __name__ == "__main__":
    main()
