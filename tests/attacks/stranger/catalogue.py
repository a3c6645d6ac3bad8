"""All attacks that a stranger can run over the network, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from petalnode.node.network.host import GOSSIP_PROTOCOLS
from petalnode.protocols.adapter import ADAPTER
from petalnode.protocols.circuit import HOP, STOP
from petalnode.protocols.credits import CREDITS
from petalnode.protocols.directory import DIRECTORY, MANIFEST, TRANSFER
from petalnode.protocols.evidence import EVIDENCE, RECEIPTS
from petalnode.protocols.inference import INFERENCE, PUSH
from petalnode.protocols.nat_traversal import AUTONAT, DIAL_BACK, DIAL_REQUEST, IDENTIFY, PUNCH
from petalnode.protocols.training import BACKWARD, FORWARD
from petalnode.protocols.weights import WEIGHTS

from . import connections, requests, services, table
from .keys import Attack

SPOKEN: Final = (
    *(IDENTIFY, services.IDENTIFY_PUSH, services.PING, table.KAD, *GOSSIP_PROTOCOLS, PUNCH, HOP, STOP),
    *(AUTONAT, DIAL_REQUEST, DIAL_BACK),
    *(protocol.id for protocol in (INFERENCE, PUSH, DIRECTORY, MANIFEST, FORWARD, BACKWARD, RECEIPTS, EVIDENCE)),
    *(protocol.id for protocol in (CREDITS, ADAPTER, TRANSFER, WEIGHTS)),
)
"""Protocols that a node may speak."""

ATTACKS: Final[Mapping[str, tuple[Attack, ...]]] = {
    "frames": tuple(
        connections.flooding(frames)
        for frames in (connections.OPENED_AND_RESET, connections.PINGS, connections.OF_NO_STREAM)
    ),
    "streams opened and reset": (connections.open_and_reset,),
    "handshakes": (connections.handshakes_without_end, connections.reconnect),
    "slow negotiation": (connections.slow_negotiation,),
    "silent streams": (connections.silent_streams, table.silent_table_streams),
    "garbage": tuple(connections.garbage(protocol) for protocol in SPOKEN),
    "Kademlia values": (table.put_padded_values, table.put_many_values, table.put_announcements),
    "Kademlia questions": (table.find_nodes, table.get_values),
    "provider records": (table.provider_records,),
    "announcements": (table.announcements, table.false_directory),
    "directory questions": (table.directory_questions, table.manifest_questions),
    "relay": (services.reservations, services.circuits),
    "dial-backs and punches": (services.dial_backs, services.punches),
    "identify and ping": (services.identify_pushes, services.pings),
    "gossip": (services.gossip_flood, services.large_gossip),
    "evidence, receipts, points": (services.evidence_fetches, services.receipts_and_orders),
    "transfers": (services.transfers,),
    "weights": (services.weights,),
    "unread bytes": (requests.unread_before_permission, requests.large_payloads),
    "hoarded cache": (requests.hoarded_cache,),
    "busy sessions": (requests.busy_session,),
    "abandoned prompts": (requests.abandoned_prompts,),
    "wrong steps and pushes": (requests.wrong_steps, requests.wrong_pushes),
    "batches and adapters": (requests.forward_batches, requests.backward_batches, requests.adapters),
}
"""By name, what each key does to each victim; of several, the keys take turns."""
