"""Old evidence in a message that says that it is new."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from petalnode.crypto.identity import Identity
from petalnode.crypto.receipts import countersign
from petalnode.crypto.statement import now_ms
from petalnode.node.models.folder import ModelFolder
from petalnode.node.testing import message_streams
from petalnode.node.trust.bundle import Bundle, equivocation_bundle, resigned, session_bundle
from petalnode.node.trust.evidence_gossip import EvidenceGossip
from petalnode.node.trust.evidence_message import EVIDENCE_LIMITS, Endorsement, EvidenceMessage, TrustedValidators
from petalnode.node.trust.store import TrustStore
from petalnode.node.validator.auditing import ReceiptAuditService
from petalnode.node.validator.endorsing import Endorser
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.evidence import RECEIPTS, send_bundle
from petalnode.protocols.inference import receipt_to_wire
from tests.attacks.forger import ATTACKER, HONEST, Listener, hidden
from tests.inspection import audits_of
from tests.signing_server import SigningServer, spoiled

VALIDATOR = Identity.generate()


def heard(gossip: EvidenceGossip, message: EvidenceMessage) -> bool:
    return gossip.accept("author", "neighbour", message.to_bytes())


def old_equivocation(server: SigningServer, time_ms: int) -> Bundle:
    first = server.session([(0, hidden(3), ())]).entries[0].receipt
    receipts = [replace(first, time_ms=time_ms, reply_hash=bytes([n]) * 32).signed(server.identity) for n in (1, 2)]
    return equivocation_bundle(ATTACKER, server.identity.peer_id, *receipts)


def answer(server: SigningServer, time_ms: int | None = None) -> Bundle:
    signed = {} if time_ms is None else {"time_ms": time_ms}
    return session_bundle(ATTACKER, server.session([(0, hidden(5), ())], spoil=spoiled, **signed), 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("days", [-4, 4])
def test_the_server_s_signed_time_counts(server: SigningServer, days: int) -> None:
    """The statement's and the message's times are of the attacker's choice."""
    now = resigned(answer(server), ATTACKER).evidence.time_ms
    for bundle in (old_equivocation(server, now + days * 86_400_000), answer(server, now + days * 86_400_000)):
        store = TrustStore()
        assert not heard(EvidenceGossip(HONEST, store), EvidenceMessage.of(resigned(bundle, ATTACKER)))
        assert not store.bans()


def test_unsigned_time_does_not_count(server: SigningServer) -> None:
    old = answer(server, answer(server).evidence.time_ms - round(EVIDENCE_LIMITS.max_age * 1000) - 60_000)
    old.evidence.steps[-1].receipt.time_ms = old.evidence.time_ms
    forged = resigned(old, ATTACKER)
    assert not heard(EvidenceGossip(HONEST, TrustStore()), EvidenceMessage.of(forged))


def test_old_endorsements_of_trusted_validators_ban_nobody(server: SigningServer) -> None:
    store = TrustStore(trusted=TrustedValidators({VALIDATOR.peer_id: "ann"}, quorum=1))
    bundle = answer(server)
    now = bundle.evidence.time_ms
    for age, banned in ((4 * 86_400_000, False), (86_400_000, True)):
        old = Endorsement.made(VALIDATOR, bundle.id, bundle.accused, now - age)
        assert heard(EvidenceGossip(HONEST, store), EvidenceMessage(bundle.id, bundle.accused, now, None, (old,)))
        assert store.is_banned(bundle.accused) == banned


async def test_an_endorser_does_not_renew_old_evidence(server: SigningServer, folder: ModelFolder) -> None:
    now = answer(server).evidence.time_ms
    old = answer(server, now - 4 * 86_400_000)
    swarm = Listener(old=old)
    endorser = Endorser(swarm, folder)  # type: ignore[arg-type]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(endorser.run)
        swarm.hear(EvidenceMessage(old.id, old.accused, now), "author")
        with trio.fail_after(600):
            while endorser.checked.get(old.id, 1) is None:  # noqa: ASYNC110  (what it waits for tells nobody)
                await trio.sleep(0.01)
        assert "it is old" in str(endorser.checked.get(old.id)), "nobody else has to bring it"
        nursery.cancel_scope.cancel()
    assert not swarm.published and not swarm.trust.bans()


@pytest.mark.parametrize(("days", "kept"), [(4, 0), (1, 1)])
async def test_an_auditor_takes_no_old_receipts(server: SigningServer, days: int, kept: int) -> None:
    """A client that keeps one of a fault could have the server banned for it, and take its deposit, for ever."""
    log = server.session([(0, hidden(5), ())], spoil=spoiled, time_ms=now_ms() - days * 86_400_000)
    handlers: list[Any] = []
    swarm: Any = SimpleNamespace(
        set_handler=lambda _, handler: handlers.append(handler), host=SimpleNamespace(origin_of=str)
    )
    service = ReceiptAuditService(swarm, server.version)
    bundle, receipt = session_bundle(server.client, log, 0), log.entries[0].receipt
    ours, theirs = message_streams(RECEIPTS, server.client.peer_id, HONEST.peer_id)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(handlers[0], theirs)
        said = replace(receipt, time_ms=now_ms())  # what is offered decides nothing
        offered = wire.Offer(receipts=[receipt_to_wire(said)], countersignatures=[countersign(server.client, said)])
        await ours.send(wire.EvidenceFrame(offer=offered), timeout=60)
        frame, _ = await ours.receive(timeout=60)
        assert frame.WhichOneof("body") == "pick"
        await send_bundle(ours, bundle.to_bytes(), timeout=60)
        frame, _ = await ours.receive(timeout=60)
        assert frame.WhichOneof("body") == "close"
    assert (audits_of(service)["bytes"] > 0) == bool(kept)
