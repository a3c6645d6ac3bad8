"""Targets that are plain functions: messages and addresses that peers send, and what is then made of them."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable
from typing import Any, Final

from google.protobuf.message import DecodeError, Message
from libp2p.kad_dht.pb import kademlia_pb2
from multiaddr import Multiaddr

from petalnode.crypto.evidence import NotProven
from petalnode.crypto.identity import peer_id_from_bytes, peer_id_to_bytes
from petalnode.node.client.request import ServerClaims, granted_pledge, pledged_points
from petalnode.node.credits.payment_verifier import PaymentVerifier
from petalnode.node.errors import BadInput, ModelError, NoChainError
from petalnode.node.links.format import DOMAIN as INVITE_DOMAIN
from petalnode.node.links.format import SCHEME, read_target
from petalnode.node.links.making import choose_addrs, where_from
from petalnode.node.models.manifest import Manifest
from petalnode.node.network import addresses
from petalnode.node.network.kad_messages import MAX_ANSWER_FIELDS, MAX_REQUEST_FIELDS, BadMessage, parse
from petalnode.node.network.kad_store import open_models_value
from petalnode.node.network.mdns import is_apart, read_txt, txt_record
from petalnode.node.network.nat.relay import origin_of
from petalnode.node.network.provider_lookup import answer_of
from petalnode.node.network.transport.dialing import kept, one_per_relay, plan
from petalnode.node.placement.observed import coverage, gaps, observe_servers, upper_bound
from petalnode.node.placement.planning.plans import fleet_of_servers
from petalnode.node.swarm.routing import Demand, RouteCandidate, cheapest_chain
from petalnode.node.swarm.view import SwarmView
from petalnode.node.trust.bundle import BadBundle, Bundle
from petalnode.node.trust.evidence_gossip import EvidenceGossip
from petalnode.node.trust.evidence_message import BadEvidenceMessage, EvidenceMessage
from petalnode.node.trust.statement import check_statement
from petalnode.node.trust.store import TrustStore
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.adapter import AnnouncedAdapter, block_of, check_tensors
from petalnode.protocols.announcement import DOMAIN, BadAnnouncement, open_announcement
from petalnode.protocols.credits import clearing_to_wire
from petalnode.protocols.delimited import parse_message
from petalnode.protocols.directory import NodeInfo, checked_records, last_peer_id
from petalnode.protocols.framing import TensorError, all_finite, wire_nbytes
from petalnode.protocols.ids import Span
from petalnode.protocols.inference import Refusal, pledge_from_wire, receipt_from_wire, receipt_to_wire, terms_of
from petalnode.protocols.nat_traversal import readable_addrs
from petalnode.protocols.tensors import decode
from petalnode.protocols.training import LoraName
from tests.fuzz import corpus
from tests.fuzz.corpus import ATTACKER, NOW_MS, OTHER, SERVER, VALIDATOR, VERSION
from tests.fuzz.harness import Target, parser
from tests.fuzz.mutation import Mutator

ADDRS: Final = (
    "/ip4/203.0.113.7/tcp/31330",
    "/ip6/2001:db8::1/tcp/31330",
    f"/ip4/203.0.113.7/tcp/31330/p2p/{OTHER.peer_id}",
    f"/dns4/example.com/tcp/4001/p2p/{OTHER.peer_id}/p2p-circuit",
    f"/ip4/10.0.0.1/tcp/4001/p2p/{OTHER.peer_id}/p2p-circuit/p2p/{SERVER.peer_id}",
    "/ip4/1.2.3.4/udp/4001/quic-v1/webtransport",
    "/ip4/1.2.3.4/tcp/443/tls/ws",
    "/unix/%2Ftmp%2Fsocket",
    "/onion3/vww6ybal4bd7szmgncyruucpgfkqahzddi37ktceo3ah7ngmcopnpyyd:1234",
)
_PARTS: Final = (
    *("ip4", "ip6", "tcp", "udp", "p2p", "p2p-circuit", "dns", "dns4", "dnsaddr", "quic", "quic-v1", "ws", "tls"),
    *("unix", "onion3", "ip6zone", "ipcidr", "memory", "garlic64", "certhash", "sni", "http-path", "webrtc-direct"),
)


def _signed(mutator: Mutator, message: wire.Announcement) -> wire.SignedAnnouncement:
    """The attacker signs what it likes."""
    data = mutator.message(message)
    return wire.SignedAnnouncement(announcement=data, signature=ATTACKER.sign(DOMAIN, data))


def _announcement(mutator: Mutator) -> bytes:
    signed = _signed(mutator, corpus.announcement())
    return mutator.message(signed) if mutator.chance(0.2) else signed.SerializeToString()


def _read_announcement(data: bytes) -> None:
    """What comes through is used wherever announcements are."""
    record = open_announcement(data, now=time.time())
    said = record.content
    view = SwarmView().merge([record], time.time())
    servers = view.servers(now=time.time())
    view.models(now=time.time())
    pledged_points(said, (), NOW_MS)
    pledged_points(said, (VALIDATOR.peer_id,), NOW_MS)
    ServerClaims.of(said).broken_by_grant(wire.Granted(dtype="float32"))
    for addr in said.addrs:
        addresses.dialable(addr)
    [AnnouncedAdapter.parse(text) for text in said.adapters]
    observed = observe_servers(servers, said.num_blocks, contested=True)
    coverage(observed.serving, said.num_blocks)
    gaps(observed.serving, said.num_blocks)
    upper_bound(observed.servers, said.num_blocks)
    candidate = RouteCandidate(
        said.peer_id,
        said.span,
        rtt=0.01,
        step_seconds=said.step_seconds,
        cache_tokens_free=said.cache_tokens_free,
        forward_tokens_per_second=said.forward_tokens_per_second,
        queue_depth=said.queue_depth,
        rtts=said.rtts,
        max_session_length=said.max_session_length,
    )
    try:
        cheapest_chain([candidate], said.span, Demand(cache_tokens=10, max_length=10, token_bytes=256, pushed=True))
    except NoChainError:
        pass
    if servers:
        fleet_of_servers(servers, {server.peer_id: 0.01 for server in servers}).problem(said.num_blocks)


def _link(mutator: Mutator) -> str:
    """As its maker would sign it, or with other bytes behind the scheme."""
    message = wire.Invite(
        maker=peer_id_to_bytes(ATTACKER.peer_id),
        addrs=[Multiaddr(f"{ADDRS[0]}/p2p/{SERVER.peer_id}").to_bytes()],
        model="org/model",
        model_version=bytes(16),
        expires=NOW_MS // 1000 + 86400,
        swarm_key_hash=bytes(8),
    )
    body = mutator.message(message)[: 1 << 15]
    data = bytes([1]) + (len(body) % (1 << 16)).to_bytes(2, "big") + body + ATTACKER.sign(INVITE_DOMAIN, body)
    if mutator.chance(0.3):
        data = mutator.bytes(data)
    return SCHEME + base64.b32encode(data).decode().rstrip("=").lower()


def _read_link(text: str) -> None:
    target = read_target([text], "ab" * 32 if len(text) % 2 else None)
    choose_addrs({peer: [peer] for peer in target.peers})
    where_from(target.peers)


def _page(mutator: Mutator) -> bytes:
    records = [_signed(mutator, corpus.announcement()) for _ in range(mutator.random.randrange(4))]
    return mutator.message(wire.DirectoryRecords(records=records, truncated=True))


def _read_page(data: bytes) -> None:
    page = parsed(wire.DirectoryRecords, data)
    if page is not None:
        list(checked_records(page, {}, now=time.time()))
        last_peer_id(page)
    list(open_models_value(data, time.time()))


def _kad_message(mutator: Mutator) -> bytes:
    peer = kademlia_pb2.Message.Peer(id=peer_id_to_bytes(OTHER.peer_id), addrs=[Multiaddr(ADDRS[0]).to_bytes()] * 2)
    record = kademlia_pb2.Record(key=b"/petalnode/models", value=_page(mutator), timeReceived="2026", author=b"a")
    peers = [peer] * mutator.random.choice((0, 1, 20))
    more: dict[str, Any] = {"key": b"k" * 34, "record": record, "closerPeers": peers, "providerPeers": peers}
    return mutator.message(kademlia_pb2.Message(type=mutator.random.randrange(7), **more))


def _read_kad_message(data: bytes) -> None:
    """By who is asked, and by who has asked."""
    answer_of(parse(data, max_fields=MAX_ANSWER_FIELDS))
    parse(data, max_fields=MAX_REQUEST_FIELDS)


def parsed(kind: type[Any], data: bytes) -> Any:
    """A message as it comes out of the framing, which refuses what protobuf cannot read; None then."""
    try:
        return kind.FromString(data)
    except Exception:
        return None


def mutated(*messages: Message) -> Callable[[Mutator], bytes]:
    return lambda mutator: mutator.message(mutator.random.choice(messages))


def _read_node_info(data: bytes) -> None:
    info = parsed(wire.NodeInfo, data)
    if info is not None:
        NodeInfo.of(info)


# --- receipts, pledges, evidence


def _receipt(mutator: Mutator) -> tuple[bytes, bytes]:
    announced = corpus.announcement()
    return mutator.message(_RECEIPT), mutator.message(announced.pledge)


def _read_receipt(given: tuple[bytes, bytes]) -> None:
    message, pledged = parsed(wire.Receipt, given[0]), parsed(wire.Pledge, given[1])
    if message is not None:
        receipt = receipt_from_wire(message)
        receipt.is_signed_by(ATTACKER.peer_id)
        receipt.hash()
        if pledged is not None:
            pledge = pledge_from_wire(pledged)
            pledge.covers(receipt)
            pledge.backed([VALIDATOR.peer_id])
            granted_pledge(wire.Granted(pledge=pledged), ATTACKER.peer_id, VERSION, Span(0, 6), NOW_MS)


def _resigned(mutator: Mutator, evidence: wire.Evidence) -> None:
    """Receipts of a server that is the attacker's own are signed whatever they say."""
    for message in evidence.receipts:
        if mutator.chance(0.5):
            try:
                receipt = receipt_from_wire(message)
                message.signature = receipt.signed(ATTACKER).signature
            except ValueError:
                pass


