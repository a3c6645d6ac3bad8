"""Pledges as they travel, in announcements and in grants."""

from __future__ import annotations

from ..crypto.identity import peer_id_from_bytes, peer_id_to_bytes
from ..crypto.pledge import Pledge
from . import wire_pb2 as wire


def pledge_to_wire(pledge: Pledge) -> wire.Pledge:
    return wire.Pledge(
        server=peer_id_to_bytes(pledge.server),
        model_version=pledge.model_version,
        span=wire.Span(start=pledge.span[0], end=pledge.span[1]),
        dtype=pledge.dtype,
        quantisation=pledge.quantisation,
        deposit=pledge.deposit,
        from_ms=pledge.from_ms,
        until_ms=pledge.until_ms,
        holder=peer_id_to_bytes(pledge.holder) if pledge.holder else b"",
        voucher=pledge.voucher,
        signature=pledge.signature,
    )


def pledge_from_wire(message: wire.Pledge) -> Pledge:
    """
    Raises:
        ValueError: if `server` or `holder` is no peer id.
    """
    return Pledge(
        server=peer_id_from_bytes(message.server),
        model_version=message.model_version,
        span=(message.span.start, message.span.end),
        dtype=message.dtype,
        quantisation=message.quantisation,
        deposit=message.deposit,
        from_ms=message.from_ms,
        until_ms=message.until_ms,
        holder=peer_id_from_bytes(message.holder) if message.holder else "",
        voucher=message.voucher,
        signature=message.signature,
    )
