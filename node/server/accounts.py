"""Who has had how much of the device, who asks for more than it gets, and who is about to come back.

`turns.py` decides by it which of the waiting steps are next, the compute thread which of the passes and calls.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ..network.shares import decayed
from .turns import CostFit, Shares, Waiting, pause


@dataclass(frozen=True)
class BacklogPolicy:
    """Who asks for more than it gets, and how long it rests."""

    generating: float = 1.0  # Seconds since its last decode step for which a peer is taken to generate
    addresses: int = 1024  # Peers whose addresses are remembered
    lately: float = 1.04  # Seconds after which it counts half whether an address had work
    backlogged: float = 0.7
    """Part of them for which it had work here: who has one session spends more time elsewhere. It takes 1.8 s."""
    contended: float = 1.25
    """Seconds on the clock for one of a processor, from which on other work of the machine is in the way."""
    rest: float = 1.0
    rest_contended: float = 5.0
    """Times of what a chunk or a part of a pass took (anything, on contended processors) for which those who wait rest.
    By that each of three servers on one processor asks for a sixth of it for them, at most."""
    forgotten: float = 0.9  # Of what was measured of contention before, at each measurement


BACKLOG: Final = BacklogPolicy()


Client = tuple[str, str]
"""An address, and a peer there."""


class _Used:
    """Seconds of the device by name. Of those who have been away only what they have had more than others is kept."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._floor = 0.0

    def settle(self, names: Collection[str]) -> None:
        """`names` are all who wait now."""
        known = [self.seconds[name] for name in names if name in self.seconds]
        if names:
            # Where nobody is left whom others have waited for, all that was before is settled.
            self._floor = max(self._floor, min(known) if known else max(self.seconds.values(), default=0.0))
        self.seconds = {name: used for name, used in self.seconds.items() if used > self._floor}
        for name in names:
            self.seconds.setdefault(name, self._floor)

    def charge(self, name: str, seconds: float) -> None:
        self.seconds[name] = max(self.seconds.get(name, 0.0), self._floor) + seconds


class Usage:
    """Which address has had how much of the device, and which peer of it."""

    def __init__(self) -> None:
        self._addresses = _Used()
        self._peers: dict[str, _Used] = {}

    @property
    def of_addresses(self) -> Mapping[str, float]:
        return self._addresses.seconds

    @property
    def of_peers(self) -> Mapping[str, float]:
        return {peer: seconds for used in self._peers.values() for peer, seconds in used.seconds.items()}

    def settle(self, clients: Collection[Client]) -> None:
        """`clients` are all who wait now."""
        peers: dict[str, set[str]] = {}
        for address, peer in clients:
            peers.setdefault(address, set()).add(peer)
        self._addresses.settle(peers.keys())
        self._peers = {address: used for address, used in self._peers.items() if address in self._addresses.seconds}
        for address, names in peers.items():
            self._peers.setdefault(address, _Used()).settle(names)

    def next_of(self, clients: Sequence[Client], behind: Collection[str] = (), others: Collection[Client] = ()) -> int:
        """The place of who is next among `clients`, in order of arrival: of the address that has had least, the peer
        that has. Addresses that wait `behind` others come last. `others` wait for something else."""
        self.settle({*clients, *others})
        had = [
            (address in behind, self._addresses.seconds[address], self._peers[address].seconds[peer], place)
            for place, (address, peer) in enumerate(clients)
        ]
        return min(had)[-1]

    def charge(self, address: str, peer: str, seconds: float) -> None:
        self._addresses.charge(address, seconds)
        self._peers.setdefault(address, _Used()).charge(peer, seconds)


class _Backlogs:
    """For which part of the last seconds each address has had work here, waiting or under way."""

    def __init__(self) -> None:
        self._parts: dict[str, float] = {}
        self._there: frozenset[str] = frozenset()
        self._since = -math.inf

    def note(self, addresses: Collection[str], now: float) -> None:
        """From `now` on, these have work."""
        left = decayed(1.0, now - self._since, BACKLOG.lately)
        parts = {address: left * part for address, part in self._parts.items()}
        for address in self._there:
            parts[address] = parts.get(address, 0.0) + 1.0 - left
        self._parts = {address: part for address, part in parts.items() if part > 0.01}
        self._there, self._since = frozenset(addresses), now

    def fill(self, address: str) -> None:
        """As if it had had work all the time."""
        self._parts[address] = 1.0

    @property
    def backlogged(self) -> frozenset[str]:
        return frozenset(address for address, part in self._parts.items() if part >= BACKLOG.backlogged)

    @property
    def there(self) -> frozenset[str]:
        """Those that have work."""
        return self._there


