"""Which server may push steps into a session, and whether what it pushes is what its receipt says."""

from __future__ import annotations

from ....crypto.identity import peer_id_to_bytes
from ....protocols import wire_pb2 as wire
from ....protocols.inference import HASH_BYTES, Refusal, bad_request, receipt_from_wire


class Upstream:
    """Who may push steps into a session: one server at a time, the one before this one in the client's chain.

    First it is who `Open.upstream` names, or the client itself if that is empty. When the client has put another server
    in its place, a step that the client sends says so: `Step.previous_receipt` is the hash of that server's receipt,
    and its next receipt, which comes with its first push, follows this one. Nobody else knows that hash.
    """

    def __init__(self, opened: bytes, client: str) -> None:
        self._peer = opened or peer_id_to_bytes(client)
        self._named = b""

    def relayed(self, step: wire.Step) -> None:
        """The client has sent `step` itself."""
        self._named = step.previous_receipt or self._named

    def check(self, pusher: str, push: wire.Receipt) -> None:
        """Whether a push may come from `pusher`. Its receipt is not checked yet.

        Raises:
            Refusal: ERROR_NOT_ALLOWED.
        """
        if peer_id_to_bytes(pusher) != self._peer and not (self._named and push.previous_receipt == self._named):
            raise Refusal(wire.ERROR_NOT_ALLOWED, f"{pusher} is not the server before this one in the session's chain")

    def pushed(self, pusher: str) -> None:
        """A push of `pusher` was in order."""
        self._peer = peer_id_to_bytes(pusher)


def check_upstream(message: wire.Receipt, pusher: str, client: str, step: wire.Step) -> bytes:
    """The hash that the payload of a pushed step has to have.

    Raises:
        Refusal: this is not the receipt of `pusher` for what it pushes as `step` for `client`.
    """
    try:
        receipt = receipt_from_wire(message)
    except ValueError as error:
        raise bad_request(f"the receipt cannot be read: {error}") from None
    if (
        receipt.client != client
        or len(receipt.reply_hash) != HASH_BYTES
        or receipt.hash() != step.previous_receipt
        or not receipt.is_signed_by(pusher)
    ):
        raise bad_request("the pusher's receipt is not for what it pushed")
    return receipt.reply_hash
