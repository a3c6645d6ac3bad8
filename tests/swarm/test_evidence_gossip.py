"""Evidence travels, verdicts do not: who is banned where, and what a flood or a liar achieves."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from petalnode.crypto.identity import Identity
from petalnode.node.network.shares import REMEMBERED, ShareCount
from petalnode.node.trust import evidence_gossip
from petalnode.node.trust.bundle import Bundle, equivocation_bundle, resigned
from petalnode.node.trust.evidence_gossip import HELD, EvidenceGossip
from petalnode.node.trust.evidence_message import (
    EVIDENCE_LIMITS,
    BadEvidenceMessage,
    Endorsement,
    EvidenceMessage,
    ForwardingShares,
    KnownMakers,
    TrustedValidators,
    is_answer_recent,
)
from petalnode.node.trust.reputation import REPUTATION
from petalnode.node.trust.store import TrustStore
from petalnode.protocols import wire_pb2 as wire
from tests.node_inspection import held, kept_evidence, known_evidence, punished_faults
from tests.receipts import RECEIPT
from tests.swarm.evidence_messages import (
    ACCUSER,
    ANN,
    BEN,
    KEYS,
    LIAR,
    NOW,
    STRANGER,
    dated,
    equivocation,
    node,
    numeric,
    receive,
)

# --- what a node does with what it hears


def test_self_proving_evidence_bans_and_is_passed_on() -> None:
    gossip, store = node()
    proven: list[Bundle] = []
    gossip.on_proven.append(proven.append)
    assert receive(gossip, dated(EvidenceMessage.of(equivocation()), NOW))
    assert [bundle.accused for bundle in proven] == [LIAR.peer_id]
    ban = store.ban_of(LIAR.peer_id)
    assert ban is not None and ban.source == "evidence" and "two answers" in ban.reason
    assert not store.is_banned(ACCUSER.peer_id)


def test_a_lie_is_neither_believed_nor_passed_on() -> None:
    gossip, store = node()
    assert not receive(gossip, dated(EvidenceMessage.of(equivocation(real=False)), NOW))
    assert not store.is_banned(LIAR.peer_id)


def test_recomputed_evidence_bans_with_enough_trusted_owners_only() -> None:
    trusted = TrustedValidators({ANN.peer_id: "ann", BEN.peer_id: "ben", STRANGER.peer_id: "ann"}, quorum=2)
    gossip, store = node(trusted)
    assert (
        receive(gossip, numeric(1))
        and receive(gossip, numeric(1, ANN))
        and receive(gossip, numeric(1, STRANGER), "another")
    )
    assert receive(gossip, numeric(2, BEN), "a third") and receive(gossip, numeric(1, *KEYS[5:]), "a fourth")
    assert not store.is_banned(LIAR.peer_id)  # two keys of one owner; and one of another's for other evidence
    assert receive(gossip, numeric(1, BEN), "a fifth")
    ban = store.ban_of(LIAR.peer_id)
    assert ban is not None and ban.source == "validators" and BEN.peer_id in ban.reason


def test_who_trusts_nobody_bans_nobody_for_others() -> None:
    gossip, store = node()
    assert receive(gossip, numeric(1, ANN, BEN, STRANGER))
    assert not store.bans()


def test_strangers_cannot_crowd_out_a_trusted_validator() -> None:
    gossip, store = node(TrustedValidators({ANN.peer_id: "ann"}, quorum=1))
    for number in range(EVIDENCE_LIMITS.max_endorsements + 5):
        assert receive(gossip, numeric(1, Identity.generate()), f"author {number}", f"forwarder {number}")
    assert receive(gossip, numeric(1, ANN), "somebody")
    assert store.is_banned(LIAR.peer_id)


@pytest.mark.parametrize("later", [-EVIDENCE_LIMITS.max_age - 60, EVIDENCE_LIMITS.max_age + 60])
def test_old_evidence_and_that_of_tomorrow_is_dropped(later: float) -> None:
    gossip, store = node()
    assert not receive(gossip, dated(EvidenceMessage.of(equivocation()), NOW + later))
    assert not store.bans()


def test_forged_endorsements_and_nonsense_are_dropped() -> None:
    good = EvidenceMessage.from_bytes(numeric(1, ANN), NOW)
    for bad in (
        replace(good, accused=BEN.peer_id),
        replace(good, evidence_id=b"x" * 32),
        replace(good, endorsements=good.endorsements * (EVIDENCE_LIMITS.max_endorsements + 1)),
        replace(good, evidence_id=b"short"),
        replace(EvidenceMessage.of(equivocation()), accused=BEN.peer_id, time_ms=round(NOW * 1000)),
        replace(EvidenceMessage.of(equivocation()), evidence_id=b"x" * 32, time_ms=round(NOW * 1000)),
    ):
        with pytest.raises(BadEvidenceMessage):
            EvidenceMessage.from_bytes(bad.to_bytes(), NOW)
    header = json.dumps({"__metadata__": []}).encode()  # of a safetensors file
    junk = wire.EvidenceNotice.FromString(good.to_bytes())
    junk.bundle = len(header).to_bytes(8, "little") + header
    for data in (b"", b"\xff" * 100, bytes(EVIDENCE_LIMITS.max_message + 1), junk.SerializeToString()):
        with pytest.raises(BadEvidenceMessage):
            EvidenceMessage.from_bytes(data, NOW)


def test_flood_is_cut_off_by_maker_and_forwarder() -> None:
    gossip, _ = node()
    accepted = [receive(gossip, numeric(number % 8), "flooder", f"{number}") for number in range(50)]
    assert sum(accepted) == EVIDENCE_LIMITS.rate
    assert sum(receive(gossip, numeric(number % 8), f"author {number}", "one neighbour") for number in range(200)) <= 30
    assert receive(gossip, numeric(1), "somebody else", "another neighbour")


def test_neighbours_own_messages_are_not_handed_on_ones() -> None:
    gossip, _ = node()
    for number in range(EVIDENCE_LIMITS.relayed):
        assert receive(gossip, numeric(number), f"author {number}", "neighbour")
    assert not receive(gossip, numeric(50), "another author", "neighbour")
    for number in range(EVIDENCE_LIMITS.rate):
        assert receive(gossip, numeric(number), "neighbour", "neighbour")
    assert not receive(gossip, numeric(EVIDENCE_LIMITS.rate), "neighbour", "neighbour")


def test_memory_of_one_server_is_bounded() -> None:
    gossip, store = node(TrustedValidators({ANN.peer_id: "ann"}, quorum=1))
    for number in range(50):
        assert receive(gossip, numeric(number), f"{number}", f"{number}")
    assert known_evidence(gossip, LIAR.peer_id) == (HELD.max_per_accused, HELD.max_per_accused)
    assert receive(gossip, numeric(99, ANN), "x", "y")
    assert store.is_banned(LIAR.peer_id)


def test_rates_forget_and_are_bounded() -> None:
    rates = ShareCount(math.inf, seconds=10)
    assert [rates.add("a", most=2, now=now) for now in (0, 1, 2, 11, 12)] == [True, True, False, True, True]
    for number in range(3 * REMEMBERED):
        assert rates.add(f"{number}", most=2, now=20)
    assert held(rates) <= 2 * REMEMBERED
    assert rates.add("a", most=2, now=30) and held(rates) == 2, "what is over is forgotten"


def test_only_accepted_messages_are_acted_on() -> None:
    gossip, _ = node()
    heard: list[tuple[str, str, str]] = []
    gossip.on_evidence.append(lambda message, *who: heard.append((message.accused, *who)))
    assert not gossip.accept("author", "forwarder", numeric(0)[:-1]) and not heard
    assert gossip.accept("author", "forwarder", numeric(0))
    assert heard == [(LIAR.peer_id, "author", "forwarder")]


def test_a_node_does_not_ban_itself() -> None:
    store = TrustStore(clock=lambda: NOW)
    gossip = EvidenceGossip(LIAR, store, clock=lambda: NOW)
    gossip.on_proven.append(lambda _: pytest.fail("it was told"))
    assert receive(gossip, dated(EvidenceMessage.of(equivocation()), NOW))
    assert not store.bans()


def test_servers_owner_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """Strangers, too, can say it, and are not to fill the log."""
    gossip = EvidenceGossip(LIAR, TrustStore(clock=lambda: NOW), clock=lambda: NOW)
    for number in range(3):
        assert receive(gossip, numeric(number), f"author {number}", f"forwarder {number}")
    (told,) = [record.getMessage() for record in caplog.records if "answered wrong" in record.getMessage()]
    assert "author 0" in told and "self-test" in told


def test_first_fault_of_one_bit_is_short_ban() -> None:
    gossip, store = node()
    gossip.record_proven(equivocation(), recomputed=True, one_bit=True)
    ban = store.ban_of(LIAR.peer_id)
    assert ban is not None and ban.source == "one bit" and ban.until == NOW + REPUTATION.one_bit_seconds


def test_refuted_validators_endorsements_do_not_count() -> None:
    gossip, store = node(TrustedValidators({ANN.peer_id: "ann", BEN.peer_id: "ben"}, quorum=2))
    store.ban(BEN.peer_id, "its evidence was refuted", "evidence")
    assert receive(gossip, numeric(1, ANN, BEN, STRANGER))
    assert not store.is_banned(LIAR.peer_id)
    store.forgive(BEN.peer_id)
    assert receive(gossip, numeric(1), "another author", "another neighbour")
    ban = store.ban_of(LIAR.peer_id)
    assert ban is not None and STRANGER.peer_id not in ban.reason


def test_remembered_servers_and_evidence_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence_gossip, "HELD", replace(evidence_gossip.HELD, max_known=5))
    gossip, _ = node()
    servers = [Identity.generate() for _ in range(20)]
    for number, server in enumerate(servers):
        assert receive(gossip, numeric(number, accused=server), f"author {number}", f"forwarder {number}")
    assert known_evidence(gossip, servers[-1].peer_id) == (5, 1)
    with pytest.raises(KeyError):
        known_evidence(gossip, servers[0].peer_id)
    # Which of its pieces were heard of last decides, whatever their number says.
    for number in (0, 1, 0, *range(2, 2 + HELD.max_per_accused - 1)):
        assert receive(gossip, numeric(number), f"maker {number}", f"neighbour {number}")
    assert known_evidence(gossip, LIAR.peer_id)[1] == HELD.max_per_accused


def test_own_checks_are_published_with_own_endorsement() -> None:
    store = TrustStore(None, TrustedValidators({}), clock=lambda: NOW)
    gossip = EvidenceGossip(BEN, store, clock=lambda: NOW)
    proven: list[Bundle] = []
    gossip.on_proven.append(proven.append)
    bundle = equivocation()
    earlier = Endorsement.made(ANN, bundle.id, LIAR.peer_id, round(NOW * 1000))
    assert receive(gossip, EvidenceMessage(bundle.id, LIAR.peer_id, round(NOW * 1000), None, (earlier,)).to_bytes())
    published = EvidenceMessage.from_bytes(gossip.record_proven(bundle, recomputed=True, addrs=["/ip4/1.2.3.4"]), NOW)
    assert [signed.validator for signed in published.endorsements] == [BEN.peer_id, ANN.peer_id]
    assert published.bundle == bundle and published.addrs == ("/ip4/1.2.3.4",)
    assert abs(published.endorsements[0].time_ms / 1000 - NOW) < 1 and proven == [bundle]
    assert known_evidence(gossip, LIAR.peer_id) == (1, 1)
    ban = store.ban_of(LIAR.peer_id)
    assert ban is not None and ban.source == "evidence" and bundle.id.hex()[:12] in ban.reason
    other = equivocation(STRANGER)
    assert EvidenceMessage.from_bytes(gossip.record_proven(other, recomputed=False), NOW).endorsements == ()
    assert known_evidence(gossip, STRANGER.peer_id) == (2, 1)


def test_message_has_few_addresses_and_small_evidence() -> None:
    good = EvidenceMessage.from_bytes(numeric(1, ANN), NOW)
    most = replace(good, addrs=("x" * EVIDENCE_LIMITS.max_addr,) * EVIDENCE_LIMITS.max_addrs)
    assert EvidenceMessage.from_bytes(most.to_bytes(), NOW) == most
    for addrs in (("x",) * (EVIDENCE_LIMITS.max_addrs + 1), ("x", "x" * (EVIDENCE_LIMITS.max_addr + 1))):
        with pytest.raises(BadEvidenceMessage, match="addresses"):
            EvidenceMessage.from_bytes(replace(good, addrs=addrs).to_bytes(), NOW)
    bundle = equivocation()
    made = EvidenceMessage.of(bundle, good.endorsements * 40, ["x"] * 9)
    assert (
        len(made.endorsements) == EVIDENCE_LIMITS.max_endorsements
        and len(made.addrs) == EVIDENCE_LIMITS.max_addrs
        and made.bundle is bundle
    )
    assert made.is_self_proving and not good.is_self_proving
    large = replace(bundle, payloads={"input": bytes(EVIDENCE_LIMITS.max_message)})
    assert EvidenceMessage.of(large).bundle is None and not EvidenceMessage.of(large).is_self_proving


def test_equivocation_is_as_old_as_its_completing_receipt() -> None:
    first = replace(RECEIPT, time_ms=round((NOW - EVIDENCE_LIMITS.max_age - 60) * 1000)).signed(LIAR)
    second = replace(first, reply_hash=b"x" * 32, time_ms=round(NOW * 1000)).signed(LIAR)
    for pair in ((first, second), (second, first)):
        assert is_answer_recent(equivocation_bundle(ACCUSER, LIAR.peer_id, *pair), NOW)
        assert not is_answer_recent(
            equivocation_bundle(ACCUSER, LIAR.peer_id, *pair), NOW + 61 + EVIDENCE_LIMITS.max_age
        )
    forged = replace(second, reply_hash=b"y" * 32).signed(STRANGER)
    assert not is_answer_recent(equivocation_bundle(ACCUSER, LIAR.peer_id, first, forged), NOW)


def test_passed_on_messages_leave_room_for_others() -> None:
    shares, now = ForwardingShares(), 0.0
    assert [shares.allows("new", "a", now, known=False) for _ in range(6)] == [True] * 5 + [False]  # 1 + 4 of anybody's
    assert [shares.allows("old", "a", now, known=True) for _ in range(3)] == [True, True, False]  # of one known maker
    known = [shares.allows(f"old {number}", "a", now, known=True) for number in range(10)]
    assert known == [True] * 6 + [False] * 4  # of all of them
    others = [shares.allows("new", f"neighbour {number}", now, known=False) for number in range(20)]
    assert others == [True] * 11 + [False] * 9
    assert sum([5, 2, *known, *others]) == EVIDENCE_LIMITS.forwarded
    now += EVIDENCE_LIMITS.rate_seconds
    assert [shares.allows("new", "a", now, known=False) for _ in range(6)] == [True] * 5 + [False]


def test_silent_maker_gives_its_place_to_others() -> None:
    makers = KnownMakers()
    for number in range(EVIDENCE_LIMITS.max_senders):
        makers.note(f"{number}", 0.0)
    makers.note("0", 50_000.0)
    makers.note("new", 90_000.0)
    assert held(makers) == 2 and makers.is_known("0", 90_000.0)
    assert not makers.is_known("new", 90_000.0 + EVIDENCE_LIMITS.key_age - 1) and makers.is_known(
        "new", 90_000.0 + EVIDENCE_LIMITS.key_age
    )
    makers.note("new", 90_000.0 + EVIDENCE_LIMITS.key_age)  # its first message counts, not its last
    assert makers.is_known("new", 90_000.0 + EVIDENCE_LIMITS.key_age)


# --- one fault, and many pieces of evidence


def test_one_fault_bans_once_whoever_brings_it() -> None:
    """A stranger's copies would else turn a week into months, and a validator's ten minutes for one bit into a week."""
    gossip, store = node()
    copies = [resigned(equivocation(), key) for key in KEYS[5:]]
    for copy in copies:
        gossip.record_proven(copy, recomputed=True, one_bit=True)
    ban = store.ban_of(LIAR.peer_id)
    assert ban is not None and (ban.count, ban.source) == (1, "one bit")
    for copy, key in zip(copies, KEYS[5:], strict=True):
        assert receive(gossip, dated(EvidenceMessage.of(copy), NOW), key.peer_id, key.peer_id)
    ban = store.ban_of(LIAR.peer_id)
    assert ban is not None and (ban.count, ban.source) == (2, "evidence"), "it proved to be more than a bit"
    gossip.record_proven(equivocation(nonce=b"another session."), recomputed=True)
    ban = store.ban_of(LIAR.peer_id)
    assert ban is not None and ban.count == 3
    gossip, store = node(TrustedValidators({ANN.peer_id: "ann"}, quorum=1))
    assert all(receive(gossip, numeric(1, ANN), f"author {number}", f"{number}") for number in range(5))
    ban = store.ban_of(LIAR.peer_id)
    assert ban is not None and ban.count == 1


def test_punished_faults_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence_gossip, "HELD", replace(evidence_gossip.HELD, max_known=5))
    gossip, store = node()
    for number in range(9):
        gossip.record_proven(equivocation(nonce=bytes([number]) * 16), recomputed=True)
    assert punished_faults(gossip) == 5
    ban = store.ban_of(LIAR.peer_id)
    assert ban is not None and ban.count == 9


def test_false_evidence_drives_out_no_proof() -> None:
    """A liar accuses itself of more than is remembered between the words of two validators, and before the proof was
    fetched."""
    gossip, store = node(TrustedValidators({ANN.peer_id: "ann", BEN.peer_id: "ben"}, quorum=2))
    proof = equivocation(STRANGER)
    gossip.record_proven(proof, recomputed=True)
    assert receive(gossip, numeric(1, ANN), "ann", "ann")
    for number in range(HELD.max_per_accused + 1):
        for accused in (LIAR, STRANGER):
            author = f"{accused.peer_id} {number}"
            assert receive(gossip, numeric(100 + number, accused=accused), author, author)
    assert kept_evidence(gossip, proof.id) is not None
    assert receive(gossip, numeric(1, BEN), "ben", "ben")
    assert store.is_banned(LIAR.peer_id)


def test_newest_counts_where_all_others_are_endorsed() -> None:
    gossip, _ = node(TrustedValidators({ANN.peer_id: "ann"}, quorum=1))
    for number in range(HELD.max_per_accused):
        assert receive(gossip, numeric(number, ANN), f"{number}", f"{number}")
    assert receive(gossip, numeric(99), "x", "y")
    assert known_evidence(gossip, LIAR.peer_id) == (HELD.max_per_accused, HELD.max_per_accused)
