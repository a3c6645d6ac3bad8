"""Keeps reservations at relays, so that others can reach a node that they cannot dial.

`plan_relays` decides at which relays: a pure function, asked anew whenever something changes. `Reservations` carries
that out: each chosen relay has a task. It asks for the reservation, pings over the connection, renews the reservation,
and reports its loss at once.
"""

from __future__ import annotations

import logging
import math
import os
import random
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

import trio

from ....protocols.circuit import RelayRefused
from ....protocols.framing import PeerError
from ..host import Host
from ..shares import backoff
from ..standard_protocols import PING
from ..transport.stream_bytes import StreamBytes
from .circuits import Circuits
from .reachability import NatNode, RelayCandidate

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReservationPolicy:
    """How reservations at relays are kept."""

    ping_size: int = 32  # bytes
    ping_every: float = 2.0  # seconds; NATs forget a silent connection, some after 15 s
    ping_limit: float = 10.0  # seconds
    ping_limit_moved: float = 1.5  # for when the own address has changed, and the connection is likely to be dead
    reserve_limit: float = 4.0  # seconds to connect and to get a reservation; a new try dials anew
    least_lifetime: float = 60.0  # seconds that a reservation is assumed to last, whatever the relay's clock says
    renewed_after: float = 60.0  # seconds at most: a relay that has lost a reservation does not say so
    max_records: int = 256
    max_addrs: int = 4  # of one relay, the one that we came by first; an announcement has room for 16
    spare: int = 1  # reservations kept beyond those wanted, when a lost relay is back
    grace_period: float = 2.0  # seconds for a lost relay to come back before another one replaces it
    at_once: int = 4  # relays tried side by side
    quick_tries: int = 120  # after which it is tried as seldom as an unknown relay
    slow: tuple[float, ...] = (1.0, 60.0)  # the same of one that never did
    refused: tuple[float, ...] = (30.0, 600.0)  # of one that refused


RELAYS: Final = ReservationPolicy()

# While a stream is open, `yamux.py` drops a connection without a sign of life within 4 s. This is for a relay whose
# pings alone hang.
_QUICK: Final = (
    0.25,
    1.0,
)  # seconds between tries of a relay that has held a reservation for us: the first, the longest


class ReservationState(Enum):
    """The state of our reservation at one relay."""

    RESERVING = "asking for a reservation"
    HELD = "holding a reservation"
    LOST = "out of reach"
    REFUSED = "the relay refused"


@dataclass(frozen=True)
class RelayRecord:
    """`failures` are those in a row; `lost_at` is when our last reservation there was lost, if ever. Times are
    in seconds."""

    state: ReservationState
    failures: int = 0
    held_before: bool = False
    lost_at: float = 0.0
    retry_at: float = 0.0


@dataclass(frozen=True)
class RelayPlan:
    """Relays to start with and to stop with now, and when to plan again (None: when something changes)."""

    start: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    wake: float | None = None


def retry_pause(state: ReservationState, failures: int, held_before: bool) -> float:
    """Seconds until a relay is tried again after `failures` in a row."""
    if state is ReservationState.REFUSED:
        first, longest = RELAYS.refused
    else:
        first, longest = _QUICK if held_before and failures < RELAYS.quick_tries else RELAYS.slow
    return backoff(failures, first, longest)


