"""Targets that are the other protocols of a node, both the side that answers and the side that asks."""

from __future__ import annotations

import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, Final, cast

from google.protobuf.message import Message

from petalnode.crypto.credits import CreditQuery, DepositOrder, Transfer
from petalnode.crypto.receipts import countersign
from petalnode.crypto.statement import Statement
from petalnode.node.credits.issuer import CreditsService
from petalnode.node.credits.ledger import Ledger
from petalnode.node.server.lifecycle.other_servers import serve_transfers
from petalnode.node.swarm.swarm import Swarm
from petalnode.node.trust.bundle import BadBundle
from petalnode.node.trust.evidence_gossip import EvidenceGossip, fetch_bundle
from petalnode.node.trust.store import TrustStore
from petalnode.node.validator.auditing import ReceiptAuditService
from petalnode.protocols import standard_pb2 as standard
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.announcement import DOMAIN, open_signed
from petalnode.protocols.circuit import CircuitLimit, ask_connection, ask_reservation, ask_stop
from petalnode.protocols.credits import CREDITS, ask_clearing, ask_credit, ask_voucher, clearing_to_wire
from petalnode.protocols.directory import (
    DIRECTORY,
    MANIFEST,
    TRANSFER,
    NodeInfo,
    answer_manifests,
    ask_manifest,
    measure_transfer,
    records_page,
)
from petalnode.protocols.evidence import EVIDENCE, RECEIPTS
from petalnode.protocols.inference import from_wire, receipt_to_wire, to_wire
from petalnode.protocols.nat_traversal import (
    TRAVERSAL,
    ask_dial,
    ask_dial_back,
    ask_identify,
    exchange_first,
    exchange_second,
)
from tests.directories import a_directory
from tests.fuzz import corpus
from tests.fuzz.corpus import ATTACKER, NOW_MS, OTHER, SERVER, VALIDATOR, VERSION
from tests.fuzz.harness import Target
from tests.fuzz.mutation import Mutator
from tests.fuzz.parsers import parsed
from tests.fuzz.streams import Conversation, Frame, Handlers, Talk, asking, conversation
from tests.inspection import audits_of, forget_audits
from tests.node_inspection import in_progress, logged


@asynccontextmanager
async def _node() -> AsyncIterator[Talk]:
    """What every node answers; its limits are those of `Swarm`."""
    handlers = Handlers()
    directory = a_directory(SERVER)
    directory.about = lambda: NodeInfo("server", "1", "public", None, 1, 2, time.time())
    gossip = EvidenceGossip(SERVER, TrustStore())
    bundle = corpus.equivocation()
    gossip.record_proven(bundle, recomputed=False)
    manifests = {VERSION: wire.Manifest(config=b"{}", embeddings=bytes(32), blocks=[bytes(32)], head=bytes(32))}
    set_handler = handlers.streams.set_handler
    set_handler(DIRECTORY, directory.serve)
    set_handler(MANIFEST, partial(answer_manifests, manifests=manifests, timeout=60.0))
    set_handler(EVIDENCE, gossip.serve)
    serve_transfers(cast(Swarm, handlers.streams))
    # One peer may leave one announcement and one line in the log behind, not more.
    state = lambda: {"records": len(directory.view.records) > 1, "logged": len(logged(directory)) > 1}  # noqa: E731
    yield Talk(lambda protocol: handlers.by_protocol[protocol], state, logged(handlers.streams))


def _signed(message: wire.Announcement) -> wire.SignedAnnouncement:
    data = message.SerializeToString()
    return wire.SignedAnnouncement(announcement=data, signature=ATTACKER.sign(DOMAIN, data))


