"""A session in a form that another process can take up."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SavedLink:
    """What it takes to find a session at a server again."""

    peer_id: str
    start: int
    end: int
    nonce: bytes
    epoch: bytes


@dataclass(frozen=True)
class SavedSession:
    """A session that another process of the same client can take up, for as long as the servers keep it."""

    links: tuple[SavedLink, ...]
    max_length: int
    position: int
    route_epoch: int
