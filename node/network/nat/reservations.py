"""Holds places at relays, so that others can reach a node that they cannot dial.

`relay_plan.py` decides at which; here every relay that was chosen has a task that asks for the place, sees to it that
the connection lives, renews, and reports the loss at once.
"""

from __future__ import annotations

import logging
import math
import os
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

import trio

from ....protocols.circuit import RelayRefused
from ....protocols.framing import PeerError
from ..host import Host
from ..transport.stream_bytes import StreamBytes
from .circuits import Circuits
from .relay_plan import FAITH, Bond, Candidate, RelayState, plan_relays, retry_pause

log = logging.getLogger(__name__)

_PING: Final = "/ipfs/ping/1.0.0"
_PING_SIZE: Final = 32  # bytes
_PING_EVERY: Final = 2.0  # seconds; NATs forget a silent connection, some after 15 s
# While a stream is open, `yamux.py` drops a connection without a sign of life within 4 s. This is for a relay whose
# pings alone hang, and
_PING_LIMIT: Final = 10.0  # seconds
_PING_LIMIT_MOVED: Final = 1.5  # for when the own address has changed, and the connection is likely to be dead
_RESERVE_LIMIT: Final = 4.0  # seconds to connect and to get a place; a new try knocks anew
_LEAST_LIFETIME: Final = 60.0  # seconds that a place is assumed to last, whatever the relay's clock says
_RENEWED_AFTER: Final = 60.0  # seconds at most: a relay that has lost a place does not tell
_MAX_STATES: Final = 256
_MAX_ADDRS: Final = 4  # of one relay, the one that we came by first; an announcement has room for 16


@dataclass(frozen=True)
class _Place:
    """The circuit addresses that a reservation gives us, and when to renew it (trio's time)."""

    addrs: tuple[str, ...]
    renew_at: float


