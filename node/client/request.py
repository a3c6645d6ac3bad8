"""Requests to one server: what steps of sessions and batches have in common.

A client opens a stream, is granted a session epoch, and numbers its requests from 1 on. The server signs a receipt for
each answer; a receipt names the request, the answer and the receipt before it. `ServerStream` holds a server to what it
has announced (`ServerClaims`) and checks every receipt. Whatever goes wrong becomes a `ServerFailed`. Its two bodies
are `session.stream.SessionStream` and `batch.batch_stream.BatchStream`.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, Generic, TypeVar

import trio

from ...crypto.pledge import Pledge
from ...crypto.receipts import NO_RECEIPT, Receipt
from ...crypto.statement import now_ms
from ...protocols import wire_pb2 as wire
from ...protocols.announcement import ANNOUNCEMENT, Announcement
from ...protocols.framing import MessageStream, PeerError, ProtocolError
from ...protocols.ids import PLAIN, PROTOCOL_VERSION, Layout, Span
from ...protocols.inference import (
    EPOCH_BYTES,
    NONCE_BYTES,
    Refusal,
    pledge_from_wire,
    receipt_from_wire,
    without_tensors,
)
from ..errors import NoChainError, ServerCheated, ServerFailed
from ..models.quantisation import describe_numerics
from ..swarm.routing import Hop
from .deadlines import DEADLINES

MAX_FAILURES: Final = 8
"""Servers for the same blocks that may fail at one request, one after another."""

_LOOK_BACK: Final = 16
"""Steps behind the last answer that are remembered; a server holds the replies to eight at most."""

Frame = TypeVar("Frame", wire.InferenceFrame, wire.BatchFrame)


@dataclass(frozen=True)
class WireTensor:
    """A tensor as it stands on the wire; hidden states are [batch, tokens, hidden].

    `layout`: of its tokens.
    """

    tensor: wire.Tensor
    payload: bytes | bytearray
    layout: Layout = PLAIN

    @property
    def tokens(self) -> int:
        return self.tensor.shape[1]


# --- errors


class ServerRefused(ServerFailed):
    """A server answered with an error; `code` is the protocol's."""

    def __init__(self, message: str, peer_id: str, code: wire.ErrorCode.ValueType) -> None:
        super().__init__(message, peer_id)
        self.code = code


class StreamLost(ServerFailed):
    """The stream to a server has ended or nothing comes on it: the server's fault, or that of the way there."""


class PushedOther(ServerFailed):
    """A server was pushed something else than the server before it has answered to this client: its answer is in order,
    and of no use. `upstream` is the receipt that came with the push, if the server shows it."""

    def __init__(self, message: str, peer_id: str, upstream: Receipt | None) -> None:
        super().__init__(message, peer_id)
        self.upstream = upstream


def server_failed(hop: Hop, what: str) -> ServerFailed:
    return ServerFailed(f"server {hop.peer_id} (blocks {hop.span}) failed: {what}", hop.peer_id)


def server_refused(hop: Hop, refusal: Refusal, what: str = "") -> ServerRefused:
    text = f"server {hop.peer_id} (blocks {hop.span}) refused{what}: {refusal.message}"
    return ServerRefused(text, hop.peer_id, refusal.code)


def has_code(error: ServerFailed, *codes: int) -> bool:
    """Whether a server answered with one of these errors."""
    return isinstance(error, ServerRefused) and error.code in codes


def is_lost(error: ServerFailed) -> bool:
    """Whether a server is gone or going, so that another may come to its place; others have said no, and mean it."""
    return not isinstance(error, ServerRefused) or error.code == wire.ERROR_DRAINING


def blames_request(error: ServerFailed) -> bool:
    """Whether a server says that the request is wrong; when two say so, it is."""
    return has_code(error, wire.ERROR_BAD_REQUEST, wire.ERROR_TOO_LONG)


def with_refusals(error: NoChainError, refused: Mapping[str, ServerFailed], peer_id: str) -> NoChainError:
    """The error with what was tried, by the client `peer_id`, and what a person can do about it."""
    if not refused:
        return error
    text = f"{error}. Tried: {'; '.join(str(failure) for failure in refused.values())}"
    if any(has_code(failure, wire.ERROR_NOT_ALLOWED) for failure in refused.values()):
        text += (
            f". Ask the owner to restart the server with --allow-client {peer_id}, the peer id of this client; "
            "`petalnode chat --identity FILE` keeps its peer id from run to run and prints it, "
            "from_pretrained(identity=FILE) keeps it too"
        )
    return NoChainError(text, error.missing, gone=all(map(is_lost, refused.values())))


