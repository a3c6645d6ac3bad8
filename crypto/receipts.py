"""Receipts: what a server signs of every reply, so that nobody can later deny what was sent.

The "signed-hash pledge" of Petals (ACL demo 2023, appendix A), made concrete. The hash proves *what* was sent. Whether
it was *right* is judged elsewhere, by recomputation within a tolerance. Two receipts of one key prove equivocation if
only their reply hashes differ, and not (client, nonce, session epoch, sequence, request hash, previous receipt).
Rollbacks and restarts never look like it, because they change the sequence or the session epoch.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Final

from .canonical import canonical, digest
from .identity import Identity, verify

RECEIPT_DOMAIN: Final = "petalnode/receipt/1"
REQUEST_DOMAIN: Final = "petalnode/request/1"
COUNTERSIGNATURE_DOMAIN: Final = "petalnode/countersignature/1"
SESSION_DOMAIN: Final = "petalnode/session/1"
NO_RECEIPT: Final = bytes(32)
"""Stands where a batch stream has no previous receipt yet; a session's first receipt refers to its `SessionRoot`."""


@dataclass(frozen=True)
class Receipt:
    """A server's signed statement about one reply of one session.

    Hashes are 32 bytes of SHA-256; `client` and the signer are peer ids; `span` is half-open; `time_ms` is
    milliseconds since 1970 by the server's clock. `upstream_receipt` is empty unless the input was pushed by another
    server. `adapter` is the hash of the adapter that the session's blocks are changed by; empty for none.
    """

    protocol_version: int
    model_version: bytes
    span: tuple[int, int]
    dtype: str
    quantisation: str
    client: str
    nonce: bytes
    session_epoch: bytes
    sequence: int
    request_hash: bytes
    reply_hash: bytes
    previous_receipt: bytes
    upstream_receipt: bytes
    time_ms: int
    adapter: bytes = b""
    signature: bytes = b""

    def canonical_bytes(self) -> bytes:
        """The bytes that are signed: every field but the signature, in the order of declaration."""
        return self._canonical_bytes

    @cached_property
    def _canonical_bytes(self) -> bytes:  # used for the check and for the hash of a step's receipt
        return canonical(RECEIPT_DOMAIN, *(getattr(self, name) for name in _SIGNED_FIELDS))

    def signed(self, identity: Identity) -> Receipt:
        """A copy that carries `identity`'s signature."""
        return replace(self, signature=identity.sign(RECEIPT_DOMAIN, self.canonical_bytes()))

    def is_signed_by(self, peer_id: str) -> bool:
        """Whether the signature is `peer_id`'s and covers exactly these fields."""
        return verify(peer_id, RECEIPT_DOMAIN, self.canonical_bytes(), self.signature)

    def hash(self) -> bytes:
        """What the next receipt of the session, and a downstream server's, refers to. Covers the signature."""
        return digest(RECEIPT_DOMAIN, self.canonical_bytes(), self.signature)


_SIGNED_FIELDS: Final = tuple(field.name for field in fields(Receipt) if field.name != "signature")


def countersign(client: Identity, receipt: Receipt) -> bytes:
    """The client's word that the server did this for it: 64 bytes. Given to auditors, on request."""
    return client.sign(COUNTERSIGNATURE_DOMAIN, receipt.hash())


def is_countersigned(receipt: Receipt, signature: bytes) -> bool:
    """Whether the client that the receipt names says so."""
    return verify(receipt.client, COUNTERSIGNATURE_DOMAIN, receipt.hash(), signature)


@dataclass(frozen=True, kw_only=True)
class SessionRoot:
    """The terms on which a session was opened, to which its first receipt refers by their hash.

    So a chain of receipts proves, beside what was asked, under which terms: without the padding of its rows, nobody
    could recompute a step. `left_padding` is empty if no row is padded; `dtype` is that of tensors before the codec;
    `pledge` the hash of the server's pledge, empty for none. `prefix` names what the session began with: a hash over
    the inputs from which an earlier session had computed it. Empty for nothing, and then it is no part of the hash.
    """

    client: str
    nonce: bytes
    session_epoch: bytes
    model_version: bytes
    span: tuple[int, int]
    batch: int
    left_padding: tuple[int, ...]
    codec: str
    dtype: str
    adapter: bytes
    pledge: bytes
    prefix: bytes = b""

    def hash(self) -> bytes:
        """What stands as the previous receipt in the first one of the session."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["left_padding"] = self.left_padding if any(self.left_padding) else ()
        if not self.prefix:
            del values["prefix"]
        return digest(SESSION_DOMAIN, *values.values())


@dataclass(frozen=True, kw_only=True)
class StepRequest:
    """A whole step request, header and payload.

    `payload_hash` is the SHA-256 of the tensor's bytes as they stood on the wire; `targets` are (peer id, nonce,
    sequence) of the servers that the output is to be pushed through.
    """

    sequence: int
    position: int
    reorder: tuple[int, ...]
    route_epoch: int
    shape: tuple[int, ...]
    dtype: str
    codec: str
    payload_hash: bytes
    upstream_receipt: bytes
    targets: tuple[tuple[bytes, bytes, int], ...]
    long_factors: bool = False
    positions: tuple[int, ...] = ()
    groups: tuple[int, ...] = ()

    def hash(self) -> bytes:
        """Hash of the canonical form. `long_factors` is a part of it if true, `positions` and `groups` if there are
        any."""
        *values, long_factors, positions, groups = (getattr(self, name) for name in _STEP_FIELDS)
        placed = [*(["positions", positions] if positions else []), *(["groups", groups] if groups else [])]
        return digest(REQUEST_DOMAIN, *values, *(["long factors"] if long_factors else []), *placed)


_STEP_FIELDS: Final = tuple(field.name for field in fields(StepRequest))
