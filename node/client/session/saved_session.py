"""A session in a form that another process can take up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import trio

from ....protocols.ids import Span
from ...errors import SwarmError, unwrapped
from ...swarm.routing import Hop
from ..router import Router
from .history import History
from .links import Link, close_links
from .stream import SessionSpec, SessionStream


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


def saved_session(links: Sequence[Link], max_length: int, position: int, route_epoch: int) -> SavedSession:
    """What another process needs to take up the session of these links."""
    saved = tuple(
        SavedLink(hop.peer_id, hop.span.start, hop.span.end, link.server.nonce, link.server.epoch)
        for link in links
        for hop in [link.server.hop]
    )
    return SavedSession(saved, max_length, position, route_epoch)


async def resumed_links(router: Router, spec: SessionSpec, saved: SavedSession) -> tuple[list[Link], int] | None:
    """The links of a session that an earlier process left, and the position from which they go on.

    None if any of its servers does not hold it any more.
    """
    links: list[Link] = []
    positions: list[int] = []

    async def resume_one(each: SavedLink) -> None:
        hop = Hop(each.peer_id, Span(each.start, each.end))
        stream, claims = await router.connect(hop), router.claims_of(hop.peer_id)
        server = SessionStream(stream, hop, spec, router.peer_id, each.nonce, claims=claims)
        links.append(Link(server))
        positions.append(await server.resume(each.epoch))

    try:
        with unwrapped(SwarmError):
            async with trio.open_nursery() as nursery:
                for each in saved.links:
                    nursery.start_soon(resume_one, each)
    except (SwarmError, ValueError):
        await close_links(links)
        return None
    position = min(saved.position, *positions)
    for link in links:
        link.history = History(start=position)
    return sorted(links, key=lambda link: link.server.hop.span.start), position