# --- what a server has announced, and whether what it grants and signs keeps to that


def check_time(receipt: Receipt, since_ms: int, now_ms: int) -> str | None:
    """What is wrong with the time of a receipt that was made after `since_ms` (milliseconds since 1970); None if
    nothing is. Clocks may differ by `CLOCK_TOLERANCE`."""
    tolerance = ANNOUNCEMENT.clock_tolerance * 1000
    if receipt.time_ms > now_ms + tolerance:
        return f"its receipt is dated {(receipt.time_ms - now_ms) / 1000:.0f} s ahead of this machine's clock"
    if receipt.time_ms < since_ms - tolerance:
        return f"its receipt is dated {(since_ms - receipt.time_ms) / 1000:.0f} s before it was asked"
    return None


def pledged_points(announced: Announcement, trusted: Collection[str], now_ms: int) -> int | None:
    """The points that a server has pledged for what it announces; None if it pledges nothing, or for something else.

    With `trusted` validators, only what one of them keeps; else what the server claims.
    """
    pledge = announced.pledge
    if (
        pledge is None
        or not pledge.is_in_force(now_ms)
        or (pledge.model_version, pledge.dtype, pledge.quantisation)
        != (announced.model_version, announced.dtype, announced.quantisation)
        or not pledge.span[0] <= announced.span.start < announced.span.end <= pledge.span[1]
        or not _is_signed(pledge)
    ):
        return None
    return pledge.backed(trusted) if trusted else pledge.deposit


@lru_cache(maxsize=1024)
def _is_signed(pledge: Pledge) -> bool:
    return pledge.is_signed


class NotInForce(ValueError):
    """A pledge of another time: the clock of one of the two machines is wrong, which proves nothing of its server."""


def granted_pledge(
    granted: wire.Granted | wire.BatchGranted, peer_id: str, model_version: bytes, span: Span, now_ms: int
) -> Pledge | None:
    """The checked pledge under which `peer_id` grants these blocks; None for none.

    Raises:
        NotInForce: it is in order, but not now.
        ValueError: it is not the server's, or for something else than is granted.
    """
    if not granted.HasField("pledge"):
        return None
    pledge = pledge_from_wire(granted.pledge)
    if pledge.server != peer_id or not pledge.is_signed:
        raise ValueError("its pledge is not signed by its key")
    if (pledge.model_version, pledge.dtype, pledge.quantisation) != (
        model_version,
        granted.dtype,
        granted.quantisation,
    ) or not Span(*pledge.span).covers(span):
        raise ValueError("its pledge is for something else than it grants")
    tolerance = round(ANNOUNCEMENT.clock_tolerance * 1000)
    if not (pledge.is_in_force(now_ms - tolerance) or pledge.is_in_force(now_ms + tolerance)):
        raise NotInForce("its pledge is not in force by this machine's clock")
    return pledge


@dataclass(frozen=True)
class ServerClaims:
    """What a server announced. An empty `dtype` or `quantisation` claims nothing.

    `step_seconds` and `forward_tokens_per_second` as in its announcement; 0: not measured.
    """

    model_version: bytes
    span: Span
    dtype: str
    quantisation: str
    pledge: Pledge | None = None
    step_seconds: float = 0.0
    forward_tokens_per_second: float = 0.0

    @classmethod
    def of(cls, announced: Announcement) -> ServerClaims:
        # A server that is still loading does not know its dtype.
        return cls(
            announced.model_version,
            announced.span,
            announced.dtype,
            announced.quantisation,
            announced.pledge,
            announced.step_seconds,
            announced.forward_tokens_per_second,
        )

    def seconds(self, tokens: int) -> float | None:
        """What a step of `tokens` tokens (all rows) takes there by the announcement; None if that says nothing."""
        if self.step_seconds <= 0:
            return None
        if self.forward_tokens_per_second <= 0:
            return self.step_seconds * tokens
        return self.step_seconds + tokens / self.forward_tokens_per_second

    def broken_by_grant(self, granted: wire.Granted | wire.BatchGranted) -> str | None:
        """What is wrong with a grant; None if nothing is."""
        if self.dtype and (granted.dtype, granted.quantisation) != (self.dtype, self.quantisation):
            return (
                f"it announces {describe_numerics(self.dtype, self.quantisation)} and grants "
                f"{describe_numerics(granted.dtype, granted.quantisation)}"
            )
        if self.pledge is not None and self.pledge.deposit > granted.pledge.deposit:
            return f"it announces a pledge of {self.pledge.deposit} points and grants one of {granted.pledge.deposit}"
        return None

    def broken_by(self, receipt: Receipt) -> str | None:
        """What is wrong with a receipt, whose signature holds; None if nothing is."""
        if self.dtype and (receipt.dtype, receipt.quantisation) != (self.dtype, self.quantisation):
            return (
                f"it announces {describe_numerics(self.dtype, self.quantisation)} and signs for "
                f"{describe_numerics(receipt.dtype, receipt.quantisation)}"
            )
        return None


