"""The messages of our protocols and of the standards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from .protocols import SERVICE
from .row import CLIENT, PEER, SERVER, Row

INFERENCE, BATCH = "as /petalnode/inference/1", "as /petalnode/forward/1"
DIRECTORY, MANIFEST = "as /petalnode/directory/1", "as /petalnode/manifest/1"
EVIDENCE, RECEIPTS = "as /petalnode/evidence/1", "as /petalnode/receipts/1"
WEIGHTS = "as /petalnode/weights/1"
CREDITS, ADAPTER = "as /petalnode/credits/1", "as /petalnode/adapter/1"


def of(by: str, protocol: str, entries: str = "", *tests: str, fuzz: str = "", size: str = "") -> Row:
    """A message that its protocol bounds, but for what is given; `fuzz` may name several targets."""
    return Row(by, size or protocol, protocol, entries or protocol, tests, tuple(fuzz.split(", ")) if fuzz else ())


_A: Final = "tests/attacks/"
MESSAGES: Final[Mapping[str, Row]] = {
    "DirectoryFrame.query": of(PEER, DIRECTORY, "", f"{_A}test_costly_directory.py"),
    "DirectoryFrame.records": of(
        SERVER, DIRECTORY, "node.swarm.view.MAX_RECORDS", f"{_A}test_flooded_directory.py", fuzz="directory page"
    ),
    "DirectoryFrame.error": of(
        SERVER, DIRECTORY, "protocols.directory.DIRECTORY_LIMITS.max_text", fuzz="asked for records"
    ),
    "DirectoryFrame.ping": of(
        PEER, DIRECTORY, size="protocols.directory.DIRECTORY_LIMITS.max_ping", fuzz="asked for a ping"
    ),
    "DirectoryFrame.publish": of(
        PEER, DIRECTORY, "node.swarm.view.MAX_RECORDS", f"{_A}test_costly_directory.py", fuzz="announcement"
    ),
    "DirectoryFrame.node_query": of(PEER, DIRECTORY, fuzz="questions to a node"),
    "DirectoryFrame.node": of(SERVER, DIRECTORY, "protocols.directory.DIRECTORY_LIMITS.max_text", fuzz="node info"),
    "ManifestFrame.query": of(PEER, MANIFEST, fuzz="questions to a node"),
    "ManifestFrame.manifest": of(SERVER, MANIFEST, "", f"{_A}test_false_versions.py", fuzz="manifest"),
    "ManifestFrame.error": of(SERVER, MANIFEST, fuzz="asked for a manifest"),
    "InferenceFrame.open": of(
        CLIENT,
        INFERENCE,
        "protocols.inference.MAX_BATCH protocols.inference.MAX_LENGTH protocols.prefix.MAX_BLOCKS",
        f"{_A}test_hoarded_cache.py",
        f"{_A}test_kept_prefixes.py",
        fuzz="terms and payment",
    ),
    "InferenceFrame.granted": of(
        SERVER, INFERENCE, "protocols.inference.MAX_SEQUENCE", f"{_A}test_granted_numbers.py", fuzz="answers to steps"
    ),
    "InferenceFrame.step": of(
        CLIENT,
        INFERENCE,
        "node.server.turns.TURNS.max_decode_rows protocols.ids.MAX_GROUP",
        f"{_A}test_payload_before_permission.py",
        f"{_A}test_encoded_tensors.py",
        f"{_A}test_many_sessions_of_one.py",
        fuzz="tensor, sessions with groups",
    ),
    "InferenceFrame.reply": of(
        SERVER, INFERENCE, "", f"{_A}test_claimed_compute.py", f"{_A}test_two_answers.py", fuzz="answers to steps"
    ),
    "InferenceFrame.error": of(SERVER, INFERENCE, fuzz="answers to steps"),
    "InferenceFrame.close": of(CLIENT, INFERENCE, f"{SERVICE}.SERVICE.most_keep", fuzz="sessions and pushes"),
    "InferenceFrame.resume": of(
        CLIENT, INFERENCE, f"{SERVICE}.SERVICE.most_keep", "tests/swarm/test_resume.py", fuzz="sessions and pushes"
    ),
    "PushFrame.push": of(
        PEER, "as /petalnode/push/1", "", f"{_A}test_rejected_push.py", f"{_A}test_abandoned_prompts.py"
    ),
    "PushFrame.error": of(SERVER, "as /petalnode/push/1", fuzz="sessions and pushes"),
    "BatchFrame.open": of(CLIENT, BATCH, f"{SERVICE}.SERVICE.most_streams", fuzz="batches"),
    "BatchFrame.granted": of(SERVER, BATCH, "node.client.batch.batch_stream.MAX_CREDITS", fuzz="answers to batches"),
    "BatchFrame.keep": of(
        CLIENT, BATCH, "protocols.training.MAX_KEPT_TENSORS", f"{_A}test_memory_of_a_node.py", fuzz="batches"
    ),
    "BatchFrame.work": of(CLIENT, BATCH, "", f"{_A}test_memory_of_a_node.py", fuzz="batches"),
    "BatchFrame.gradient": of(CLIENT, BATCH, fuzz="batches"),
    "BatchFrame.reply": of(SERVER, BATCH, fuzz="answers to batches"),
    "BatchFrame.piece": of(CLIENT, BATCH, size="protocols.training.PIECE_BYTES", fuzz="batches"),
    "BatchFrame.error": of(SERVER, BATCH, fuzz="answers to batches"),
    "BatchFrame.close": of(CLIENT, BATCH, fuzz="batches"),
    "BatchFrame.adapter": of(
        CLIENT,
        ADAPTER,
        "protocols.adapter.MAX_ADAPTER_TENSORS",
        f"{_A}test_adapter_patterns.py",
        fuzz="adapters from clients",
    ),
    "BatchFrame.adapter_state": of(SERVER, ADAPTER, fuzz="answers to batches"),
    "EvidenceFrame.offer": of(
        CLIENT, RECEIPTS, "protocols.evidence.EVIDENCE_SIZES.max_offer", fuzz="offers to an auditor"
    ),
    "EvidenceFrame.pick": of(
        "an auditor of one's choice", RECEIPTS, "node.client.sharing.SHARING.most_picks", fuzz="evidence of answers"
    ),
    "EvidenceFrame.fetch": of(PEER, EVIDENCE, "", f"{_A}test_slow_evidence.py", fuzz="questions to a node"),
    "EvidenceFrame.sending": of(
        PEER, EVIDENCE, "", f"{_A}test_slow_evidence.py", size="protocols.evidence.EVIDENCE_SIZES.max_shared"
    ),
    "EvidenceFrame.piece": of(PEER, EVIDENCE, "", f"{_A}test_slow_evidence.py", size="protocols.evidence.PIECE_BYTES"),
    "EvidenceFrame.error": of(PEER, EVIDENCE, fuzz="asked for evidence"),
    "EvidenceFrame.close": of(PEER, EVIDENCE, fuzz="questions to a node"),
    "CreditsFrame.query": of(CLIENT, CREDITS, fuzz="orders for points"),
    "CreditsFrame.credit": of("the issuer", CREDITS, fuzz="asked for a balance"),
    "CreditsFrame.transfer": of(CLIENT, CREDITS, "node.credits.ledger.LEDGER.max_accounts", fuzz="orders for points"),
    "CreditsFrame.clearing": of("the issuer", CREDITS, fuzz="asked for a clearing"),
    "CreditsFrame.deposit": of(
        CLIENT, CREDITS, "node.credits.issuer.ISSUER.max_pending_orders", fuzz="orders for points"
    ),
    "CreditsFrame.voucher": of("the issuer", CREDITS, fuzz="asked for a voucher"),
    "CreditsFrame.error": of("the issuer", CREDITS, fuzz="asked for a balance"),
    "WeightsFrame.query": of(PEER, WEIGHTS, fuzz="questions about weights"),
    "WeightsFrame.offer": of(
        SERVER,
        WEIGHTS,
        "protocols.weights.WEIGHTS_LIMITS.max_bare",
        f"{_A}weights/test_false_weights.py",
        fuzz="asked for weights",
    ),
    "WeightsFrame.tree_query": of(PEER, WEIGHTS, fuzz="questions about weights"),
    "WeightsFrame.tree": of(
        SERVER,
        WEIGHTS,
        "protocols.weights.WEIGHTS_LIMITS.max_tensors",
        f"{_A}weights/test_false_weights.py",
        fuzz="tree of weights",
    ),
    "WeightsFrame.piece_query": of(PEER, WEIGHTS, fuzz="questions about weights"),
    "WeightsFrame.piece": of(
        SERVER,
        WEIGHTS,
        "node.weights.fetching.FETCHING.in_flight",
        f"{_A}weights/test_false_weights.py",
        size="protocols.weights.PIECE_BYTES",
    ),
    "WeightsFrame.error": of(SERVER, WEIGHTS, fuzz="asked for weights"),
    "TransferFrame": of("another server", "as /petalnode/transfer/1", fuzz="asked for bytes"),
    # In the bytes of others, signed as they stand.
    "Invite": Row(
        "who made the link",
        "node.links.format.INVITE.max_text",
        "node.links.format.INVITE.max_text",
        "node.links.format.INVITE.max_addrs",
        (f"{_A}test_hostile_links.py", "tests/unit/test_invite.py"),
        ("link",),
    ),
    "Announcement": of(
        PEER,
        DIRECTORY,
        "protocols.announcement.ANNOUNCEMENT.max_addrs "
        "protocols.announcement.ANNOUNCEMENT.max_rtts protocols.announcement.ANNOUNCEMENT.max_adapters",
        f"{_A}test_large_announcements.py",
        f"{_A}test_claimed_lengths.py",
        fuzz="announcement",
        size="protocols.announcement.ANNOUNCEMENT.max_bytes",
    ),
    "EvidenceNotice": of(
        PEER,
        "as /meshsub/1.1.0",
        "node.trust.evidence_message.EVIDENCE_LIMITS.max_endorsements node.trust.evidence_gossip.HELD.max_known",
        f"{_A}test_malformed_evidence.py",
        fuzz="evidence by gossip",
        size="node.trust.evidence_message.EVIDENCE_LIMITS.max_message",
    ),
    "SignedEvidence": of(
        PEER,
        EVIDENCE,
        "",
        f"{_A}test_forged_statements.py",
        fuzz="evidence file",
        size="node.trust.bundle.BUNDLE.max_statement",
    ),
    "Evidence": of(
        PEER,
        EVIDENCE,
        "node.trust.bundle.BUNDLE.max_tensors",
        f"{_A}test_rewritten_undone_step.py",
        fuzz="evidence of answers",
        size="node.trust.bundle.BUNDLE.max_bytes",
    ),
    # Of the standards.
    "AutoNat": of(PEER, "as /libp2p/autonat/1.0.0", fuzz="asked to dial back"),
    "AutoNat2": of(PEER, "as /libp2p/autonat/2/dial-request", fuzz="asked to dial one address"),
    "HolePunch": of(PEER, "as /libp2p/dcutr", fuzz="punching first"),
    "HopMessage": of(PEER, "as /libp2p/circuit/relay/0.2.0/hop", fuzz="asked to relay"),
    "StopMessage": of("a relay", "as /libp2p/circuit/relay/0.2.0/stop", fuzz="asked to take a circuit"),
    "Identify": of(PEER, "as /ipfs/id/1.0.0", fuzz="asked who we are"),
    "RelayVoucher": of("a relay", "as /libp2p/circuit/relay/0.2.0/hop", fuzz="asked to relay"),
}
"""Each body of a frame, and each message that is in no other one."""
