"""Which of the waiting steps are computed next: a fair share of the device for each address, and there for each peer.

Every turn runs waiting decode steps as one ragged batch: the largest single gain when several people talk to one
server. After it comes at most one chunk of one prefill. So nobody's next token waits for more than that of somebody's
long prompt. `next_turn`, a pure function, decides it.

A peer with many sessions makes everybody's batch longer. What others may do to a peer is bounded by what each could ask
for by itself: of A addresses, one of which has P peers, a batch takes at most A x P times as long as the steps of such
a peer would alone (sharing incentive: Ghodsi et al. 2011, section 3). A batch is quicker than its steps one by one, so
nobody gets less than that part of the machine either. Keys are free and addresses are not, so an address with many keys
has the share of one. Who has had least of the device goes first (start-time fair queueing in two levels: Goyal et al.
1996, sections 2 and 3).

An address is *backlogged* if it has had work here for nearly all of the last seconds. It asks for more than it gets. As
long as one that is not generates, those that are wait behind it. They go last, by short batches and chunks, and rest
after those. So who asks for one token at a time waits for little. It takes from the others what it computes, and the
order in which they have the rest. An address that asks for less than its share is never backlogged.

Passes of batches and what else strangers ask for go by the same order (`accounts.py`). While sessions generate, a part
of a pass is followed by as long a time without passes (`pass_wait`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from ..blocks.span import PREFILL_CHUNK
from ..swarm.cost import Estimate, EstimateRule, LineEstimate
from .budget import next_in_line, now_overtaken


@dataclass(frozen=True)
class TurnPolicy:
    """How large batches and chunks are."""

    max_decode_rows: int = 256
    chunk_beside: int = 128
    """Tokens of a chunk of a prefill while others generate, each of whose tokens may wait for one at every server. A
    prompt takes 13 % longer by these than by chunks of 256, and 38 % by 64 (SmolLM2, one core)."""
    chunk_behind: int = 32
    """Tokens of a chunk for an address that waits behind others. A prompt takes 75 % longer by these than by chunks of
    256."""
    beside_others: float = 1.25
    """How much longer the batch of who is not backlogged may take for the sake of those who are."""
    before_others: float = 2.0
    """Times of the step of who is about to come, for which a batch of those who wait behind it may take at most. By
    batches of twice the cost of a row, a device computes half of the rows at least that it does by the largest."""
    rounding: float = 1 + 1e-9
    kept: float = 0.98  # Of the weight of what was measured before, at each batch: some fifty count

    recent: int = 256  # Batches after which the line tells what those of a size take, which were not seen since
    sizes: int = 64


TURNS: Final = TurnPolicy()
_OF_SIZE: Final = EstimateRule(newest=1 / 8)  # of batches with as many rows


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
        generating: rows of peers that have had a decode step lately.
        behind: addresses that wait behind others. None if nobody else generates or waits.
        resting: these have had their part for now.
    """

    cost: BatchCost | None = None
    used: Mapping[str, float] | None = None
    expected: Mapping[str, int] | None = None
    addresses: Mapping[str, str] = field(default_factory=dict)
    used_of: Mapping[str, float] = field(default_factory=dict)
    generating: Mapping[str, int] = field(default_factory=dict)
    behind: Collection[str] = ()
    resting: bool = False

    def address(self, peer: str) -> str:
        return self.addresses.get(peer, peer)

    def rank(self, peer: str) -> tuple[bool, float, float]:
        """Less for who is next: whether it waits behind others, and what its address and it have had of the device."""
        address = self.address(peer)
        return address in self.behind, self.used_of.get(address, 0.0), (self.used or {}).get(peer, 0.0)

    def is_behind(self, peer: str) -> bool:
        return self.address(peer) in self.behind


