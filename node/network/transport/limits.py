"""What this node takes from one peer, and from all of its peers together: connections, streams, unread bytes, frames.

A share is soft wherever nothing has to be taken back: who is alone gets half of all there is, and whoever comes next
half of what is left, so that nobody can leave nothing for the others.
"""

from __future__ import annotations

import ipaddress
import math
import time
import types
from collections import Counter
from collections.abc import Callable, Coroutine, Generator, Iterable
from functools import cached_property, partial
from typing import Any, Final, Generic, Protocol, TypeVar

import trio

from .bandwidth import Recent, Throttle, Traffic
from .memory import Budgets, own_budgets

MAX_CONNECTIONS: Final = 4096
_SILENCE: Final = 8.0  # seconds; keeps the mappings of NATs alive, too
_WINDOW_KEPT: Final = 60.0  # seconds
_FEW_WINDOWS: Final = 16
_FEW_CONNECTIONS: Final = 64
MAX_INBOUND: Final = 3072
"""Of these, how many others may make; the rest is for our own."""
MAX_HANDSHAKES: Final = 512
"""Connections that were accepted and are not encrypted yet."""
MAX_HANDSHAKES_OF_LOUD: Final = 32
"""Of an address that is not quiet, while others use what they were granted: each is a task that waits for its turn."""
LEAST_OF_ADDRESS: Final = 8
"""Connections, and handshakes, that an address may have as long as there are any: many share one behind a NAT."""
MAX_STREAMS: Final = 8192
"""Streams that peers have opened, over all connections."""
MAX_STREAMS_OF_CONNECTION: Final = 2048
"""Open at once, both ways together."""
LEAST_STREAMS: Final = 32
"""Of a peer, as long as there are any."""
MAX_WINDOWS_OF_PEER: Final = 64 << 20
"""Bytes that one peer may send on all of its streams beyond what the specification gives to every stream."""

FRAMES_PER_SECOND: Final = 10_000
"""Small frames of one peer: more than all sessions of a server need, and less than a tenth of a core."""
FRAMES_AT_ONCE: Final = 20_000
"""Up to twice as many after a pause, since the clock is looked at only when these are used up; as with streams."""
OPENED_PER_SECOND: Final = 100
"""New streams of one peer: each starts a task and negotiates a protocol, which takes 0.3 ms."""
OPENED_AT_ONCE: Final = 1024
WORK_PER_SECOND: Final = 25_000
"""Units of 10 us of processor time that connections, streams and answers of all peers together may take: a quarter of a
core. Beyond that, addresses take turns. Streams that were granted something do not count: they have shares of it."""
WORK_WHILE_SERVING: Final = 4000
"""Units of this that addresses that are not quiet may take while others use what they were granted: with what is not
measured, about a tenth of a core."""
WORK_BURST: Final = 0.04
"""Seconds' worth of either that may be done at once: nothing else of the loop has a turn meanwhile."""
_SERVING: Final = 1.0  # seconds after which nobody does any more
UNITS_OF_SECOND: Final = 100_000
WORK_AT_ONCE: Final = 64
"""Units between two turns of all others."""
WAKING_WORK: Final = 4
"""Units of a frame on a stream that was granted nothing, whose reader it wakes."""
STREAM_WORK: Final = 6
"""Units of opening a stream, before the task that serves it, whose time is measured."""
HANDSHAKE_WORK: Final = 300
"""Units of a new connection beside its handshake, whose time is measured: its tasks, and who is there."""
ACCEPTED_WORK: Final = 50
"""Units of an accepted connection, whatever comes of it: its task, its socket and their end."""
REFUSED_WORK: Final = 3
"""Units of one that is closed at once."""
REFUSED_PER_SECOND: Final = 4000
"""Refused connections of all addresses, after which others wait in the system's queue: a tenth of a core."""
REFUSED_AT_ONCE: Final = 32
"""Between two turns of all others."""
STEP_WORK: Final = 1.0
"""Units of each step of a task: trio's part of it."""
WORK_BYTES: Final = 4096
"""Bytes on streams that were granted nothing for which a unit is counted: receiving and deciphering them."""
QUIET_WORK: Final = 1000
"""Units of an address lately, below which what it sends goes before what the others send."""
GRANTED_PART: Final = 1 / 8
"""Of a frame on such a stream, which counts for being quiet: sessions send many, a flood many more."""
LARGE_FRAME: Final = 4096
"""Bytes of data from which on a frame does not count: then bytes, not frames, are what it costs."""
_REMEMBERED: Final = 4096
"""Peers without a connection whose frames are still counted, so that reconnecting gains nothing."""


