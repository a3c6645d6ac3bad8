"""One granted session of a server: takes steps from its client or by pushes, has them computed, answers with receipts,
and pushes outputs on. It may outlive the stream that it came with."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import trio

from ....crypto.identity import peer_id_to_bytes
from ....protocols import wire_pb2 as wire
from ....protocols.framing import MessageStream, PeerError, StreamClosed, StreamTimeout
from ....protocols.inference import (
    Refusal,
    SessionTerms,
    bad_request,
    hash_of_step,
    pushed_step,
    receipt_to_wire,
    sha256,
)
from ..budget import Lease
from ..steps import ComputeSession, StepInput, StepOutput
from ..tallies import ServedSession
from .admission import check_step, check_step_tensors, is_prompt, layouts_known, step_tokens
from .pushes import PushConnector, Pushes, Upstream
from .replies import REPLIES, SendQueue, SentReplies, SentReply
from .request import REQUESTS, ReceiptChain, RequestContext, not_held, open_window

InferenceStream = MessageStream[wire.InferenceFrame]


@dataclass(eq=False)
class ServerSession:
    """Holds one session's place in the cache and its chain of receipts.

    Steps come from the client's stream and from pushes, and are taken one at a time as they arrive. When the stream is
    lost the session waits for its client to take it up on another one. It ends where somebody needs the cache. A client
    may also take it up while the stream still lives, to move it. Replies that were lost with the old stream are sent
    again on the new one. Those that come later go there, and no step is taken from the old one any more.
    """

    _context: RequestContext
    _client: str
    _terms: SessionTerms
    _compute: ComputeSession
    _lease: Lease
    _connector: PushConnector
    _keep: float
    _upstream: Upstream
    _paid: bool = False

    def __post_init__(self) -> None:
        self._stream: InferenceStream | None = None
        self._lock = trio.Lock()
        self._replying = trio.Lock()  # replies leave in their order, behind Granted
        self._sequence = 0
        self._position = self._begun_at = self._compute.begun
        self._route_epoch = self._terms.route_epoch
        self._receipts = ReceiptChain(self._context, self._client, self._terms, self._begun_at)
        self._replies = SentReplies()
        self._sent_again = 0  # up to this sequence number, the stream got its replies when it was attached
        self._attempt = 0
        self._resuming = self._early_pushes = 0
        self._over = self._served = False
        self._changed = trio.Event()
        self._pushes: Pushes | None = None
        self._leaving: SendQueue | None = None
        self._begun = time.time()
        self._steps = self._tokens = 0
        self._queue = self._compute_seconds = 0.0
        self._listening = trio.CancelScope()

    async def run(self, stream: InferenceStream, downstream: bytes) -> None:
        """Serves the session until its client closes it, or is lost and does not come back in time.

        Raises:
            Refusal: the client broke the protocol.
            PeerError: the client is lost.
        """
        ended: Refusal | PeerError | None = None
        try:
            async with trio.open_nursery() as nursery:
                self._pushes, self._leaving = Pushes(self._connector, nursery), SendQueue(nursery)
                if downstream:
                    self._pushes.prepare(downstream)
                try:
                    await self._greet(stream)
                    self._lease.on_taken = self._evict
                    await self._attend(stream)
                except (Refusal, PeerError) as error:
                    ended = error
                await self._wait_until_over()
                await self._pushes.close()
                nursery.cancel_scope.cancel()
        finally:
            if not self._lease.taken:
                self._context.compute.close(self._compute)
            self._tell(ended)
        if ended is not None:
            raise ended

    async def resume(self, stream: InferenceStream, resume: wire.Resume) -> None:
        """Serves the session on another stream of the same client, which takes the place of the one before.

        Raises:
            Refusal: the session is over or a later attempt came first, or the client broke the protocol.
            PeerError: the client is lost.
        """
        if self._over or resume.session_epoch != self._receipts.epoch:
            raise not_held()
        if resume.attempt and resume.attempt <= self._attempt:
            raise bad_request(f"attempt {resume.attempt} came after attempt {self._attempt}")
        self._attempt = resume.attempt
        self._lease.recall()
        self._resuming += 1
        before, self._stream = self._stream, None
        try:
            if before is not None:
                await before.reset()  # no reply must be stuck there
            await self._attach(stream, resume.answered if resume.HasField("answered") else None)
        finally:
            self._resuming -= 1
            self._notify()
        await self._attend(stream)

    def _tell(self, ended: Refusal | PeerError | None) -> None:
        tell = self._context.tallies.on_session
        if tell is not None:
            refusal = wire.ErrorCode.Name(ended.code) if isinstance(ended, Refusal) else ""
            terms, now = self._terms, time.time()
            sums = self._steps, self._tokens, self._queue, self._compute_seconds
            tell(ServedSession(terms.nonce, terms.span, self._begun, now, terms.batch, *sums, refusal))

    async def _greet(self, stream: InferenceStream) -> None:
        try:
            await self._attach(stream, None)
        except PeerError:
            self._over = True  # nobody knows the session's epoch, so nobody can take it up
            raise

    async def _wait_until_over(self) -> None:
        """While there is no stream the cache is on loan. A client that comes back finds the session if nobody has
        needed the room, and not for ever."""
        while not self._over:
            changed = self._changed
            if self._stream is not None or self._resuming:
                await changed.wait()
                continue
            self._lease.lend(self._evict)
            with trio.move_on_after(self._keep) as scope:
                await changed.wait()
            self._lease.recall()
            if scope.cancelled_caught and self._stream is None and not self._resuming:
                self._over = True

    def _evict(self) -> None:
        self._over = True
        self._context.compute.close(self._compute)  # before the cache of whoever takes the room is made
        self._listening.cancel()
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def _attach(self, stream: InferenceStream, answered: int | None) -> None:
        """Makes `stream` the one on which replies leave, beginning with those behind the sequence number `answered`."""
        async with self._replying:
            if self._over:
                raise not_held()
            before, self._stream = self._stream, stream
            self._notify()
            try:
                if before is not None:
                    await before.reset()
                # A step may be computing: its reply waits for us, and comes behind these.
                missing = self._replies.after(answered)
                self._sent_again = missing[-1].sequence if missing else 0
                open_window(stream, self._served)
                await stream.send(wire.InferenceFrame(granted=self._granted()), timeout=REQUESTS.send)
                for sent in missing:
                    await stream.send(sent.frame, sent.payloads, timeout=REQUESTS.send)
            except BaseException:
                self._detach(stream)
                raise

    def _detach(self, stream: InferenceStream) -> None:
        if self._stream is stream:
            self._stream = None
            self._notify()

    async def _attend(self, stream: InferenceStream) -> None:
        """Takes steps from `stream`, until it ends or another one takes its place.

        The session is over when the client has closed it or broken the protocol, and when others need its cache. If it
        is not to be kept, it ends with its stream, too.
        """
        if self._over:
            raise not_held()
        self._listening = trio.CancelScope()
        try:
            with self._listening as scope:
                await self._listen(stream)
            if scope.cancelled_caught:
                raise Refusal(wire.ERROR_CACHE_FULL, "others need the cache of this session")
            self._over = True
        except (StreamClosed, StreamTimeout):
            if self._stream is stream and not self._keep:
                self._over = True
                raise
        except PeerError:
            self._over = self._over or self._stream is stream
            raise
        except Refusal as refusal:
            self._over = True
            if self._stream is not None and self._stream is not stream:  # where the client listens now
                with suppress(PeerError):
                    await self._stream.send(wire.InferenceFrame(error=refusal.to_wire()), timeout=REQUESTS.send)
            raise
        finally:
            self._detach(stream)
            self._notify()

    def _granted(self) -> wire.Granted:
        return wire.Granted(
            **self._receipts.granted(),
            cache_tokens=self._terms.cache_tokens,
            codec=self._terms.codec,
            credits=REPLIES.credits,
            max_step_tokens=step_tokens(self._terms.batch),
            keep_ms=round(self._keep * 1000),
            position=self._position,
            sequence=self._sequence,
            last_receipt=self._receipts.last,
            priority=self._paid,
            prefix_tokens=self._begun_at,
            bytes_in_flight=REPLIES.bytes_in_flight,
            **layouts_known(self._context.hosted),
        )

    async def _listen(self, stream: InferenceStream) -> None:
        """Takes steps from `stream` until the client closes the session there."""
        while True:
            frame, payloads = await stream.receive(timeout=REQUESTS.session_idle, admit=partial(self._admit, stream))
            body = frame.WhichOneof("body")
            if self._stream is not stream or (stream.is_lost and body == "step" and is_prompt(frame.tensors)):
                raise StreamClosed("the client has left, or gone on with another stream", stream.peer_id)
            if body == "close":
                return
            if body != "step" or len(payloads) != 1:
                raise bad_request(f"an open session takes Step with one tensor, or Close; not {body}")
            try:
                await self._take(frame.step, frame.tensors[0], payloads[0], None)
            except Refusal as refusal:
                if refusal.code != wire.ERROR_TOO_LONG:
                    raise
                await stream.send(wire.InferenceFrame(error=refusal.to_wire()), timeout=REQUESTS.send)

    def _admit(self, stream: InferenceStream, frame: wire.InferenceFrame) -> None:
        """Tensors that the session's terms do not allow are not waited for."""
        if self._stream is stream and frame.tensors:
            check_step_tensors(frame.tensors, self._terms, self._context.hosted)

    def admit_push(self, frame: wire.PushFrame, pusher: str) -> None:
        """Whether to wait for the tensor of a push; to be called with its header.

        Raises:
            Refusal: `pusher` is not the server before this one, or the tensor does not fit the session.
        """
        self._upstream.check(pusher, frame.push.receipt)
        check_step_tensors(frame.tensors, self._terms, self._context.hosted)

    async def take_push(self, push: wire.Push, tensor: wire.Tensor, payload: bytes, pusher: str) -> None:
        """A step that `pusher`, the server before this one, sent on. Steps before it may still be on their way from the
        client, where they could not be pushed: it waits for its turn. A part of a prompt whose client is away waits for
        that client. So nothing is computed of a prompt that was given up.

        What is refused leaves the session as it was: checks come before tokens of the cache are forgotten, and what
        was added meanwhile is forgotten again. If the blocks fail at a step that passed them, the cache is unknown, and
        the session over.

        Raises:
            Refusal: the step does not fit the session, or the receipt is not the pusher's for these bytes.
        """
        prompt = is_prompt([tensor])
        self._early_pushes += 1
        try:
            with trio.move_on_after(REQUESTS.turn):
                while self._is_early(push.step) or (prompt and self._is_alone):
                    await self._changed.wait()
        finally:
            self._early_pushes -= 1
        if prompt and self._is_alone:
            raise Refusal(wire.ERROR_NOT_FOUND, "the client of this session is away, and nobody waits for the step")
        await self._take(push.step, tensor, payload, (push.receipt, pusher))

    def _is_early(self, step: wire.Step) -> bool:
        """Whether steps before it may still come."""
        return self._sequence + 1 < step.sequence <= self._sequence + REPLIES.credits and not self._over

    @property
    def _is_alone(self) -> bool:
        """Whether the client is away. It may come back, and then sends again what was not taken."""
        return self._stream is None and not self._over

    async def _take(
        self, step: wire.Step, tensor: wire.Tensor, payload: bytes, upstream: tuple[wire.Receipt, str] | None
    ) -> None:
        """`upstream` is the receipt that came with a push, and who sent it."""
        async with self._lock:
            if self._over:
                raise not_held()
            with self._lease.in_use():
                await self._take_next(step, tensor, payload, upstream)

    async def _take_next(
        self, step: wire.Step, tensor: wire.Tensor, payload: bytes, upstream: tuple[wire.Receipt, str] | None
    ) -> None:
        if step.sequence <= self._sequence:
            # The client has been sent the reply; who pushes what the client relayed already gets no second one.
            if upstream is None:
                await self._repeat(step, tensor, payload)
            return
        if upstream is not None and step.sequence != self._sequence + 1:
            raise bad_request(f"step {step.sequence} was pushed, and {self._sequence + 1} comes next")
        check_step(
            step,
            [tensor],
            self._terms,
            self._context.hosted,
            last=self._sequence,
            position=self._position,
            route_epoch=self._route_epoch,
        )
        output = await self._computed(step, tensor, payload, upstream)
        if upstream is None:
            self._upstream.relayed(step)
        else:
            self._upstream.pushed(upstream[1], step.previous_receipt)
        await self._answer(step, tensor, output, upstream[0] if upstream is not None else None)

    async def _computed(
        self, step: wire.Step, tensor: wire.Tensor, payload: bytes, upstream: tuple[wire.Receipt, str] | None
    ) -> StepOutput:
        """The output of a right step. Where the step only adds to the cache, the receipt of a push is checked
        meanwhile. A refused step leaves the cache as it was."""
        payload_hash, check = b"", None
        prompt, only_adds = is_prompt([tensor]), step.position == self._position and not step.reorder
        client = self if upstream is None and prompt and only_adds else None
        if upstream is not None:
            later = only_adds and not prompt  # nothing is forgotten, no rows change places, nothing is long
            payload_hash, check = self._upstream.checks(*upstream, self._client, step, later)
        request = StepInput.of(step, tensor, payload, payload_hash)
        try:
            return await self._context.compute.step(self._compute, request, check, client)
        except Refusal as refusal:
            if client is not None and refusal.code == wire.ERROR_NOT_FOUND and not self._compute.closed:
                self._served = False
                raise StreamClosed("the client has left before its step was computed", self._client) from None
            if refusal.code != wire.ERROR_BAD_REQUEST:
                self._over = True
                self._notify()
            raise

    async def wait_lost(self) -> None:
        """Returns when the client's stream is lost and no other takes its place."""
        while (stream := self._stream) is not None or self._resuming:
            await (stream.wait_lost() if stream is not None else self._changed.wait())
            if stream is not None and self._stream is stream:
                return

    async def _answer(
        self, step: wire.Step, tensor: wire.Tensor, output: StepOutput, upstream: wire.Receipt | None
    ) -> None:
        self._steps += 1
        self._tokens += max(0, output.position - step.position)
        self._queue += output.queue_seconds
        self._compute_seconds += output.compute_seconds
        self._sequence = step.sequence
        self._position = output.position
        if self._early_pushes:
            self._notify()
        self._route_epoch = step.route_epoch
        request = hash_of_step(step, tensor, output.input_hash)
        upstream_receipt = step.previous_receipt
        signed = self._receipts.sign(step.sequence, request, output.output_hash, upstream=upstream_receipt)
        push = None
        if step.targets:
            push = wire.Push(
                client=peer_id_to_bytes(self._client),
                nonce=step.targets[0].nonce,
                step=pushed_step(step, self._receipts.last),
                receipt=receipt_to_wire(signed),
            )
        reply = wire.Reply(
            sequence=step.sequence,
            position=output.position,
            receipt=receipt_to_wire(signed),
            queue_us=round(output.queue_seconds * 1e6),
            compute_us=round(output.compute_seconds * 1e6),
            pushed=upstream is not None,
            draining=self._context.draining,
            upstream=upstream,
        )
        assert self._leaving is not None
        send = partial(self._send_output, step, output, push, reply, request)
        await self._leaving.put(len(output.payload), send)

    async def _send_output(
        self, step: wire.Step, output: StepOutput, push: wire.Push | None, reply: wire.Reply, request_hash: bytes
    ) -> None:
        if push is not None and self._pushes is not None:
            # Before the reply: the next server's work is what the client waits for.
            reply.handed_on = await self._pushes.send(step.targets[0].peer_id, push, output)
        payloads = [] if step.receipt_only and not step.targets else [output.payload]
        frame = wire.InferenceFrame(reply=reply, tensors=[output.tensor] if payloads else [])
        sent = SentReply(step.sequence, request_hash, frame, payloads)
        self._replies.add(sent)
        await self._reply(sent)

    async def _reply(self, sent: SentReply, *, asked_again: bool = False) -> None:
        async with self._replying:
            if (stream := self._stream) is None:
                return  # sent when the client is back
            if sent.sequence <= self._sent_again and not asked_again:
                return  # a stream was attached since the reply was made, and began with it
            with suppress(PeerError):  # noticed by whoever reads the stream; a pusher must not suffer for it
                await stream.send(sent.frame, sent.payloads, timeout=REQUESTS.send)
                self._served = True
                open_window(stream, self._served)

    async def _repeat(self, step: wire.Step, tensor: wire.Tensor, payload: bytes) -> None:
        request = hash_of_step(step, tensor, await trio.to_thread.run_sync(sha256, payload))
        if self._leaving is not None:
            await self._leaving.empty()
        sent = self._replies.find(step.sequence, request)
        if sent is None:
            raise bad_request(f"step {step.sequence} is over, and was another request or is too old to be repeated")
        await self._reply(sent, asked_again=True)