class Accounts:
    """Of all work that is done here for others: steps, parts of passes, calls. Times are seconds of one clock."""

    def __init__(self) -> None:
        self._usage = Usage()
        self._backlogs = _Backlogs()
        self._waiting: frozenset[Client] = frozenset()
        self._addresses: dict[str, str] = {}
        self._last: dict[str, tuple[float, int]] = {}  # when their last decode steps were computed, and how many rows
        self._fit = CostFit()
        self._clock = self._core = 0.0  # what work took lately, and that without waiting for a processor
        self._rest = 0.0, 0.0  # for how long those who wait behind others rest, and since when

    def note_waiting(self, clients: Collection[Client], now: float) -> None:
        """From `now` on these have work here: whatever waits, and what is being done."""
        self._waiting = frozenset(clients)
        self._backlogs.note({address for address, _ in clients}, now)

    def note_left(self, clients: Collection[Client], now: float) -> None:
        """Before the end of what is being done, these have no work here any more."""
        self.note_waiting(self._waiting.difference(clients), now)

    def note_given_up(self, client: Client) -> None:
        """It asked for work, and left before that was done: it is backlogged for a while, or would gain by leaving."""
        self._backlogs.fill(client[0])

    def shares(self, waiting: Sequence[Waiting], now: float) -> Shares:
        """What `next_turn` goes by."""
        for step in waiting:
            self._addresses.pop(step.peer, None)
            self._addresses[step.peer] = step.address or step.peer
        while len(self._addresses) > max(BACKLOG.addresses, len(waiting)):
            del self._addresses[next(iter(self._addresses))]  # who has had no step for longest
        self._usage.settle(self._waiting | {(self._addresses[step.peer], step.peer) for step in waiting})
        cost = self._fit.cost
        rows = sum(step.rows for step in waiting if step.is_decode)
        # Who takes longer than a batch of all for its next step loses less by waiting than others by short batches.
        soon = cost.seconds(rows) if cost is not None else 0.0
        kept = max(soon, BACKLOG.generating)
        self._last = {peer: (at, count) for peer, (at, count) in self._last.items() if now - at <= kept}
        generating = {peer: count for peer, (_, count) in self._last.items()}
        behind = self.behind(now)
        expected = {
            peer: count
            for peer, count in generating.items()
            if now - self._last[peer][0] <= soon and self._addresses.get(peer, peer) not in behind
        }
        of_addresses, of_peers = self._usage.of_addresses, self._usage.of_peers
        resting = self.rest(now) > 0.0
        return Shares(cost, of_peers, expected, self._addresses, of_addresses, generating, behind, resting)

    def _generating(self, now: float) -> set[str]:
        """The addresses of those that generate."""
        return {
            self._addresses.get(peer, peer) for peer, (at, _) in self._last.items() if now - at <= BACKLOG.generating
        }

    def behind(self, now: float) -> frozenset[str]:
        """The addresses that are backlogged, if one that is not generates or has work here."""
        backlogged = self._backlogs.backlogged
        others = self._backlogs.there | self._generating(now)
        return backlogged if others - backlogged else frozenset()

    def rest(self, now: float) -> float:
        """Seconds for which those who wait behind others rest from now on. None if nobody generates before whom they
        would have to."""
        behind = self.behind(now)
        if not behind or behind.issuperset(self._generating(now)):
            return 0.0
        seconds, since = self._rest
        return pause(seconds, now - since)

    def next_of(self, clients: Sequence[Client], now: float) -> int | None:
        """The place of who is next among those who wait for a pass or a call. None if all of them rest."""
        behind = self.behind(now)
        place = self._usage.next_of(clients, behind, self._waiting)
        if self.rest(now) and clients[place][0] in behind:
            return None
        return place

    def note_decode(self, rows: Mapping[str, int], seconds: float, now: float, core: float = 1.0) -> None:
        """A batch with these numbers of rows of each peer took `seconds`, and ended `now`; for the part `core` of them
        it had a processor."""
        total = sum(rows.values())
        self._fit.note(total, seconds)
        addresses = set()
        for peer, count in rows.items():
            addresses.add(self._addresses.get(peer, peer))
            self._charge(peer, core * seconds * count / total)
            self._last[peer] = now, count
        self._worked(addresses, seconds, now, core, 0.0)

    def note_prefill(self, peer: str, seconds: float, now: float = 0.0, core: float = 1.0) -> None:
        self._charge(peer, core * seconds)
        self._worked({self._addresses.get(peer, peer)}, seconds, now, core, BACKLOG.rest)

    def note_other(self, client: Client, seconds: float, now: float, core: float = 1.0) -> None:
        """A part of a pass, or a call."""
        self._usage.charge(*client, core * seconds)
        self._worked({client[0]}, seconds, now, core, BACKLOG.rest)

    def _charge(self, peer: str, seconds: float) -> None:
        self._usage.charge(self._addresses.get(peer, peer), peer, seconds)

    def _worked(self, addresses: Collection[str], seconds: float, now: float, core: float, times: float) -> None:
        self._clock = BACKLOG.forgotten * self._clock + seconds
        self._core = BACKLOG.forgotten * self._core + core * seconds
        if self._clock > BACKLOG.contended * self._core:
            times = BACKLOG.rest_contended
        if self._backlogs.backlogged.issuperset(addresses):
            left = pause(self._rest[0], now - self._rest[1])
            self._rest = left + times * seconds, now
