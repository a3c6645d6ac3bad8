"""A server that holds keys and values in fewer bits than it announces: more sessions in its memory, worse answers."""

from __future__ import annotations

from random import Random

import pytest

from petalnode.node.blocks.kernels.library import library
from petalnode.node.blocks.span import load_span
from petalnode.node.models import compute_manifest
from petalnode.node.models.folder import ModelFolder
from petalnode.node.trust.bundle import session_bundle
from petalnode.node.trust.receipt_log import SessionLog
from petalnode.node.verification import recomputation
from petalnode.node.verification.evidence_check import check_evidence
from petalnode.protocols.ids import Span
from tests.attacks.forger import ATTACKER, hidden
from tests.attacks.kernels import OtherKernels
from tests.signing_server import SigningServer, probed

BFLOAT16, INT8 = "none/cache=bfloat16", "none/cache=int8"


@pytest.fixture(autouse=True)
def known_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recomputation, "SystemRandom", lambda: Random(3))


def serving(folder: ModelFolder, announced: str, held: str, kernels: str = "torch") -> SigningServer:
    server = SigningServer(folder.path, compute_manifest(folder).version, Span(1, 4), dtype="float32", quant=announced)
    server.blocks = load_span(  # type: ignore[call-overload]
        folder.path, server.span, dtype="float32", device="cpu", quantisation=held, kernels=kernels
    )
    return server


def talked(server: SigningServer) -> SessionLog:
    """A prompt, tokens, a rollback, tokens again."""
    steps = [(0, hidden(24), ()), *((24 + at, hidden(1, seed=at), ()) for at in range(4)), (20, hidden(3, seed=9), ())]
    return server.session(steps)


@pytest.mark.parametrize(("announced", "held"), [("none", BFLOAT16), ("none", INT8), (BFLOAT16, INT8)])
def test_fewer_bits_than_announced_are_proved(folder: ModelFolder, announced: str, held: str) -> None:
    """By a probe, and by a client's receipts."""
    log = talked(serving(folder, announced, held))
    found = probed(folder, log)
    assert found.verdict == "faulty" and " is off by " in found.reason, found
    assert check_evidence(session_bundle(ATTACKER, log, len(log.entries) - 1), folder).proven


@pytest.mark.parametrize("announced", [BFLOAT16, INT8])
def test_who_holds_what_is_announced_is_right(folder: ModelFolder, announced: str) -> None:
    log = talked(serving(folder, announced, announced, "auto" if library() is None else "native"))
    assert probed(folder, log).verdict == "ok"
    with OtherKernels():
        log = talked(serving(folder, announced, announced))
    assert probed(folder, log).verdict == "ok"
    assert not check_evidence(session_bundle(ATTACKER, log, 0), folder).proven


def test_coarser_weights_are_found_behind_a_coarse_cache(folder: ModelFolder) -> None:
    found = probed(folder, talked(serving(folder, INT8, "nf4/cache=int8")))
    assert found.verdict == "faulty", found
