"""Answers the requests for one hosted span: who gets a session or a stream of batches, and whose a stream is."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import Final

import psutil
import torch
import trio

from ....crypto.identity import peer_id_from_bytes
from ....protocols import wire_pb2 as wire
from ....protocols.framing import StreamClosed
from ....protocols.inference import Refusal, SessionTerms, bad_request, session_name, terms_of
from ....protocols.prefix import PrefixNames
from ....protocols.training import BACKWARD, FORWARD, MICRO_BATCH_TOKENS, BatchFrames, BatchProtocol, batch_terms_of
from ...blocks.passes import SpanPasses
from ...errors import unwrapped
from ..budget import BudgetFull, Lease, MemoryBudget
from ..prefixes import SHARE as PREFIX_SHARE
from ..prefixes import PrefixUse
from .adapters import Adapters
from .admission import PriorityPayments, prefix_scope
from .batch_requests import BatchMemory, BatchRequests
from .pushes import PushConnector, PushStream, Upstream
from .request import REQUESTS, OpenCount, RequestContext, not_held, open_window, serve_stream
from .session import InferenceStream, ServerSession

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServicePolicy:
    """What all clients together may have of a hosted span. Times in seconds."""

    most_wait: float = 60.0  # For cache
    most_keep: float = 120.0
    """For which a session may ask to be kept when its client is lost. Its cache goes to who needs it before that."""
    first_push: float = 60.0
    """For streams that are opened ahead. If this is too short the client sends the first step itself; nothing is
    lost."""
    most_sessions: int = 1024
    most_streams: int = 512  # Of batches. A client that is alone may have half of either
    batch_share: float = 0.05
    """Parts of the free memory: for batches under way, for what clients want kept, and for what autograd keeps."""
    kept_share: float = 0.05
    activation_share: float = 0.15


SERVICE: Final = ServicePolicy()


class RequestService:
    """Serves sessions and batches of one hosted span; anyone's chat goes before batches.

    Sessions reserve cache from `cache`, with priority if `payments` are given and taken. Batches have memory of their
    own. One pass at a time computes within its share for what autograd keeps.
    """

    def __init__(
        self,
        context: RequestContext,
        cache: MemoryBudget,
        connector: PushConnector,
        adapters: Adapters,
        payments: PriorityPayments | None = None,
    ) -> None:
        self.context = context
        self.cache = cache
        self._connector = connector
        self._adapters = adapters
        self._payments = payments
        self._by_key: dict[tuple[str, bytes], ServerSession] = {}
        self._sessions = OpenCount("sessions", SERVICE.most_sessions, context.origins)
        self._batches = OpenCount("batches", SERVICE.most_streams, context.origins)
        self._streams = OpenCount("streams of batches", SERVICE.most_streams, context.origins)
        self._memory = _batch_memory(context)
        cache.on_change = self._limit_prefixes
        self._limit_prefixes(cache.free)

    def _limit_prefixes(self, free: int) -> None:
        """What sessions leave for later ones has room that nobody has reserved."""
        self.context.compute.limit_prefixes(min(free, int(PREFIX_SHARE * self.cache.capacity)))

    @property
    def sessions(self) -> int:
        """Those that are open, or wait for cache."""
        return self._sessions.count

    @property
    def batch_streams(self) -> int:
        return self._streams.count

    async def wait_idle(self) -> None:
        """Returns once there are no sessions, and no batch is under way."""
        await self._sessions.wait_none()
        await self._batches.wait_none()

    # --- sessions

    async def handle_session(self, stream: InferenceStream) -> None:
        """One stream from Open or Resume to its end. Never raises for anything that the client did."""
        await serve_stream(stream, self._serve_session, self.context)

    async def _serve_session(self, stream: InferenceStream, frame: wire.InferenceFrame) -> None:
        body = frame.WhichOneof("body")
        if body == "resume":
            await self._find(stream.peer_id, frame.resume.nonce).resume(stream, frame.resume)
            return
        if body != "open":
            raise bad_request("a session begins with Open")
        terms = terms_of(frame.open)
        self.context.admit(stream.peer_id, terms, self._sessions)
        self._check_nonce(stream.peer_id, terms.nonce)
        with self._adapters.borrowed(terms.adapter, stream.peer_id, terms.span) as adapter:
            self._sessions.add(stream.peer_id)
            try:
                lease, paid = await self._reserve(stream, frame.open, terms)
                name = session_name(terms.nonce)
                log.info(
                    "session %s: granted to %s, blocks %s", name, stream.peer_id, terms.span, extra={"session": name}
                )
                try:
                    self.context.tallies.sessions_opened += 1
                    self.context.changed.set()
                    scope = prefix_scope(stream.peer_id, terms.salt, self.context.prefix_cache)
                    shared = None
                    if terms.shares and scope is not None:
                        shared = PrefixUse(scope, PrefixNames(terms.prefix_root), terms.keeps)
                    compute = await self.context.compute.open(terms, stream.peer_id, adapter, paid, shared)
                    try:
                        self._check_nonce(stream.peer_id, terms.nonce)
                    except Refusal:  # its twin was quicker
                        self.context.compute.close(compute)
                        raise
                    keep = min(frame.open.keep_ms / 1000, SERVICE.most_keep)
                    session = ServerSession(
                        self.context,
                        stream.peer_id,
                        terms,
                        compute,
                        lease,
                        self._connector,
                        keep,
                        Upstream(frame.open.upstream, stream.peer_id),
                        paid,
                    )
                    await self._run(session, stream, frame.open)
                finally:
                    lease.release()
                    log.info("session %s: over", name, extra={"session": name})
            finally:
                self._sessions.remove(stream.peer_id)
                self.context.changed.set()

    def _check_nonce(self, peer_id: str, nonce: bytes) -> None:
        if (peer_id, nonce) in self._by_key:
            raise bad_request("this nonce names another session")

    async def _run(self, session: ServerSession, stream: InferenceStream, opened: wire.Open) -> None:
        key = (stream.peer_id, opened.nonce)
        self._by_key[key] = session
        try:
            await session.run(stream, opened.downstream)
        finally:
            del self._by_key[key]

    async def _reserve(self, stream: InferenceStream, opened: wire.Open, terms: SessionTerms) -> tuple[Lease, bool]:
        """Cache for a session, and whether it has priority."""
        payment = self._payments.take(opened, stream.peer_id, terms) if self._payments is not None else None
        paid = payment is not None
        try:
            tokens = self.context.compute.blocks.cache_tokens(terms.batch, terms.max_length)
            lease = await self._cache_for(stream, tokens, min(opened.wait_ms / 1000, SERVICE.most_wait), paid)
        except BaseException:
            if self._payments is not None:
                self._payments.give_back(payment)
            raise
        return lease, paid

    async def _cache_for(self, stream: InferenceStream, tokens: int, wait: float, paid: bool) -> Lease:
        """Waits for cache; a client that dies in the queue loses its place at once."""
        lease: Lease | None = None
        try:
            with unwrapped(BudgetFull):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(_cancel_when_lost, stream, nursery.cancel_scope)
                    client, address = stream.peer_id, self.context.origins.origin_of(stream.peer_id)
                    lease = await self.cache.acquire(tokens, wait, paid=paid, holder=client, address=address)
                    nursery.cancel_scope.cancel()
        except BudgetFull as error:
            raise Refusal(wire.ERROR_CACHE_FULL, str(error)) from None
        except BaseException:
            if lease is not None:
                lease.release()
            raise
        if lease is None:
            raise StreamClosed(f"{stream.peer_id} left while it waited for cache", stream.peer_id)
        return lease

    async def handle_push(self, stream: PushStream) -> None:
        """Steps that another server pushes into a session here.

        Who may push, and what, is settled by the header of a push: nothing else is waited for from a stranger. A stream
        on which no push has been taken is not kept open for long.
        """
        timeout = SERVICE.first_push
        while True:
            try:
                with self.context.serving():
                    frame, payloads = await stream.receive(timeout=timeout, admit=partial(self._admit_push, stream))
                    session = self._pushed_session(frame)
                    await session.take_push(frame.push, frame.tensors[0], payloads[0], stream.peer_id)
                open_window(stream, served=True)
                timeout = REQUESTS.session_idle
            except Refusal as refusal:
                await stream.send(wire.PushFrame(error=refusal.to_wire()), timeout=REQUESTS.send)
                return

    def _admit_push(self, stream: PushStream, frame: wire.PushFrame) -> None:
        self._pushed_session(frame).admit_push(frame, stream.peer_id)
        open_window(stream, served=False)

    def _pushed_session(self, frame: wire.PushFrame) -> ServerSession:
        if frame.WhichOneof("body") != "push":
            raise bad_request("a push stream takes Push with one tensor")
        return self._find(_peer_id(frame.push.client), frame.push.nonce)

    def _find(self, client: str, nonce: bytes) -> ServerSession:
        session = self._by_key.get((client, nonce))
        if session is None:
            raise not_held()
        return session

    # --- batches

    async def handle_forward(self, stream: BatchFrames) -> None:
        """One stream of forward passes. Never raises for anything that the client did."""
        await serve_stream(stream, partial(self._serve_batches, FORWARD), self.context)

    async def handle_backward(self, stream: BatchFrames) -> None:
        """One stream of backward passes. Never raises for anything that the client did."""
        await serve_stream(stream, partial(self._serve_batches, BACKWARD), self.context)

    async def _serve_batches(self, protocol: BatchProtocol, stream: BatchFrames, frame: wire.BatchFrame) -> None:
        if frame.WhichOneof("body") != "open":
            raise bad_request("a stream of batches begins with BatchOpen")
        terms = batch_terms_of(frame.open)
        self.context.admit(stream.peer_id, terms, self._streams)
        self._streams.add(stream.peer_id)
        try:
            await BatchRequests(self.context, self._memory, self._batches, stream, terms, protocol).run()
        finally:
            self._streams.remove(stream.peer_id)


def _batch_memory(context: RequestContext) -> BatchMemory:
    """Bounds for batches: what they hold from reading to answering (two of the largest at least), what streams keep,
    and what autograd keeps of a pass."""
    free, devices = psutil.virtual_memory().available, [part.device for part in context.compute.blocks.parts]
    on_device = min(torch.cuda.mem_get_info(one)[0] if one.type == "cuda" else free for one in devices)
    width = context.hosted.width(context.hosted.span.start)
    largest = 4 * MICRO_BATCH_TOKENS * width * 4  # a backward pass and its reply, in float32
    return BatchMemory(
        MemoryBudget(max(int(SERVICE.batch_share * free), 2 * largest), "MiB for batches", 1 << 20),
        MemoryBudget(int(SERVICE.kept_share * free), "MiB for tensors that are kept", 1 << 20),
        SpanPasses(context.compute.blocks, int(SERVICE.activation_share * on_device)),
    )


def _peer_id(client: bytes) -> str:
    try:
        return peer_id_from_bytes(client)
    except ValueError:
        raise not_held() from None


async def _cancel_when_lost(stream: InferenceStream, scope: trio.CancelScope) -> None:
    await stream.wait_lost()
    scope.cancel()