def may_have_more(own: int, total: int, most: int, least: int) -> bool:
    """Whether who holds `own` of the `total` that is taken may have one more, where there are `most` in all: no more
    than is left for others, but `least` as long as there are any."""
    return total < most and own < max(least, most - total)


class Unread(Protocol):
    """A connection whose streams hold unread bytes."""

    def held(self, granted: bool | None = None) -> int:
        """Unread bytes of all streams, or of those that were granted something, or were not."""

    def drop_fullest(self, granted: bool | None = None) -> None:
        """Resets the one of these streams that has the most."""


class TokenBucket:
    """Lets `rate` things per second pass in the long run, and `most` at once."""

    def __init__(self, rate: float, most: float) -> None:
        self._rate = rate
        self._most = most
        self._tokens = most
        self._at = trio.current_time()

    def take(self) -> bool:
        """Whether one more may pass. Looks at the clock only when no tokens are left."""
        self._tokens -= 1
        if self._tokens < 0:
            self._refill()
        return self._tokens >= 0

    def delay(self, cost: float) -> float:
        """Seconds until so much may pass, after all that went ahead of its time."""
        self._refill()
        return max(0.0, (cost - self._tokens) / self._rate)

    def take_ahead(self, cost: float) -> None:
        """Takes so much, of the tokens to come if need be."""
        self._tokens -= cost

    @property
    def may_be_forgotten(self) -> bool:
        """Whether it is full, as a new one is."""
        self._refill()
        return self._tokens >= self._most

    def _refill(self) -> None:
        now = trio.current_time()
        self._tokens = min(self._most, self._tokens + (now - self._at) * self._rate)
        self._at = now


class Forgettable(Protocol):
    @property
    def may_be_forgotten(self) -> bool:
        """Whether a new one would have about the same values."""


_Use = TypeVar("_Use", bound=Forgettable)


class Remembered(Generic[_Use]):
    """What is remembered of each peer, or of each address: as many as there are that may not be forgotten.

    All of them are looked through when there are twice as many as were left the last time, not for each new name.
    """

    def __init__(self, make: Callable[[str], _Use]) -> None:
        self._make = make
        self._uses: dict[str, _Use] = {}
        self._most = _REMEMBERED

    def __len__(self) -> int:
        return len(self._uses)

    def of(self, name: str) -> _Use:
        use = self._uses.get(name)
        if use is None:
            if len(self._uses) >= self._most:
                self._uses = {known: use for known, use in self._uses.items() if not use.may_be_forgotten}
                self._most = max(_REMEMBERED, 2 * len(self._uses))
            use = self._uses[name] = self._make(name)
        return use

    def all(self) -> Iterable[_Use]:
        return self._uses.values()


class Rates(Remembered[TokenBucket]):
    """A token bucket for each peer, or for each address."""

    def __init__(self, rate: float, most: float) -> None:
        super().__init__(lambda _: TokenBucket(rate, most))


class PeerUse:
    """What one peer takes of this node, on all of its connections.

    Attributes:
        streams: how many it has opened.
        windows: bytes that it may send beyond the windows that every stream has.
        unread: bytes that came from it and were not read yet.
        frames, opened: the small frames and the new streams that it may send.
    """

    def __init__(self) -> None:
        self.streams = 0
        self.windows = 0
        self.unread = 0
        self.connections: list[Unread] = []
        self.frames = TokenBucket(FRAMES_PER_SECOND, FRAMES_AT_ONCE)
        self.opened = TokenBucket(OPENED_PER_SECOND, OPENED_AT_ONCE)

    @property
    def may_be_forgotten(self) -> bool:
        """Whether a new one would have the same values."""
        return not self.connections and self.frames.may_be_forgotten and self.opened.may_be_forgotten

    def drop_fullest(self) -> None:
        """Resets the stream with the most unread bytes on the connection that has the most."""
        if self.connections:
            max(self.connections, key=lambda connection: connection.held()).drop_fullest()


