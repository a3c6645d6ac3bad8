"""The receipts of a session, or of a stream of batches: where they are made, and where those of pushing servers are
checked."""

from __future__ import annotations

import os
import time
from typing import Any

from ....crypto.receipts import NO_RECEIPT, Receipt, session_root
from ....protocols import wire_pb2 as wire
from ....protocols.ids import PROTOCOL_VERSION
from ....protocols.inference import EPOCH_BYTES, SessionTerms, bad_request, pledge_to_wire, receipt_from_wire
from ....protocols.training import BatchTerms
from .opening import RequestContext


class ReceiptChain:
    """Signs for the replies to one client, each receipt over the one before it.

    Attributes:
        epoch: random, names this session or stream.
        last: the hash of the newest receipt; before the first one the session's root, which is the hash of its terms.
    """

    def __init__(self, context: RequestContext, client: str, terms: SessionTerms | BatchTerms) -> None:
        self.epoch = os.urandom(EPOCH_BYTES)
        self._hosted = context.hosted
        self._identity = context.identity
        self._client = client
        self._terms = terms
        self._pledge = context.pledger()
        self.last = self._root()

    def _root(self) -> bytes:
        terms = self._terms
        if isinstance(terms, BatchTerms):
            return NO_RECEIPT
        return session_root(
            client=self._client,
            nonce=terms.nonce,
            session_epoch=self.epoch,
            model_version=terms.model_version,
            span=(terms.span.start, terms.span.end),
            batch=terms.batch,
            left_padding=terms.left_padding,
            codec=terms.codec,
            dtype=terms.dtype,
            adapter=terms.adapter,
            pledge=self._pledge.hash() if self._pledge is not None else b"",
        )

    def granted(self) -> dict[str, Any]:
        """The fields of Granted and BatchGranted that say what the receipts will stand for."""
        return {
            "session_epoch": self.epoch,
            "dtype": self._hosted.dtype,
            "quantisation": self._hosted.quantisation,
            "pledge": pledge_to_wire(self._pledge) if self._pledge is not None else None,
        }

    def sign(self, sequence: int, request_hash: bytes, reply_hash: bytes, upstream: bytes = b"") -> Receipt:
        """The next receipt. `upstream` is the hash of the pushing server's receipt for the request."""
        terms = self._terms
        receipt = Receipt(
            protocol_version=PROTOCOL_VERSION,
            model_version=self._hosted.model_version,
            span=(terms.span.start, terms.span.end),
            dtype=self._hosted.dtype,
            quantisation=self._hosted.quantisation,
            client=self._client,
            nonce=terms.nonce,
            session_epoch=self.epoch,
            sequence=sequence,
            request_hash=request_hash,
            reply_hash=reply_hash,
            previous_receipt=self.last,
            upstream_receipt=upstream,
            time_ms=time.time_ns() // 1_000_000,
            adapter=terms.adapter if isinstance(terms, SessionTerms) else b"",
        ).signed(self._identity)
        self.last = receipt.hash()
        return receipt


def check_upstream(message: wire.Receipt, pusher: str, client: str, step: wire.Step, payload_hash: bytes) -> None:
    """
    Raises:
        Refusal: this is not the receipt of `pusher` for these bytes, which it pushed for `client`.
    """
    try:
        receipt = receipt_from_wire(message)
    except ValueError as error:
        raise bad_request(f"the receipt cannot be read: {error}") from None
    if (
        receipt.client != client
        or receipt.reply_hash != payload_hash
        or receipt.hash() != step.previous_receipt
        or not receipt.is_signed_by(pusher)
    ):
        raise bad_request("the pusher's receipt is not for what it pushed")