def bundle_bytes(mutator: Mutator) -> bytes:
    """The file of a bundle: with another statement that is signed, or with other bytes around it."""
    base = mutator.random.choice((corpus.equivocation().evidence, corpus.broken_pledge()))
    evidence = parsed(wire.Evidence, mutator.message(base)) or corpus.broken_pledge()
    _resigned(mutator, evidence)
    statement = evidence.SerializeToString() if mutator.chance(0.8) else mutator.message(base)
    payloads = {"output": b"12345678", "input.0": b"1234", mutator.random.choice(("kept.0", "", "\0", "x" * 99)): b""}
    data = corpus.accused(statement, payloads).to_bytes()
    return mutator.bytes(data) if mutator.chance(0.3) else data


def _read_bundle(data: bytes) -> None:
    bundle = Bundle.from_bytes(data)
    _ = bundle.last_receipt, bundle.id, bundle.accused
    check_statement(bundle)


def notice_bytes(mutator: Mutator) -> bytes:
    statement = mutator.message(mutator.random.choice((corpus.equivocation().evidence, corpus.broken_pledge())))
    bundle = corpus.equivocation()
    if mutator.chance(0.5) and parsed(wire.Evidence, statement) is not None:
        bundle = corpus.accused(statement, {})
    try:
        message = corpus.notice(bundle)
    except (ValueError, DecodeError):  # it accuses nobody, or has a field that is too long
        message = corpus.notice(corpus.equivocation())
        message.bundle = bundle.to_bytes()
        message.id = bundle.id
    return mutator.message(message) if mutator.chance(0.7) else message.SerializeToString()