# --- the client's end of a stream of requests


class ServerStream(Generic[Frame]):
    """The requests of one grant at one server.

    Attributes:
        hop: the server, and the blocks that it computes for these requests.
        nonce: of this client, by which server and receipts name the requests beside the epoch.
    """

    def __init__(
        self,
        stream: MessageStream[Frame],
        hop: Hop,
        model_version: bytes,
        client: str,
        claims: ServerClaims | None,
        nonce: bytes | None = None,
    ) -> None:
        self.hop = hop
        self.nonce = nonce or os.urandom(NONCE_BYTES)
        self._stream: MessageStream[Frame] = stream
        self._model_version = model_version
        self._client = client
        self._claims = claims
        self._opened_ms = now_ms()
        self._sequence = 0
        self._granted: wire.Granted | wire.BatchGranted = wire.Granted()
        self._last_receipt = NO_RECEIPT
        self._largest = 0  # bytes of a step that was asked

    @property
    def epoch(self) -> bytes:
        """The server's name of this grant."""
        return self._granted.session_epoch

    def announced_seconds(self, tokens: int) -> float | None:
        """What a step of `tokens` tokens (all rows) takes there, as the server announced; None if it said nothing."""
        return None if self._claims is None else self._claims.seconds(tokens)

    def next_sequence(self, nbytes: int = 0) -> int:
        """The number of the next request, of `nbytes` bytes if that is known; they only grow."""
        self._sequence += 1
        self._largest = max(self._largest, nbytes)
        return self._sequence

    async def _ask(self, stream: MessageStream[Frame], question: Frame, timeout: float) -> Frame:
        """Asks for a grant, and holds the answer to what the server has announced.

        Raises:
            StreamLost: there is no answer within `timeout` seconds.
            ServerRefused: the server will not, and says why.
            ServerFailed: it answers nonsense.
        """
        try:
            await stream.send(question, timeout=DEADLINES.send)
            frame, _ = await stream.receive(timeout=timeout, admit=without_tensors(self.hop.peer_id))
        except PeerError as error:
            raise self._lost(error) from error
        self._raise_refusal(frame)
        if frame.WhichOneof("body") != "granted" or len(frame.granted.session_epoch) != EPOCH_BYTES:
            raise self._failed("it answered with something else than a grant")
        if self._claims is not None and (broken := self._claims.broken_by_grant(frame.granted)):
            raise self._cheated(broken)
        return frame

    def _admit(self, step: wire.Step, chunk: WireTensor, frame: wire.InferenceFrame) -> None:
        """Waits for no answer that is larger than `chunk`, whose shape it has. One that nobody wants any more may be as
        large as the step that it is for.

        Raises:
            ServerFailed: more is about to come.
        """
        asked = len(chunk.payload)
        self._largest = max(self._largest, asked)
        allowed = asked if frame.reply.sequence >= step.sequence else self._largest
        coming = sum(tensor.nbytes for tensor in frame.tensors)
        if coming > (allowed if frame.WhichOneof("body") == "reply" else 0):
            raise self._failed(f"it answers {coming} bytes to a step of {asked}")

    def _check_pledge(self, granted: wire.Granted | wire.BatchGranted) -> Pledge | None:
        try:
            return granted_pledge(granted, self.hop.peer_id, self._model_version, self.hop.span, now_ms())
        except NotInForce as error:
            raise self._failed(str(error)) from None
        except ValueError as error:
            raise self._cheated(str(error)) from None

    def _receipt_of(self, message: wire.Receipt) -> Receipt:
        try:
            return receipt_from_wire(message)
        except ValueError as error:
            raise self._cheated(f"its receipt cannot be read: {error}") from None

    def _check_receipt(
        self,
        message: wire.Receipt,
        *,
        sequence: int,
        request_hash: bytes,
        reply_hash: bytes,
        previous: bytes,
        upstream: bytes = b"",
        adapter: bytes = b"",
    ) -> Receipt:
        """Checks that the receipt is this server's, and for exactly what was sent and came back. May run in a thread.

        Raises:
            ServerCheated: if it is not; nothing of this server can be used then.
            ServerFailed: it is dated at another time than this machine's clock says.
        """
        receipt = self._receipt_of(message)
        if not message.signature:
            raise self._cheated("it does not sign what it answers")
        expected = replace(
            receipt,
            protocol_version=PROTOCOL_VERSION,
            model_version=self._model_version,
            span=(self.hop.span.start, self.hop.span.end),
            dtype=self._granted.dtype,
            quantisation=self._granted.quantisation,
            client=self._client,
            nonce=self.nonce,
            session_epoch=self.epoch,
            sequence=sequence,
            request_hash=request_hash,
            reply_hash=reply_hash,
            previous_receipt=previous,
            upstream_receipt=upstream,
            adapter=adapter,
        )
        if receipt != expected:
            raise self._cheated("its receipt is for something else than what was sent and came back")
        if not receipt.is_signed_by(self.hop.peer_id):
            raise self._cheated("its receipt is not signed by its key")
        if self._claims is not None and (broken := self._claims.broken_by(receipt)):
            raise self._cheated(broken)
        if wrong := check_time(receipt, self._opened_ms, now_ms()):
            raise self._failed(wrong)  # no lie: its clock is wrong, or this machine's was put right meanwhile
        return receipt

    def _raise_refusal(self, frame: Frame) -> None:
        if frame.WhichOneof("body") == "error":
            raise server_refused(self.hop, Refusal.from_wire(frame.error))

    def _lost(self, error: PeerError) -> ServerFailed:
        """What an error of the stream says of the server: nonsense is its own fault, the rest may be the way's."""
        failed = self._failed(str(error))
        return failed if isinstance(error, ProtocolError) else StreamLost(str(failed), self.hop.peer_id)

    def _failed(self, what: str) -> ServerFailed:
        return server_failed(self.hop, what)

    def _cheated(self, what: str, proof: tuple[Receipt, Receipt] | None = None) -> ServerCheated:
        text = f"server {self.hop.peer_id} (blocks {self.hop.span}) cannot be believed: {what}"
        return ServerCheated(text, self.hop.peer_id, proof)