class Reservations:
    """The places at relays. `changed` is called when one was won or lost.

    `candidates` gives the relays to choose from, `addrs_of` the multiaddrs of one; `wanted` is how many places to hold.
    """

    def __init__(
        self,
        host: Host,
        circuits: Circuits,
        *,
        candidates: Callable[[], Sequence[Candidate]],
        addrs_of: Callable[[str], Sequence[str]],
        wanted: int,
        changed: Callable[[], None],
    ) -> None:
        self._host = host
        self._circuits = circuits
        self._candidates = candidates
        self._addrs_of = addrs_of
        self._wanted = wanted
        self._changed = changed
        self._enabled = False
        self._states: dict[str, RelayState] = {}
        self._places: dict[str, _Place] = {}
        self._keepers: dict[str, trio.CancelScope] = {}
        self._news = trio.Event()
        self._check = trio.Event()

    @property
    def circuits(self) -> dict[str, tuple[str, ...]]:
        """The circuit addresses of each relay that holds a place for us, or will in a moment again."""
        now = trio.current_time()
        found = {}
        for relay_id, place in self._places.items():
            state = self._states.get(relay_id)
            if state and (state.bond is Bond.HELD or (state.held_before and now - state.lost_at < FAITH)):
                found[relay_id] = place.addrs
        return found

    def enable(self, enabled: bool) -> None:
        """Whether places are to be held; those held are given up otherwise."""
        if enabled != self._enabled:
            self._enabled = enabled
            self.wake()

    def wake(self) -> None:
        """There may be others to choose from."""
        self._news.set()

    def check(self) -> None:
        """Doubts all connections to relays: the own address has changed."""
        self._check.set()
        self._check = trio.Event()

    async def run(self) -> None:
        self._give_up()
        async with trio.open_nursery() as nursery:
            while True:
                self._news = trio.Event()
                if self._enabled:
                    wake = self._carry_out(nursery)
                else:
                    wake = None
                    self._give_up()
                self._changed()
                with trio.move_on_at(wake if wake is not None else math.inf):
                    await self._news.wait()

    def _give_up(self) -> None:
        for scope in self._keepers.values():
            scope.cancel()
        self._keepers.clear()
        self._states.clear()
        self._places.clear()

    def _carry_out(self, nursery: trio.Nursery) -> float | None:
        plan = plan_relays(self._candidates(), self._states, wanted=self._wanted, now=trio.current_time())
        for relay_id in plan.stop:
            self._keepers[relay_id].cancel()
            self._states.pop(relay_id)
            self._places.pop(relay_id, None)
        for relay_id in plan.start:
            self._become(relay_id, Bond.RESERVING)
            self._keepers[relay_id] = scope = trio.CancelScope()
            nursery.start_soon(self._keep, relay_id, scope)
        return plan.wake

    def _become(self, relay_id: str, bond: Bond) -> None:
        before = self._states.pop(relay_id, RelayState(bond))
        now = trio.current_time()
        was_held = before.bond is Bond.HELD
        failures, retry_at = before.failures, 0.0
        if bond is Bond.HELD:
            failures = 0
        elif bond is not Bond.RESERVING:
            failures += 1
            pause = retry_pause(bond, failures, before.held_before or was_held)
            retry_at = now + pause * random.uniform(0.8, 1.2)
        self._states[relay_id] = RelayState(
            bond, failures, before.held_before or was_held, now if was_held else before.lost_at, retry_at
        )
        idle = [peer for peer in self._states if peer not in self._keepers]
        for peer in idle[: len(self._states) - _MAX_STATES]:
            del self._states[peer]

    async def _keep(self, relay_id: str, scope: trio.CancelScope) -> None:
        """Gets a place at a relay and holds it until it is lost, or not to be held any more."""
        outcome = Bond.LOST
        with scope:
            try:
                await self._hold(relay_id)
            except RelayRefused as error:
                log.info("no place at a relay: %s", error)
                outcome = Bond.REFUSED
            except (PeerError, OSError, trio.TooSlowError) as error:
                log.info("no place at the relay %s: %s", relay_id, str(error) or "no answer")
        if self._keepers.get(relay_id) is scope:
            del self._keepers[relay_id]
            if not scope.cancelled_caught:
                self._become(relay_id, outcome)
            self.wake()

    async def _hold(self, relay_id: str) -> None:
        self._host.remember(relay_id, self._addrs_of(relay_id))
        place = await self._reserve(relay_id)
        self._become(relay_id, Bond.HELD)
        log.info("holding a place at the relay %s", relay_id)
        connections = self._host.connections(relay_id, direct=True)
        if not connections:
            raise ConnectionResetError("the connection is gone again")
        with trio.fail_after(_RESERVE_LIMIT):
            stream = await connections[0].open_stream(_PING)
        limit = _PING_LIMIT
        try:
            while True:
                check = self._check
                try:
                    with trio.fail_after(limit):
                        await _ping(stream)
                except trio.TooSlowError:
                    await self._host.disconnect(relay_id)
                    raise
                if trio.current_time() >= place.renew_at:
                    place = await self._reserve(relay_id)
                limit = _PING_LIMIT_MOVED if await _disturbed(stream, check) else _PING_LIMIT
        finally:
            await stream.reset()

    async def _reserve(self, relay_id: str) -> _Place:
        """Gets a place, or keeps it."""
        with trio.fail_after(_RESERVE_LIMIT):
            reservation = await self._circuits.reserve(relay_id)
        lifetime = max(reservation.expires - time.time(), _LEAST_LIFETIME)
        addrs = tuple(str(addr) for addr in reservation.addrs[:_MAX_ADDRS])
        place = _Place(addrs, trio.current_time() + min(lifetime / 2, _RENEWED_AFTER))
        self._places[relay_id] = place
        self.wake()
        return place


async def _ping(stream: StreamBytes) -> None:
    """Raises OSError if the stream is lost or the answer a wrong one."""
    question = os.urandom(_PING_SIZE)
    await stream.write(question)
    answer = b""
    while len(answer) < _PING_SIZE:
        part = await stream.read(_PING_SIZE - len(answer))
        if not part:
            raise ConnectionResetError("the relay answers no more pings")
        answer += part
    if answer != question:
        raise ConnectionAbortedError("the relay answered another ping")


async def _disturbed(stream: StreamBytes, check: trio.Event) -> bool:
    """Waits until it is time for the next ping, or sooner: returns whether there is a reason to doubt the connection.

    Raises:
        ConnectionResetError: it is lost.
    """
    with trio.move_on_after(_PING_EVERY):
        async with trio.open_nursery() as nursery:

            async def until(wait: Callable[[], Awaitable[None]]) -> None:
                await wait()
                nursery.cancel_scope.cancel()

            nursery.start_soon(until, stream.wait_lost)
            nursery.start_soon(until, check.wait)
    if stream.is_lost:
        raise ConnectionResetError("the connection is gone")
    return check.is_set()