class _Gossip:
    """A node that gossips, whose clock is far enough for each message to be allowed."""

    def __init__(self) -> None:
        self.now = float(corpus.NOW)
        self.gossip = EvidenceGossip(SERVER, TrustStore(), clock=lambda: self.now)

    def read(self, data: bytes) -> None:
        self.now += 0.01
        author = peer_id_from_bytes(
            peer_id_to_bytes(ATTACKER.peer_id)[:-4] + int(self.now * 100).to_bytes(8, "big")[4:]
        )
        self.gossip.accept(author, author, data)
        EvidenceMessage.from_bytes(data, self.now)


# --- tensors and adapters


def _tensor(mutator: Mutator) -> tuple[bytes, bytes]:
    codec = mutator.random.choice(("none", "float16", "bfloat16", "int8-block64"))
    dtype = mutator.random.choice(("float32", "float16", "bfloat16"))
    size = wire_nbytes((2, 3, 4), dtype, codec)
    payload = mutator.random.randbytes(size)
    header = corpus.tensor(2, 3, 4, dtype=dtype, codec=codec, nbytes=size)
    return mutator.message(header), mutator.bytes(payload) if mutator.chance(0.3) else payload


def _read_tensor(given: tuple[bytes, bytes]) -> None:
    header = parsed(wire.Tensor, given[0])
    if header is not None:
        decode(header, given[1])
        all_finite(header, given[1])


