"""Somebody's genuine evidence and genuine endorsements, in messages of the attacker's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import trio
import trio.testing

from petalnode.crypto.identity import Identity
from petalnode.node.models.folder import ModelFolder
from petalnode.node.trust.bundle import Bundle, session_bundle
from petalnode.node.trust.evidence_gossip import EvidenceGossip
from petalnode.node.trust.evidence_message import Endorsement, EvidenceMessage, TrustedValidators
from petalnode.node.trust.store import TrustStore
from petalnode.node.validator.endorsing import Endorser
from tests.attacks.forger import ATTACKER, HONEST, Listener, hidden
from tests.node_inspection import kept_evidence
from tests.signing_server import SigningServer, spoiled

VALIDATOR, VICTIM = Identity.generate(), Identity.generate()


@pytest.fixture(scope="module")
def genuine(server: SigningServer) -> Bundle:
    return session_bundle(HONEST, server.session([(0, hidden(5), ())], spoil=spoiled), 0)


def endorsed(bundle: Bundle) -> EvidenceMessage:
    """As the honest validator publishes it."""
    mine = Endorsement.made(VALIDATOR, bundle.id, bundle.accused, bundle.evidence.time_ms)
    return EvidenceMessage.of(bundle, [mine])


async def hear(swarm: Listener, folder: ModelFolder, *messages: EvidenceMessage, until: Callable[[], bool]) -> None:
    """An endorser hears the attacker's messages."""
    endorser = Endorser(swarm, folder)  # type: ignore[arg-type]
    with trio.fail_after(600):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(endorser.run)
            for number, message in enumerate(messages):
                swarm.hear(message, ATTACKER.peer_id if not number else VALIDATOR.peer_id)
                while any(outcome is None for outcome in endorser.checked.values()):  # noqa: ASYNC110
                    await trio.sleep(0.01)
            while not until():  # noqa: ASYNC110  (what it waits for tells nobody)
                await trio.sleep(0.01)
            nursery.cancel_scope.cancel()


async def test_another_name_for_accused_is_author_s_lie(folder: ModelFolder, genuine: Bundle) -> None:
    swarm = Listener(genuine=genuine)
    borrowed = replace(EvidenceMessage.of(genuine), bundle=None, accused=VICTIM.peer_id)
    await hear(swarm, folder, borrowed, endorsed(genuine), until=lambda: bool(swarm.published))
    assert [ban.peer_id for ban in swarm.trust.bans()] == [ATTACKER.peer_id]


@pytest.mark.parametrize("name", ["input.0", "output"])
@pytest.mark.parametrize("missing", [False, True])
async def test_exchanged_tensors_are_the_author_s_lie(
    folder: ModelFolder, genuine: Bundle, name: str, missing: bool
) -> None:
    """The accuser's signature does not cover them. The evidence itself may still come from another peer."""
    swarm = Listener()
    payloads = dict(genuine.payloads)
    payloads[name] = bytes(len(payloads[name]))
    if missing:
        del payloads[name]
    message = endorsed(genuine)
    borrowed = replace(message, bundle=replace(genuine, payloads=payloads))
    borrowed = EvidenceMessage.from_bytes(borrowed.to_bytes(), genuine.evidence.time_ms / 1000)
    await hear(swarm, folder, borrowed, message, until=lambda: bool(swarm.published))
    assert [ban.peer_id for ban in swarm.trust.bans()] == [ATTACKER.peer_id]


def test_who_hands_out_evidence_has_checked_it(genuine: Bundle) -> None:
    """Tensors that others have exchanged neither replace those that this node serves, nor stay in their place."""
    gossip = EvidenceGossip(HONEST, TrustStore())
    borrowed = replace(genuine, payloads={})

    def spread() -> None:
        assert gossip.accept("author", "neighbour", EvidenceMessage.of(borrowed).to_bytes())

    spread()
    gossip.record_proven(genuine, recomputed=True)
    spread()
    assert kept_evidence(gossip, genuine.id) == genuine.to_bytes()


def test_endorsements_count_against_the_server_that_they_name(genuine: Bundle) -> None:
    """And none against another goes out with this node's own: nobody would take that message."""
    store = TrustStore(trusted=TrustedValidators({VALIDATOR.peer_id: "ann"}, quorum=1))
    store.ban = lambda peer_id, *why: banned.append(peer_id)  # type: ignore[method-assign, assignment]
    banned: list[str] = []
    gossip = EvidenceGossip(HONEST, store)
    now = genuine.evidence.time_ms
    slander = Endorsement.made(ATTACKER, genuine.id, VICTIM.peer_id, now)
    for message in (
        replace(endorsed(genuine), bundle=None),
        EvidenceMessage(genuine.id, VICTIM.peer_id, now, None, (slander,)),
    ):
        assert gossip.accept("author", "neighbour", message.to_bytes())
    assert banned == [genuine.accused]
    published = EvidenceMessage.from_bytes(gossip.record_proven(genuine, recomputed=True), now / 1000)
    assert {endorsement.validator for endorsement in published.endorsements} == {HONEST.peer_id, VALIDATOR.peer_id}
