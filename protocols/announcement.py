"""Announcements: what a server says of itself, signed by its key, so that anyone may pass it on.

An announcement has a sequence number (the time it was made: higher replaces lower) and an expiry. Whoever reads
one checks the signature, the expiry and every field before believing any of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property
from typing import Final

from google.protobuf.message import DecodeError
from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from ..crypto.identity import Identity, peer_id_from_bytes, peer_id_to_bytes, verify
from ..crypto.pledge import Pledge
from . import wire_pb2 as wire
from .ids import Span
from .inference import pledge_from_wire, pledge_to_wire

DOMAIN: Final = "petalnode/announcement/1"


@dataclass(frozen=True)
class AnnouncementLimits:
    """What an announcement may have; longer ones count nowhere."""

    clock_tolerance: float = 10.0  # seconds that the clocks of two nodes may differ
    max_lifetime: float = 3600.0  # seconds from now to the expiry, at most
    max_bytes: int = 16 * 1024  # of a signed announcement
    max_blocks: int = 4096
    max_addrs: int = 16
    max_issuers: int = 8
    max_rtts: int = 64
    max_adapters: int = 64
    max_text: int = 256  # characters of any one text
    max_step_us: int = 600 * 1_000_000
    max_load_ms: int = 24 * 3600 * 1000
    max_places: int = 2**31


ANNOUNCEMENT: Final = AnnouncementLimits()


# Fields that stand in the message as they are.
# fmt: off
_SAME: Final = (
    "sequence", "model_version", "model_name", "num_blocks", "dtype", "quantisation", "software_version",
    "public_name", "cache_tokens_free", "cache_tokens", "queue_depth", "max_session_length", "fixed", "device",
)
# fmt: on


class BadAnnouncement(ValueError):
    """Not a valid announcement: forged, expired, malformed or absurd."""


class ServerState(IntEnum):
    """What a server is ready for."""

    JOINING = wire.STATE_JOINING  # loading; takes no sessions yet
    ONLINE = wire.STATE_ONLINE
    DRAINING = wire.STATE_DRAINING  # finishes its sessions, takes no new ones
    OFFLINE = wire.STATE_OFFLINE  # retracted


_STATES: Final = frozenset(int(state) for state in ServerState)


@dataclass(frozen=True)
class RelayOffer:
    """Places for nodes that others cannot dial: how many are `free`, and how many `reservations` there are."""

    free: int
    reservations: int

    def to_wire(self) -> wire.RelayOffer:
        return wire.RelayOffer(
            free=min(self.free, ANNOUNCEMENT.max_places), reservations=min(self.reservations, ANNOUNCEMENT.max_places)
        )

    @classmethod
    def of(cls, message: wire.Announcement | wire.NodeInfo) -> RelayOffer | None:
        """The offer in a message, None if there is none."""
        return cls(message.relay.free, message.relay.reservations) if message.HasField("relay") else None


@dataclass(frozen=True)
class Announcement:
    """What a server says of itself.

    `model_version` is 32 bytes, `span` half-open. `step_seconds` is one decode step through the whole span with an
    empty queue, `forward_tokens_per_second` a long prefill. Cache tokens count a row through all blocks of the span.
    `rtts` are seconds to other servers by peer id, `addrs` textual multiaddrs without /p2p. `relay` is set if it takes
    reservations, `fixed` if it stays with its span whatever the swarm needs. `next_span` is where it means to go,
    `span` itself for one that has not begun to load. `network_seconds` is what the bytes of a token take into it and
    out of it (0: not measured), `load_seconds` what loading a block took. `pledge` is what it stands by (whose
    signature was not checked yet), `device` the kind that it computes on ("cpu+cuda": some of its devices are of each).
    `credits_of` are the validators whose points buy priority. `sequence` (nanoseconds since 1970) and `expires`
    (seconds since 1970) are set anew each time it is published.
    """

    peer_id: str
    model_version: bytes
    model_name: str
    num_blocks: int
    span: Span
    state: ServerState
    sequence: int = 0
    expires: float = 0.0
    step_seconds: float = 0.0
    forward_tokens_per_second: float = 0.0
    dtype: str = ""
    quantisation: str = "none"
    cache_tokens_free: int = 0
    cache_tokens: int = 0
    queue_depth: int = 0
    adapters: tuple[str, ...] = ()
    addrs: tuple[str, ...] = ()
    rtts: Mapping[str, float] = field(default_factory=dict)
    software_version: str = ""
    public_name: str = ""
    max_session_length: int = 0
    relay: RelayOffer | None = None
    fixed: bool = False
    next_span: Span | None = None
    network_seconds: float = 0.0
    load_seconds: float = 0.0
    pledge: Pledge | None = None
    device: str = ""
    credits_of: tuple[str, ...] = ()

    def to_wire(self) -> wire.Announcement:
        """The message that is signed.

        Raises:
            ValueError: a field that does not fit, or that no reader would accept.
        """
        message = wire.Announcement(
            **{name: getattr(self, name) for name in _SAME},
            peer_id=peer_id_to_bytes(self.peer_id),
            expires_ms=round(self.expires * 1000),
            span=wire.Span(start=self.span.start, end=self.span.end),
            state=wire.ServerState.ValueType(self.state),
            step_us=min(round(self.step_seconds * 1e6), ANNOUNCEMENT.max_step_us),
            forward_tokens_per_second=min(round(self.forward_tokens_per_second), 2**31),
            adapters=self.adapters,
            addrs=[Multiaddr(addr).to_bytes() for addr in self.addrs[: ANNOUNCEMENT.max_addrs]],
            rtts=[
                wire.Rtt(peer_id=peer_id_to_bytes(peer), microseconds=min(round(rtt * 1e6), 2**31))
                for peer, rtt in list(self.rtts.items())[: ANNOUNCEMENT.max_rtts]
            ],
            relay=self.relay.to_wire() if self.relay is not None else None,
            next_span=wire.Span(start=self.next_span.start, end=self.next_span.end) if self.next_span else None,
            network_us=min(round(self.network_seconds * 1e6), ANNOUNCEMENT.max_step_us),
            load_ms=min(round(self.load_seconds * 1e3), ANNOUNCEMENT.max_load_ms),
            pledge=pledge_to_wire(self.pledge) if self.pledge is not None else None,
            credits_of=[peer_id_to_bytes(peer) for peer in self.credits_of],
        )
        _check_message(message)
        return message


@dataclass(frozen=True)
class SignedAnnouncement:
    """An announcement as it travels. Made by `sign_announcement` or taken from `open_signed`: checked once."""

    content: Announcement
    announcement: bytes  # the serialised message, signed as these bytes
    signature: bytes

    @cached_property
    def key(self) -> bytes:
        """The server's peer id in bytes, in whose order directories answer."""
        return peer_id_to_bytes(self.content.peer_id)

    def to_wire(self) -> wire.SignedAnnouncement:
        return wire.SignedAnnouncement(announcement=self.announcement, signature=self.signature)

    def to_bytes(self) -> bytes:
        return self.to_wire().SerializeToString()