class OutstandingReplies:
    """Counts how often each step was asked of a server, and its replies; no more of them than that may come. Pure.

    A server answers a step once more when its client sends it again: another server had pushed it, or a stream was
    lost. Nobody asked for replies beyond that. A server could send them in place of the one that is due, to hold up a
    client that went on waiting.
    """

    def __init__(self) -> None:
        self._due: dict[int, int] = {}

    def ask(self, sequence: int) -> None:
        """The step is sent to the server, or another one is told to push it there."""
        self._due[sequence] = self._due.get(sequence, 0) + 1

    def ask_again(self, answered: int) -> None:
        """The session goes on over another stream, on which all replies behind the step `answered` come again."""
        for sequence in self._due:
            if sequence > answered:
                self._due[sequence] += 1

    def answer(self, sequence: int) -> bool:
        """Whether this reply was due."""
        due = self._due.get(sequence, 0)
        self._due[sequence] = due - 1
        for old in [known for known in self._due if known <= sequence - _LOOK_BACK]:
            del self._due[old]
        return due > 0


async def close_stream(stream: MessageStream[Frame], last: Frame) -> None:
    """Sends a last message, so that the server frees what it keeps at once, and closes the stream. Never raises."""
    with trio.CancelScope(shield=True):
        try:
            await stream.send(last, timeout=DEADLINES.close)
            await stream.close()
        except PeerError:
            await stream.reset()  # the server, if it lives, learns by that
