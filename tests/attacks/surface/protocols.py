"""Connections, and the protocols that are spoken on them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from .row import CLIENT, PEER, Row

MEMORY = "node.network.transport.memory"
LIMITS: Final = "node.network.transport.limits"
FRAMING: Final = "protocols.framing"
STREAMS: Final = "node.swarm.streams"
REQUEST: Final = "node.server.requests.request"
SERVICE: Final = "node.server.requests.service"
MESSAGES: Final = "node.network.kad_messages"
KADEMLIA: Final = "node.network.kad_service"
GOSSIP: Final = "node.network.gossip"
STANDARD: Final = "node.network.standard_protocols"
NAT: Final = "node.network.nat.reachability.NAT"
DIALS: Final = "node.network.nat.dial_back.DIALS"


CONNECTION: Final[Mapping[str, Row]] = {
    "connection": Row(
        "any address",
        f"{MEMORY}.budgets_of",
        f"{LIMITS}.LIMITS.patience",
        f"{LIMITS}.LIMITS.inbound {LIMITS}.LIMITS.handshakes {LIMITS}.LIMITS.least_of_address",
        ("tests/unit/test_limits.py", "tests/attacks/test_many_identities.py"),
        ("handshakes",),
        ("handshakes",),
    ),
    "WebSocket": Row(
        "any address",
        f"{LIMITS}.LIMITS.large_frame node.network.transport.raw_connection.READ_SIZE",
        f"{LIMITS}.LIMITS.patience {LIMITS}.LIMITS.frames_per_second",
        "as connection",
        ("tests/attacks/test_websocket.py",),
        ("WebSocket",),
    ),
    "swarm key and Noise": Row(
        "any address",
        "node.network.transport.noise.MAX_PLAINTEXT node.network.transport.noise.MAX_RSA_KEY",
        f"{LIMITS}.LIMITS.patience",
        "as connection",
        ("tests/attacks/test_costly_keys.py", "tests/unit/test_noise.py", "tests/swarm/test_private_hosts.py"),
        ("Noise messages", "handshakes"),
        ("handshakes",),
    ),
    "Yamux": Row(
        PEER,
        "node.network.transport.muxed_stream.MAX_DATA node.network.transport.muxed_stream.INITIAL_WINDOW",
        f"{LIMITS}.LIMITS.frames_per_second {LIMITS}.LIMITS.opened_per_second {LIMITS}.WORK.per_second",
        f"{LIMITS}.LIMITS.streams {LIMITS}.LIMITS.streams_of_connection {LIMITS}.LIMITS.windows_of_peer",
        ("tests/attacks/test_frame_floods.py", "tests/attacks/test_memory_of_a_node.py"),
        ("Yamux",),
        ("frames", "streams opened and reset", "unread bytes"),
    ),
    "multistream-select": Row(
        PEER,
        "node.network.transport.muxed_stream.INITIAL_WINDOW",
        f"{LIMITS}.LIMITS.patience",
        f"{LIMITS}.LIMITS.streams {LIMITS}.LIMITS.negotiating",
        ("tests/unit/test_negotiation.py", "tests/attacks/test_slow_negotiation.py"),
        ("NAT, identify and relay",),
        ("slow negotiation", "silent streams"),
    ),
}

PROTOCOLS: Final[Mapping[str, Row]] = {
    "/ipfs/id/1.0.0": Row(
        PEER,
        f"protocols.nat_traversal.TRAVERSAL.identify_max_message "
        f"protocols.delimited.DELIMITED.max_fields {STANDARD}._MAX_IDENTIFIED",
        f"{LIMITS}.LIMITS.patience",
        "node.network.transport.address_book.MAX_ADDRS node.network.transport.address_book.MAX_PEERS",
        ("tests/attacks/test_pings_and_pushes.py", "tests/attacks/test_many_identities.py"),
        ("asked who we are", "NAT, identify and relay"),
        ("identify and ping", "garbage"),
    ),
    "/ipfs/id/push/1.0.0": Row(
        PEER,
        f"protocols.nat_traversal.TRAVERSAL.identify_max_message {STANDARD}._MAX_IDENTIFIED",
        f"{STANDARD}.PUSHES {LIMITS}.LIMITS.patience",
        f"node.network.transport.address_book.MAX_ADDRS {STANDARD}._MAX_IDENTIFIED_PROTOCOLS",
        ("tests/attacks/test_pings_and_pushes.py", "tests/attacks/test_many_identities.py"),
        ("NAT, identify and relay",),
        ("identify and ping", "garbage"),
    ),
    "/ipfs/ping/1.0.0": Row(
        PEER,
        f"{STANDARD}._PING_BYTES",
        f"{STANDARD}.PINGS {LIMITS}.LIMITS.patience",
        f"{LIMITS}.LIMITS.streams",
        ("tests/attacks/test_pings_and_pushes.py",),
        ("NAT, identify and relay",),
        ("identify and ping", "garbage"),
    ),
    "/ipfs/kad/1.0.0": Row(
        PEER,
        f"{MESSAGES}.MAX_REQUEST {MESSAGES}.MAX_REQUEST_FIELDS {MESSAGES}.MAX_ANSWER {MESSAGES}.MAX_ANSWER_FIELDS",
        f"{KADEMLIA}.PATIENCE {KADEMLIA}.OF_PEER {KADEMLIA}.OF_ADDRESS {LIMITS}.WORK.per_second",
        f"{KADEMLIA}.MAX_STREAMS node.network.kad_store.MAX_RECORDS node.network.transport.memory.budgets_of",
        ("tests/attacks/test_kademlia.py", "tests/attacks/test_provider_records.py"),
        ("Kademlia", "message of Kademlia"),
        ("Kademlia values", "Kademlia questions", "provider records"),
    ),
    "/meshsub/1.1.0": Row(
        PEER,
        f"{GOSSIP}.GOSSIP.max_rpc {GOSSIP}.GOSSIP.max_fields "
        f"{GOSSIP}.GOSSIP.max_queued node.trust.evidence_message.EVIDENCE_LIMITS.max_message",
        f"{GOSSIP}.GOSSIP.of_peer {GOSSIP}.GOSSIP.of_address {GOSSIP}.GOSSIP.patience {GOSSIP}.GOSSIP.reading "
        f"{LIMITS}.WORK.per_second "
        "node.trust.evidence_message.EVIDENCE_LIMITS.rate "
        "node.trust.evidence_message.EVIDENCE_LIMITS.relayed node.trust.evidence_message.EVIDENCE_LIMITS.forwarded",
        f"{GOSSIP}.GOSSIP.max_taken {GOSSIP}.GOSSIP.max_control "
        f"{GOSSIP}._MAX_LARGE node.trust.evidence_message.EVIDENCE_LIMITS.max_senders",
        (
            "tests/attacks/test_gossip_floods.py",
            "tests/attacks/test_gossip_with_many_keys.py",
            "tests/attacks/test_gossip_control.py",
        ),
        ("gossipsub",),
        ("gossip", "garbage"),
    ),
    "/libp2p/autonat/1.0.0": Row(
        PEER,
        "protocols.nat_traversal.TRAVERSAL.autonat_max_message protocols.nat_traversal.TRAVERSAL.autonat_max_addrs",
        f"{DIALS}.max_dialed",
        f"{NAT}.max_kept {DIALS}.at_once_of_host",
        ("tests/attacks/test_announced_addresses.py", "tests/attacks/test_relay_and_dial_backs.py"),
        ("asked to dial back",),
        ("dial-backs and punches", "garbage"),
    ),
    "/libp2p/autonat/2/dial-request": Row(
        PEER,
        "protocols.nat_traversal.TRAVERSAL.autonat_max_message protocols.nat_traversal.TRAVERSAL.dial_data",
        f"{DIALS}.request {DIALS}.dialing",
        f"{DIALS}.at_once {DIALS}.per_host",
        ("tests/attacks/test_relay_and_dial_backs.py", "tests/unit/test_dial_requests.py"),
        ("asked to dial one address",),
        ("dial-backs and punches", "garbage"),
    ),
    "/libp2p/autonat/2/dial-back": Row(
        PEER,
        "protocols.delimited.MAX_MESSAGE",
        f"{DIALS}.request",
        "none: a number that nobody waits for is not kept",
        ("tests/swarm/test_autonat.py",),
        ("NAT, identify and relay",),
        ("dial-backs and punches", "garbage"),
    ),
    "/libp2p/dcutr": Row(
        PEER,
        "protocols.delimited.MAX_MESSAGE protocols.nat_traversal.TRAVERSAL.punch_max_addrs",
        "node.network.nat.hole_punching.PUNCHING.max_targets node.network.nat.hole_punching.PUNCHING.whole",
        "node.network.nat.hole_punching.PUNCHING.max_records node.network.nat.hole_punching.PUNCHING.at_once",
        ("tests/attacks/test_announced_addresses.py", "tests/attacks/test_punches.py"),
        ("punching first", "punching second"),
        ("dial-backs and punches", "garbage"),
    ),
    "/libp2p/circuit/relay/0.2.0/hop": Row(
        PEER,
        "protocols.delimited.MAX_MESSAGE",
        "node.network.nat.relay.RELAY.window",
        "node.network.nat.relay.RELAY.window node.network.nat.relay.RELAY.least_to",
        ("tests/swarm/test_relay.py", "tests/attacks/test_relay_and_dial_backs.py"),
        ("asked to relay", "asked for a circuit"),
        ("relay", "garbage"),
    ),
    "/libp2p/circuit/relay/0.2.0/stop": Row(
        "a relay that this node uses",
        "protocols.delimited.MAX_MESSAGE",
        f"{NAT}.answer {NAT}.by_relay",
        f"{NAT}.max_pending",
        ("tests/swarm/test_relay.py", "tests/attacks/test_unasked_circuits.py"),
        ("asked to take a circuit",),
        ("garbage",),
    ),
    "/petalnode/inference/1": Row(
        CLIENT,
        f"protocols.inference.INFERENCE.max_header protocols.inference.INFERENCE.max_payload {MEMORY}.budgets_of",
        f"{REQUEST}.REQUESTS.open {FRAMING}.PATIENCE {FRAMING}.LEAST_RATE",
        f"{SERVICE}.SERVICE.most_sessions {STREAMS}.SHARES.max_served {STREAMS}.SHARES.least_served",
        ("tests/attacks/test_payload_before_permission.py", "tests/attacks/test_hoarded_cache.py"),
        ("sessions and pushes",),
        ("unread bytes", "hoarded cache", "busy sessions", "abandoned prompts"),
    ),
    "/petalnode/push/1": Row(
        "any peer, as the server before",
        "protocols.inference.PUSH.max_header protocols.inference.PUSH.max_payload",
        f"{SERVICE}.SERVICE.first_push node.server.requests.pushes.PUSHES.timeout",
        f"{STREAMS}.SHARES.max_served",
        ("tests/attacks/test_rejected_push.py", "tests/attacks/test_push_after_replacement.py"),
        ("sessions and pushes",),
        ("wrong steps and pushes", "garbage"),
    ),
    "/petalnode/directory/1": Row(
        PEER,
        "protocols.directory.DIRECTORY.max_header protocols.directory.DIRECTORY.max_payload "
        "protocols.directory.DIRECTORY_LIMITS.max_page protocols.announcement.ANNOUNCEMENT.max_bytes",
        f"protocols.directory.DIRECTORY_LIMITS.max_pages "
        f"node.swarm.answers.ANSWERS.frames_per_second {LIMITS}.WORK.per_second",
        "node.swarm.view.MAX_RECORDS node.swarm.view.VIEW.max_sources",
        ("tests/attacks/test_costly_directory.py", "tests/attacks/test_flooded_directory.py"),
        ("questions to a node", "asked for records", "asked for a ping", "asked what it is"),
        ("announcements", "directory questions", "garbage"),
    ),
    "/petalnode/manifest/1": Row(
        PEER,
        "protocols.directory.MANIFEST.max_header node.models.manifest.MAX_WIRE_BYTES",
        f"{STREAMS}.SHARES.max_served",
        "node.models.folder.MAX_BLOCKS",
        ("tests/attacks/test_false_versions.py",),
        ("questions to a node", "asked for a manifest"),
        ("directory questions", "garbage"),
    ),
    "/petalnode/forward/1": Row(
        CLIENT,
        f"protocols.training.FORWARD.max_header protocols.training.FORWARD.max_payload {MEMORY}.budgets_of",
        f"{REQUEST}.REQUESTS.piece node.server.requests.batch_requests.BATCHES.idle",
        f"{SERVICE}.SERVICE.most_streams protocols.training.MAX_KEPT_TENSORS",
        ("tests/attacks/test_memory_of_a_node.py",),
        ("batches",),
        ("batches and adapters", "garbage"),
    ),
    "/petalnode/backward/1": Row(
        CLIENT,
        f"protocols.training.BACKWARD.max_header protocols.training.BACKWARD.max_payload {MEMORY}.budgets_of",
        f"{REQUEST}.REQUESTS.piece node.server.requests.batch_requests.BATCHES.gradient",
        f"{SERVICE}.SERVICE.most_streams protocols.training.MAX_KEPT_TENSORS",
        ("tests/attacks/test_memory_of_a_node.py",),
        ("batches",),
        ("batches and adapters", "garbage"),
    ),
    "/petalnode/adapter/1": Row(
        CLIENT,
        "protocols.adapter.ADAPTER.max_header protocols.adapter.MAX_ADAPTER_BYTES",
        f"node.server.requests.adapters.ADAPTERS.bring {REQUEST}.REQUESTS.piece",
        "node.server.requests.adapters.ADAPTERS.most_streams protocols.adapter.MAX_ADAPTER_TENSORS",
        ("tests/attacks/test_memory_of_a_node.py", "tests/attacks/test_adapter_patterns.py"),
        ("adapters from clients", "names of an adapter's tensors"),
        ("batches and adapters", "garbage"),
    ),
    "/petalnode/receipts/1": Row(
        "a client that shares receipts with a validator",
        "protocols.evidence.RECEIPTS.max_header protocols.evidence.RECEIPTS.max_payload "
        "protocols.evidence.EVIDENCE_SIZES.max_shared",
        "node.validator.auditing.AUDITS.offer_timeout node.validator.auditing.AUDITS.piece_timeout",
        "node.validator.auditing.AUDITS.max_pending_bytes node.validator.auditing.AUDITS.max_calls",
        ("tests/attacks/test_false_answers.py", "tests/attacks/test_held_places.py"),
        ("offers to an auditor",),
        ("evidence, receipts, points", "garbage"),
    ),
    "/petalnode/evidence/1": Row(
        PEER,
        "protocols.evidence.EVIDENCE.max_header protocols.evidence.EVIDENCE_SIZES.max_shared",
        "node.trust.evidence_gossip.HELD.idle_timeout protocols.evidence.EVIDENCE_SIZES.min_rate",
        "node.trust.evidence_gossip.HELD.fetches_per_stream node.trust.evidence_gossip.HELD.max_held_bytes",
        ("tests/attacks/test_slow_evidence.py",),
        ("questions to a node", "asked for evidence"),
        ("evidence, receipts, points", "garbage"),
    ),
    "/petalnode/credits/1": Row(
        "any peer, at a node that keeps points",
        "protocols.credits.CREDITS.max_header",
        "node.credits.issuer.ISSUER.idle_timeout protocols.credits.CREDITS_LIMITS.max_orders",
        "node.credits.issuer.ISSUER.max_streams "
        "node.credits.issuer.ISSUER.max_pending_orders node.credits.ledger.LEDGER.max_accounts",
        ("tests/swarm/test_credits.py", "tests/attacks/test_held_places.py"),
        ("orders for points", "asked for a balance", "asked for a clearing", "asked for a voucher"),
        ("evidence, receipts, points", "garbage"),
    ),
    "/petalnode/weights/1": Row(
        PEER,
        "protocols.weights.WEIGHTS.max_header protocols.weights.WEIGHTS_LIMITS.question "
        "protocols.weights.WEIGHTS.max_payload",
        "node.weights.holder.HOLDING.idle node.weights.holder.HOLDING.send node.weights.holder.HOLDING.beside_sessions "
        "node.weights.fetching.FETCHING.piece",
        "node.weights.holder.HOLDING.places node.weights.fetching.FETCHING.peers",
        (
            "tests/attacks/weights/test_false_weights.py",
            "tests/attacks/weights/test_slow_weights.py",
            "tests/swarm/test_weights_from_peers.py",
        ),
        ("questions about weights", "asked for weights"),
        ("weights", "garbage"),
    ),
    "/petalnode/transfer/1": Row(
        "another server",
        "protocols.directory.TRANSFER.max_header protocols.directory.TRANSFER.max_payload",
        "node.server.lifecycle.other_servers.TRANSFERS.timeout",
        "node.server.lifecycle.other_servers.TRANSFERS.max_streams",
        ("tests/swarm/test_streams.py",),
        ("questions to a node", "asked for bytes"),
        ("transfers", "garbage"),
    ),
}
"""By the id under which the handler is set."""
