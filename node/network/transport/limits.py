"""What this node takes from one peer, and from all peers together: connections, streams, unread bytes, frames."""

from __future__ import annotations

import math
import time
import types
from collections import Counter
from collections.abc import Callable, Coroutine, Generator, Hashable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Final, Protocol, TypeVar

import trio

from ..shares import Remembered, ShareCount, TokenBucket, may_have_more
from .bandwidth import Recent, Throttle, Traffic
from .memory import Budgets, own_budgets


@dataclass(frozen=True)
class TransportLimits:
    """What peers may hold of a node, and send to it."""

    connections: int = 4096
    connections_of_peer: int = 8
    patience: float = 10.0
    """Seconds for the handshake of who connects to us, for naming a stream's protocol, for a ping, and for identify."""
    farewell: float = 1.0  # seconds for a refused peer to read what we sent before we close
    silence: float = 8.0  # seconds; keeps the mappings of NATs alive, too
    silence_in_use: float = 1.0  # seconds, while streams are open
    sign_of_life: float = 3.0  # seconds for the answer to who is asked for one after that silence
    sign_behind_data: float = 10.0  # the same where our question may be stuck behind much data on a slow line
    half_closed: float = 30.0  # seconds that a stream closed by us waits for the peer's close
    unsent: int = 64 * 1024
    """Bytes for the socket, at which writers wait: a decode step behind a prefill waits for these and one frame."""
    unsent_before_pings: int = 1024 * 1024  # Beyond these, pings are not answered
    most_unsent: int = 16 * 1024 * 1024
    """Window updates, resets and the like do not wait; a peer that leaves so many bytes of them unread is no peer."""
    stall: float = 10.0
    """Seconds; a peer whose system takes no 64 KiB in these, on average over a frame, is as good as gone."""
    window_kept: float = 60.0  # seconds
    few_windows: int = 16
    few_connections: int = 64
    inbound: int = 3072  # Of these, how many others may make; the rest is for our own
    handshakes: int = 512
    """Connections that were accepted and are not encrypted yet; as many wait in the system's queue."""
    handshakes_of_loud: int = 32
    """Of an address that is not quiet, while others use what they were granted: each is a task that waits."""
    least_of_address: int = 8
    """Connections, and handshakes, that an address may have as long as there are any: many share one behind a NAT."""
    streams: int = 8192  # Streams that peers have opened, over all connections
    streams_of_connection: int = 2048  # Open at once, both ways together
    least_streams: int = 32  # Of a peer, as long as there are any
    negotiating: int = 128
    """Streams of an address that wait for the peer to name a protocol. Beyond that, the oldest of the connection that
    has the most of them is reset. Whoever shares an address behind a NAT or a relay loses none by his neighbour's.
    Each has a task and some hundred objects: thousands made full garbage collections that held the loop for 250 ms."""
    windows_of_peer: int = 64 << 20
    """Bytes that one peer may send on all of its streams beyond what the specification gives to every stream."""
    frames_per_second: int = 10_000
    """Small frames of one peer: more than all sessions of a server need, and less than a tenth of a core."""
    frames_at_once: int = 20_000
    """Up to twice as many after a pause, since the clock is looked at only when these are used up; as with streams."""
    opened_per_second: int = 100
    """New streams of one peer: each starts a task and negotiates a protocol, which takes 0.3 ms."""
    opened_at_once: int = 1024
    refused_per_second: int = 4000
    """Refused connections of all addresses, after which others wait in the system's queue: a tenth of a core."""
    refused_at_once: int = 32  # Between two turns of all others
    large_frame: int = 4096
    """Bytes of data from which on a frame does not count: then bytes, not frames, are what it costs."""


LIMITS: Final = TransportLimits()


