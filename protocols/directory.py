"""/petalnode/directory/1: asks a peer for all announcements it holds, tells it one's own, measures the way to it.

A page of records per query, in the order of the peer ids; `after` continues where the last page ended. Every
record is checked by who reads it, so a directory can hide servers but never invent or alter one. A node also answers
what it is itself, server or not: that stays between the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from google.protobuf.message import DecodeError

from ..crypto.identity import peer_id_to_bytes
from . import wire_pb2 as wire
from .announcement import BadAnnouncement, RelayOffer, SignedAnnouncement, open_signed

MAX_PAGE: Final = 512 * 1024  # bytes of records in one reply
MAX_HEADER: Final = MAX_PAGE + 64 * 1024
MAX_PAGES: Final = 32  # that one asks of one peer
MAX_PING: Final = 64  # bytes
_MAX_TEXT: Final = 256  # characters


@dataclass(frozen=True)
class NodeInfo:
    """What a node says of itself when asked; nobody vouches for it.

    `role` is "server", "bootstrap" or "client"; `reachability` a line for a person; `relay` is None if it relays for
    nobody, else `circuits` it carries now, and `relayed_bytes` it has carried since it started. `time`: its clock when
    it answered, seconds since 1970.
    """

    role: str
    software_version: str = ""
    reachability: str = ""
    relay: RelayOffer | None = None
    circuits: int = 0
    relayed_bytes: int = 0
    time: float = 0.0

    def to_frame(self) -> wire.DirectoryFrame:
        info = wire.NodeInfo(
            role=self.role,
            software_version=self.software_version,
            reachability=self.reachability[:_MAX_TEXT],
            relay=self.relay.to_wire() if self.relay is not None else None,
            circuits=self.circuits,
            relayed_bytes=self.relayed_bytes,
            time_ms=round(self.time * 1000),
        )
        return wire.DirectoryFrame(node=info)

    @classmethod
    def of(cls, message: wire.NodeInfo) -> NodeInfo:
        return cls(
            role=_readable(message.role),
            software_version=_readable(message.software_version),
            reachability=_readable(message.reachability),
            relay=RelayOffer.of(message),
            circuits=message.circuits,
            relayed_bytes=message.relayed_bytes,
            time=message.time_ms / 1000,
        )


def _readable(text: str) -> str:
    return "".join(char for char in text[:_MAX_TEXT] if char.isprintable())


def records_page(records: Iterable[SignedAnnouncement], *, after: bytes = b"", limit: int = 0) -> wire.DirectoryFrame:
    """A reply with the records whose peer id lies behind `after`, as many as fit."""
    page = wire.DirectoryRecords()
    size = 0
    keyed = {peer_id_to_bytes(record.content.peer_id): record for record in records}
    for key in sorted(keyed):
        record = keyed[key]
        if key <= after:
            continue
        size += len(record.announcement) + len(record.signature) + 16
        if size > MAX_PAGE or (limit and len(page.records) >= limit):
            page.truncated = True
            break
        page.records.append(record.to_wire())
    return wire.DirectoryFrame(records=page)


def open_records(
    page: wire.DirectoryRecords, known: Mapping[str, SignedAnnouncement], *, now: float
) -> list[SignedAnnouncement]:
    """The valid announcements of a page; bad ones are left out. `now` in seconds since 1970.

    What is byte for byte the announcement in `known` is not checked again: signatures cost 0.1 ms each.
    """
    held = {(record.announcement, record.signature): record for record in known.values()}
    opened = []
    for message in page.records:
        record = held.get((message.announcement, message.signature))
        if record is None:
            try:
                record = open_signed(message, now=now)
            except BadAnnouncement:
                continue
        opened.append(record)
    return opened


def last_peer_id(page: wire.DirectoryRecords) -> bytes:
    """Where the next page starts; empty if the page says nothing about it."""
    if not page.records:
        return b""
    try:
        return wire.Announcement.FromString(page.records[-1].announcement).peer_id
    except DecodeError:
        return b""
