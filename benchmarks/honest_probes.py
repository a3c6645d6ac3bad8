"""Whether a verdict is ever wrong when everybody around an honest server is hostile, and how many cheats are caught.

    python benchmarks/honest_probes.py [--json] [--probes 10000] [--cheats 500] [--seed 0] [--jobs 1]

A probe is one session at one server, two or three steps, judged by the product's own functions: the client's receipts,
`Judge`, `check_evidence`. Servers hold a block of tiny models with random weights (Llama, and Mixtral with four
experts; all six blocks in a whole server) in float32 and bfloat16, plain, int8 and nf4, and in float32 with keys and
values in bfloat16 and int8, and with activations in int8. They compute on this processor, on older ones (this one with
its newer instructions switched off, as in calibration.py), in float32 half of them by the compiled kernels, others with
products added up in another order, or with subnormal numbers taken for zero. The validator computes on this processor,
by torch.

What the client, or the server before, does is drawn for each probe (`MOVES`): ordinary text, garbage, huge, tiny and
cancelling values, ties between experts, steps that are rolled back. A share of the probes runs through a whole server
on streams in memory, whose neighbours push what is refused, and garbage under a receipt in order. Of some probes a
hostile accuser makes evidence: as it is, changed, or with another server's name on a cheat's.

Beside these, cheats answer wrong (`CHEATS`), half of them on ordinary inputs. Exit code 1 if an honest server was
called faulty, or evidence against one was accepted.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
import trio
from calibration import as_processor
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from petalnode.crypto.identity import Identity, peer_id_to_bytes
from petalnode.node.blocks.kernels.library import ISA_VARIABLE, library
from petalnode.node.blocks.span import load_span
from petalnode.node.models import ModelFolder, compute_manifest
from petalnode.node.models.folder import open_folder
from petalnode.node.models.quantisation import Kernels
from petalnode.node.trust.bundle import Bundle, session_bundle
from petalnode.node.trust.receipt_log import SessionLog
from petalnode.node.verification.evidence_check import check_evidence
from petalnode.node.verification.observed import observed_session
from petalnode.node.verification.verdicts import Judge
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.ids import Span
from petalnode.protocols.inference import receipt_from_wire
from tests.attacks.forger import ATTACKER, altered
from tests.attacks.kernels import OtherKernels, decisive, subnormals_are_zero
from tests.attacks.one_server import OneServer, one_server, pushed
from tests.attacks.test_rejected_push import CLIENT, PUSHES, UPSTREAM
from tests.signing_server import SigningServer, Spoil, honest
from tests.swarm.raw import values
from tests.tiny_models import HIDDEN, NUM_BLOCKS, save_tiny

sys.modules.setdefault("wire_pb2", wire)  # the name by which messages are pickled
SPAN = Span(1, 2)
MODELS = ("llama", "mixtral")
KINDS = [(dtype, quant) for dtype in ("float32", "bfloat16") for quant in ("none", "int8", "nf4")]
KINDS += [("float32", "none/cache=bfloat16"), ("float32", "none/cache=int8")]
KINDS += [("float32", f"{weights}/activations=int8") for weights in ("none", "int8", "nf4")]
PROCESSORS = {"this one": {}, "avx2": {ISA_VARIABLE: "avx2"}, "sse": {ISA_VARIABLE: "plain"}}
"""What the compiled kernels are told, where a server has them; the rest is in calibration.py."""
KERNELS: tuple[Kernels, ...] = ("torch", "native")
WHOLE_SERVER = 0.1
"""Of the probes, those that run through a whole server on streams in memory."""
EVIDENCE = 0.02
"""Of the probes, those of which a hostile accuser makes evidence."""
EVIDENCE_COUNTS = (
    "against honest servers",
    "accepted against honest servers",
    "against cheats",
    "accepted against cheats",
)
AT_ONCE = 16
"""Sessions with a whole server at the same time."""
ROUND = 100
"""Probes that are judged at once: a model is loaded for each round."""
PUSH_TIMEOUT = 60.0

Steps = list[tuple[int, torch.Tensor, Sequence[int]]]


@dataclass(frozen=True)
class Probe:
    """One session. `cheat`: what the server does wrong, "" for nothing."""

    model: str
    move: str
    server: str
    log: Any
    cheat: str = ""


# --- what a hostile client, or the server before, sends


def text(random: Random, tokens: int) -> torch.Tensor:
    return torch.randn(1, tokens, HIDDEN, generator=torch.Generator().manual_seed(random.getrandbits(40)))


def then_decoded(random: Random, prompt: torch.Tensor) -> Steps:
    return [(0, prompt, ()), (prompt.shape[1], text(random, 1), ())]


def one_token(change: Callable[[Random, torch.Tensor], torch.Tensor]) -> Callable[[Random], Steps]:
    def steps(random: Random) -> Steps:
        prompt = text(random, random.randint(3, 10))
        where = random.randrange(prompt.shape[1])
        prompt[:, where] = change(random, prompt[:, where])
        return then_decoded(random, prompt)

    return steps


def rolled_back(random: Random) -> Steps:
    prompt, garbage = text(random, random.randint(3, 8)), 1e3 * text(random, 3)
    length = prompt.shape[1]
    return [(0, prompt, ()), (length, garbage, ()), (length, text(random, 2), ())]


MOVES: dict[str, Callable[[Random], Steps]] = {
    "ordinary": lambda random: then_decoded(random, text(random, random.randint(3, 12))),
    "garbage": lambda random: then_decoded(random, 10 ** random.uniform(1, 4) * text(random, 6)),
    "huge values": one_token(lambda random, token: token * 10 ** random.uniform(4, 37)),
    "tiny values": lambda random: then_decoded(random, 10 ** random.uniform(-44, -30) * text(random, 4)),
    "one tiny token": one_token(lambda random, token: token * 10 ** random.uniform(-44, -3)),
    "cancelling values": one_token(lambda random, token: token + 10 ** random.uniform(2, 8)),
    "rolled back": rolled_back,
}


# --- servers, as they compute on one processor


def noise(output: torch.Tensor) -> torch.Tensor:
    drawn = torch.randn(output.shape, generator=torch.Generator().manual_seed(7))
    return output + 0.25 * drawn * output.norm(dim=-1, keepdim=True) / drawn.norm(dim=-1, keepdim=True)


CHEATS: dict[str, Spoil] = {
    "noise of a quarter": noise,
    "nothing": torch.zeros_like,
    "values turned around": lambda output: output.flip(-1),
    "other weights": honest,
    "nf4 weights": honest,
    "a cache of eight bits": honest,
    "activations of eight bits": honest,
}
INSTEAD = {
    "nf4 weights": "nf4",
    "a cache of eight bits": "none/cache=int8",
    "activations of eight bits": "none/activations=int8",
}
"""What a cheat computes with, whatever it announces."""


class Servers:
    """Honest servers and cheats of one model."""

    def __init__(self, folder: Path, others: Path) -> None:
        self._folder = folder
        self._others = others
        self._version = compute_manifest(open_folder(folder, "tiny")).version
        self._known: dict[tuple[str, str, str, Kernels], SigningServer] = {}
        self._ties: list[torch.Tensor] = []

    def get(self, dtype: str, quant: str, cheat: str = "", kernels: Kernels = "torch") -> SigningServer:
        held = cheat if cheat in ("other weights", *INSTEAD) else ""
        server = self._known.get((dtype, quant, held, kernels))
        if server is None:
            folder = self._others if held == "other weights" else self._folder
            own = INSTEAD.get(held, quant)
            server = SigningServer(folder, self._version, SPAN, dtype=dtype, quant=own, kernels=kernels)
            server.quant = quant  # what it signs
            self._known[dtype, quant, held, kernels] = server
        return server

    def tie(self, random: Random) -> torch.Tensor:
        """A token of which a rounding decides which experts it gets."""
        while len(self._ties) < 4:
            try:
                self._ties.append(decisive(self.get("float32", "none").blocks, text(random, 1), text(random, 1)))
            except ValueError:
                continue
        return random.choice(self._ties)


def other_ways(random: Random, name: str, kind: Kernels) -> tuple[str, Callable[[], AbstractContextManager[Any]]]:
    if kind == "native":
        return f"{name}, compiled kernels", nullcontext
    if name != "this one":
        return name, nullcontext
    ways = (("this one", nullcontext), ("other sums", OtherKernels), ("no subnormals", subnormals_are_zero))
    return random.choice(ways)


def probes_of(
    processor: str, model: str, folders: dict[str, Path], count: int, cheats: int, random: Random
) -> Iterator[Probe]:
    servers = Servers(folders[model], folders[f"other {model}"])
    for number in range(count + cheats):
        cheat = "" if number < count else list(CHEATS)[number % len(CHEATS)]
        dtype, quant = KINDS[number // (len(CHEATS) if cheat else 1) % len(KINDS)]
        announces_more = dtype == "float32" and quant in ("none", "none/cache=bfloat16")
        if INSTEAD.get(cheat) == quant or (cheat.endswith("of eight bits") and not announces_more):
            cheat = "nothing"
        kernels = random.choice(KERNELS) if dtype == "float32" and library() is not None else "torch"
        moves = [*MOVES, *(["tie"] if model == "mixtral" else [])]
        move = random.choice(moves) if not cheat or random.random() < 0.5 else "ordinary"
        steps = then_decoded(random, servers.tie(random)) if move == "tie" else MOVES[move](random)
        way, within = other_ways(random, processor, kernels)
        server = servers.get(dtype, quant, cheat, kernels)
        with within():
            log = server.session(steps, spoil=CHEATS[cheat] if cheat else honest)
        yield Probe(model, move, f"{dtype} {quant} {way}", log, cheat)


# --- a whole server and its neighbours


async def through_a_server(server: OneServer, random: Random) -> tuple[str, SessionLog]:
    """A session in which somebody pushes; every receipt that the client gets is in the log."""
    session = server.session(CLIENT)
    granted = await session.open(upstream=peer_id_to_bytes(UPSTREAM.peer_id))
    log = SessionLog("server", keeps_tensors=True)
    log.begin(session.terms, granted.granted)

    async def answered(step: wire.Step, payload: bytes) -> None:
        frame, (answer,) = await session.receive()
        tokens = len(payload) // (4 * HIDDEN)
        tensor = wire.Tensor(shape=[1, tokens, HIDDEN], dtype="float32", codec="none", nbytes=len(payload))
        log.asked(step, tensor, payload)
        log.answered(step.sequence, receipt_from_wire(frame.reply.receipt), answer)

    async def relay(sequence: int, position: int, payload: bytes) -> None:
        await session.send_step(sequence, position, payload)
        await answered(wire.Step(sequence=sequence, position=position, route_epoch=1), payload)

    await relay(1, 0, values(3, seed=random.getrandbits(30)))
    kind = random.choice([*PUSHES, "garbage under a receipt in order"])
    sequence, position = 2, 3
    if kind in PUSHES:
        pusher, frame = PUSHES[kind](session)
        stream = server.pusher(pusher)
        await stream.send(frame, [values(3, seed=9)], timeout=PUSH_TIMEOUT)
        refused, _ = await stream.receive(timeout=PUSH_TIMEOUT)
        assert refused.HasField("error"), kind
    else:
        garbage = (10 ** random.uniform(0, 12) * text(random, 2)).numpy().tobytes()
        position = random.choice((0, 3))
        frame = pushed(session, CLIENT, UPSTREAM, sequence, position, garbage)
        await server.pusher(UPSTREAM).send(frame, [garbage], timeout=PUSH_TIMEOUT)
        await answered(frame.push.step, garbage)
        sequence, position = 3, random.choice((position, position + 2))
    await relay(sequence, position, values(1, seed=random.getrandbits(30)))
    await session.close()
    return f"push: {kind}", log


def through_servers(folder: Path, count: int, random: Random) -> Iterator[Probe]:
    """Some at a time: a step out of order waits seconds for the one before it."""
    found: dict[int, tuple[str, SessionLog]] = {}
    seeds = iter([(number, random.getrandbits(30)) for number in range(count)])

    async def some(server: OneServer) -> None:
        for number, seed in seeds:
            found[number] = await through_a_server(server, Random(seed))

    async def main() -> None:
        async with one_server(load_span(folder, Span(0, NUM_BLOCKS))) as server, trio.open_nursery() as nursery:
            for _ in range(AT_ONCE):
                nursery.start_soon(some, server)

    trio.run(main)
    for number in range(count):
        move, log = found[number]
        yield Probe("llama", move, "float32 none this one", log)


# --- judging


def judged(probes: Sequence[Probe], folders: dict[str, Path]) -> Iterator[tuple[Probe, str]]:
    """Every probe with its verdict."""
    for model in MODELS:
        judge = Judge(folders[model])
        mine = [probe for probe in probes if probe.model == model]
        mine.sort(key=lambda probe: probe.server)
        for start in range(0, len(mine), ROUND):
            part = mine[start : start + ROUND]
            seen = [observed_session(probe.log, "cpu") for probe in part]
            compared = judge.compare([one for one in seen if one is not None])
            verdicts = iter([judge.verdict(one).verdict for one in compared])
            for probe, one in zip(part, seen, strict=True):
                yield probe, "not judged" if one is None else next(verdicts)


def renamed(bundle: Bundle, victim: Identity) -> Bundle:
    def change(evidence: wire.Evidence, payloads: dict[str, bytes]) -> None:
        evidence.accused = peer_id_to_bytes(victim.peer_id)

    return altered(bundle, change)


def exchanged(bundle: Bundle, other: Bundle) -> Bundle:
    def change(evidence: wire.Evidence, payloads: dict[str, bytes]) -> None:
        payloads["output"] = other.payloads["output"]

    return altered(bundle, change)


def accusations(probes: Sequence[Probe], folders: dict[str, Path], count: int, random: Random) -> Counter[str]:
    """What becomes of evidence against honest servers, and of genuine evidence against cheats."""
    models: dict[str, ModelFolder] = {model: open_folder(folders[model], model) for model in MODELS}
    usable = [probe for probe in probes if not probe.move.startswith("push")]
    innocent = [probe for probe in usable if not probe.cheat]
    guilty = [probe for probe in usable if probe.cheat and probe.move == "ordinary"]
    found: Counter[str] = Counter()
    for number in range(count):
        probe, other = random.choice(innocent), random.choice(guilty or innocent)
        last = len(probe.log.entries) - 1
        bundle = session_bundle(ATTACKER, probe.log, last)
        if number % 3 == 1:
            bundle = exchanged(bundle, session_bundle(ATTACKER, other.log, len(other.log.entries) - 1))
        elif number % 3 == 2:
            bundle = renamed(session_bundle(ATTACKER, other.log, len(other.log.entries) - 1), Identity.generate())
            probe = other
        outcome = check_evidence(Bundle.from_bytes(bundle.to_bytes()), models[probe.model])
        found["against honest servers"] += 1
        found["accepted against honest servers"] += outcome.proven
    for probe in random.sample(guilty, min(len(guilty), count // 10)):
        bundle = session_bundle(ATTACKER, probe.log, len(probe.log.entries) - 1)
        found["against cheats"] += 1
        found["accepted against cheats"] += check_evidence(bundle, models[probe.model]).proven
    return found


# --- the whole


def of_processor(processor: str, scratch: Path, options: argparse.Namespace) -> tuple[list[tuple[Probe, str]], Any]:
    """The probes of servers on this processor, each with its verdict, and what became of evidence.

    The servers compute in a process of their own, and the validator in another one, on the processor that there is.
    """
    made, found = scratch / f"{processor}.made", scratch / f"{processor}.found"
    for part, env in (
        (
            ("--serve", processor, str(made)),
            {} if processor == "this one" else as_processor(processor) | PROCESSORS[processor],
        ),
        (("--judge", str(made), str(found)), {}),
    ):
        command = [sys.executable, __file__, "--scratch", str(scratch), *part, "--seed", str(options.seed)]
        command += ["--probes", str(options.probes), "--cheats", str(options.cheats)]
        cache = scratch / f"cache of {processor if part[0] == '--serve' else 'the validator'}"
        # Quantised blocks may be laid out otherwise on another processor.
        settings = {**env, "OMP_NUM_THREADS": "1", "PETALNODE_CACHE": str(cache)}
        subprocess.run(command, env=os.environ | settings, check=True)
    return pickle.loads(found.read_bytes())  # type: ignore[no-any-return]


def serve(processor: str, made: Path, options: argparse.Namespace) -> None:
    random, folders = Random(f"{options.seed} {processor}"), folders_in(options.scratch)
    whole = round(WHOLE_SERVER * options.probes)
    found: list[Probe] = []
    share = len(MODELS) * len(PROCESSORS)
    for model in MODELS:
        count, cheats = -(-(options.probes - whole) // share), -(-options.cheats // share)
        found += probes_of(processor, model, folders, count, cheats, random)
    if processor == "this one":
        found += through_servers(folders["llama"], whole, random)
    made.write_bytes(pickle.dumps(found))


def judge_all(made: Path, found: Path, options: argparse.Namespace) -> None:
    probes: list[Probe] = pickle.loads(made.read_bytes())
    folders = folders_in(options.scratch)
    verdicts = [(replace(probe, log=None), verdict) for probe, verdict in judged(probes, folders)]
    count = round(EVIDENCE * options.probes / len(PROCESSORS))
    evidence = accusations(probes, folders, count, Random(options.seed))
    found.write_bytes(pickle.dumps((verdicts, evidence)))


def folders_in(scratch: Path) -> dict[str, Path]:
    return {name: scratch / name for model in MODELS for name in (model, f"other {model}")}


def measured(options: argparse.Namespace) -> dict[str, Any]:
    begun = os.times()
    with tempfile.TemporaryDirectory() as kept, ThreadPoolExecutor(options.jobs) as pool:
        scratch = Path(kept)
        for seed, (name, folder) in enumerate(folders_in(scratch).items()):
            save_tiny(name.rpartition(" ")[2], folder, seed=seed)
        parts = list(pool.map(lambda processor: of_processor(processor, scratch, options), PROCESSORS))
    rows: dict[tuple[str, str], Counter[str]] = {}
    by_server: dict[tuple[str, str], Counter[str]] = {}
    evidence: Counter[str] = Counter()
    for verdicts, accused in parts:
        evidence += accused
        for probe, verdict in verdicts:
            rows.setdefault((probe.cheat, probe.move), Counter())[verdict] += 1
            kind = "cheat" if probe.cheat and probe.move == "ordinary" else "" if probe.cheat else "honest"
            if kind:
                by_server.setdefault((kind, f"{probe.model} {probe.server}"), Counter())[verdict] += 1
    total: Counter[str] = Counter()
    caught: dict[str, Counter[str]] = {"ordinary": Counter(), "hostile": Counter()}
    for (cheat, move), counts in rows.items():
        if cheat:
            caught["ordinary" if move == "ordinary" else "hostile"] += counts
        else:
            total += counts
    ended = os.times()
    return {
        "probes": sum(total.values()),
        "honest_called_faulty": total["faulty"],
        "honest_inconclusive": total["inconclusive"],
        "honest_not_judged": total["not judged"],
        "cheats_on_ordinary_inputs": sum(caught["ordinary"].values()),
        "caught_on_ordinary_inputs": caught["ordinary"]["faulty"],
        "cheats_on_hostile_inputs": sum(caught["hostile"].values()),
        "caught_on_hostile_inputs": caught["hostile"]["faulty"],
        "evidence": {name: evidence[name] for name in EVIDENCE_COUNTS},
        "moves": [{"cheat": cheat, "move": move, **counts} for (cheat, move), counts in sorted(rows.items())],
        "servers": [{"kind": kind, "server": server, **counts} for (kind, server), counts in sorted(by_server.items())],
        "processor_seconds": round(sum(ended[:4]) - sum(begun[:4]), 1),
    }


def show(found: dict[str, Any]) -> None:
    console = Console()
    for title, name in (("What hostile neighbours did", "moves"), ("Servers; cheats on ordinary inputs", "servers")):
        table = Table(title=title)
        first = ("cheat", "move") if name == "moves" else ("kind", "server")
        columns = (*first, "ok", "inconclusive", "faulty")
        for column in columns:
            table.add_column(column)
        for row in found[name]:
            table.add_row(*(str(row.get(column, 0)) for column in columns))
        console.print(table)
    console.print({name: value for name, value in found.items() if not isinstance(value, list)})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--probes", type=int, default=10_000, help="of honest servers")
    parser.add_argument("--cheats", type=int, default=500, help="probes of cheats, beside those")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes at once, up to three")
    for part, values_of in (("--scratch", 1), ("--serve", 2), ("--judge", 2)):
        parser.add_argument(part, nargs=values_of if values_of > 1 else None, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.serve:
        return serve(str(options.serve[0]), options.serve[1], options)
    if options.judge:
        return judge_all(*options.judge, options)
    found = measured(options)
    if options.json:
        print(json.dumps(found))
    else:
        show(found)
    wrong = found["honest_called_faulty"] + found["evidence"]["accepted against honest servers"]
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