def sign_announcement(identity: Identity, announcement: Announcement) -> SignedAnnouncement:
    """Signs `announcement` as it is; its peer id must be the identity's.

    Raises:
        ValueError: another peer's announcement, or one that no reader would accept.
    """
    if announcement.peer_id != identity.peer_id:
        raise ValueError("a node announces itself only")
    data = announcement.to_wire().SerializeToString()
    signature = identity.sign(DOMAIN, data)
    if len(data) + len(signature) + 16 > ANNOUNCEMENT.max_bytes:
        raise ValueError(f"an announcement of {len(data)} bytes is too long")
    return SignedAnnouncement(_content(wire.Announcement.FromString(data)), data, signature)


def freshened(announcement: Announcement, *, now: float, lifetime: float, after: int = 0) -> Announcement:
    """`announcement` with a new expiry and a sequence number above `after`; times in seconds since 1970.

    An `after` further ahead than an announcement lasts is of a time when the clock was wrong. Nobody has kept it. A
    number above it would be refused for as long as the clock was ahead.
    """
    least = 0 if is_ahead(after, now + lifetime) else after + 1
    return replace(announcement, sequence=max(int(now * 1e9), least), expires=now + lifetime)


def open_signed(message: wire.SignedAnnouncement, *, now: float) -> SignedAnnouncement:
    """Checks a signed announcement that came from anywhere; `now` in seconds since 1970.

    Clocks may differ by `ANNOUNCEMENT.clock_tolerance`: an announcement may come from that far in the future, and
    counts until `counts_until`.

    Raises:
        BadAnnouncement: with the reason.
    """
    if len(message.announcement) + len(message.signature) > ANNOUNCEMENT.max_bytes:
        raise BadAnnouncement("too long")
    try:
        inner = wire.Announcement.FromString(message.announcement)
        content = _content(inner)
    except (DecodeError, MultiaddrError, ValueError) as error:
        raise BadAnnouncement(str(error)) from error
    check_times(content, now)
    if not verify(content.peer_id, DOMAIN, message.announcement, message.signature):
        raise BadAnnouncement("the signature does not hold")
    return SignedAnnouncement(content, message.announcement, message.signature)


