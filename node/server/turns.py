"""Which of the waiting steps are computed next: a fair share of the device for each address, and there for each peer.

Every turn runs waiting decode steps as one ragged batch (the largest single gain when several people talk to one
server), and after it at most one chunk of one prefill, so that nobody's next token waits for more than that of
somebody's long prompt. `next_turn`, a pure function, decides it.

A peer with many sessions makes everybody's batch longer. What others may do to a peer is bounded by what each could
ask for by itself: of A addresses, one of which has P peers, a batch takes at most A x P times as long as the steps of
such a peer would alone (sharing incentive: Ghodsi et al. 2011, section 3). Since a batch is quicker than its steps
one by one, nobody gets less than that part of the machine either. Keys are free and addresses are not, so an address
with many keys has the share of one. Who has had least of the device goes first (start-time fair queueing in two
levels: Goyal et al. 1996, sections 2 and 3).

Passes of batches and what else strangers ask for go by the same order (`Usage`). While sessions generate, a part of a
pass is followed by as long a time without passes (`pass_wait`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from ..blocks.span import PREFILL_CHUNK
from .budget import next_in_line, now_overtaken

MAX_DECODE_ROWS: Final = 256
CHUNK_BESIDE: Final = 128
"""Tokens of a chunk of a prefill while others generate, each of whose tokens may wait for one at every server. A prompt
takes 13 % longer by these than by chunks of 256, and 38 % by 64 (SmolLM2, one core)."""
_GENERATING: Final = 1.0
"""Seconds since its last decode step for which a peer is taken to generate."""
_ROUNDING: Final = 1 + 1e-9
_FADING: Final = 0.99
"""Of the weight of what was measured before, at each measurement: some hundred turns count."""
_NEWEST: Final = 0.125
"""Weight of the newest of measurements with as many rows."""
_ENOUGH: Final = 0.1
"""Weight from which what batches of so many rows took is told as it is, not by the line through all."""
_SIZES: Final = 64
_ADDRESSES: Final = 1024
"""Peers whose addresses are remembered."""


@dataclass(frozen=True)
class Waiting:
    """A step that waits: `rows` of `tokens` each, `done` tokens a row of it already computed, for `peer` at `address`
    (none: one of its own). `paid`: has priority."""

    rows: int
    tokens: int
    done: int = 0
    paid: bool = False
    peer: str = ""
    address: str = ""

    @property
    def is_decode(self) -> bool:
        return self.tokens == 1


@dataclass(frozen=True)
class Turn:
    """Indices into the waiting steps: all of `decode` in one batch, then `chunk` tokens a row of `prefill`. `overtaken`
    is for the turn after it."""

    decode: tuple[int, ...]
    prefill: int | None
    chunk: int = 0
    overtaken: int = 0


@dataclass(frozen=True)
class BatchCost:
    """Seconds of a batch of decode steps: `base`, and `row` for each row, where it has not been measured itself."""

    base: float
    row: float
    measured: Mapping[int, float] = field(default_factory=dict, compare=False)

    def seconds(self, rows: int) -> float:
        found = self.measured.get(rows)
        return self.base + self.row * rows if found is None else found


@dataclass(frozen=True)
class Shares:
    """What is known of the peers.

    Attributes:
        cost: of a batch; None as long as nothing was measured.
        used: seconds of the device by peer, as `Accounts` counts them.
        expected: rows of peers none of whose steps waits, and whose next ones are about to come.
        addresses: of peers; one that is not named has an address of its own.
        used_of: seconds of the device by address.
        generating: peers that have had a decode step lately.
    """

    cost: BatchCost | None = None
    used: Mapping[str, float] | None = None
    expected: Mapping[str, int] | None = None
    addresses: Mapping[str, str] = field(default_factory=dict)
    used_of: Mapping[str, float] = field(default_factory=dict)
    generating: Collection[str] = ()

    def address(self, peer: str) -> str:
        return self.addresses.get(peer, peer)


def next_turn(waiting: Sequence[Waiting], overtaken: int = 0, shares: Shares | None = None) -> Turn:
    """Decides one turn. `waiting` is in order of arrival.

    Decode steps all run, unless that would take another peer's share. Of prefills, one of the address that has had
    least of the device is next, and there of the peer that has; those with priority come first, as `next_in_line` has
    it. Earlier steps of a peer go first within their kind.
    """
    shares = shares or Shares()
    used = shares.used or {}
    prefills = [index for index, step in enumerate(waiting) if not step.is_decode]
    decode = _decode_steps(waiting, shares, bool(prefills))
    if not prefills:
        return Turn(decode, None)

    def had(index: int) -> tuple[float, float, int]:
        peer = waiting[index].peer
        return shares.used_of.get(shares.address(peer), 0.0), used.get(peer, 0.0), index

    prefills.sort(key=had)
    paid = [waiting[index].paid for index in prefills]
    place = next_in_line(paid, overtaken)
    step = waiting[prefills[place]]
    beside = any(peer != step.peer for peer in shares.generating)
    chunk = min(step.tokens - step.done, max(1, (CHUNK_BESIDE if beside else PREFILL_CHUNK) // step.rows))
    return Turn(decode, prefills[place], chunk, now_overtaken(paid, place, overtaken))


def _decode_steps(waiting: Sequence[Waiting], shares: Shares, with_prefill: bool) -> tuple[int, ...]:
    by_peer: dict[str, list[int]] = {}
    for index, step in enumerate(waiting):
        if step.is_decode:
            by_peer.setdefault(step.peer, []).append(index)
    # A chunk of a prefill takes longer than any batch: short batches before each would help nobody.
    limit = None if with_prefill else _most_seconds(_rows_of(waiting, by_peer), shares)
    used, used_of = dict(shares.used or {}), dict(shares.used_of)

    def had(peer: str) -> tuple[float, float, int]:
        return used_of.get(shares.address(peer), 0.0), used.get(peer, 0.0), by_peer[peer][0]

    chosen: list[int] = []
    rows = 0
    while by_peer:
        peer = min(by_peer, key=had)
        index = by_peer[peer].pop(0)
        if not by_peer[peer]:
            del by_peer[peer]
        more = waiting[index].rows
        if chosen and rows + more > MAX_DECODE_ROWS:
            continue
        if shares.cost is not None and limit is not None:
            seconds = shares.cost.seconds(rows + more)
            if not chosen:
                limit += seconds if seconds > limit else 0.0  # a step that is too large by itself has its turn, too
            elif seconds > limit:
                continue
            address, seconds = shares.address(peer), shares.cost.row * more
            used[peer] = used.get(peer, 0.0) + seconds
            used_of[address] = used_of.get(address, 0.0) + seconds
        chosen.append(index)
        rows += more
    return tuple(sorted(chosen))


def _rows_of(waiting: Sequence[Waiting], by_peer: Mapping[str, Sequence[int]]) -> dict[str, int]:
    return {peer: sum(waiting[index].rows for index in steps) for peer, steps in by_peer.items()}


def _most_seconds(rows_of: Mapping[str, int], shares: Shares) -> float | None:
    """How long a batch may take where so many rows of each peer wait; None: as long as it needs."""
    expected = {peer: rows for peer, rows in (shares.expected or {}).items() if peer not in rows_of}
    if len(rows_of) + len(expected) < 2 or shares.cost is None:
        return None
    peers_at = Counter(shares.address(peer) for peer in (*rows_of, *expected))

    def parts(peer: str) -> int:
        return len(peers_at) * peers_at[shares.address(peer)]

    limits = [parts(peer) * shares.cost.seconds(rows) for peer, rows in rows_of.items()]
    # Who is about to come waits for this batch, and then for that in which it is.
    limits += [(parts(peer) - 1) * shares.cost.seconds(rows) for peer, rows in expected.items()]
    return _ROUNDING * min(limits)


def most_rows(rows_of: Mapping[str, int], shares: Shares) -> int:
    """How many rows a batch may have where so many of each peer wait, and no prefill."""
    rows, limit = min(sum(rows_of.values()), MAX_DECODE_ROWS), _most_seconds(rows_of, shares)
    if limit is not None and shares.cost is not None:
        while rows > 1 and shares.cost.seconds(rows) > limit:
            rows -= 1
    return rows


class CostFit:
    """What batches have taken, by their rows, and a straight line through it: least squares, in which sizes that were
    not seen for long count less."""

    def __init__(self) -> None:
        self._sizes: dict[int, tuple[float, float]] = {}  # rows: weight, mean of the seconds

    def note(self, rows: int, seconds: float) -> None:
        self._sizes = {size: (_FADING * weight, mean) for size, (weight, mean) in self._sizes.items()}
        weight, mean = self._sizes.get(rows, (0.0, 0.0))
        self._sizes[rows] = weight + 1.0, mean + (seconds - mean) * max(_NEWEST, 1.0 / (weight + 1.0))
        if len(self._sizes) > _SIZES:
            del self._sizes[min(self._sizes, key=lambda size: self._sizes[size][0])]

    @property
    def cost(self) -> BatchCost | None:
        """What a batch costs; None before the first one. As long as all had as many rows, each row is taken to cost as
        much as the others: then shorter ones follow, and show what is so."""
        if not self._sizes:
            return None
        total = sum(weight for weight, _ in self._sizes.values())
        rows = sum(weight * size for size, (weight, _) in self._sizes.items()) / total
        seconds = sum(weight * mean for weight, mean in self._sizes.values()) / total
        spread = sum(weight * (size - rows) ** 2 for size, (weight, _) in self._sizes.items())
        together = sum(weight * (size - rows) * mean for size, (weight, mean) in self._sizes.items())
        row = together / spread if spread > 1e-6 * total * rows * rows else seconds / rows
        row = min(max(row, 0.0), seconds / rows)
        measured = {size: mean for size, (weight, mean) in self._sizes.items() if weight >= _ENOUGH}
        return BatchCost(max(seconds - row * rows, 0.0), row, measured)


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
    """Which address has had how much of the device, and which peer of it. Clients are pairs of both."""

    def __init__(self) -> None:
        self._addresses = _Used()
        self._peers: dict[str, _Used] = {}

    @property
    def of_addresses(self) -> Mapping[str, float]:
        return self._addresses.seconds

    @property
    def of_peers(self) -> Mapping[str, float]:
        return {peer: seconds for used in self._peers.values() for peer, seconds in used.seconds.items()}

    def settle(self, clients: Collection[tuple[str, str]]) -> None:
        """`clients` are all who wait now."""
        peers: dict[str, set[str]] = {}
        for address, peer in clients:
            peers.setdefault(address, set()).add(peer)
        self._addresses.settle(peers.keys())
        self._peers = {address: used for address, used in self._peers.items() if address in self._addresses.seconds}
        for address, names in peers.items():
            self._peers.setdefault(address, _Used()).settle(names)

    def next_of(self, clients: Sequence[tuple[str, str]]) -> int:
        """The place of who is next among those who wait, in order of arrival: of the address that has had least, the
        peer that has."""
        self.settle(clients)

        def had(place: int) -> tuple[float, float, int]:
            address, peer = clients[place]
            return self._addresses.seconds[address], self._peers[address].seconds[peer], place

        return min(range(len(clients)), key=had)

    def charge(self, address: str, peer: str, seconds: float) -> None:
        self._addresses.charge(address, seconds)
        self._peers.setdefault(address, _Used()).charge(peer, seconds)


class Accounts:
    """Which peer has had how much of the device for its steps, and who is about to come back."""

    def __init__(self) -> None:
        self._usage = Usage()
        self._addresses: dict[str, str] = {}
        self._last: dict[str, tuple[float, int]] = {}  # when their last decode steps were computed, and how many rows
        self._fit = CostFit()

    def shares(self, waiting: Sequence[Waiting], now: float) -> Shares:
        """What `next_turn` goes by. `now` in seconds of any clock."""
        for step in waiting:
            self._addresses.pop(step.peer, None)
            self._addresses[step.peer] = step.address or step.peer
        while len(self._addresses) > max(_ADDRESSES, len(waiting)):
            del self._addresses[next(iter(self._addresses))]  # who has had no step for longest
        self._usage.settle({(self._addresses[step.peer], step.peer) for step in waiting})
        cost = self._fit.cost
        rows = sum(step.rows for step in waiting if step.is_decode)
        # Who takes longer than a batch of all for its next step loses less by waiting than others by short batches.
        soon = cost.seconds(rows) if cost is not None else 0.0
        kept = max(soon, _GENERATING)
        self._last = {peer: (at, count) for peer, (at, count) in self._last.items() if now - at <= kept}
        expected = {peer: count for peer, (at, count) in self._last.items() if now - at <= soon}
        of_addresses = self._usage.of_addresses
        return Shares(cost, self._usage.of_peers, expected, self._addresses, of_addresses, self._last.keys())

    def note_decode(self, rows: Mapping[str, int], seconds: float, now: float) -> None:
        """A batch with so many rows of each peer took `seconds`, and ended `now`."""
        total = sum(rows.values())
        self._fit.note(total, seconds)
        for peer, count in rows.items():
            self._charge(peer, seconds * count / total)
            self._last[peer] = now, count

    def note_prefill(self, peer: str, seconds: float) -> None:
        self._charge(peer, seconds)

    def _charge(self, peer: str, seconds: float) -> None:
        self._usage.charge(self._addresses.get(peer, peer), peer, seconds)


def pass_wait(took: float, since: float, generating: bool) -> float:
    """Seconds until the next part of a pass may begin, `since` so many after the one before, which took `took`. While
    sessions generate they keep half of the time; a step in a chain needs more of it than what it computes."""
    return max(took - since, 0.0) if generating else 0.0
