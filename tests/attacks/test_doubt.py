"""Who cannot be proved wrong: kinds of computation that nobody has measured, evidence that says nothing of the accused,
answers to inputs that a server before has chosen."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trio

from petalnode.crypto.identity import Identity, peer_id_to_bytes
from petalnode.node.client.api.causal_lm import AutoDistributedModelForCausalLM
from petalnode.node.client.request import WireTensor
from petalnode.node.client.session.comparing import Agreement, SpanAnswer, settle
from petalnode.node.client.session.history import Input, InputHistory
from petalnode.node.errors import MachineError, ServerCheated
from petalnode.node.models.folder import ModelFolder, has_experts
from petalnode.node.swarm.routing import Hop
from petalnode.node.testing.memory_network import MemoryNode
from petalnode.node.testing.memory_servers import memory_swarm
from petalnode.node.trust.bundle import Bundle, session_bundle
from petalnode.node.trust.receipt_log import ReceiptArchive
from petalnode.node.validator import service as service_module
from petalnode.node.validator.auditing import Audit
from petalnode.node.validator.history import History
from petalnode.node.validator.probe_plan import Probe
from petalnode.node.validator.prober import Probed
from petalnode.node.validator.service import Validator
from petalnode.node.verification.evidence_check import check_evidence
from petalnode.node.verification.tolerances import MARGINS, NO_DOUBT, UNPROVEN, Calibration, Doubt, Tolerance, doubt
from petalnode.node.verification.verdicts import Verdict
from petalnode.protocols.announcement import Announcement
from petalnode.protocols.ids import Span
from petalnode.protocols.tensors import encode
from tests.attacks.forger import ATTACKER, Listener, altered, hidden
from tests.inspection import call, client_of
from tests.signing_server import SigningServer, spoiled
from tests.tiny_models import save_tiny

VERSION = b"v" * 32
LIMITS = Tolerance(ok_worst=0.02, ok_mean=0.01, faulty_worst=0.04, faulty_mean=0.02)


# --- kinds that nobody has measured


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (("float32", "none", "cpu"), NO_DOUBT),
        (("bfloat16", "nf4", "cpu"), NO_DOUBT),
        (("float32", "none", ""), NO_DOUBT),  # judged by the widest tolerance
        (("", "", "cuda"), NO_DOUBT),  # it is still loading
        (("float32", "none", "abacus"), UNPROVEN),
        (("float32", "none", "cuda"), UNPROVEN),
        (("float32", "none", "cpu+cuda"), UNPROVEN),
        (("float16", "none", "cpu"), UNPROVEN),
        (("float128", "none", "cpu"), UNPROVEN),
        (("float32", "int2", ""), UNPROVEN),
        (("float32", "none/exact-1", "cpu"), NO_DOUBT),
        (("bfloat16", "none/exact-1", "cpu"), UNPROVEN),
    ],
)
def test_what_nobody_can_prove_wrong_pays(kind: tuple[str, str, str], expected: Doubt) -> None:
    assert doubt(*kind) == expected


def test_a_measured_gpu_pays_nothing() -> None:
    row = Calibration("float16", "none", "cpu", "cuda", "forward", 6, 0.05, 0.02, 10, "")
    assert doubt("float16", "none", "cuda", (row,)) == NO_DOUBT
    assert doubt("float16", "none", "cpu+cuda", (row,)) == NO_DOUBT
    for unknown in ("abacus", "abacus+cuda"):
        assert doubt("float16", "none", unknown, (row,)) == UNPROVEN


def test_server_with_an_abacus_earns_nothing(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "model")

    def with_an_abacus(node: MemoryNode) -> None:
        announce = node.announce

        def changed(announcement: Announcement) -> None:
            announce(replace(announcement, device="abacus"))

        node.announce = changed  # type: ignore[method-assign]

    with memory_swarm() as swarm:
        honest, other = swarm.start(folder, "0:6"), swarm.start(folder, "0:6", prepare=with_an_abacus)
        assert honest.ready and other.ready
        with swarm.open_model(AutoDistributedModelForCausalLM, folder) as model:
            found = call(model, client_of(model).candidates)
            penalties = {candidate.peer_id: candidate.penalty_seconds for candidate in found}
            assert penalties[other.peer_id] == pytest.approx(penalties[honest.peer_id] + MARGINS.unproven_seconds)
            for server in (honest, other):

                async def note(peer_id: str = server.peer_id) -> None:
                    client_of(model).note_tokens(peer_id, 1000)

                call(model, note)
            trust = client_of(model).swarm.trust
            assert trust.reputation(honest.peer_id) > 0.0 == trust.reputation(other.peer_id)


def test_evidence_about_an_unmeasured_kind_proves_nothing(server: SigningServer, folder: ModelFolder) -> None:
    """A processor that is as honest may round otherwise. What the accuser says of the device does not count."""
    bundle = session_bundle(ATTACKER, server.session([(0, hidden(5), ())], spoil=spoiled), 0)
    for device in ("", "cpu"):
        assert check_evidence(bundle, folder, server_device=device).proven
    assert check_evidence(bundle, folder, server_device="cuda").inconclusive


# --- audits


async def audited(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: ModelFolder, *bundles: Bundle
) -> list[Verdict]:
    """What a validator finds that is shown these receipts."""
    found: list[Verdict] = []
    done = trio.Event()
    waiting = list(bundles)

    class Shared:
        def __init__(self, *_: object) -> None:
            pass

        async def next(self) -> Audit:
            if not waiting:
                done.set()
                await trio.sleep_forever()
            bundle = waiting.pop(0)
            return Audit(ATTACKER.peer_id, SimpleNamespace(span=(1, 4)), bundle)  # type: ignore[arg-type]

    monkeypatch.setattr(service_module, "ReceiptAuditService", Shared)
    model: Any = SimpleNamespace(swarm_model=SimpleNamespace(folder=folder, version=VERSION))
    judge: Any = SimpleNamespace(device="cpu")
    with History(tmp_path / "history.sqlite") as history:
        options = service_module.ValidatorOptions(
            config=None,  # type: ignore[arg-type]
            model=model,
            judge=judge,
            history=history,
            on_verdict=found.append,
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(Validator(Listener(), options).judge_for_others)  # type: ignore[arg-type]
            await done.wait()
            nursery.cancel_scope.cancel()
        assert not history.seconds_since(VERSION), "an audit delays probes"
    return found


async def test_unsigned_statements_say_nothing_of_the_accused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, server: SigningServer, folder: ModelFolder
) -> None:
    genuine = session_bundle(ATTACKER, server.session([(0, hidden(5), ())]), 0)

    def sign_it_oneself(evidence: Any, payloads: dict[str, bytes]) -> None:
        evidence.steps[-1].receipt.signature = bytes(64)

    def say_another(evidence: Any, payloads: dict[str, bytes]) -> None:
        evidence.accused = peer_id_to_bytes(Identity.generate().peer_id)

    unsigned = [altered(genuine, change) for change in (sign_it_oneself, say_another)]
    (verdict,) = await audited(monkeypatch, tmp_path, folder, *unsigned, genuine)
    assert verdict.verdict == "ok" and verdict.peer_id == server.identity.peer_id


async def test_only_two_own_receipts_make_a_server_faulty(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, server: SigningServer
) -> None:
    """Whatever else is wrong with its answers, its neighbours may have made it so."""
    log = server.session([(0, hidden(3), ())])
    first = log.entries[0].receipt
    second = replace(first, reply_hash=bytes(32)).signed(server.identity)
    liar, other = log.peer_id, Identity.generate().peer_id
    failures = {
        liar: ServerCheated("it signed two answers", liar, (first, second)),
        other: ServerCheated("its receipt is for something else", other),
    }

    async def run_probe(config: object, model: object, probe: Probe) -> Probed:
        return Probed(probe, ReceiptArchive(), {}, failures)

    class Told(Validator):
        async def servers(self) -> Any:
            return {peer: SimpleNamespace(peer_id=peer, span=Span(0, 3)) for peer in failures}

    monkeypatch.setattr(service_module, "run_probe", run_probe)
    swarm = Listener()
    with History(tmp_path / "history.sqlite") as history:
        options = service_module.ValidatorOptions(
            config=None,  # type: ignore[arg-type]
            model=SimpleNamespace(swarm_model=SimpleNamespace(version=VERSION, num_blocks=3)),  # type: ignore[arg-type]
            judge=SimpleNamespace(device="cpu", compare=lambda seen: []),  # type: ignore[arg-type]
            history=history,
            on_verdict=lambda verdict: None,
            accuser=ATTACKER,
        )
        given = await Told(swarm, options).once()  # type: ignore[arg-type]
    found = {verdict.peer_id: verdict.verdict for verdict in given}
    assert found == {liar: "faulty", other: "inconclusive"}
    (published,) = swarm.published
    assert published.accused == liar and check_evidence(published, None).proven


def test_audits_do_not_delay_probes(tmp_path: Path) -> None:
    with History(tmp_path / "history.sqlite") as history:
        probed = Verdict("server", Span(0, 3), "ok", "", 0.0, 1.0, "forward", 1)
        history.add(VERSION, probed, now=10.0)
        history.add(VERSION, replace(probed, kind="receipts"), now=50.0)
        assert history.seconds_since(VERSION, now=60.0) == {"server": 50.0}


# --- chains without own weights


def asked(peer_id: str, span: Span, entering: torch.Tensor, left: torch.Tensor) -> SpanAnswer:
    history = InputHistory()
    history.append(Input(0, (), WireTensor(*encode(entering, "none"))))
    return SpanAnswer(Hop(peer_id, span), history, left)


@pytest.mark.parametrize(("change", "steady", "banned"), [(0.0, True, True), (1e-3, True, False), (0.0, False, False)])
def test_most_chains_ban_nobody_for_their_inputs(change: float, steady: bool, banned: bool) -> None:
    """A server before it can choose a change within tolerance of which blocks that compute right make much."""
    middle, end = hidden(3, seed=1), hidden(3, seed=2)
    moved, wrong = middle * (1 + change), end * 1.5
    first, last = Span(0, 3), Span(3, 6)

    def chain(name: str, at_junction: torch.Tensor, at_end: torch.Tensor) -> list[SpanAnswer]:
        return [
            asked(f"{name}-first", first, hidden(3), at_junction),
            asked(f"{name}-last", last, at_junction, at_end),
        ]

    answered = [chain("a", middle, end), chain("b", middle, end), chain("c", moved, wrong)]
    found = Agreement((0, 1), (2,), 0.5, 0.02)
    counts = torch.ones(1, 3, dtype=torch.bool)
    settled = settle(found, answered, counts, LIMITS, None, steady)
    assert (set(settled.liars), settled.suspects) == (({"c-last"}, set()) if banned else (set(), {"c-last"}))


def test_chains_of_one_server_each_are_settled() -> None:
    whole, end = Span(0, 6), hidden(3, seed=2)
    answered = [[asked(name, whole, hidden(3), left)] for name, left in (("a", end), ("b", end), ("c", 1.5 * end))]
    counts = torch.ones(1, 3, dtype=torch.bool)
    settled = settle(Agreement((0, 1), (2,), 0.5, 0.02), answered, counts, LIMITS, None)
    assert (settled.settled, settled.kept, set(settled.liars)) == ("majority", [0, 1], {"c"})


def test_mixtures_of_experts_are_known_by_their_configuration(tmp_path: Path) -> None:
    assert has_experts(save_tiny("mixtral", tmp_path / "mixtral", num_hidden_layers=1))
    assert not has_experts(save_tiny("llama", tmp_path / "llama", num_hidden_layers=1))


def test_history_that_cannot_be_read_says_so(tmp_path: Path) -> None:
    with History(tmp_path / "history.sqlite") as history:
        with closing(sqlite3.connect(tmp_path / "history.sqlite")) as other:
            other.execute("DROP TABLE verdicts")
        with pytest.raises(MachineError, match="the validator's history"):
            history.seconds_since(VERSION)