@dataclass(frozen=True)
class WorkShares:
    """Processor time for what strangers ask, in units of 10 us."""

    per_second: int = 25_000
    """Units that connections, streams and answers of all peers together may take: a quarter of a core. Beyond that,
    addresses take turns. Streams that were granted something do not count: they have shares of it."""
    while_serving: int = 4000
    """Units of this that addresses that are not quiet may take while others use what they were granted: with what is
    not measured, about a tenth of a core."""
    burst: float = 0.04
    """Seconds' worth of either that may be done at once: nothing else of the loop has a turn meanwhile."""
    serving: float = 10.0
    """Seconds after which nobody does any more. A token of a large model takes seconds: with less, strangers have a
    quarter of a core between its steps, by which these take longer still."""
    units_of_second: int = 100_000
    at_once: int = 64  # Units between two turns of all others
    waking: int = 4  # Units of a frame on a stream that was granted nothing, whose reader it wakes
    stream: int = 6  # Units of opening a stream, before the task that serves it, whose time is measured
    handshake: int = 300
    """Units of a new connection beside its handshake, whose time is measured: its tasks, and who is there."""
    accepted: int = 50  # Units of an accepted connection, whatever comes of it: its task, its socket and their end
    refused: int = 3  # Units of one that is closed at once
    step: float = 1.0  # Units of each step of a task: trio's part of it
    bytes_of_unit: int = 4096
    """Bytes on streams that were granted nothing for which a unit is counted: receiving and deciphering them."""
    quiet: int = 1000  # Units of an address lately, below which what it sends goes before what the others send
    granted_part: float = 1 / 8
    """Of a frame on such a stream, and of the work that led there, which counts for being quiet: sessions send many and
    open often, a flood does so much more."""
    long_step: float = 300.0
    """Units of a step that are more than what was asked says: what others have announced makes a directory's answer
    long. Of few of these only that part counts: one question must not make all of an address loud for a second."""
    long_steps: float = 0.5  # a second, of an address
    long_at_once: int = 4


WORK: Final = WorkShares()


class Unread(Protocol):
    """A connection whose streams hold unread bytes."""

    def held(self, granted: bool | None = None) -> int:
        """Unread bytes of all streams, or of those that were granted something, or were not."""

    def drop_fullest(self, granted: bool | None = None) -> None:
        """Resets the one of these streams that has the most."""


