"""What sessions and batches need of the client that they belong to: servers are found, reached and remembered."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import trio

from ...crypto.credits import Clearing
from ...crypto.receipts import Receipt
from ...protocols import wire_pb2 as wire
from ...protocols.adapter import ADAPTER
from ...protocols.announcement import Announcement
from ...protocols.framing import F, MessageStream, PeerError
from ...protocols.ids import StreamProtocol
from ...protocols.inference import INFERENCE
from ...protocols.training import BatchFrames, BatchProtocol
from ..errors import NoChainError, ServerCheated, ServerFailed
from ..swarm.routing import Hop
from ..swarm.swarm import Swarm
from ..trust.bundle import equivocation_bundle
from ..trust.receipt_log import ReceiptArchive
from ..verification.tolerances import doubt
from .deadlines import DEADLINES, SessionTotals
from .losses import LOSSES
from .request import PushedOther, ServerClaims, WireTensor, close_stream, has_code, is_lost, with_refusals
from .server_selection import ServerLimits, ServerMemory, ServerSelection
from .session.prefixes import PrefixMemory, SharedSession
from .session.stream import InferenceStream, SessionSpec
from .session.trace import OnSession
from .session_adapter import bring
from .swarm_model import SwarmModel

if TYPE_CHECKING:
    from .session.comparing import Disagreement


class Payments(Protocol):
    """Pays busy servers for priority; a wallet, if the person has points."""

    async def pay(self, server: Announcement | None, batch: int, max_length: int) -> Clearing | None:
        """What to show this server when a session is opened; None for nothing. Never raises."""

    def spent(self, clearing: Clearing) -> None:
        """The server has taken it."""


@dataclass
class ClientState:
    """What a client and its variants have in common.

    Attributes:
        known: of the servers.
        receipts: where those of servers are kept.
        payments: for priority, if the person has points.
        prefixes: what sessions may begin with.
        prefix_salt: of sessions that name none; at servers that allow it, who knows it shares what they keep.
        disagreements: of chains that were compared, in all sessions so far.
        totals: of all sessions.
        on_session: is called with each session that has ended, for traces.
        answering: the conversations that are being answered.
        uncoded: the session that was opened last without a codec.
        junctions: of such a session, until they are measured.
        codec_errors: the largest relative error of each codec on those.
        noted: whether the trust store has this version as one that computes.
    """

    known: ServerMemory
    receipts: ReceiptArchive = field(default_factory=ReceiptArchive)
    payments: Payments | None = None
    prefixes: PrefixMemory = field(default_factory=PrefixMemory)
    prefix_salt: bytes = b""
    disagreements: list[Disagreement] = field(default_factory=list)
    totals: SessionTotals = field(default_factory=SessionTotals)
    on_session: OnSession | None = None
    answering: set[object] = field(default_factory=set)
    uncoded: SharedSession | None = None
    junctions: list[WireTensor] = field(default_factory=list)
    codec_errors: dict[str, float] = field(default_factory=dict)
    noted: bool = False


class Router(ServerSelection):
    """The client as its sessions and batches have it: finds and reaches servers, and is told of answers and failures.

    Attributes:
        state: what the client shares with its variants.
    """

    def __init__(
        self, swarm: Swarm, model: SwarmModel, nursery: trio.Nursery, limits: ServerLimits, state: ClientState | None
    ) -> None:
        super().__init__(swarm, model, nursery, limits, None if state is None else state.known)
        self.state = state or ClientState(self._known)

    @property
    def peer_id(self) -> str:
        return self.swarm.peer_id

    @property
    def receipts(self) -> ReceiptArchive:
        return self.state.receipts

    @property
    def disagreements(self) -> list[Disagreement]:
        return self.state.disagreements

    def claims_of(self, peer_id: str) -> ServerClaims | None:
        """What this server has announced; None if nothing is known of it."""
        announced = self.swarm.view.get(peer_id, time.time())
        return None if announced is None else ServerClaims.of(announced)

    def accuse(self, peer_id: str, reason: str, proof: tuple[Receipt, Receipt] | None = None) -> None:
        """Bans a server that signed something else than it did, or nothing. Publishes the proof if there is one."""
        self.swarm.trust.ban(peer_id, reason, "own")
        if proof is not None and peer_id not in self.trusted.peers:  # the receipts tell of inputs that nobody may know
            bundle = equivocation_bundle(self.swarm.identity, peer_id, *proof)
            self.start_soon(partial(self.swarm.publish_evidence, bundle, recomputed=False))

    def note_tokens(self, peer_id: str, tokens: int) -> None:
        """Counts tokens that a server answered with a valid receipt, if anybody could tell whether they are right."""
        if self.model.held is not None and not self.state.noted:
            self.swarm.trust.note_version(self.model.held, self.model.version)
            self.state.noted = True
        said = self.swarm.view.get(peer_id, time.time())
        if said is None or doubt(said.dtype, said.quantisation, said.device).earns:
            self.swarm.trust.note_tokens(peer_id, tokens)

    async def connect(self, hop: Hop, *, direct: bool = False) -> InferenceStream:
        """A stream to the server of `hop`; with `direct`, only on a connection that there is, without a relay.
        Raises ServerFailed."""
        return await self._stream(hop, INFERENCE, direct=direct)

    async def batch_stream(self, hop: Hop, protocol: BatchProtocol) -> BatchFrames:
        """A stream for batches to the server of `hop`; `protocol` says of which kind. Raises ServerFailed."""
        return await self._stream(hop, protocol)

    async def _stream(self, hop: Hop, protocol: StreamProtocol[F], *, direct: bool = False) -> MessageStream[F]:
        if not self.trusted.permits(hop, self.model.num_blocks):
            # No plan has it so; a session that another process has left may.
            raise NoChainError(
                f"{hop.peer_id} is no trusted server, and is not asked for blocks {hop.span}",
                tuple(range(hop.span.start, hop.span.end)),
            )
        try:
            return await self.swarm.new_stream(hop.peer_id, protocol, timeout=DEADLINES.open, direct=direct)
        except PeerError as error:
            text = f"server {hop.peer_id} (blocks {hop.span}) cannot be reached: {error}"
            raise ServerFailed(text, hop.peer_id) from error

    @asynccontextmanager
    async def adapter_at(self, hop: Hop, spec: SessionSpec) -> AsyncIterator[None]:
        """Within it, the server of `hop` holds the adapter of `spec`, if there is one: it is brought there if need be.

        Raises:
            ServerFailed: the server cannot be reached, or will not have it.
        """
        adapter = spec.adapter
        record = self.swarm.view.records.get(hop.peer_id)
        if adapter is None or adapter.content is None or (record is not None and adapter.is_held_by(record.content)):
            yield
            return
        stream = await self._stream(hop, ADAPTER)
        try:
            await bring(stream, adapter, hop, self.model.version)
            yield
        finally:
            await close_stream(stream, wire.BatchFrame(close=wire.Close()))

    async def payment(self, hop: Hop, spec: SessionSpec) -> Clearing | None:
        """Points for the server of `hop`, if it is busy and this client has any for it. Never raises."""
        if self.state.payments is None:
            return None
        announced = self.swarm.view.get(hop.peer_id, time.time())
        return await self.state.payments.pay(announced, spec.batch, spec.max_length)

    def paid(self, payment: Clearing) -> None:
        """Notes that a server has taken points."""
        if self.state.payments is not None:
            self.state.payments.spent(payment)

    def watch_direct(self, peer_id: str) -> trio.Event:
        """Set when there is a connection to this peer without a relay."""
        return self.swarm.watch_direct(peer_id)

    def start_soon(self, function: Callable[..., Awaitable[Any]], *args: Any) -> None:
        """Runs `function` in the background for as long as the client lives."""
        self._nursery.start_soon(function, *args)


def note_failure(router: Router, error: ServerFailed) -> None:
    """Lets the client know what to think of a server that failed or said no."""
    if isinstance(error, PushedOther):
        return  # the server before it may have lied as well
    if isinstance(error, ServerCheated):
        router.accuse(error.peer_id, str(error), error.proof)
    else:
        router.suspect(
            error.peer_id, DEADLINES.not_allowed if has_code(error, wire.ERROR_NOT_ALLOWED) else DEADLINES.suspect
        )


class ServerSearch:
    """Looks for servers as long as some may come: they come and go, and announcements may be old.

    Attributes:
        refused: the servers that are left out, each with how it failed or what it said.
    """

    def __init__(
        self,
        router: Router,
        refused: Mapping[str, ServerFailed],
        *,
        until: float,
        wait: bool,
        lost: bool,
        ask_again: Callable[[ServerFailed], bool],
        pays: bool = True,
    ) -> None:
        """If a server was `lost`, others are looked for `until` then, on trio's clock; with `wait`, for ever. Which of
        those that are left out are asked again, `ask_again` says; whether busy ones get points for their place, `pays`.
        """
        self.refused = dict(refused)
        self.pays = pays
        self._router = router
        self._tried = dict(refused)
        self._until = until
        self._wait = wait
        self._lost = lost
        self._ask_again = ask_again
        self._fresh = False
        self._failed_replays: Counter[str] = Counter()

    def given_up(self, error: NoChainError) -> NoChainError:
        """The error with who was tried."""
        return with_refusals(error, self._tried, self._router.peer_id)

    def refuse(self, error: ServerFailed, *, granted: bool = False) -> None:
        """Leaves this server out, for good at the third time that it had `granted` what it then failed at. To bring it
        to where a session was has cost as much as if it had gone well."""
        self.leave_out(error)
        note_failure(self._router, error)
        if granted:
            self._failed_replays[error.peer_id] += 1
            self._router.note_loss(error.peer_id, admitted=has_code(error, wire.ERROR_NOT_FOUND))

    def leave_out(self, error: ServerFailed) -> None:
        """Leaves this server out for a while, and thinks no worse of it."""
        self.refused[error.peer_id] = self._tried[error.peer_id] = error

    async def found_nobody(self, error: NoChainError) -> None:
        """Returns when it is time to look again.

        Raises:
            NoChainError: it is time to give up; `error` with who refused.
        """
        self._lost = self._lost or any(map(is_lost, self.refused.values()))
        if not self._fresh:
            self._fresh = True
            # Where a step waits, late directories are not waited for: the next look comes soon.
            with trio.move_on_after(DEADLINES.look if self._lost else math.inf):
                await self._router.refresh()
            return
        if not self._wait and (not self._lost or trio.current_time() >= self._until):
            raise self.given_up(error) from None
        await trio.sleep(DEADLINES.retry_interval)
        self.reconsider()
        self._fresh = False

    def is_over(self, more: float) -> bool:
        """Whether nobody has been found for so long that `more` seconds are enough for those who were asked."""
        return not self._wait and trio.current_time() >= self._until + more

    def reconsider(self) -> None:
        """Lets those be asked again that may have changed their mind."""
        self.refused = {
            peer: failure
            for peer, failure in self.refused.items()
            if not self._ask_again(failure) or self._failed_replays[peer] >= LOSSES.failed_replays
        }