def next_turn(waiting: Sequence[Waiting], overtaken: int = 0, shares: Shares | None = None) -> Turn:
    """Decides one turn. `waiting` is in order of arrival.

    Decode steps all run, unless that would take another peer's share. Of prefills, one of the address that has had
    least of the device is next. There it is one of the peer that has; those with priority come first, as `next_in_line`
    has it. Earlier steps of a peer go first within their kind. A turn is empty if all who wait rest.
    """
    shares = shares or Shares()
    ready = [index for index, step in enumerate(waiting) if not (shares.resting and shares.is_behind(step.peer))]
    prefills = [index for index in ready if not waiting[index].is_decode]
    decode = _decode_steps(waiting, ready, shares, bool(prefills))
    if not prefills:
        return Turn(decode, None)

    prefills.sort(key=lambda index: shares.rank(waiting[index].peer))
    paid = [waiting[index].paid for index in prefills]
    place = next_in_line(paid, overtaken)
    step = waiting[prefills[place]]
    chunk = min(step.tokens - step.done, max(1, _chunk(step.peer, shares) // step.rows))
    return Turn(decode, prefills[place], chunk, now_overtaken(paid, place, overtaken))


def _chunk(peer: str, shares: Shares) -> int:
    """Tokens of a chunk of a prompt of this peer."""
    others = [other for other in shares.generating if other != peer]
    if shares.is_behind(peer) and not all(map(shares.is_behind, others)):
        return TURNS.chunk_behind
    return TURNS.chunk_beside if others else PREFILL_CHUNK


def _decode_steps(
    waiting: Sequence[Waiting], ready: Sequence[int], shares: Shares, with_prefill: bool
) -> tuple[int, ...]:
    by_peer: dict[str, list[int]] = {}
    for index in ready:
        if waiting[index].is_decode:
            by_peer.setdefault(waiting[index].peer, []).append(index)
    rows_of = {peer: sum(waiting[index].rows for index in steps) for peer, steps in by_peer.items()}
    first = {peer: count for peer, count in rows_of.items() if not shares.is_behind(peer)}
    # A chunk of a prefill takes longer than any batch: short batches before each would help nobody.
    limit = None if with_prefill else _most_seconds(first or rows_of, shares)
    limit_behind = _most_seconds_behind(first, shares)
    used, used_of = dict(shares.used or {}), dict(shares.used_of)
    then = replace(shares, used=used, used_of=used_of)  # with what the steps that are chosen here will have had
    chosen: list[int] = []
    rows = 0
    while by_peer:
        peer = min(by_peer, key=lambda peer: (then.rank(peer), by_peer[peer][0]))
        index = by_peer[peer].pop(0)
        if not by_peer[peer]:
            del by_peer[peer]
        more = waiting[index].rows
        if chosen and rows + more > TURNS.max_decode_rows:
            continue
        most = limit_behind if shares.is_behind(peer) and limit_behind is not None else limit
        if shares.cost is not None and most is not None:
            seconds = shares.cost.seconds(rows + more)
            if chosen and seconds > most:
                continue
            if limit is not None and seconds > limit:
                limit += seconds  # a step that is too large by itself has its turn, too
            address, seconds = shares.address(peer), shares.cost.row * more
            used[peer] = used.get(peer, 0.0) + seconds
            used_of[address] = used_of.get(address, 0.0) + seconds
        chosen.append(index)
        rows += more
    return tuple(sorted(chosen))


def _most_seconds_behind(first: Mapping[str, int], shares: Shares) -> float | None:
    """How long a batch with steps of who waits behind others may take, where `first` rows of these wait. None:
    as long as any."""
    if not shares.behind or shares.cost is None:
        return None
    if first:
        return TURNS.beside_others * shares.cost.seconds(sum(first.values()))
    coming = [rows for peer, rows in shares.generating.items() if not shares.is_behind(peer)]
    return TURNS.before_others * shares.cost.seconds(min(coming)) if coming else None


def _most_seconds(rows_of: Mapping[str, int], shares: Shares) -> float | None:
    """How long a batch may take where the rows `rows_of` each peer wait; None: as long as it needs."""
    expected = {peer: rows for peer, rows in (shares.expected or {}).items() if peer not in rows_of}
    if len(rows_of) + len(expected) < 2 or shares.cost is None:
        return None
    peers_at = Counter(shares.address(peer) for peer in (*rows_of, *expected))
    parts = {peer: len(peers_at) * peers_at[shares.address(peer)] for peer in (*rows_of, *expected)}
    limits = [parts[peer] * shares.cost.seconds(rows) for peer, rows in rows_of.items()]
    # Who is about to come waits for this batch, and then for that in which it is.
    limits += [(parts[peer] - 1) * shares.cost.seconds(rows) for peer, rows in expected.items()]
    return TURNS.rounding * min(limits)


def most_rows(rows_of: Mapping[str, int], shares: Shares) -> int:
    """How many rows a batch may have where the rows `rows_of` each peer wait, and no prefill."""
    rows, limit = min(sum(rows_of.values()), TURNS.max_decode_rows), _most_seconds(rows_of, shares)
    if limit is not None and shares.cost is not None:
        while rows > 1 and shares.cost.seconds(rows) > limit:
            rows -= 1
    return rows


class CostFit:
    """What batches have taken, by their rows: a line through all, and an `Estimate` for each size of the last ones."""

    def __init__(self) -> None:
        self._line = LineEstimate(TURNS.kept)
        self._sizes: dict[int, tuple[int, Estimate]] = {}  # rows: with which batch they were noted last
        self._batches = 0

    def note(self, rows: int, seconds: float) -> None:
        self._batches += 1
        self._line.note(rows, seconds)
        _, size = self._sizes.pop(rows, (0, Estimate(_OF_SIZE)))
        size.note(seconds)
        self._sizes[rows] = self._batches, size
        if len(self._sizes) > TURNS.sizes:
            del self._sizes[next(iter(self._sizes))]

    @property
    def cost(self) -> BatchCost | None:
        """What a batch costs; None before the first one. While all have had the same number of rows, each row is taken
        to cost the same; shorter batches follow, and show what is true."""
        if not self._line.is_known:
            return None
        rows, seconds = self._line.means
        row = min(self._line.slope(seconds / rows), seconds / rows)
        known = {size: found.value for size, (at, found) in self._sizes.items() if self._batches - at < TURNS.recent}
        return BatchCost(max(seconds - row * rows, 0.0), row, known)


def pause(seconds: float, since: float) -> float:
    """What is left of a pause of `seconds`, which began `since` ago."""
    return max(seconds - since, 0.0)


def pass_wait(took: float, since: float, generating: bool) -> float:
    """Seconds until the next part of a pass may begin, `since` seconds after the one before, which took `took`. While
    sessions generate they keep half of the time. A step in a chain needs more of it than what it computes."""
    return pause(took, since) if generating else 0.0