def _adapter_names(mutator: Mutator) -> dict[str, tuple[int, ...]]:
    names = [
        "3.self_attn.q_proj.lora_A",
        "3.self_attn.q_proj.lora_B",
        "3.prompts",
        "4.prompts",
        f"fine@{bytes(32).hex()}",
    ]
    shapes = [(2, 8), (8, 2), (3, 8), (), (1 << 40, 8)]
    found = {}
    for name in mutator.random.sample(names, 3):
        changed = mutator.bytes(name.encode()).decode("utf-8", "replace") if mutator.chance(0.4) else name
        found[changed] = mutator.random.choice(shapes)
    return found


def _read_adapter_names(given: dict[str, tuple[int, ...]]) -> None:
    for name in given:
        AnnouncedAdapter.parse(name)
        LoraName.parse(name)
        block_of(name)
        try:
            Span.parse(name)
        except ValueError:
            pass
    check_tensors(given, Span(3, 5), {3: {"self_attn.q_proj": (8, 8)}, 4: {}}, 8)


# --- addresses


def _address(mutator: Mutator) -> bytes:
    """As text; its binary form is made below."""
    if mutator.chance(0.4):
        parts = mutator.random.choices(_PARTS, k=mutator.random.randrange(1, 6))
        values = ("1.2.3.4", "::1", "80", "0", "", OTHER.peer_id, "example.com", "x" * 70, "4294967296", "1.2.3.4/8")
        return "".join(
            f"/{part}/{mutator.random.choice(values)}" if mutator.chance(0.6) else f"/{part}" for part in parts
        ).encode()
    text = mutator.random.choice(ADDRS).encode()
    return mutator.bytes(text) if mutator.chance(0.8) else text