def plan_relays(
    candidates: Sequence[RelayCandidate], states: Mapping[str, RelayRecord], *, wanted: int, now: float
) -> RelayPlan:
    """What to do to hold `wanted` reservations. `states` are those of all relays that were ever tried, by peer id.

    A relay that held a reservation for us is tried until it is back: its clients know it; another one replaces it
    meanwhile if it stays away. One reservation too many is kept: the next loss then costs nothing.
    """
    ranks = {candidate.peer_id: candidate.rank for candidate in candidates}
    held = [peer for peer, record in states.items() if record.state is ReservationState.HELD]
    busy = [peer for peer, record in states.items() if record.state is ReservationState.RESERVING]
    lost = {
        peer: record
        for peer, record in states.items()
        if record.state in (ReservationState.LOST, ReservationState.REFUSED)
    }
    old = [peer for peer in (*busy, *lost) if states[peer].held_before]
    # Lost relays that may come back any moment. Without any reservation left, there is nothing to wait for.
    expected = [peer for peer in old if held and now - states[peer].lost_at < RELAYS.grace_period]
    missing = wanted - len(held) - len(expected) - sum(not states[peer].held_before for peer in busy)

    due = [peer for peer in ranks if peer not in states or (peer in lost and lost[peer].retry_at <= now)]
    due += [peer for peer in old if peer in lost and peer not in ranks and lost[peer].retry_at <= now]
    due.sort(key=lambda peer: (peer not in old, ranks.get(peer, 99), _failures(states, peer)))
    others = [peer for peer in due if peer not in old]
    wanted_now = [peer for peer in due if peer in old] + others[: max(missing, 0)]
    start = wanted_now[: max(RELAYS.at_once - len(busy), 0)]

    surplus = sorted(held, key=lambda peer: ranks.get(peer, 99))[wanted + RELAYS.spare :]
    wakes = [record.retry_at for peer, record in lost.items() if peer in old or missing > 0]
    wakes += [states[peer].lost_at + RELAYS.grace_period for peer in old]  # then the grace period ends
    if len(wanted_now) > len(start):
        wakes.append(now + 1.0)
    future = [when for when in wakes if when > now]
    return RelayPlan(tuple(start), tuple(surplus), min(future, default=None))


def _failures(states: Mapping[str, RelayRecord], peer: str) -> int:
    return states[peer].failures if peer in states else 0


# --- carrying it out


@dataclass(frozen=True)
class RelayReservation:
    """The circuit addresses that a reservation gives us, and when to renew it (trio's time)."""

    addrs: tuple[str, ...]
    renew_at: float