class Negotiating(Protocol):
    """A stream that a peer has opened, on which no protocol was agreed yet."""

    @property
    def muxed_conn(self) -> Hashable:
        """The connection that it is on."""

    @property
    def has_unread(self) -> bool:
        """Whether it does not wait for the peer."""

    def drop(self, why: str) -> None:
        """Resets it."""


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
        self.frames = TokenBucket(LIMITS.frames_per_second, LIMITS.frames_at_once)
        self.opened = TokenBucket(LIMITS.opened_per_second, LIMITS.opened_at_once)

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
        negotiating: its streams on which no protocol was agreed yet, the oldest first.
        recent: the units of work that it took lately.
        long_steps: those that do not count in full for it.
    """

    def __init__(self, origin: str) -> None:
        self.origin = origin
        self.users = 0
        self.negotiating: dict[Negotiating, None] = {}
        self.connections: list[Unread] = []
        self.unread = [0, 0]
        self.recent = Recent()
        self.long_steps = TokenBucket(WORK.long_steps, WORK.long_at_once)

    @property
    def is_quiet(self) -> bool:
        return self.recent.amount() < WORK.quiet

    @property
    def may_be_forgotten(self) -> bool:
        """Whether a new one would have about the same values."""
        spent = any(self.unread) or self.recent.amount() >= 1.0 or not self.long_steps.may_be_forgotten
        return not self.users and not spent

    def negotiate(self, stream: Negotiating) -> None:
        """A stream waits for its peer to name a protocol, until `negotiated`. Of too many, one is reset."""
        self.negotiating[stream] = None
        if len(self.negotiating) > LIMITS.negotiating:
            waiting = [one for one in self.negotiating if not one.has_unread] or [stream]
            counts = Counter(one.muxed_conn for one in waiting)
            most = max(waiting, key=lambda one: counts[one.muxed_conn])  # the oldest of them
            most.drop("too many streams of this address wait for a protocol to be named")

    def negotiated(self, stream: Negotiating) -> None:
        """A protocol was agreed on, or the stream has ended."""
        self.negotiating.pop(stream, None)

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
        self.inbound = ShareCount(LIMITS.inbound, LIMITS.least_of_address)
        self.handshakes = ShareCount(LIMITS.handshakes, LIMITS.least_of_address)

    @cached_property
    def work(self) -> Throttle:
        """The turns of addresses for what strangers may ask."""
        return Throttle(WORK.per_second, WORK.burst)

    @cached_property
    def _loud(self) -> Throttle:
        """The part of it for addresses that are not quiet."""
        return Throttle(WORK.per_second, WORK.burst)

    def of(self, peer_id: str) -> PeerUse:
        return self._peers.of(peer_id)

    def of_address(self, origin: str) -> AddressUse:
        return self._addresses.of(origin)

    @property
    def is_serving(self) -> bool:
        """Whether others use what they were granted."""
        return trio.current_time() - self.served_at < WORK.serving

    async def work_turn(self, use: AddressUse) -> None:
        """Returns when something may be done for this address; what is done then is told to `worked`."""
        quiet = use.is_quiet
        if not quiet:
            self._loud.set_rate(WORK.while_serving if self.is_serving else WORK.per_second)
            await self._loud.turn(use.origin)
        await self.work.turn(use.origin, urgent=quiet)

    def worked(self, use: AddressUse, units: float, granted: float = 0.0) -> None:
        """`granted` are those of the units that went on streams that were granted something, or are not its fault."""
        self.work.spend(units)
        if not use.is_quiet:
            self._loud.spend(units)
        use.recent.add(units + (WORK.granted_part - 1) * granted)

    def granted(self, use: AddressUse, units: float) -> None:
        """This number of the units that it took lately was for what it is granted."""
        use.recent.add((WORK.granted_part - 1) * units)

    def admit(self, origin: str) -> bool:
        """Whether another connection of this address is worth a task. Counts the work of accepting or refusing it."""
        use = self.of_address(origin)
        is_loud = self.is_serving and not use.is_quiet
        pending = LIMITS.handshakes_of_loud if is_loud else LIMITS.handshakes
        admitted = self.inbound.has_room(origin) and self.handshakes.has_room(origin, pending)
        self.worked(use, WORK.accepted if admitted else WORK.refused)
        return admitted

    @property
    def silence(self) -> float:
        """Seconds of silence after which a connection without streams asks for a sign of life. Of many connections each
        asks more seldom, so that all of them together cost as much as 64."""
        return LIMITS.silence * max(self.connections / LIMITS.few_connections, 1.0)

    @property
    def window_kept(self) -> float:
        """Seconds for which TCP's window of a connection is kept at most after a large message: the fewer, the more
        connections there are, since each costs half a percent of a core."""
        return LIMITS.window_kept / max(self.connections / LIMITS.few_windows, 1.0)

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
        if not may_have_more(use.streams, self.streams, LIMITS.streams, LIMITS.least_streams):
            return False
        use.streams += 1
        self.streams += 1
        return True

    def close_stream(self, use: PeerUse) -> None:
        use.streams -= 1
        self.streams -= 1

    def hold(self, use: PeerUse, address: AddressUse, size: int, granted: bool) -> None:
        """`size` more bytes of the peer are unread, or fewer, on a stream `granted` something, or not. Where that is
        too much, the address that holds the most of these loses its fullest stream. Nobody suffers for what others
        send, under however many keys."""
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


class MeteredStream(Protocol):
    """A stream of which a peer's address bears the processor time."""

    waits_turn: bool
    granted: bool


R = TypeVar("R")


@types.coroutine
def metered(
    work: Coroutine[Any, Any, R], limits: NodeLimits, address: AddressUse, stream: MeteredStream | None = None
) -> Generator[Any, Any, R]:
    """Does `work`, and counts the processor time of each of its steps for the address. It does not count while the
    stream, if any, waits for its turn or was granted something. What was counted before that was for it."""
    step: Callable[[], Any] = partial(work.send, None)
    asking = None if stream is None else Recent()
    while True:
        begun = time.thread_time()
        try:
            asked = step()
        except StopIteration as end:
            done: R = end.value
            return done
        finally:
            if stream is None or not (stream.waits_turn or stream.granted):
                units = WORK.step + (time.thread_time() - begun) * WORK.units_of_second
                excused = units > WORK.long_step and not address.long_steps.delay(1)
                if excused:
                    address.long_steps.take_ahead(1)
                limits.worked(address, units, units if excused else 0.0)
                if asking is not None and not excused:
                    asking.add(units)
            elif stream.granted and asking is not None:
                limits.granted(address, asking.amount())
                asking = None
        try:
            step = partial(work.send, (yield asked))
        except BaseException as error:
            step = partial(work.throw, error)
