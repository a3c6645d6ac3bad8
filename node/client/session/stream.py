"""The client's end of one session at one server, on one stream after another."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial

import trio

from ....crypto.credits import Clearing
from ....crypto.identity import peer_id_to_bytes
from ....protocols import wire_pb2 as wire
from ....protocols.credits import clearing_to_wire
from ....protocols.framing import PeerError
from ....protocols.ids import PROTOCOL_VERSION, LayoutNeeds
from ....protocols.inference import MAX_SEQUENCE, STEP_TOKENS, root_of
from ...errors import ServerFailed
from ...models.quantisation import is_exact
from ...swarm.routing import Hop
from ...trust.receipt_log import SessionLog
from ..deadlines import DEADLINES
from ..request import OutstandingReplies, ServerClaims, StreamLost, WireTensor, close_stream
from .answers import Answer, AnswerChecks, HopTiming, InferenceStream, SessionSpec, UncheckedAnswer
from .history import Input, Signer

__all__ = ["Answer", "HopTiming", "InferenceStream", "OutstandingReplies", "SessionSpec", "SessionStream"]


class SessionStream(AnswerChecks):
    """One granted session at one server.

    Calls may be cancelled: an answer that nobody waits for any more is skipped when the next one is read.

    Attributes:
        round_trip: seconds to the server and back, the least that was seen.
        generation: grows with every stream that takes the place of another.
        held: the sequence number of the last step that the server had done when the stream was changed.
        prefix_tokens: of a row, that the server held from the start.
        abandoned: the stream was ended by `abandon`, and no other one has taken its place.
        bytes_sent, bytes_received: tensor bytes between this client and the server.

    `claims` are what the server has announced, to which it is held; `log` keeps its receipts.
    """

    def __init__(
        self,
        stream: InferenceStream,
        hop: Hop,
        spec: SessionSpec,
        client: str,
        nonce: bytes | None = None,
        *,
        claims: ServerClaims | None = None,
        log: SessionLog | None = None,
    ) -> None:
        super().__init__(stream, hop, spec, client, nonce, claims=claims, log=log)
        self.prefix_tokens = 0
        self.bytes_sent = 0
        self.bytes_received = 0
        self.round_trip = float("inf")
        self.generation = 0
        self.held = 0
        self.abandoned = False
        self._due = OutstandingReplies()
        self._sent: tuple[int, InferenceStream] | None = None  # the last step that was sent, and on what
        self._attempt = 0

    @property
    def max_step_tokens(self) -> int:
        """Tokens of a row that one step may have: what the server grants, and no more than the protocol has."""
        return max(1, min(self._granted.max_step_tokens, STEP_TOKENS // self._spec.batch))

    @property
    def credits(self) -> int:
        """How many steps may be under way."""
        return self._granted.credits

    @property
    def spare_credits(self) -> int:
        """How many more steps may be under way."""
        return self._granted.credits - (self._sequence - self._answered)

    @property
    def bytes_in_flight(self) -> int:
        """Bytes of steps that may be under way; 0: no more than one large step."""
        return self._granted.bytes_in_flight

    @property
    def priority(self) -> bool:
        """Whether the server has taken points for this session."""
        return self._granted.priority

    @property
    def kept(self) -> float:
        """Seconds for which the server keeps the session when its stream is lost, at most the asked ones."""
        return min(self._granted.keep_ms / 1000, self._asked_keep)

    @property
    def _asked_keep(self) -> float:
        return max(self._spec.keep, DEADLINES.path_keep)

    @property
    def direct(self) -> bool:
        """Whether no relay is on the way to the server."""
        return self._stream.direct

    @property
    def signer(self) -> Signer | None:
        """None where answers of honest servers may differ. Sessions with adapters may be computed by torch."""
        kind = self._granted.dtype, self._granted.quantisation
        return Signer(self.hop, *kind) if is_exact(kind[1]) and self._spec.adapter is None else None

    def uses(self, stream: InferenceStream) -> bool:
        return self._stream is stream

    async def wait_lost(self) -> None:
        """Returns once the present stream was reset or its connection is gone."""
        await self._stream.wait_lost()

    # --- opening and resuming

    async def open(
        self,
        route_epoch: int,
        upstream: str | None,
        downstream: str | None,
        payment: Clearing | None = None,
        prefix: Sequence[bytes] = (),
    ) -> None:
        """Opens the session; the neighbours in the chain are told, so that streams between them can be made ready.
        `payment` is shown for priority; `prefix` names the blocks of tokens that it begins with if they are kept there.

        Raises:
            ServerRefused: the server will not, and says why.
            ServerFailed: it does not answer, or answers nonsense.
        """
        spec = self._spec
        message = wire.Open(
            protocol_version=PROTOCOL_VERSION,
            model_version=spec.model_version,
            span=wire.Span(start=self.hop.span.start, end=self.hop.span.end),
            max_length=spec.max_length,
            batch=spec.batch,
            left_padding=spec.left_padding,
            codec=spec.codec,
            adapter=spec.adapter_hash,
            nonce=self.nonce,
            route_epoch=route_epoch,
            upstream=peer_id_to_bytes(upstream) if upstream else b"",
            downstream=peer_id_to_bytes(downstream) if downstream else b"",
            wait_ms=round(spec.cache_wait * 1000),
            activation_dtype=spec.dtype,
            keep_ms=round(self._asked_keep * 1000),
            clearing=clearing_to_wire(payment) if payment is not None else None,
            prefix=wire.Prefix(blocks=prefix, salt=spec.salt_at(self.hop.peer_id), keep=True) if spec.share else None,
        )
        question = wire.InferenceFrame(open=message)
        self._granted = await self._granted_for(self._stream, question, spec.cache_wait + DEADLINES.send)
        pledge = self._check_pledge(self._granted)
        pledged, self.prefix_tokens = pledge.hash() if pledge is not None else b"", self._granted.prefix_tokens
        try:
            self._last_receipt = root_of(message, self._client, self.epoch, pledged, self.prefix_tokens)
        except ValueError as error:
            raise self._failed(str(error)) from None
        message.ClearField("clearing")  # is nobody's business who is shown the receipts
        if self._log is not None:
            self._log.begin(message, self._granted)

    async def resume(self, epoch: bytes) -> int:
        """Takes up the session that an earlier process left there; returns how many tokens of a row it holds.

        Raises:
            ServerRefused: the server does not hold it any more.
            ServerFailed: it does not answer, or answers nonsense.
        """
        message = wire.Resume(nonce=self.nonce, session_epoch=epoch)
        granted = await self._granted_for(self._stream, wire.InferenceFrame(resume=message), DEADLINES.send)
        if granted.session_epoch != epoch or granted.sequence > MAX_SEQUENCE:
            raise self._failed("it took up another session, or at no step of one")
        self._granted = granted
        self._sequence = self._answered = granted.sequence
        self._last_receipt = granted.last_receipt
        return granted.position

    async def take_up(self, stream: InferenceStream) -> None:
        """Goes on with the session on another stream, and ends the one before; on failure it is the other way round.

        Answers that were lost with the old stream come again on the new one. A step that the server has not got
        (`held` is below its number) has to be sent again.

        Raises:
            StreamLost: nothing came of it.
            ServerRefused: the server does not hold the session any more.
            ServerFailed: it does not go on where it was.
        """
        self._attempt += 1
        answered = self._answered  # a reply may still be read from the old stream
        message = wire.Resume(nonce=self.nonce, session_epoch=self.epoch, answered=answered, attempt=self._attempt)
        try:
            granted = await self._granted_for(stream, wire.InferenceFrame(resume=message), DEADLINES.send)
            if granted.session_epoch != self.epoch or not self._answered <= granted.sequence <= self._sequence:
                raise self._failed("it took up another session, or at another step")
            if granted.sequence == self._answered and granted.last_receipt != self._last_receipt:
                raise self._cheated("its receipts do not follow each other")
        except BaseException:
            with trio.CancelScope(shield=True):
                await stream.reset()
            raise
        before, self._stream = self._stream, stream
        self.held = granted.sequence
        self.generation += 1
        self.abandoned = False
        self._due.ask_again(answered)
        await before.reset()

    async def _granted_for(
        self, stream: InferenceStream, question: wire.InferenceFrame, timeout: float
    ) -> wire.Granted:
        begun = trio.current_time()
        granted = (await self._ask(stream, question, timeout)).granted
        self.round_trip = min(self.round_trip, trio.current_time() - begun)
        if granted.codec != self._spec.codec or not granted.max_step_tokens:
            raise self._failed(f"it granted codec {granted.codec!r} instead of {self._spec.codec!r}")
        if self._spec.takes_long_factors(self._spec.max_length) and not granted.long_factors:
            raise self._failed(f"its version knows no texts of more than {self._spec.original_length} tokens")
        known = LayoutNeeds(granted.positions, granted.groups, granted.features)
        if unmet := self._spec.layout.unmet(known, self.hop.span):
            raise self._failed(f"its version knows no {unmet}")
        return granted

    # --- steps

    def target(self, nbytes: int = 0, *, receipt_only: bool = False) -> wire.PushTarget:
        """Where another server pushes the next step, of `nbytes` bytes, and whether a receipt is enough of an answer to
        it. The step gets its sequence number by that."""
        sequence = self.next_sequence(nbytes)
        self._due.ask(sequence)
        self._targeted = True
        peer = peer_id_to_bytes(self.hop.peer_id)
        return wire.PushTarget(peer_id=peer, nonce=self.nonce, sequence=sequence, receipt_only=receipt_only)

    async def exchange(self, given: Input, route_epoch: int) -> Answer:
        """Sends one step, and returns the checked answer.

        Raises:
            ServerFailed: the server is gone, silent, refuses or cheats.
        """
        chunk = given.chunk
        step = wire.Step(
            sequence=self.next_sequence(),
            position=given.position,
            reorder=given.reorder,
            route_epoch=route_epoch,
            long_factors=given.long_factors,
            positions=chunk.layout.positions,
            groups=chunk.layout.groups,
        )
        await self.send(step, chunk)
        answer = await self.receive(step, chunk, self._spec.step_timeout)
        if answer is None:
            raise self.silent(self._spec.step_timeout)
        return answer

    async def send(self, step: wire.Step, chunk: WireTensor) -> None:
        """Raises StreamLost: the server is gone or does not read."""
        self._sent = step.sequence, self._stream
        self._due.ask(step.sequence)
        if self._log is not None:
            self._log.asked(step, chunk.tensor, chunk.payload)
        try:
            frame = wire.InferenceFrame(step=step, tensors=[chunk.tensor])
            await self._stream.send(frame, [chunk.payload], timeout=DEADLINES.send)
        except PeerError as error:
            raise self._lost(error) from error
        self.bytes_sent += len(chunk.payload)

    async def receive(self, step: wire.Step, chunk: WireTensor, timeout: float) -> Answer | None:
        """The answer to `step`, which took `chunk`, whoever sent it; None if it did not come within `timeout` seconds.

        Raises:
            StreamLost, PushedOther, ServerFailed: as `read` and `checked` do.
        """
        unchecked = await self.read(step, chunk, timeout)
        return None if unchecked is None else await self.checked(unchecked)

    async def read(self, step: wire.Step, chunk: WireTensor, timeout: float) -> UncheckedAnswer | None:
        """What has come for `step`; `checked` has to follow. None if it did not come within `timeout` seconds.

        Raises:
            StreamLost: the stream has ended, or another one has taken its place without the step.
            ServerFailed: the server refuses, or answers nonsense.
        """
        begun = trio.current_time()
        if self._sent is not None and self._sent[0] == step.sequence > self.held and not self.uses(self._sent[1]):
            raise StreamLost(str(self._failed(f"step {step.sequence} was lost with a stream")), self.hop.peer_id)
        while True:
            received = None
            # Only the read may be cut off: what was read must be checked and counted.
            with trio.move_on_at(begun + timeout):
                try:
                    received = await self._stream.receive(timeout=None, admit=partial(self._admit, step, chunk))
                except PeerError as error:
                    raise self._lost(error) from error
            if received is None:
                return None
            frame, payloads = received
            self._raise_refusal(frame)
            if frame.WhichOneof("body") != "reply" or len(payloads) > 1:
                raise self._failed("it answered a step with something else than one reply")
            answer = WireTensor(frame.tensors[0], payloads[0]) if payloads else None
            self.bytes_received += sum(map(len, payloads))
            due = self._due.answer(frame.reply.sequence)
            if frame.reply.sequence < step.sequence:
                self._skip(frame.reply, answer)
                if not due:
                    raise self._failed(f"it answered step {frame.reply.sequence} more often than it was asked")
                continue
            return self._unchecked(frame.reply, answer, step, chunk, begun)

    def silent(self, seconds: float) -> ServerFailed:
        """The error of a server that did not answer for so long."""
        return self._failed(f"it did not answer for {seconds:.0f} s")

    @property
    def is_in_step(self) -> bool:
        """Whether the last answer was wanted, and no more than one step is under way behind it."""
        return not self._skipped and self._sequence - self._answered <= 1

    # --- leaving

    @property
    def is_behind(self) -> bool:
        """Whether the server has been sent a step on the present stream that it has not answered."""
        return self._sent is not None and self._sent[0] > self._answered and self.uses(self._sent[1])

    async def abandon(self) -> None:
        """Ends the stream, so that the server drops what it was sent of a prompt and has not begun. It keeps the
        session, to be taken up on another stream. Never waits, never raises."""
        self.abandoned = True
        await self.leave()

    async def close_on(self, stream: InferenceStream) -> None:
        """Ends the session by another stream than the one that was left. Never raises."""
        self._attempt += 1
        resume = wire.Resume(nonce=self.nonce, session_epoch=self.epoch, attempt=self._attempt)
        with contextlib.suppress(PeerError):
            await stream.send(wire.InferenceFrame(resume=resume), timeout=DEADLINES.close)
        await close_stream(stream, wire.InferenceFrame(close=wire.Close()))

    async def close(self) -> None:
        """Ends the session, so that the cache is free at once. Never raises."""
        await close_stream(self._stream, wire.InferenceFrame(close=wire.Close()))

    async def leave(self) -> None:
        """Breaks the stream off without a Close, so that the server keeps the session for a while."""
        with trio.CancelScope(shield=True):
            await self._stream.reset()
