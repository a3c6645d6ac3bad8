"""Signed statements to begin from: what tests of receipts, pledges and evidence have in common."""

from __future__ import annotations

from typing import Any

from petalnode.crypto.identity import Identity
from petalnode.crypto.pledge import DEPOSIT_DOMAIN, Pledge, deposit_bytes


def pledge_of(server: Identity, holder: Identity, **fields: Any) -> Pledge:
    """A pledge of 50 points that `holder` keeps, with `span`, `quantisation`, `from_ms` and `until_ms` as given."""
    voucher = holder.sign(DEPOSIT_DOMAIN, deposit_bytes(server.peer_id, 50, fields["until_ms"]))
    return Pledge(
        server=server.peer_id,
        model_version=b"m" * 32,
        dtype="bfloat16",
        deposit=50,
        holder=holder.peer_id,
        voucher=voucher,
        **fields,
    ).signed(server)


def terms_of(client: Identity, pledge: Pledge, span: tuple[int, int]) -> dict[str, Any]:
    """Of a session under `pledge`: the arguments of `SessionRoot`."""
    return {
        "client": client.peer_id,
        "nonce": b"n" * 16,
        "session_epoch": b"e" * 16,
        "model_version": b"m" * 32,
        "span": span,
        "batch": 2,
        "left_padding": (0, 3),
        "codec": "none",
        "dtype": "float32",
        "adapter": b"",
        "pledge": pledge.hash(),
    }