class AddressUse:
    """What all peers of one address take of this node, whatever their keys; addresses as `origin_of_ip` counts them.

    A peer that comes through a relay has the relay's address.

    Attributes:
        users: connections and handshakes.
        unread: bytes that came from it and were not read yet, on streams that were granted nothing, and on others.
        recent: the units of work that it took lately.
    """

    def __init__(self, origin: str) -> None:
        self.origin = origin
        self.users = 0
        self.connections: list[Unread] = []
        self.unread = [0, 0]
        self.recent = Recent()

    @property
    def is_quiet(self) -> bool:
        return self.recent.amount() < QUIET_WORK

    @property
    def may_be_forgotten(self) -> bool:
        """Whether a new one would have about the same values."""
        return not self.users and not any(self.unread) and self.recent.amount() < 1.0

    def drop_fullest(self, granted: bool) -> None:
        if self.connections:
            max(self.connections, key=lambda connection: connection.held(granted)).drop_fullest(granted)


class NodeLimits:
    """What the peers of one host take of it, and what all streams with them have carried."""

    def __init__(self, budgets: Budgets | None = None) -> None:
        self.traffic = Traffic()
        self.budgets = budgets or own_budgets()
        self.connections = 0
        self.streams = 0
        self.served_at = -math.inf  # when a peer last used what it was granted
        self.waking = trio.Lock()  # who ends streams of a lost connection in this pass of the loop
        self._unread = [0, 0]  # on streams that were granted nothing, and on others
        self._peers = Remembered(lambda _: PeerUse())
        self._addresses = Remembered(AddressUse)

    @cached_property
    def work(self) -> Throttle:
        """The turns of addresses for what strangers may ask."""
        return Throttle(WORK_PER_SECOND, WORK_BURST)

    @cached_property
    def _loud(self) -> Throttle:
        """The part of it for addresses that are not quiet."""
        return Throttle(WORK_PER_SECOND, WORK_BURST)

    def of(self, peer_id: str) -> PeerUse:
        return self._peers.of(peer_id)

    def of_address(self, origin: str) -> AddressUse:
        return self._addresses.of(origin)

    @property
    def is_serving(self) -> bool:
        """Whether others use what they were granted."""
        return trio.current_time() - self.served_at < _SERVING

    async def work_turn(self, use: AddressUse) -> None:
        """Returns when something may be done for this address; what is done then is told to `worked`."""
        quiet = use.is_quiet
        if not quiet:
            self._loud.set_rate(WORK_WHILE_SERVING if self.is_serving else WORK_PER_SECOND)
            await self._loud.turn(use.origin)
        await self.work.turn(use.origin, urgent=quiet)

    def worked(self, use: AddressUse, units: float, granted: float = 0.0) -> None:
        """`granted` are those of the units that went on streams that were granted something."""
        self.work.spend(units)
        if not use.is_quiet:
            self._loud.spend(units)
        use.recent.add(units - granted + GRANTED_PART * granted)

    def admit(self, use: AddressUse, connections: ShareCount, handshakes: ShareCount) -> bool:
        """Whether another connection of this address is worth a task. Counts the work of accepting or refusing it."""
        is_loud = self.is_serving and not use.is_quiet
        pending = MAX_HANDSHAKES_OF_LOUD if is_loud else MAX_HANDSHAKES
        admitted = connections.has_room(use.origin) and handshakes.has_room(use.origin, pending)
        self.worked(use, ACCEPTED_WORK if admitted else REFUSED_WORK)
        return admitted

    @property
    def silence(self) -> float:
        """Seconds of silence after which a connection without streams asks for a sign of life. Of many connections each
        asks more seldom, so that all of them together cost as much as 64."""
        return _SILENCE * max(self.connections / _FEW_CONNECTIONS, 1.0)

    @property
    def window_kept(self) -> float:
        """Seconds for which TCP's window of a connection is kept at most after a large message: the fewer, the more
        connections there are, since each costs half a percent of a core."""
        return _WINDOW_KEPT / max(self.connections / _FEW_WINDOWS, 1.0)

    @property
    def unread(self) -> int:
        """Bytes that came and were not read yet, over all connections."""
        return sum(self._unread)

    def connected(self, use: PeerUse, address: AddressUse, connection: Unread) -> None:
        use.connections.append(connection)
        address.connections.append(connection)
        address.users += 1
        self.connections += 1

    def lost(self, use: PeerUse, address: AddressUse, connection: Unread) -> None:
        if connection in use.connections:
            use.connections.remove(connection)
            address.connections.remove(connection)
            address.users -= 1
            self.connections -= 1

    def open_stream(self, use: PeerUse) -> bool:
        """Whether the peer may open another stream; counts it then."""
        if not may_have_more(use.streams, self.streams, MAX_STREAMS, LEAST_STREAMS):
            return False
        use.streams += 1
        self.streams += 1
        return True

    def close_stream(self, use: PeerUse) -> None:
        use.streams -= 1
        self.streams -= 1

    def hold(self, use: PeerUse, address: AddressUse, size: int, granted: bool) -> None:
        """So many more bytes of the peer are unread, or fewer, on a stream that was granted something, or was not.
        Where that is too much, the address that holds the most of these loses its fullest stream: nobody suffers for
        what others send, under however many keys."""
        use.unread += size
        address.unread[granted] += size
        self._unread[granted] += size
        if size <= 0:
            return
        if use.unread > self.budgets.unread_of_peer:
            use.drop_fullest()
        while self._unread[granted] > (self.budgets.unread if granted else self.budgets.ungranted):
            before = self._unread[granted]
            max(self._addresses.all(), key=lambda other: other.unread[granted]).drop_fullest(granted)
            if self._unread[granted] == before:
                return


