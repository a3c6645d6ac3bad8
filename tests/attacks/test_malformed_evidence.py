"""Evidence and audits with headers that no server takes, signed by a server that is the attacker's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import trio
import trio.testing

from petalnode.crypto.identity import Identity
from petalnode.node.errors import PetalnodeError
from petalnode.node.models.folder import ModelFolder
from petalnode.node.trust.bundle import Bundle, batch_bundle, session_bundle
from petalnode.node.trust.evidence_message import EvidenceMessage
from petalnode.node.trust.receipt_log import LoggedBatch
from petalnode.node.validator import endorsing
from petalnode.node.validator.endorsing import Endorser
from petalnode.node.verification import evidence_check
from petalnode.node.verification.evidence_check import Outcome, check_evidence
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.tensors import encode
from petalnode.protocols.training import KeptSet, MicroBatch
from tests.attacks.forger import ATTACKER, Listener, altered, hidden, signed_anew
from tests.signing_server import SigningServer, spoiled
from tests.tiny_models import HIDDEN

Spoil = Callable[[SigningServer, LoggedBatch], LoggedBatch]


def asked_anew(change: Callable[[MicroBatch], MicroBatch]) -> Spoil:
    return lambda server, logged: signed_anew(server, replace(logged, asked=change(logged.asked)))


def asking(**fields: object) -> Spoil:
    """A request with other fields."""

    def change(asked: MicroBatch) -> MicroBatch:
        request = wire.BatchRequest()
        request.CopyFrom(asked.message)
        request.MergeFrom(wire.BatchRequest(**fields))  # type: ignore[arg-type]
        return replace(asked, message=request)

    return asked_anew(change)


def of_shape(*shape: int) -> Spoil:
    tensor, payload = encode(torch.ones(shape), "none")
    request = wire.BatchRequest(sequence=1, tensors=[tensor])
    return asked_anew(lambda asked: replace(asked, message=request, payloads=(payload,)))


def keeping(name: str, *shape: int) -> Spoil:
    tensor, payload = encode(torch.ones(shape), "none")
    kept = KeptSet.of(wire.Keep(number=1, names=[name], tensors=[tensor]), [payload])
    return asked_anew(lambda asked: replace(asked, kept=kept))


def signing(**fields: object) -> Spoil:
    return lambda server, logged: signed_anew(server, logged, **fields)


MALFORMED: dict[str, Spoil] = {
    "positions of too few tokens": asking(positions=[1, 2, 3]),
    "positions of too many tokens": asking(positions=range(100)),
    "a position beyond every model": asking(positions=[(1 << 32) - 1] * 20),
    "a mask of too few tokens": asking(mask=b"\x01"),
    "a mask of too many tokens": asking(mask=b"\xff" * 1000),
    "hidden states of another size": of_shape(1, 5, 24),
    "a shape of two dimensions": of_shape(5, 24),
    "no rows": of_shape(0, 5, 24),
    "prompts of another size": keeping("prompts", 3, 1, 2, 7),
    "prompts that are longer than the rows": keeping("prompts", 3, 1, 50, HIDDEN),
    "prompts of too few blocks": keeping("prompts", 1, 1, 2, HIDDEN),
    "an unknown tensor": keeping("nothing", 3),
    "LoRA of another shape": keeping("1.self_attn.q_proj.lora_A", 3, 3),
    "an unknown dtype": signing(dtype="float8"),
    "an unknown quantisation": signing(quantisation="int1"),
    "a span that is none": signing(span=(4, 4)),
    "a span beyond the model": signing(span=(3, 4_000_000_000)),
}


def outcome_of(bundle: Bundle, folder: ModelFolder) -> Outcome | None:
    """None if this machine says that it cannot judge it."""
    try:
        return check_evidence(Bundle.from_bytes(bundle.to_bytes()), folder)
    except PetalnodeError:
        return None


@pytest.mark.parametrize("name", MALFORMED)
def test_no_header_raises_past_the_check(server: SigningServer, folder: ModelFolder, name: str) -> None:
    logged = MALFORMED[name](server, server.work(hidden(20)))
    outcome = outcome_of(batch_bundle(ATTACKER, logged), folder)
    assert outcome is None or (not outcome.proven and outcome.reason)


STEP_CHANGES: dict[str, Callable[[wire.Evidence, dict[str, bytes]], None]] = {
    "another size": lambda evidence, payloads: evidence.steps[0].tensor.shape.__setitem__(2, 7),
    "no such codec": lambda evidence, payloads: setattr(evidence.opening, "codec", "zip"),
    "no tensor": lambda evidence, payloads: evidence.steps[0].ClearField("tensor"),
    "no step": lambda evidence, payloads: evidence.steps[0].ClearField("step"),
    "a span that is none": lambda evidence, payloads: evidence.opening.ClearField("span"),
    "padding of everything": lambda evidence, payloads: evidence.opening.left_padding.extend([99]),
}


@pytest.mark.parametrize("name", STEP_CHANGES)
def test_no_step_raises_past_the_check(server: SigningServer, folder: ModelFolder, name: str) -> None:
    genuine = session_bundle(ATTACKER, server.session([(0, hidden(5), ())]), 0)
    outcome = outcome_of(altered(genuine, STEP_CHANGES[name]), folder)
    assert outcome is not None and not outcome.proven and outcome.reason


async def test_an_endorser_outlives_whatever_the_recomputation_raises(
    server: SigningServer, folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First malformed evidence, then a failure of the machine itself, then evidence that is right."""
    swarm = Listener()
    endorser = Endorser(swarm, folder)  # type: ignore[arg-type]
    malformed = [batch_bundle(ATTACKER, spoil(server, server.work(hidden(20)))) for spoil in MALFORMED.values()]
    genuine = session_bundle(Identity.generate(), server.session([(0, hidden(5), ())], spoil=spoiled), 0)
    failing = session_bundle(ATTACKER, server.session([(0, hidden(5), ())]), 0)
    real = evidence_check.check_evidence

    def check(bundle: Bundle, *args: object, **options: object) -> Outcome:
        if bundle.id == failing.id:
            raise RuntimeError("out of memory")
        return real(bundle, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(endorsing, "check_evidence", check)
    with trio.fail_after(100):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(endorser.run)
            for bundle in [*malformed, failing, genuine]:
                swarm.hear(EvidenceMessage.of(bundle), f"author of {bundle.id.hex()}")
                await trio.testing.wait_all_tasks_blocked(0.05)
            while not swarm.published:  # noqa: ASYNC110  (what it waits for tells nobody)
                await trio.sleep(0.01)
            nursery.cancel_scope.cancel()
    assert [bundle.id for bundle in swarm.published] == [genuine.id]
