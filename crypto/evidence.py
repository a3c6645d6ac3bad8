"""Faults that prove themselves: two signatures of one key that no honest server makes. Pure; no stream, no weights.

Bytes that do not match a signed hash are a fault, too, but only to the one who received them. Others cannot know where
the bytes came from. Who receives such bytes stops using the server; there is nothing to show around.
"""

from __future__ import annotations

from .identity import verify
from .pledge import Pledge
from .receipts import Receipt

ACCUSATION_DOMAIN = "petalnode/evidence/1"
_SAME_REQUEST = (
    *("client", "nonce", "session_epoch", "sequence"),
    *("request_hash", "previous_receipt", "upstream_receipt"),
)


class NotProven(Exception):
    """The evidence does not prove the fault that it claims; the text says why."""


class ExchangedTensors(NotProven):
    """The tensors are not those that the statement names. The accuser's signature does not cover them, so this is the
    fault of whoever has sent them. The accuser may be honest."""


def check_equivocation(accused: str, first: Receipt, second: Receipt) -> str:
    """What is proved by two receipts for one request with different answers.

    Rollbacks, repeated requests and restarts never look like it. Each request has a sequence number of its own, and a
    repeated one gets the same reply. A new session has a new epoch.

    Raises:
        NotProven: they do not contradict each other, or are not both signed by the accused.
    """
    for receipt in (first, second):
        if not receipt.is_signed_by(accused):
            raise NotProven(f"a receipt is not signed by {accused}")
    for name in _SAME_REQUEST:
        if getattr(first, name) != getattr(second, name):
            raise NotProven(f"the receipts are for two requests: their {name.replace('_', ' ')} differs")
    if first.reply_hash == second.reply_hash:
        raise NotProven("both receipts are for one answer")
    return f"it signed two answers to request {first.sequence} of one session"


def check_pledge_broken(accused: str, pledge: Pledge, root: bytes, receipts: list[Receipt]) -> str:
    """What is proved by receipts of a session that ran under a pledge: that the last of them is outside of it.

    `root` is `session_root` of the terms of the session, the pledge among them; `receipts` are all from the first one.

    Raises:
        NotProven: it is not outside, or something does not belong together.
    """
    if pledge.server != accused or not pledge.is_signed:
        raise NotProven("the pledge is not the server's")
    check_chain(accused, root, receipts)
    if pledge.covers(receipts[-1]):
        raise NotProven("the receipt is what was pledged for")
    last = receipts[-1]
    return (
        f"it signed for blocks {last.span[0]}:{last.span[1]} in {last.dtype} ({last.quantisation}) under a pledge for "
        f"{pledge.span[0]}:{pledge.span[1]} in {pledge.dtype} ({pledge.quantisation})"
    )


def check_chain(accused: str, root: bytes, receipts: list[Receipt]) -> None:
    """
    Raises:
        NotProven: the receipts are not those of one session of `accused`, from its first one on.
    """
    if not receipts:
        raise NotProven("there is no receipt")
    first = receipts[0]
    previous, sequence = root, 0
    for receipt in receipts:
        if not receipt.is_signed_by(accused):
            raise NotProven(f"the receipt of step {receipt.sequence} is not signed by {accused}")
        if receipt.previous_receipt != previous:
            raise NotProven(f"the receipt of step {receipt.sequence} does not follow the one before")
        if receipt.sequence <= sequence:
            raise NotProven(f"step {receipt.sequence} comes after step {sequence}")
        if (receipt.client, receipt.nonce, receipt.session_epoch, receipt.adapter) != (
            first.client,
            first.nonce,
            first.session_epoch,
            first.adapter,
        ):
            raise NotProven(f"the receipt of step {receipt.sequence} is of another session")
        previous, sequence = receipt.hash(), receipt.sequence


def is_accusation_signed(accuser: str, evidence: bytes, signature: bytes) -> bool:
    return verify(accuser, ACCUSATION_DOMAIN, evidence, signature)