@cache
def _questions() -> tuple[tuple[Frame, ...], ...]:
    directory, manifest, evidence = f"{DIRECTORY.id} 1", f"{MANIFEST.id} 1", f"{EVIDENCE.id} 1"
    query = wire.DirectoryQuery(model_version=VERSION, limit=5, after=b"\0")
    transfer = wire.TransferFrame(wanted=1000, tensors=[wire.Tensor(nbytes=1000)])
    return (
        (
            Frame(directory, wire.DirectoryFrame(publish=_signed(corpus.announcement()))),
            Frame(directory, wire.DirectoryFrame(query=query)),
            Frame(directory, wire.DirectoryFrame(ping=wire.Ping(payload=b"1"))),
            Frame(directory, wire.DirectoryFrame(node_query=wire.NodeQuery())),
        ),
        (Frame(manifest, wire.ManifestFrame(query=wire.ManifestQuery(model_version=VERSION))),) * 2,
        (
            Frame(evidence, wire.EvidenceFrame(fetch=wire.Fetch(id=corpus.equivocation().id))),
            Frame(evidence, wire.EvidenceFrame(fetch=wire.Fetch(id=bytes(32)))),
            Frame(evidence, wire.EvidenceFrame(close=wire.Close())),
        ),
        (Frame(f"{TRANSFER.id} 1", transfer, bytes(1000)),) * 3,
    )


def _resigned(mutator: Mutator, data: bytes) -> bytes:
    frame = parsed(wire.DirectoryFrame, data)
    if frame is None or not frame.HasField("publish") or mutator.chance(0.3):
        return data
    frame.publish.announcement = mutator.message(corpus.announcement())
    frame.publish.signature = ATTACKER.sign(DOMAIN, frame.publish.announcement)
    return bytes(frame.SerializeToString())


def _to_node(mutator: Mutator) -> Conversation:
    return conversation(mutator, mutator.random.choice(_questions()), _resigned, shares=0.4)


# --- points


_ORDERS: Final[Mapping[str, type[Statement]]] = {"query": CreditQuery, "transfer": Transfer, "deposit": DepositOrder}


@asynccontextmanager
async def _issuer() -> AsyncIterator[Talk]:
    handlers = Handlers()
    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger(Path(folder) / "ledger.sqlite", VALIDATOR)
        ledger.issue(ATTACKER.peer_id, 1_000_000)
        service = CreditsService(cast(Swarm, handlers.streams), ledger)
        state = lambda: {"in progress": in_progress(service)}  # noqa: E731
        yield Talk(lambda protocol: handlers.by_protocol[protocol], state, logged(handlers.streams))


@cache
def _order_frames() -> tuple[Frame, ...]:
    query, transfer, deposit = corpus.orders()
    return (
        Frame(f"{CREDITS.id} 1", wire.CreditsFrame(query=to_wire(query, wire.CreditQuery))),
        Frame(f"{CREDITS.id} 1", wire.CreditsFrame(transfer=to_wire(transfer, wire.CreditTransfer))),
        Frame(f"{CREDITS.id} 1", wire.CreditsFrame(deposit=to_wire(deposit, wire.CreditDeposit))),
    )


def _signed_order(mutator: Mutator, data: bytes) -> bytes:
    """A changed order that the attacker signs."""
    frame = parsed(wire.CreditsFrame, data)
    body = None if frame is None else frame.WhichOneof("body")
    if body not in _ORDERS or mutator.chance(0.2):
        return data
    try:
        message = getattr(frame, body)
        message.signature = from_wire(message, _ORDERS[body]).signed(ATTACKER).signature  # type: ignore[attr-defined]
    except ValueError:
        pass
    return bytes(frame.SerializeToString())


def _orders(mutator: Mutator) -> Conversation:
    return conversation(mutator, _order_frames(), _signed_order, shares=0.6)


# --- receipts for auditors


@asynccontextmanager
async def _auditor() -> AsyncIterator[Talk]:
    handlers = Handlers()
    service = ReceiptAuditService(cast(Swarm, handlers.streams), VERSION)
    talk = Talk(lambda protocol: handlers.by_protocol[protocol], dict, logged(handlers.streams), OTHER.peer_id)

    class Auditor:
        async def feed(self, given: Conversation) -> None:
            await talk.feed(given)
            await forget_audits(service)  # a client may not call so often

        def held(self) -> Mapping[str, int]:
            return audits_of(service)

    yield cast(Talk, Auditor())


