"""The links of a session's chain: one server each, with the inputs that made its cache, a tether, perhaps a standby."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import trio

from ...errors import ServerFailed, SwarmError, unwrapped
from ...swarm.routing import Hop
from ..router import Router
from .history import History, Input, merged
from .reconnector import SessionReconnector
from .stream import SessionSpec, SessionStream


class HistoryLost(SwarmError):
    """A server failed whose inputs this process has not seen: the session must be filled anew from its tokens."""


@dataclass(eq=False)
class Link:
    """One server of the chain, and the inputs that made its cache.

    `usual`: seconds that its last answers took per token, beyond the round trip. `tether`: once it is in the chain.
    """

    server: SessionStream
    history: History = field(default_factory=History)
    usual: float | None = None
    standby: Standby | None = None
    tether: SessionReconnector | None = None
    no_standby_until: float = 0.0

    def note(self, tokens: int) -> None:
        taken = max(0.0, self.server.timing.total - self.server.round_trip) / tokens
        self.usual = taken if self.usual is None else 0.8 * self.usual + 0.2 * taken


@dataclass(eq=False)
class Standby:
    """Servers that are brought to where a link is, to take its place. `applied`: the link's inputs they have."""

    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    links: list[Link] = field(default_factory=list)
    applied: list[Input] = field(default_factory=list)
    ready: bool = False


def step_limit(links: Sequence[Link]) -> int:
    """Tokens of a row that one step through all of `links` may have."""
    return min((link.server.max_step_tokens for link in links), default=1)


async def replay(links: Sequence[Link], steps: Sequence[Input], route_epoch: int) -> None:
    """Runs `steps` through new links, one server after the other, to build their caches.

    Raises:
        ServerFailed: one of them failed.
    """
    for step in steps:
        for link in links:
            chunk = await link.server.exchange(step.chunk, step.position, step.reorder, route_epoch)
            link.history.append(step)
            step = replace(step, chunk=chunk)


async def catch_up(link: Link, standby: Standby, route_epoch: int) -> int:
    """Gives the standby what the link has had and it has not; returns how many tokens that were.

    Raises:
        SwarmError: a server of the standby failed, or it cannot follow (rows changed places and back).
    """
    if link.history.start:
        raise HistoryLost("what the server held before this process started is not known here")
    wanted = link.history.needed(link.history.end)
    common = 0
    for mine, theirs in zip(standby.applied, wanted, strict=False):
        if mine is not theirs:
            break
        common += 1
    if any(each.reorder for each in standby.applied[common:]):
        raise SwarmError("the standby took a reorder that was undone")
    todo = wanted[common:]
    await replay(standby.links, merged(todo, step_limit(standby.links)), route_epoch)
    standby.applied = wanted
    return sum(each.chunk.tokens for each in todo)


async def open_links(
    router: Router, spec: SessionSpec, route: Sequence[Hop], route_epoch: int, links: list[Link]
) -> None:
    """Opens a session at every server of `route`, side by side. `links` then has those that must be closed.

    Raises:
        ServerFailed: one of them cannot be reached or refuses.
    """
    opened: dict[Hop, Link] = {}

    async def open_one(index: int, hop: Hop) -> None:
        payment = await router.payment(hop, spec)
        async with router.adapter_at(hop, spec):
            stream = await router.connect(hop)
            server = SessionStream(
                stream,
                hop,
                spec,
                router.peer_id,
                claims=router.claims_of(hop.peer_id),
                log=router.receipts.session(hop.peer_id),
            )
            opened[hop] = Link(server)
            await server.open(
                route_epoch,
                upstream=route[index - 1].peer_id if index else None,
                downstream=route[index + 1].peer_id if spec.push and index + 1 < len(route) else None,
                payment=payment,
            )
            if payment is not None and server.priority:
                router.paid(payment)

    try:
        with unwrapped(ServerFailed):
            async with trio.open_nursery() as nursery:
                for index, hop in enumerate(route):
                    nursery.start_soon(open_one, index, hop)
    finally:
        links.extend(opened[hop] for hop in route if hop in opened)


async def close_links(links: Sequence[Link]) -> None:
    """Ends the sessions of `links`, side by side. Never raises."""
    async with trio.open_nursery() as nursery:
        for link in links:
            if link.tether is not None:
                link.tether.cancel()
            nursery.start_soon(link.server.close)


async def leave_links(links: Sequence[Link]) -> None:
    """Leaves the sessions of `links` at their servers. Never raises."""
    for link in links:
        if link.tether is not None:
            link.tether.cancel()
        await link.server.leave()