def check_times(content: Announcement, now: float) -> None:
    """Raises BadAnnouncement if it has expired or claims a time far from `now` (seconds since 1970)."""
    if is_expired(content, now):
        raise BadAnnouncement("expired")
    if content.expires > now + ANNOUNCEMENT.max_lifetime + ANNOUNCEMENT.clock_tolerance:
        raise BadAnnouncement("expires too far ahead")
    if is_ahead(content.sequence, now):
        raise BadAnnouncement("made in the future")


def is_ahead(sequence: int, now: float) -> bool:
    """Whether a sequence number's clock is ahead of this one by more than clocks may differ."""
    return sequence > (now + ANNOUNCEMENT.clock_tolerance) * 1e9


def counts_until(content: Announcement) -> float:
    """When an announcement stops to count (seconds since 1970): its expiry and a tolerance for clocks.

    The tolerance is a third of its lifetime at most, so that short-lived ones vanish in time, too.
    """
    lifetime = max(content.expires - content.sequence / 1e9, 0.0)
    return content.expires + min(ANNOUNCEMENT.clock_tolerance, lifetime / 3)


def is_expired(content: Announcement, now: float) -> bool:
    return counts_until(content) < now


def is_overdue(made: float, expires: float, now: float) -> bool:
    """Whether a server's next announcement is overdue; times in seconds since 1970.

    Servers announce themselves again after a third of an announcement's lifetime; half of it leaves time to spread.
    """
    return now > made + (expires - made) / 2


def open_announcement(data: bytes, *, now: float) -> SignedAnnouncement:
    """As `open_signed`, from serialised bytes.

    Raises:
        BadAnnouncement: with the reason.
    """
    if len(data) > ANNOUNCEMENT.max_bytes:
        raise BadAnnouncement("too long")
    try:
        message = wire.SignedAnnouncement.FromString(data)
    except DecodeError as error:
        raise BadAnnouncement("no announcement at all") from error
    return open_signed(message, now=now)


def _check_message(message: wire.Announcement) -> None:
    """The limits of every field, for the writer and for readers alike."""
    texts = (
        message.model_name,
        message.dtype,
        message.quantisation,
        message.software_version,
        message.public_name,
        message.device,
        *message.adapters,
    )
    checks = {
        "the model version": len(message.model_version) == 32,
        "the number of blocks": 0 < message.num_blocks <= ANNOUNCEMENT.max_blocks,
        "the span": message.span.start < message.span.end <= message.num_blocks,
        "the next span": not message.HasField("next_span")
        or message.next_span.start < message.next_span.end <= message.num_blocks,
        "the state": message.state in _STATES,
        "the step time": max(message.step_us, message.network_us) <= ANNOUNCEMENT.max_step_us,
        "the loading time": message.load_ms <= ANNOUNCEMENT.max_load_ms,
        "the number of addresses": len(message.addrs) <= ANNOUNCEMENT.max_addrs,
        "an address": all(len(addr) <= ANNOUNCEMENT.max_text for addr in message.addrs),
        "the number of round trip times": len(message.rtts) <= ANNOUNCEMENT.max_rtts,
        "the number of validators": len(message.credits_of) <= ANNOUNCEMENT.max_issuers,
        "the number of adapters": len(message.adapters) <= ANNOUNCEMENT.max_adapters,
        "a text": all(len(text) <= ANNOUNCEMENT.max_text and text.isprintable() for text in texts),
        "the free cache": message.cache_tokens_free <= message.cache_tokens,
    }
    for what, fits in checks.items():
        if not fits:
            raise ValueError(f"{what} is out of range")


def _content(message: wire.Announcement) -> Announcement:
    _check_message(message)
    return Announcement(
        **{name: getattr(message, name) for name in _SAME},
        peer_id=peer_id_from_bytes(message.peer_id),
        span=Span(message.span.start, message.span.end),
        state=ServerState(message.state),
        expires=message.expires_ms / 1000,
        step_seconds=message.step_us / 1e6,
        forward_tokens_per_second=float(message.forward_tokens_per_second),
        adapters=tuple(message.adapters),
        addrs=tuple(str(Multiaddr(addr)) for addr in message.addrs),
        rtts={peer_id_from_bytes(rtt.peer_id): rtt.microseconds / 1e6 for rtt in message.rtts},
        relay=RelayOffer.of(message),
        next_span=Span(message.next_span.start, message.next_span.end) if message.HasField("next_span") else None,
        network_seconds=message.network_us / 1e6,
        load_seconds=message.load_ms / 1e3,
        pledge=_pledge(message) if message.HasField("pledge") else None,
        credits_of=tuple(peer_id_from_bytes(peer) for peer in message.credits_of),
    )


def _pledge(message: wire.Announcement) -> Pledge:
    pledge = pledge_from_wire(message.pledge)
    # Its signature is checked by who relies on it: most readers do not.
    if message.pledge.server != message.peer_id:
        raise ValueError("the pledge is another server's")
    return pledge