@cache
def _offers() -> tuple[Frame, ...]:
    stream = f"{RECEIPTS.id} 1"
    receipts = [corpus.receipt(sequence=number) for number in (1, 2, 3)]
    offer = wire.Offer(
        receipts=map(receipt_to_wire, receipts), countersignatures=[countersign(OTHER, receipt) for receipt in receipts]
    )
    evidence = corpus.broken_pledge()
    evidence.kind = "answer"
    evidence.work.receipt.CopyFrom(receipt_to_wire(receipts[0]))
    data = corpus.accused(evidence.SerializeToString(), {"output.0": b"x"}).to_bytes()
    piece = wire.EvidenceFrame(piece=wire.Piece(), tensors=[wire.Tensor(nbytes=len(data))])
    sending = wire.EvidenceFrame(sending=wire.Sending(nbytes=len(data)))
    return (
        Frame(stream, wire.EvidenceFrame(offer=offer)),
        *((Frame(stream, sending), Frame(stream, piece, data)) * 2),
    )


def _offers_of(mutator: Mutator) -> Conversation:
    return conversation(mutator, _offers(), shares=0.3)


# --- the side that asks


def _of(*frames: Message | tuple[Message, bytes]) -> Callable[[Mutator], Sequence[tuple[Message, bytes]]]:
    answers = [given if isinstance(given, tuple) else (given, b"") for given in frames]
    return lambda mutator: answers