def _read_address(data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    try:
        addresses.parse_peer(text)
    except BadInput:
        pass
    try:
        addresses.parse_own(text, "announce")
    except BadInput:
        pass
    addresses.Endpoint.parse(text)
    found = addresses.dialable(text)
    if found is not None:
        use_address(found)


def use_address(found: Any) -> None:
    """All that is done with an address that has passed as one that can be dialed."""
    addresses.ip_of(found)
    addresses.is_public(found)
    addresses.circuit_of(found)
    origin_of(str(found))
    plan(one_per_relay(kept([found, found]), {}), addresses.own_networks(), {}, 0.0)


def _binary_address(mutator: Mutator) -> bytes:
    try:
        data = addresses.read_multiaddr(_address(mutator).decode("utf-8", "replace")).to_bytes()
    except ValueError:
        data = Multiaddr(mutator.random.choice(ADDRS)).to_bytes()
    return mutator.bytes(data) if mutator.chance(0.8) else data


def _read_binary_address(data: bytes) -> None:
    for text in readable_addrs([data]):
        _read_address(text.encode())
    announced = corpus.announcement()
    del announced.addrs[:]
    announced.addrs.append(data)
    signed = announced.SerializeToString()
    message = wire.SignedAnnouncement(announcement=signed, signature=ATTACKER.sign(DOMAIN, signed))
    open_announcement(message.SerializeToString(), now=time.time())


def _txt(mutator: Mutator) -> bytes:
    record = txt_record([f"{addr}/p2p/{OTHER.peer_id}" for addr in ADDRS[:2]] + [ADDRS[4]], apart=True)
    if mutator.chance(0.5):
        text = b"dnsaddr=" + _address(mutator)
        record = bytes([min(len(text), 255)]) + text + record
    return mutator.bytes(record)


# --- credits, manifests, terms


def _opening(mutator: Mutator) -> bytes:
    opened = corpus.opening()
    opened.clearing.CopyFrom(clearing_to_wire(corpus.clearing()))
    return mutator.message(opened)


class _Payments:
    def __init__(self) -> None:
        self._verifier = PaymentVerifier(SERVER.peer_id, [VALIDATOR.peer_id])

    def read(self, data: bytes) -> None:
        opened = parsed(wire.Open, data)
        if opened is not None:
            terms = terms_of(opened)
            self._verifier.give_back(self._verifier.take(opened, ATTACKER.peer_id, terms))


_RECEIPT: Final = receipt_to_wire(corpus.receipt())
_MANIFEST: Final = wire.Manifest(
    config=b'{"model_type":"llama"}', embeddings=bytes(32), blocks=[bytes(32)] * 3, head=bytes(32)
)


def _long_message(mutator: Mutator) -> bytes:
    return mutator.message(corpus.equivocation().evidence)


def _read_long_message(data: bytes) -> None:
    assert parse_message(wire.Evidence, data, most=1000).SerializeToString(deterministic=True) == (
        wire.Evidence.FromString(data).SerializeToString(deterministic=True)
    )


TARGETS: Final[tuple[Target, ...]] = (
    parser("link", 10, _link, _read_link, BadInput),
    parser("announcement", 12, _announcement, _read_announcement, BadAnnouncement),
    parser("message of Kademlia", 3, _kad_message, _read_kad_message, BadMessage),
    parser("directory page", 4, _page, _read_page, BadAnnouncement),
    parser("node info", 1, mutated(NodeInfo("server", "1", "x", None, 1, 2, 3.0).to_frame().node), _read_node_info),
    parser("receipt and pledge", 5, _receipt, _read_receipt, ValueError),
    parser("evidence file", 8, bundle_bytes, _read_bundle, BadBundle, NotProven),
    parser("evidence by gossip", 5, notice_bytes, _Gossip().read, BadEvidenceMessage),
    parser("tensor", 30, _tensor, _read_tensor, TensorError),
    parser("names of an adapter's tensors", 20, _adapter_names, _read_adapter_names, ValueError),
    parser("address", 30, _address, _read_address),
    parser("binary address", 8, _binary_address, _read_binary_address, BadAnnouncement),
    parser("mDNS record", 12, _txt, lambda record: (read_txt(record), is_apart(record))),
    parser("terms and payment", 16, _opening, _Payments().read, Refusal),
    parser("manifest", 20, mutated(_MANIFEST), Manifest.from_wire, ModelError),
    parser("long message", 5, _long_message, _read_long_message, DecodeError),
)
