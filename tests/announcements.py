"""Announcements of servers that a test makes up."""

from __future__ import annotations

import time
from functools import cache
from typing import Any

from petalnode.crypto.identity import Identity
from petalnode.protocols.announcement import (
    ANNOUNCEMENT,
    Announcement,
    ServerState,
    SignedAnnouncement,
    freshened,
    sign_announcement,
)
from petalnode.protocols.ids import Span

MODEL = b"m" * 32
_FIRST = Span(0, 1)


@cache
def identity_of(number: int) -> Identity:
    return Identity.from_seed(number.to_bytes(32, "big"))


def plain(peer_id: str, span: Span = _FIRST, **fields: Any) -> Announcement:
    """Of a server of a model of 10 blocks, unless `fields` say otherwise. Nobody has signed it, and it has no time."""
    usual = {"model_version": MODEL, "model_name": "model", "num_blocks": 10, "state": ServerState.ONLINE}
    return Announcement(peer_id=peer_id, span=span, **usual | fields)


def signed(
    identity: Identity, span: Span = _FIRST, *, now: float | None = None, lifetime: float = 45.0, **fields: Any
) -> SignedAnnouncement:
    """The same by its server, made `now` (seconds since 1970, by default that) and good for `lifetime` seconds."""
    content = freshened(
        plain(identity.peer_id, span, **fields), now=time.time() if now is None else now, lifetime=lifetime
    )
    return sign_announcement(identity, content)


def held(
    number: int,
    span: Span | None = None,
    *,
    now: float | None = None,
    lifetime: float = ANNOUNCEMENT.max_lifetime,
    size: int = 0,
    **fields: Any,
) -> SignedAnnouncement:
    """Of the server `identity_of(number)`, as a view holds it after its signature was checked: nobody need sign
    thousands. It has `size` bytes, and by default three of the blocks."""
    first = number % 8
    content = freshened(
        plain(identity_of(number).peer_id, Span(first, first + 3) if span is None else span, **fields),
        now=time.time() if now is None else now,
        lifetime=lifetime,
    )
    return SignedAnnouncement(content, bytes(size), number.to_bytes(64, "big"))
