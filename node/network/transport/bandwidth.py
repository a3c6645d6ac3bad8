"""Limits in bytes per second that are shared fairly, and the bytes that went."""

from __future__ import annotations

import re
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Final

import trio

from ...errors import BadInput
from ..shares import Line, TokenBucket, decayed

_UNITS: Final = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


@dataclass(frozen=True)
class ThrottlePolicy:
    """How those who share a limit take turns."""

    least_rate: int = 10_000
    """Bytes per second; with less, the DHT requests and announcements of a node miss their deadlines."""
    burst: float = 0.25
    """Seconds' worth of bytes that may go at once after a pause; urgent ones may go as much ahead of their time."""
    starving: float = 0.25  # seconds for which urgent bytes may keep all others waiting
    turn: float = 0.05  # seconds' worth that one turn should take, so that nobody waits long for the others
    least_turn: int = 4096  # bytes
    most_turn: int = 256 * 1024
    quiet: int = 64 * 1024  # bytes lately, below which a connection need not wait for those that carry much
    least_buffer: int = 64 * 1024  # bytes of a socket that is read in turns


THROTTLING: Final = ThrottlePolicy()


def turn_size(rate: float) -> int:
    """How many bytes should go at most in one turn."""
    return int(min(max(rate * THROTTLING.turn, THROTTLING.least_turn), THROTTLING.most_turn))


class _TurnWaiter:
    __slots__ = ("is_next",)

    def __init__(self) -> None:
        self.is_next = trio.Event()


class Throttle:
    """A limit of `rate` bytes per second for whoever asks here before it sends or reads; or of whatever is counted.
    `burst` seconds' worth may go at once.

    Those who wait are served in turns, one for each key; urgent ones before all others, as long as these get something.
    """

    def __init__(self, rate: float, burst: float = THROTTLING.burst) -> None:
        self.turn_size = turn_size(rate)
        self._ahead = rate * burst  # urgent ones may go so much ahead of their time
        self._burst = burst
        self._bucket = TokenBucket(rate, rate * burst)
        self._urgent, self._others = Line[_TurnWaiter](), Line[_TurnWaiter]()
        self._others_served = 0.0  # when one of the others had its turn, or the first of them began to wait

    def set_rate(self, rate: float) -> None:
        """From now on. Who waits already waits at most as long as at the rate before, once."""
        self._ahead = rate * self._burst
        self._bucket.set_rate(rate, self._ahead)

    def spend(self, size: float) -> None:
        """Says that `size` bytes went, in turn or not."""
        self._bucket.take_ahead(size)

    def is_free(self, *, urgent: bool = False) -> bool:
        """Whether `turn` would return at once."""
        if self._urgent or self._delay(urgent) > 0.0:
            return False
        return not self._others or (urgent and not self._others_starve())

    async def turn(self, key: Hashable, *, urgent: bool = False) -> None:
        """Returns when it is this key's turn. What goes then has to be passed to `spend` before the next await."""
        if self.is_free(urgent=urgent):
            return
        if not self._others:
            self._others_served = trio.current_time()
        waiter = _TurnWaiter()
        line = self._urgent if urgent else self._others
        line.join(key, waiter)
        try:
            await self._wait_in_line(waiter, urgent)
        finally:
            line.leave(key, waiter)
            line.go_behind(key)
            self._wake_next()
        if not urgent:
            self._others_served = trio.current_time()

    async def _wait_in_line(self, waiter: _TurnWaiter, urgent: bool) -> None:
        while True:
            if self._next() is not waiter:
                self._wake_next()
                waiter.is_next = trio.Event()
                await waiter.is_next.wait()
            elif (seconds := self._delay(urgent)) > 0.0:
                await trio.sleep(seconds)
            else:
                return

    def _next(self) -> _TurnWaiter | None:
        line = self._urgent if self._urgent and not self._others_starve() else self._others
        return next((waiter for _, waiter in line), None)

    def _wake_next(self) -> None:
        following = self._next()
        if following is not None:
            following.is_next.set()

    def _others_starve(self) -> bool:
        return bool(self._others) and trio.current_time() - self._others_served > THROTTLING.starving

    def _delay(self, urgent: bool) -> float:
        """Seconds until something may go, however large: what is taken beyond the tokens, later turns wait out."""
        return self._bucket.delay(-self._ahead if urgent else 0.0)


class ByteCount:
    """Bytes that went each way so far."""

    __slots__ = ("received", "sent")

    def __init__(self) -> None:
        self.received = 0
        self.sent = 0


NEGOTIATION: Final = "negotiation"


class Traffic:
    """What the streams of a node have carried so far, by the protocol that is spoken on them.

    A circuit is a stream between two peers and their relay: what streams within it carry counts for both.
    """

    def __init__(self) -> None:
        self.by_protocol: dict[str, ByteCount] = {}

    def of(self, protocol: str) -> ByteCount:
        """The count of one protocol: one that this node speaks, since no other is agreed on."""
        return self.by_protocol.setdefault(protocol, ByteCount())


@dataclass(frozen=True)
class Bandwidth:
    """The limits of a node over all its connections (None is without limit), and the bytes on its sockets."""

    upload: Throttle | None = None
    download: Throttle | None = None
    sockets: ByteCount = field(default_factory=ByteCount)

    @classmethod
    def of(cls, max_upload: int | None, max_download: int | None) -> Bandwidth:
        """Both in bytes per second."""
        return cls(
            None if max_upload is None else Throttle(max_upload),
            None if max_download is None else Throttle(max_download),
        )


class Recent:
    """How many bytes went lately, or whatever is counted: half of them are forgotten in half a second."""

    def __init__(self) -> None:
        self._amount = 0.0
        self._at = trio.current_time()

    def add(self, size: float) -> None:
        self._amount = self.amount(now := trio.current_time()) + size
        self._at = now

    def amount(self, now: float | None = None) -> float:
        return decayed(self._amount, (trio.current_time() if now is None else now) - self._at, 0.5)


def parse_rate(text: str | None, option: str) -> int | None:
    """Parses a rate such as 10MB into bytes per second; None for no limit. `option` is named in errors.

    Raises:
        BadInput: not a rate, a rate in bits, or less than a node needs.
    """
    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)(?:/s)?", text.strip())
    unit = found[2] if found else ""
    if found is None or (unit or "B").lower() not in _UNITS:
        raise BadInput(f"{option} {text}: give bytes per second, such as 10MB or 500kB")
    if unit.endswith("b"):
        raise BadInput(f"{option} {text}: a small b means bits; give bytes, such as 10MB")
    rate = int(float(found[1]) * _UNITS[(unit or "B").lower()])
    if rate < THROTTLING.least_rate:
        raise BadInput(f"{option} {text}: a node needs {THROTTLING.least_rate // 1000}kB per second at least")
    return rate