class Reservations:
    """The reservations of one node, which is to hold `wanted`, and is updated when one was made or lost."""

    def __init__(self, host: Host, circuits: Circuits, node: NatNode, *, wanted: int) -> None:
        self._host = host
        self._circuits = circuits
        self._node = node
        self._wanted = wanted
        self._enabled = False
        self._records: dict[str, RelayRecord] = {}
        self._reservations: dict[str, RelayReservation] = {}
        self._keepers: dict[str, trio.CancelScope] = {}
        self._news = trio.Event()
        self._check = trio.Event()

    @property
    def circuits(self) -> dict[str, tuple[str, ...]]:
        """The circuit addresses of each relay that holds a reservation for us, or is in its grace period."""
        now = trio.current_time()
        found = {}
        for relay_id, reservation in self._reservations.items():
            record = self._records.get(relay_id)
            if record and (
                record.state is ReservationState.HELD
                or (record.held_before and now - record.lost_at < RELAYS.grace_period)
            ):
                found[relay_id] = reservation.addrs
        return found

    @property
    def relays(self) -> Collection[str]:
        """The relays that hold a reservation for us, or are being asked for one."""
        return self._keepers.keys()

    def enable(self, enabled: bool) -> None:
        """Whether reservations are to be held; those held are given up otherwise."""
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
                self._node.update()
                with trio.move_on_at(wake if wake is not None else math.inf):
                    await self._news.wait()

    def _give_up(self) -> None:
        for scope in self._keepers.values():
            scope.cancel()
        self._keepers.clear()
        self._records.clear()
        self._reservations.clear()

    def _carry_out(self, nursery: trio.Nursery) -> float | None:
        plan = plan_relays(self._node.relay_candidates(), self._records, wanted=self._wanted, now=trio.current_time())
        for relay_id in plan.stop:
            self._keepers[relay_id].cancel()
            self._records.pop(relay_id)
            self._reservations.pop(relay_id, None)
        for relay_id in plan.start:
            self._become(relay_id, ReservationState.RESERVING)
            self._keepers[relay_id] = scope = trio.CancelScope()
            nursery.start_soon(self._keep, relay_id, scope)
        return plan.wake

    def _become(self, relay_id: str, state: ReservationState) -> None:
        before = self._records.pop(relay_id, RelayRecord(state))
        now = trio.current_time()
        was_held = before.state is ReservationState.HELD
        failures, retry_at = before.failures, 0.0
        if state is ReservationState.HELD:
            failures = 0
        elif state is not ReservationState.RESERVING:
            failures += 1
            pause = retry_pause(state, failures, before.held_before or was_held)
            retry_at = now + pause * random.uniform(0.8, 1.2)
        self._records[relay_id] = RelayRecord(
            state, failures, before.held_before or was_held, now if was_held else before.lost_at, retry_at
        )
        idle = [peer for peer in self._records if peer not in self._keepers]
        for peer in idle[: len(self._records) - RELAYS.max_records]:
            del self._records[peer]

    async def _keep(self, relay_id: str, scope: trio.CancelScope) -> None:
        """Makes a reservation and holds it until it is lost, or not to be held any more."""
        outcome = ReservationState.LOST
        with scope:
            try:
                await self._hold(relay_id)
            except RelayRefused as error:
                log.info("no reservation at a relay: %s", error)
                outcome = ReservationState.REFUSED
            except (PeerError, OSError, trio.TooSlowError) as error:
                log.info("no reservation at the relay %s: %s", relay_id, str(error) or "no answer")
        if self._keepers.get(relay_id) is scope:
            del self._keepers[relay_id]
            if not scope.cancelled_caught:
                self._become(relay_id, outcome)
            self.wake()

    async def _hold(self, relay_id: str) -> None:
        self._host.learn(relay_id, self._node.addrs_of(relay_id))
        reservation = await self._reserve(relay_id)
        self._become(relay_id, ReservationState.HELD)
        log.info("holding a reservation at the relay %s", relay_id)
        connections = self._host.connections(relay_id, direct=True)
        if not connections:
            raise ConnectionResetError("the connection is gone again")
        with trio.fail_after(RELAYS.reserve_limit):
            stream = await connections[0].open_stream(PING)
        limit = RELAYS.ping_limit
        try:
            while True:
                check = self._check
                try:
                    with trio.fail_after(limit):
                        await _ping(stream)
                except trio.TooSlowError:
                    await self._host.disconnect(relay_id)
                    raise
                if trio.current_time() >= reservation.renew_at:
                    reservation = await self._reserve(relay_id)
                limit = RELAYS.ping_limit_moved if await _disturbed(stream, check) else RELAYS.ping_limit
        finally:
            await stream.reset()

    async def _reserve(self, relay_id: str) -> RelayReservation:
        """Makes or renews the reservation."""
        with trio.fail_after(RELAYS.reserve_limit):
            granted = await self._circuits.reserve(relay_id)
        lifetime = max(granted.expires - time.time(), RELAYS.least_lifetime)
        addrs = tuple(str(addr) for addr in granted.addrs[: RELAYS.max_addrs])
        reservation = RelayReservation(addrs, trio.current_time() + min(lifetime / 2, RELAYS.renewed_after))
        self._reservations[relay_id] = reservation
        self.wake()
        return reservation


async def _ping(stream: StreamBytes) -> None:
    """Raises OSError if the stream is lost or the answer a wrong one."""
    question = os.urandom(RELAYS.ping_size)
    await stream.write(question)
    answer = b""
    while len(answer) < RELAYS.ping_size:
        part = await stream.read(RELAYS.ping_size - len(answer))
        if not part:
            raise ConnectionResetError("the relay answers no more pings")
        answer += part
    if answer != question:
        raise ConnectionAbortedError("the relay answered another ping")


async def _end_when_set(check: trio.Event, nursery: trio.Nursery) -> None:
    await check.wait()
    nursery.cancel_scope.cancel()


async def _disturbed(stream: StreamBytes, check: trio.Event) -> bool:
    """Waits until it is time for the next ping, or sooner: returns whether there is a reason to doubt the connection.

    Raises:
        ConnectionResetError: it is lost.
    """
    with trio.move_on_after(RELAYS.ping_every):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_end_when_set, check, nursery)
            await stream.wait_lost()
            nursery.cancel_scope.cancel()
    if stream.is_lost:
        raise ConnectionResetError("the connection is gone")
    return check.is_set()
