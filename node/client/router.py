"""What a session needs of the client that opens it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import trio

from ...crypto.credits import Clearing
from ...crypto.receipts import Receipt
from ..swarm.routing import Hop
from ..trust.receipt_log import ReceiptArchive
from .deadlines import SUSPECT_SECONDS
from .promise import Promise
from .session.server_session import HopTiming, InferenceStream, SessionSpec


class Router(Protocol):
    """Finds servers, reaches them and hears how they do."""

    @property
    def peer_id(self) -> str: ...

    async def route(self, spec: SessionSpec, excluded: Collection[str] = ()) -> tuple[Hop, ...]:
        """The best chain for `spec.span` without `excluded`. Raises NoChainError, BadInput."""

    async def standby(self, spec: SessionSpec, route: Sequence[Hop], index: int) -> tuple[Hop, ...]:
        """The best others for the blocks of one hop of `route`. Raises NoChainError."""

    @property
    def receipts(self) -> ReceiptArchive:
        """Where the receipts of servers are kept."""

    def promised(self, peer_id: str) -> Promise | None:
        """What this server has announced; None if nothing is known of it."""

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

    def suspect(self, peer_id: str, seconds: float = SUSPECT_SECONDS) -> None:
        """Notes that a server failed or said no: for so long it is asked only if nobody else is left."""

    def accuse(self, peer_id: str, reason: str, proof: tuple[Receipt, Receipt] | None = None) -> None:
        """Notes that a server signed something else than it did, or nothing: it is not used for long.

        `proof`, two receipts that contradict each other, is shown to others.
        """

    def note_tokens(self, peer_id: str, tokens: int) -> None:
        """Hears of tokens that a server answered with a receipt in order."""

    def note_transfer(self, timing: HopTiming, nbytes: int) -> None:
        """Hears of every answer, and how many bytes went both ways for it."""

    async def refresh(self) -> None:
        """Asks the swarm anew who is there."""

    def start_soon(self, function: Callable[..., Awaitable[Any]], *args: Any) -> None:
        """Runs `function` in the background for as long as the client lives."""
