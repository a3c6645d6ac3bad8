"""The server's side of `/petalnode/inference/1` and `/petalnode/push/1`: who gets a session, and whose a stream is."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

import trio

from ....crypto.identity import Identity, peer_id_from_bytes
from ....protocols import wire_pb2 as wire
from ....protocols.framing import PeerError, StreamClosed
from ....protocols.inference import Refusal, SessionTerms, bad_request, terms_of
from ...credits.payment_verifier import PaymentVerifier
from ..budget import CacheBudget, CacheFull
from ..compute_thread import ComputeThread
from ..lifecycle.pledging import Pledger
from .adapters import Adapters, Borrowed
from .admission import Hosted, check_client, check_terms
from .pushes import PushConnector, PushStream
from .session import IDLE_TIMEOUT, SEND_TIMEOUT, InferenceStream, ServerSession, not_held

OPEN_TIMEOUT: Final = 10.0
MAX_WAIT: Final = 60.0
MAX_KEEP: Final = 120.0
"""Seconds that a session may ask to be kept when its client is lost. Its cache goes to whoever needs it before that."""
MAX_SESSIONS: Final = 512


class InferenceService:
    """Serves sessions of one hosted span. `on_change` is called when free cache or queue depth have changed.

    `allowed_clients`: the peer ids that get sessions; none lets everybody. `pledger` gives the pledge for
    a session that is opened. `till` takes points for priority; by default it takes none.

    Attributes:
        draining: set it and new sessions are refused and present clients told to leave.
    """

    def __init__(
        self,
        hosted: Hosted,
        compute: ComputeThread,
        budget: CacheBudget,
        identity: Identity,
        connector: PushConnector,
        adapters: Adapters,
        on_change: Callable[[], None] = lambda: None,
        allowed_clients: Collection[str] = (),
        pledger: Pledger = lambda: None,
        till: PaymentVerifier | None = None,
    ) -> None:
        self.hosted = hosted
        self.budget = budget
        self.compute = compute
        self.identity = identity
        self.connector = connector
        self.pledger = pledger
        self.till = till or PaymentVerifier(identity.peer_id, ())
        self.adapters = adapters
        self.draining = False
        self.sessions = 0
        self._by_key: dict[tuple[str, bytes], ServerSession] = {}
        self._on_change = on_change
        self._allowed_clients = frozenset(allowed_clients)
        self._idle = trio.Event()

    async def wait_idle(self) -> None:
        """Returns once there are no sessions."""
        while self.sessions:
            await self._idle.wait()

    async def handle(self, stream: InferenceStream) -> None:
        """One stream from Open or Resume to its end. Never raises for anything that the client did."""
        try:
            frame, _ = await stream.receive(timeout=OPEN_TIMEOUT)
            try:
                if frame.WhichOneof("body") == "resume":
                    await self._resume(stream, frame.resume)
                else:
                    await self._serve(stream, frame)
            except Refusal as refusal:
                await stream.send(wire.InferenceFrame(error=refusal.to_wire()), timeout=SEND_TIMEOUT)
            await stream.close()
        except PeerError:
            # The client is gone, silent or speaks nonsense; its cache has been given back on the way here.
            await stream.reset()

    async def handle_push(self, stream: PushStream) -> None:
        """Steps that another server pushes into a session here."""
        while True:
            frame, payloads = await stream.receive(timeout=IDLE_TIMEOUT)
            try:
                if frame.WhichOneof("body") != "push" or len(frame.tensors) != 1:
                    raise bad_request("a push stream takes Push with one tensor")
                session = self._find(frame.push.client, frame.push.nonce)
                await session.take_push(frame.push, frame.tensors[0], payloads[0], stream.peer_id)
            except Refusal as refusal:
                await stream.send(wire.PushFrame(error=refusal.to_wire()), timeout=SEND_TIMEOUT)
                return

    def _find(self, client: bytes, nonce: bytes) -> ServerSession:
        try:
            session = self._by_key.get((peer_id_from_bytes(client), nonce))
        except ValueError:
            session = None
        if session is None:
            raise not_held()
        return session

    async def _serve(self, stream: InferenceStream, frame: wire.InferenceFrame) -> None:
        if frame.WhichOneof("body") != "open":
            raise bad_request("a session begins with Open")
        check_client(stream.peer_id, self._allowed_clients)
        terms = terms_of(frame.open)
        check_terms(terms, self.hosted)
        if self.draining:
            raise Refusal(wire.ERROR_DRAINING, "this server is about to stop")
        if self.sessions >= MAX_SESSIONS:
            raise Refusal(wire.ERROR_BUSY, f"this server already has {self.sessions} sessions")
        if (stream.peer_id, terms.nonce) in self._by_key:
            raise bad_request("this nonce names another session")
        adapter = self.adapters.borrow(terms.adapter, stream.peer_id, terms.span)
        self.sessions += 1
        try:
            payment = self.till.take(frame.open, stream.peer_id, terms)
            wait = min(frame.open.wait_ms / 1000, MAX_WAIT)
            try:
                await self._acquire(stream, terms.cache_tokens, wait, payment is not None)
            except BaseException:
                self.till.give_back(payment)
                raise
            evicted = False
            try:
                self._on_change()
                evicted = await self._run(stream, terms, frame.open, adapter, payment is not None)
            finally:
                if not evicted:
                    self.budget.release(terms.cache_tokens)
        finally:
            self.adapters.give_back(adapter)
            self.sessions -= 1
            if not self.sessions:
                self._idle.set()
                self._idle = trio.Event()
            self._on_change()

    async def _acquire(self, stream: InferenceStream, tokens: int, wait: float, paid: bool) -> None:
        """Takes cache for a session. A client that dies in the queue loses its place at once.

        Raises:
            Refusal: ERROR_CACHE_FULL after `wait` seconds.
            PeerError: the client is gone.
        """
        full: CacheFull | None = None
        held = lost = False
        async with trio.open_nursery() as nursery:

            async def watch() -> None:
                nonlocal lost
                await stream.wait_lost()
                lost = True
                nursery.cancel_scope.cancel()

            nursery.start_soon(watch)
            try:
                await self.budget.acquire(tokens, wait, paid=paid)
                held = True
            except CacheFull as error:
                full = error
            nursery.cancel_scope.cancel()
        if full is not None:
            raise Refusal(wire.ERROR_CACHE_FULL, str(full))
        if lost:
            if held:
                self.budget.release(tokens)
            raise StreamClosed(f"{stream.peer_id} left while it waited for cache", stream.peer_id)

    async def _run(
        self, stream: InferenceStream, terms: SessionTerms, opened: wire.Open, adapter: Borrowed | None, paid: bool
    ) -> bool:
        """Serves one session to its end; whether its cache was taken while it waited for its client."""
        compute = await self.compute.open(
            terms.batch,
            terms.max_length,
            terms.left_padding,
            terms.codec,
            terms.span,
            adapter.adapter if adapter is not None else None,
            paid,
        )
        keep = min(opened.keep_ms / 1000, MAX_KEEP)
        session = ServerSession(self, stream.peer_id, terms, compute, keep, paid)
        key = (stream.peer_id, terms.nonce)
        self._by_key[key] = session
        try:
            await session.run(stream, opened.downstream)
        finally:
            del self._by_key[key]
            if not session.evicted:
                self.compute.close(compute)
        return session.evicted

    async def _resume(self, stream: InferenceStream, resume: wire.Resume) -> None:
        session = self._by_key.get((stream.peer_id, resume.nonce))
        if session is None:
            raise not_held()
        await session.resume(stream, resume)
