"""What sessions and batches need of the client that they belong to."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Protocol

import trio

from ...crypto.credits import Clearing
from ...crypto.receipts import Receipt
from ...protocols import wire_pb2 as wire
from ...protocols.announcement import Announcement
from ...protocols.training import BatchFrames
from ..errors import NoChainError, ServerCheated, ServerFailed
from ..swarm.routing import Demand, Hop, RouteCandidate
from ..trust.receipt_log import ReceiptArchive
from .deadlines import DEADLINES
from .losses import LOSSES
from .request import PushedOther, ServerClaims, has_code, is_lost, with_refusals
from .session.stream import HopTiming, InferenceStream, SessionSpec
from .session_adapter import SessionAdapter
from .swarm_model import SwarmModel

if TYPE_CHECKING:
    from .session.comparing import Disagreement


class Payments(Protocol):
    """Pays busy servers for priority; a wallet, if the person has points."""

    async def pay(self, server: Announcement | None, batch: int, max_length: int) -> Clearing | None:
        """What to show this server when a session is opened; None for nothing. Never raises."""

    def spent(self, clearing: Clearing) -> None:
        """The server has taken it."""


class Router(Protocol):
    """What a session needs: finds servers, reaches them, and is notified of their answers and failures."""

    @property
    def peer_id(self) -> str: ...

    @property
    def model(self) -> SwarmModel: ...

    @property
    def receipts(self) -> ReceiptArchive:
        """Where the receipts of servers are kept."""

    async def route(
        self, spec: SessionSpec, excluded: Collection[str] = (), *, again: Sequence[Hop] = (), held: int = 0
    ) -> tuple[Hop, ...]:
        """The best chain for `spec.span` without `excluded`: that of `again`, where `held` tokens of the session may be
        kept, if computing them anew costs more. Raises NoChainError, BadInput."""

    async def standby(
        self, spec: SessionSpec, route: Sequence[Hop], index: int, excluded: Collection[str] = ()
    ) -> tuple[Hop, ...]:
        """The best others for the blocks of one hop of `route`. Raises NoChainError."""

    def claims_of(self, peer_id: str) -> ServerClaims | None:
        """What this server has announced; None if nothing is known of it."""

    def round_trip(self, peer_id: str) -> float | None:
        """Seconds to this server and back, as they were measured last; None if they never were."""

    def seconds_per_byte(self, peer_id: str) -> float | None:
        """What a byte to or from this server takes beyond the round trip; None where it was never measured."""

    async def connect(self, hop: Hop, *, direct: bool = False) -> InferenceStream:
        """A stream to the server of `hop`, with `direct` only on a connection without a relay. Raises ServerFailed."""

    def adapter_at(self, hop: Hop, spec: SessionSpec) -> AbstractAsyncContextManager[None]:
        """Within it, the server of `hop` holds the adapter of `spec`, if there is one. Raises ServerFailed."""

    async def payment(self, hop: Hop, spec: SessionSpec) -> Clearing | None:
        """Points to show the server of `hop` for priority; None for none. Never raises."""

    def paid(self, payment: Clearing) -> None:
        """Notes that the server has taken them."""

    def watch_direct(self, peer_id: str) -> trio.Event:
        """Set when there is a connection to this peer without a relay."""

    def suspect(self, peer_id: str, seconds: float = DEADLINES.suspect) -> None:
        """Notes that a server failed or said no: for so long it is asked only if nobody else is left."""

    def note_loss(self, peer_id: str, *, admitted: bool = False) -> None:
        """Notes that a server has lost what a session held; `admitted`: it says so of what it answered for last."""

    def accuse(self, peer_id: str, reason: str, proof: tuple[Receipt, Receipt] | None = None) -> None:
        """Notes that a server signed something else than it did, or nothing: it is not used for long.

        `proof`, two receipts that contradict each other, is shown to others.
        """

    def note_tokens(self, peer_id: str, tokens: int) -> None:
        """Counts tokens that a server answered with a valid receipt."""

    def note_transfer(self, timing: HopTiming, nbytes: int) -> None:
        """Takes the time of an answer, and how many bytes went both ways for it."""

    async def refresh(self) -> None:
        """Asks the swarm anew who is there."""

    def start_soon(self, function: Callable[..., Awaitable[Any]], *args: Any) -> None:
        """Runs `function` in the background for as long as the client lives."""


class ModelClient(Router, Protocol):
    """What batches and compared sessions need beyond that: they choose their chains themselves."""

    @property
    def disagreements(self) -> list[Disagreement]: ...

    def servers(self) -> tuple[Announcement, ...]:
        """The servers of the model that may be used."""

    async def candidates(
        self, excluded: Collection[str] = (), adapter: SessionAdapter | None = None
    ) -> tuple[RouteCandidate, ...]:
        """Those that answer soon, each with its round trip."""

    def demand(self, spec: SessionSpec) -> Demand:
        """What a session asks of a route."""

    def explained(self, error: NoChainError, any_server: bool) -> NoChainError:
        """The error with what is known of servers that are not used."""

    async def batch_stream(self, hop: Hop, protocol: str) -> BatchFrames:
        """A stream for batches to the server of `hop`. Raises ServerFailed."""


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
    ) -> None:
        """If a server was `lost`, others are looked for `until` then, on trio's clock; with `wait`, for ever. Which of
        those that are left out are asked again, `ask_again` says."""
        self.refused = dict(refused)
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
