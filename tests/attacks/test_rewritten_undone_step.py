"""Evidence in which a step that a rollback has undone is not the one that the server was asked."""

from __future__ import annotations

import pytest
import torch

from petalnode.node.models.folder import ModelFolder
from petalnode.node.trust.bundle import Bundle, session_bundle
from petalnode.node.verification.evidence_check import check_evidence
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.inference import sha256
from tests.attacks.forger import HONEST, altered, hidden
from tests.signing_server import SigningServer, spoiled

STEPS = [(0, hidden(6, 2), ()), (6, hidden(1, 2, 1), (1, 0)), (4, hidden(2, 2, 2), ()), (6, hidden(1, 2, 3), ())]
"""The second step is undone, but its change of rows stays."""
UNDONE = [(0, hidden(6), ()), (6, hidden(1, 1, 1), ()), (4, hidden(2, 1, 2), ()), (6, hidden(1, 1, 3), ())]


def without_the_change_of_rows(evidence: wire.Evidence, payloads: dict[str, bytes]) -> None:
    evidence.steps[1].step.ClearField("reorder")
    payloads.pop("input.1")


def with_a_hash_of_its_own(evidence: wire.Evidence, payloads: dict[str, bytes]) -> None:
    evidence.steps[1].step.ClearField("reorder")
    evidence.steps[1].payload_hash = sha256(payloads.pop("input.1"))


def without_the_hash(evidence: wire.Evidence, payloads: dict[str, bytes]) -> None:
    without_the_change_of_rows(evidence, payloads)
    evidence.steps[1].ClearField("payload_hash")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("change", [without_the_change_of_rows, with_a_hash_of_its_own, without_the_hash])
def test_a_rewritten_step_convicts_nobody(
    server: SigningServer, coarse: SigningServer, folder: ModelFolder, change, dtype: str
) -> None:
    victim = server if dtype == "float32" else coarse
    genuine = session_bundle(HONEST, victim.session(STEPS), 3)
    outcome = check_evidence(Bundle.from_bytes(altered(genuine, change).to_bytes()), folder)
    assert not outcome.proven, outcome


def test_every_step_s_request_is_checked(server: SigningServer, folder: ModelFolder) -> None:
    def longer(evidence: wire.Evidence, payloads: dict[str, bytes]) -> None:
        evidence.steps[1].step.route_epoch += 1

    genuine = session_bundle(HONEST, server.session(UNDONE, spoil=spoiled), 3)
    assert "input.1" not in genuine.payloads
    assert check_evidence(genuine, folder).proven
    outcome = check_evidence(altered(genuine, longer), folder)
    assert not outcome.proven and not outcome.inconclusive and "step 2" in outcome.reason


def test_undone_step_without_a_hash_proves_nothing(server: SigningServer, folder: ModelFolder) -> None:
    def unhashed(evidence: wire.Evidence, payloads: dict[str, bytes]) -> None:
        for step in evidence.steps:
            step.ClearField("payload_hash")

    wrong = altered(session_bundle(HONEST, server.session(STEPS, spoil=spoiled), 3), unhashed)
    assert check_evidence(wrong, folder).proven
    undone = altered(session_bundle(HONEST, server.session(UNDONE, spoil=spoiled), 3), unhashed)
    outcome = check_evidence(undone, folder)
    assert not outcome.proven and "was undone" in outcome.reason


def test_step_of_other_bytes_is_no_evidence(server: SigningServer, folder: ModelFolder) -> None:
    def other(evidence: wire.Evidence, payloads: dict[str, bytes]) -> None:
        payloads["input.0"] = torch.zeros(len(payloads["input.0"]), dtype=torch.uint8).numpy().tobytes()

    genuine = session_bundle(HONEST, server.session(STEPS), 3)
    assert not check_evidence(altered(genuine, other), folder).proven
