"""/petalnode/directory/1: asks a peer for all announcements it holds, tells it one's own, measures the way to it.

A page of records per query, in the order of the peer ids; `after` continues where the last page ended. Every
record is checked by who reads it, so a directory can hide servers but never invent or alter one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from google.protobuf.message import DecodeError

from ..crypto.identity import peer_id_to_bytes
from . import wire_pb2 as wire
from .announcement import BadAnnouncement, SignedAnnouncement, open_signed

MAX_PAGE: Final = 512 * 1024  # bytes of records in one reply
MAX_HEADER: Final = MAX_PAGE + 64 * 1024
MAX_PAGES: Final = 32  # that one asks of one peer
MAX_PING: Final = 64  # bytes


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