@types.coroutine
def metered(work: Coroutine[Any, Any, None], charge: Callable[[float], None]) -> Generator[Any, Any, None]:
    """Does `work`. `charge(seconds)` is called with the processor time of each of its steps, after it."""
    step: Callable[[], Any] = partial(work.send, None)
    while True:
        begun = time.thread_time()
        try:
            asked = step()
        except StopIteration:
            return
        finally:
            charge(time.thread_time() - begun)
        try:
            step = partial(work.send, (yield asked))
        except BaseException as error:
            step = partial(work.throw, error)


class ShareCount:
    """Counts what peers or addresses hold of `most`, as `may_have_more` has it."""

    def __init__(self, most: int, least: int) -> None:
        self.total = 0
        self._most = most
        self._least = least
        self._held: Counter[str] = Counter()

    def add(self, *holders: str) -> bool:
        """Whether each of the holders may have one more: of a peer and its address, both. Counts it then."""
        if not all(may_have_more(self._held[holder], self.total, self._most, self._least) for holder in holders):
            return False
        self._held.update(set(holders))
        self.total += 1
        return True

    def __len__(self) -> int:
        """How many hold something."""
        return len(self._held)

    def has_room(self, holder: str, most: float = math.inf) -> bool:
        """Whether this one may have one more, and has fewer than `most`."""
        own = self._held[holder]
        return own < most and may_have_more(own, self.total, self._most, self._least)

    def remove(self, *holders: str) -> None:
        """Gives back what `add` counted for the same holders."""
        self.total -= 1
        for holder in set(holders):
            self._held[holder] -= 1
            if not self._held[holder]:
                del self._held[holder]


def origin_of_ip(host: str, prefix: int = 64) -> str:
    """What counts as one address: an IPv4 address, or the network of so many bits that an IPv6 one is in. Text that is
    no address stands for itself."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, prefix), strict=False))
