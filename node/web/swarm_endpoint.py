"""GET /v1/petalnode/swarm: gathers what this node knows of the servers of its model. GET /v1/petalnode/invite: a link
into the swarm."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import trio
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from ..api.engine.core import Core
from ..client.round_trips import measure_rtts
from ..errors import SwarmError
from ..links.format import check_word
from ..links.making import LinkWishes, join_command, link_now, near_link, qr_code, where_from
from ..network.addresses import parse_peer
from ..version import __version__
from .swarm_report import KnownServer, LastVerdict, Path, SwarmState, swarm_report

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReportTimes:
    """How old a report may be. With the 4 s between two looks of the page, who is gone disappears within 10 s."""

    fresh_seconds: float = 1.0
    refresh_seconds: float = 15.0
    refresh_timeout: float = 5.0
    answer_seconds: float = 1.5  # between two times that servers are asked whether they answer
    answer_timeout: float = 3.0
    max_asked: int = 32


REPORTS: Final = ReportTimes()
Verdicts = Callable[[bytes], Mapping[str, LastVerdict]]
"""The last verdict of each server by a validator of this machine, for a model version; may take a while."""


def no_verdicts(_model_version: bytes) -> Mapping[str, LastVerdict]:
    return {}


def swarm_routes(core: Core, *, peers: Sequence[str] = (), verdicts: Verdicts = no_verdicts) -> list[BaseRoute]:
    """The route of the swarm as JSON. `peers` are the addresses that this node joined by."""
    return [
        Route("/v1/petalnode/swarm", _SwarmEndpoint(core, peers, verdicts).get, methods=["GET"]),
        Route("/v1/petalnode/invite", _InviteEndpoint(core).get, methods=["GET"]),
    ]


class _InviteEndpoint:
    """However often it is asked, a link is made every 15 s at most. The key of a private swarm is in none."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._making = trio.Lock()
        self._made = -REPORTS.refresh_seconds
        self._answer: dict[str, Any] = {}

    async def get(self, request: Request) -> Response:
        async with self._making:
            if trio.current_time() - self._made >= REPORTS.refresh_seconds or not self._answer:
                try:
                    self._answer = await self._make()
                except SwarmError as error:
                    return JSONResponse({"error": {"message": str(error), "type": "server_error"}}, 503)
                self._made = trio.current_time()
        return JSONResponse(self._answer)

    async def _make(self) -> dict[str, Any]:
        swarm = self._core.client.swarm
        wishes = LinkWishes(self._core.base.name, self._core.client.model.version, swarm.psk)
        link, invite = await link_now(swarm, wishes, swarm.identity)
        word = await trio.to_thread.run_sync(check_word, link)
        rows = ["".join("01"[bool(module)] for module in row) for row in qr_code(link).matrix]
        return {
            "link": link,
            "command": join_command(link, swarm.psk),
            "check_word": word,
            "expires": invite.expires,
            "reached_from": where_from(invite.addrs) or "anywhere",
            "qr": rows,
        }


class _SwarmEndpoint:
    """However often it is asked, the report is made once a second. The swarm is asked every 15 s at most."""

    def __init__(self, core: Core, peers: Sequence[str], verdicts: Verdicts) -> None:
        self._core = core
        self._peers = tuple(peers)
        self._verdicts = verdicts
        self._making = trio.Lock()
        self._made = -REPORTS.fresh_seconds
        self._report: dict[str, Any] = {}
        self._asked = -REPORTS.refresh_seconds
        self._pinged = -REPORTS.answer_seconds
        self._pinging = False
        self._answers: dict[str, bool] = {}

    async def get(self, request: Request) -> Response:
        async with self._making:
            if trio.current_time() - self._made >= REPORTS.fresh_seconds or not self._report:
                self._look_soon()
                found = await trio.to_thread.run_sync(self._verdicts, self._core.client.model.version)
                self._report = swarm_report(self._state(found))
                self._made = trio.current_time()
        return JSONResponse(self._report)

    def _look_soon(self) -> None:
        """Asks for all servers in the background: a client knows only some of a large swarm."""
        if trio.current_time() - self._asked >= REPORTS.refresh_seconds:
            self._asked = trio.current_time()
            self._core.client.start_soon(self._look)
        if not self._pinging and trio.current_time() - self._pinged >= REPORTS.answer_seconds:
            self._pinging = True
            self._core.client.start_soon(self._ping)

    async def _ping(self) -> None:
        """Asks the servers that this node is connected to, or was, whether they are there. Nobody else is dialed."""
        client = self._core.client
        known = [said.peer_id for said in client.swarm.view.servers(client.model.version, now=time.time())]
        near = [peer for peer in known if client.swarm.is_connected(peer) or peer in self._answers]
        near.sort(key=lambda peer: (-client.swarm.trust.reputation(peer), peer))
        try:
            found = await measure_rtts(client.swarm, near[: REPORTS.max_asked], timeout=REPORTS.answer_timeout)
            self._answers = {peer: isinstance(seconds, float) for peer, seconds in found.items()}
        finally:
            self._pinging, self._pinged = False, trio.current_time()

    async def _look(self) -> None:
        client = self._core.client
        try:
            await client.swarm.refresh(model_version=client.model.version, timeout=REPORTS.refresh_timeout)
            await client.candidates()  # measures round trips
        except SwarmError as error:
            log.debug("the swarm page shows what was known: %s", error)

    def _state(self, verdicts: Mapping[str, LastVerdict]) -> SwarmState:
        client, now = self._core.client, time.time()
        swarm, version = client.swarm, client.model.version
        silent = [peer_id for peer_id, answers in self._answers.items() if not answers]
        link = near_link(swarm, LinkWishes(self._core.base.name, version, swarm.psk), without=silent)
        servers = tuple(
            KnownServer(
                said,
                round_trip=client.round_trip(said.peer_id),
                path=self._path(said.peer_id, said.addrs),
                answers=self._answers.get(said.peer_id),
                reputation=swarm.trust.reputation(said.peer_id),
                ban=swarm.trust.ban_of(said.peer_id),
                verdict=verdicts.get(said.peer_id),
            )
            for said in swarm.view.servers(version, now=now)
        )
        return SwarmState(
            model=self._core.base.name,
            model_version=version,
            num_blocks=client.model.num_blocks,
            servers=servers,
            self_id=swarm.peer_id,
            join=join_command(link, swarm.psk),
            peers=[peer for peer in self._peers if self._is_there(parse_peer(peer)[0])],
            now=now,
            software_version=__version__,
        )

    def _is_there(self, peer_id: str) -> bool:
        return self._core.client.swarm.is_connected(peer_id) and self._answers.get(peer_id, True)

    def _path(self, peer_id: str, addrs: Sequence[str]) -> Path | None:
        swarm = self._core.client.swarm
        if swarm.is_connected(peer_id):
            return "direct" if swarm.is_direct(peer_id) else "relay"
        behind_nat = bool(addrs) and all("/p2p-circuit" in addr for addr in addrs)
        return "relay" if behind_nat else None
