"""Valid messages with every field set, made and signed by the product's own code: what mutations begin from."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import cache
from typing import Any, Final

from petalnode.crypto.canonical import digest
from petalnode.crypto.credits import Clearing, CreditQuery, DepositOrder, Transfer, sign_voucher
from petalnode.crypto.evidence import ACCUSATION_DOMAIN
from petalnode.crypto.identity import Identity, peer_id_to_bytes
from petalnode.crypto.pledge import Pledge
from petalnode.crypto.receipts import Receipt
from petalnode.node.trust.bundle import Bundle, equivocation_bundle
from petalnode.node.trust.evidence_message import Endorsement, EvidenceMessage
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.announcement import Announcement, RelayOffer, ServerState
from petalnode.protocols.ids import Span
from petalnode.protocols.inference import receipt_to_wire, root_of, sha256
from tests import messages
from tests.receipts import unsigned

ATTACKER: Final = Identity.from_seed(b"attacker" * 4)
SERVER: Final = Identity.from_seed(b"a server" * 4)
OTHER: Final = Identity.from_seed(b"somebody" * 4)
VALIDATOR: Final = Identity.from_seed(b"referee " * 4)
VERSION: Final = b"v" * 32
EPOCH: Final = b"e" * 16
NONCE: Final = b"n" * 16
NOW: Final = time.time()
NOW_MS: Final = int(NOW * 1000)


@cache
def pledge_of(server: Identity) -> Pledge:
    until = NOW_MS + 10_000_000
    voucher = sign_voucher(VALIDATOR, server.peer_id, 10, until)
    pledge = Pledge(
        server.peer_id, VERSION, (0, 6), "float32", "none", 10, NOW_MS - 1000, until, VALIDATOR.peer_id, voucher
    )
    return pledge.signed(server)


def announcement(server: Identity = ATTACKER) -> wire.Announcement:
    return wire.Announcement.FromString(_announcement(server))


@cache
def _announcement(server: Identity) -> bytes:
    made = Announcement(
        peer_id=server.peer_id,
        model_version=VERSION,
        model_name="model",
        num_blocks=6,
        span=Span(1, 4),
        state=ServerState.ONLINE,
        sequence=int(NOW * 1e9),
        expires=NOW + 3000,
        step_seconds=0.0125,
        forward_tokens_per_second=512.0,
        dtype="float32",
        quantisation="none",
        cache_tokens=100,
        cache_tokens_free=40,
        queue_depth=2,
        adapters=(f"fine@{bytes(32).hex()}",),
        addrs=(
            "/ip4/10.0.0.2/tcp/4001",
            f"/ip4/203.0.113.4/tcp/4001/p2p/{OTHER.peer_id}/p2p-circuit",
            "/ip6/2001:db8::2/tcp/4001",
            "/dns4/example.com/tcp/4001",
        ),
        rtts={OTHER.peer_id: 0.002, SERVER.peer_id: 0.1},
        software_version="0.1.0",
        public_name="ünïcode",
        max_session_length=2048,
        relay=RelayOffer(2, 3),
        fixed=True,
        next_span=Span(2, 5),
        network_seconds=0.001,
        load_seconds=3.0,
        pledge=pledge_of(server),
        device="cpu",
        credits_of=(VALIDATOR.peer_id,),
    )
    return made.to_wire().SerializeToString()


def receipt(server: Identity = ATTACKER, **fields: Any) -> Receipt:
    usual = {"model_version": VERSION, "span": (0, 6), "client": OTHER.peer_id, "time_ms": NOW_MS, "adapter": bytes(32)}
    return unsigned(**usual | fields).signed(server)


def opening() -> wire.Open:
    return messages.opening(
        Span(0, 6),
        model_version=VERSION,
        batch=2,
        left_padding=[0, 1],
        nonce=NONCE,
        upstream=peer_id_to_bytes(OTHER.peer_id),
        downstream=peer_id_to_bytes(SERVER.peer_id),
        wait_ms=100,
        keep_ms=5000,
    )


@cache
def clearing(spender: Identity = ATTACKER, recipient: Identity = SERVER) -> Clearing:
    order = Transfer(VALIDATOR.peer_id, spender.peer_id, recipient.peer_id, 1000, 1, NOW_MS + 100_000).signed(spender)
    return Clearing(order, NOW_MS).signed(VALIDATOR)


@cache
def orders() -> list[CreditQuery | Transfer | DepositOrder]:
    issuer, own = VALIDATOR.peer_id, ATTACKER.peer_id
    return [
        CreditQuery(issuer, own, NOW_MS).signed(ATTACKER),
        Transfer(issuer, own, SERVER.peer_id, 5, 1, NOW_MS + 100_000).signed(ATTACKER),
        DepositOrder(issuer, own, 5, NOW_MS + 90_000_000, 2).signed(ATTACKER),
    ]


@cache
def equivocation() -> Bundle:
    return equivocation_bundle(OTHER, ATTACKER.peer_id, receipt(), receipt(reply_hash=sha256(b"something else")))


def broken_pledge() -> wire.Evidence:
    return wire.Evidence.FromString(_broken_pledge())


@cache
def _broken_pledge() -> bytes:
    pledge, opened = pledge_of(ATTACKER), opening()
    root = root_of(opened, OTHER.peer_id, EPOCH, pledge.hash())
    outside = receipt(dtype="float16", previous_receipt=root, adapter=b"")
    evidence = wire.Evidence(
        version=1,
        accused=peer_id_to_bytes(ATTACKER.peer_id),
        kind="pledge",
        receipts=[receipt_to_wire(outside)],
        opening=opened,
        session_epoch=EPOCH,
        time_ms=NOW_MS,
    )
    evidence.pledge.CopyFrom(announcement().pledge)
    return evidence.SerializeToString()


def accused(statement: bytes, payloads: dict[str, bytes], accuser: Identity = OTHER) -> Bundle:
    """Evidence that is signed, whatever it says."""
    return Bundle(statement, accuser.peer_id, accuser.sign(ACCUSATION_DOMAIN, statement), payloads)


def notice(bundle: Bundle) -> wire.EvidenceNotice:
    endorsement = Endorsement.made(VALIDATOR, bundle.id, bundle.accused, NOW_MS)
    message = EvidenceMessage.of(bundle, [endorsement], ["/ip4/203.0.113.4/tcp/4001"])
    return wire.EvidenceNotice.FromString(message.to_bytes())


def evidence_id(statement: bytes) -> bytes:
    return digest(ACCUSATION_DOMAIN, statement)


def tensor(*shape: int, dtype: str = "float32", codec: str = "none", nbytes: int = 0) -> wire.Tensor:
    return wire.Tensor(shape=shape, dtype=dtype, codec=codec, nbytes=nbytes)


def changed(base: Receipt, signer: Identity, **fields: Any) -> Receipt:
    return replace(base, **fields).signed(signer)