def _bundle_answers(mutator: Mutator) -> Sequence[tuple[Message, bytes]]:
    data = corpus.equivocation().to_bytes()
    parts = [data[: len(data) // 2], data[len(data) // 2 :]]
    pieces = [(wire.EvidenceFrame(piece=wire.Piece(), tensors=[wire.Tensor(nbytes=len(part))]), part) for part in parts]
    return [(wire.EvidenceFrame(sending=wire.Sending(nbytes=len(data))), b""), *pieces]


def _page_answers(mutator: Mutator) -> Sequence[tuple[Message, bytes]]:
    page = records_page([open_signed(_signed(corpus.announcement()), now=corpus.NOW)])
    page.records.truncated = True
    return [(page, b"")] * 3


async def _pull(stream: Any) -> None:
    async def opened(peer_id: str, timeout: float) -> Any:
        return stream

    directory = a_directory(SERVER, opened)
    await directory.pull(ATTACKER.peer_id, timeout=6.0)


async def _measure(stream: Any) -> None:
    async def opened(peer_id: str, timeout: float) -> Any:
        return stream

    await a_directory(SERVER, opened).measure_rtt(ATTACKER.peer_id, timeout=6.0)


async def _ask_node(stream: Any) -> None:
    async def opened(peer_id: str, timeout: float) -> Any:
        return stream

    await a_directory(SERVER, opened).ask_node(ATTACKER.peer_id, timeout=6.0)


def _credit_asked() -> tuple[CreditQuery, Transfer, DepositOrder]:
    return cast(Any, tuple(corpus.orders()))


_ADDR: Final = bytes.fromhex("04cb007107067a62")
_HOP: Final = standard.HopMessage(
    type=standard.HopMessage.STATUS,
    status=standard.OK,
    reservation=standard.RelayReservation(expire=NOW_MS // 1000 + 3600, addrs=[_ADDR, _ADDR], voucher=b"v"),
    limit=standard.RelayLimit(duration=60, data=1000),
)
_STOP: Final = standard.StopMessage(type=standard.StopMessage.STATUS, status=standard.OK)
_CONNECT: Final = standard.HolePunch(type=standard.HolePunch.CONNECT, observed_addrs=[_ADDR, _ADDR])
_SYNC: Final = standard.HolePunch(type=standard.HolePunch.SYNC)
_IDENTIFY: Final = standard.Identify(listen_addrs=[_ADDR, _ADDR], protocols=["/a", "/b"], observed_addr=_ADDR)
_DIALED: Final = standard.AutoNat(
    type=standard.AutoNat.DIAL_RESPONSE,
    dial_response=standard.AutoNat.DialResponse(status=standard.AutoNat.OK, status_text="ok", addr=_ADDR),
)
_PRICE: Final = standard.AutoNat2(dial_data_request=standard.AutoNat2.DialDataRequest(num_bytes=9000))
_DIALED_ONE: Final = standard.AutoNat2(
    dial_response=standard.AutoNat2.DialResponse(status=standard.AutoNat2.ANSWERED, dial_status=standard.AutoNat2.OK)
)
_SHORT: Final = 4096
TARGETS: Final[tuple[Target, ...]] = (
    Target("questions to a node", 8, _to_node, _node, 400.0, peak=4 << 20),
    Target("orders for points", 1, _orders, _issuer, 4000.0),
    Target("offers to an auditor", 4, _offers_of, _auditor, 400.0, peak=4 << 20),
    asking("asked for records", 3, _pull, _page_answers, DIRECTORY, max_header=DIRECTORY.max_header),
    asking("asked for a ping", 1, _measure, _of(wire.DirectoryFrame(ping=wire.Ping(payload=b"\0"))), DIRECTORY),
    asking(
        "asked what it is",
        1,
        _ask_node,
        _of(NodeInfo("server", "1", "x", None, 1, 2, 3.0).to_frame()),
        DIRECTORY,
    ),
    asking(
        "asked for a manifest",
        2,
        partial(ask_manifest, model_version=VERSION, timeout=10.0),
        _of(wire.ManifestFrame(manifest=wire.Manifest(config=b"{}", blocks=[b"1"]))),
        MANIFEST,
    ),
    asking(
        "asked for evidence",
        3,
        partial(fetch_bundle, evidence_id=bytes(32)),
        _bundle_answers,
        EVIDENCE,
        BadBundle,
        max_header=EVIDENCE.max_header,
    ),
    asking(
        "asked for bytes",
        1,
        partial(measure_transfer, timeout=10.0),
        _of(*[(wire.TransferFrame(tensors=[wire.Tensor(nbytes=1)]), b"1")] * 3),
        TRANSFER,
    ),
    asking(
        "asked for a balance",
        1,
        partial(ask_credit, query=_credit_asked()[0], timeout=10.0),
        _of(wire.CreditsFrame(credit=wire.Credit(issuer=b"1", points=5))),
        CREDITS,
    ),
    asking(
        "asked for a clearing",
        1,
        partial(ask_clearing, transfer=_credit_asked()[1], timeout=10.0),
        _of(wire.CreditsFrame(clearing=clearing_to_wire(corpus.clearing()))),
        CREDITS,
    ),
    asking(
        "asked for a voucher",
        1,
        partial(ask_voucher, order=_credit_asked()[2], timeout=10.0),
        _of(wire.CreditsFrame(voucher=wire.CreditVoucher(voucher=b"v"))),
        CREDITS,
    ),
    asking("asked to relay", 2, partial(ask_reservation, timeout=4.0), _of(_HOP), None, max_header=_SHORT),
    asking(
        "asked for a circuit",
        1,
        partial(ask_connection, target=OTHER.peer_id, timeout=4.0),
        _of(_HOP),
        None,
        max_header=_SHORT,
    ),
    asking(
        "asked to take a circuit",
        1,
        partial(ask_stop, source=OTHER.peer_id, limit=CircuitLimit(1, 1), timeout=4.0),
        _of(_STOP),
        None,
        max_header=_SHORT,
    ),
    asking(
        "asked who we are",
        2,
        partial(ask_identify, timeout=5.0),
        _of(_IDENTIFY),
        None,
        max_header=TRAVERSAL.identify_max_message,
    ),
    asking(
        "asked to dial back",
        2,
        partial(ask_dial_back, own_peer_id=SERVER.peer_id, addrs=["/ip4/1.2.3.4/tcp/1"], timeout=5.0),
        _of(_DIALED),
        None,
        max_header=8192,
    ),
    asking(
        "asked to dial one address",
        2,
        partial(ask_dial, addrs=["/ip4/1.2.3.4/tcp/1"], nonce=7, timeout=5.0),
        _of(_PRICE, _DIALED_ONE),
        None,
        max_header=8192,
    ),
    asking("punching first", 1, partial(exchange_first, addrs=[], timeout=5.0), _of(_CONNECT), None, max_header=_SHORT),
    asking(
        "punching second",
        1,
        partial(exchange_second, addrs=[], timeout=5.0),
        _of(_CONNECT, _SYNC),
        None,
        max_header=_SHORT,
    ),
)
