"""Which servers of one model a client uses: those that it may use, how near they are, and the best chain of them."""

from __future__ import annotations

import time
from collections.abc import Collection, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import trio

from ...crypto.statement import now_ms
from ...protocols.announcement import Announcement, ServerState
from ...protocols.framing import wire_nbytes
from ...protocols.ids import Span
from ..errors import BadInput, NoChainError, SwarmError
from ..swarm.cost import Estimate, WireCost, choose_codec
from ..swarm.routing import (
    NOBODY_HOLDS,
    Demand,
    Hop,
    RouteCandidate,
    cheapest_chain,
    describe_blocks,
    missing_blocks,
    pays_again,
    second_best,
)
from ..swarm.swarm import Swarm
from ..swarm.trusted_servers import TrustedServers, trusted_servers
from ..verification.tolerances import doubt
from .deadlines import DEADLINES
from .losses import LossRecord
from .request import pledged_points
from .round_trips import RoundTrips
from .session.stream import HopTiming, SessionSpec
from .session_adapter import SessionAdapter
from .swarm_model import SwarmModel

BANDWIDTH_BYTES: Final = 1 << 16
"""Steps below this say more of the round trip than of the bandwidth."""
SUSPECT_PENALTY: Final = 60.0
"""A server that failed seems this many seconds farther away for so long: it is asked only if nobody else is left."""


@dataclass(frozen=True)
class FixedRoute:
    """The only chain of a client, which fails where another client would look for other servers.

    Attributes:
        failures: by peer id, why servers were left out.
    """

    hops: tuple[Hop, ...]
    failures: dict[str, SwarmError] = field(default_factory=dict)

    def without(self, excluded: Collection[str]) -> tuple[Hop, ...]:
        """Its hops. Raises NoChainError: one of them is excluded."""
        if isinstance(excluded, Mapping):
            self.failures.update(excluded)
        if any(hop.peer_id in excluded for hop in self.hops):
            raise NoChainError("a server of the only chain has failed", ())
        return self.hops


@dataclass(frozen=True)
class ServerLimits:
    """Which servers a client uses.

    Attributes:
        allowed: peer ids; none: all.
        blocked: peer ids.
        require_pledge: the least points that they pledge; None: whether they pledge or not.
        trusted: those for the first and the last blocks.
        fixed: the chain of all sessions, if none is to be looked for.
    """

    allowed: Collection[str] = ()
    blocked: Collection[str] = ()
    require_pledge: int | None = None
    trusted: TrustedServers | None = None
    fixed: FixedRoute | None = None


@dataclass(frozen=True)
class ServerMemory:
    """What is known of the servers of a model, by peer id; clients that demand other things of them share it.

    Attributes:
        suspects: until when others are preferred.
    """

    round_trips: RoundTrips
    suspects: dict[str, float] = field(default_factory=dict)
    losses: LossRecord = field(default_factory=LossRecord)
    seconds_per_byte: dict[str, Estimate] = field(default_factory=dict)

    def keep_only(self, peers: Container[str]) -> None:
        """Forgets all others but their losses: keys cost nothing, and a client may run for months."""
        self.round_trips.keep_only(peers)
        tables: tuple[dict[str, Any], ...] = (self.suspects, self.seconds_per_byte)
        for table in tables:
            for gone in [peer_id for peer_id in table if peer_id not in peers]:
                del table[gone]


class ServerSelection:
    """Measures the servers of `model` and chooses among them; `swarm` is where they announce themselves.

    Attributes:
        trusted: who may compute the first and the last blocks.
    """

    def __init__(
        self,
        swarm: Swarm,
        model: SwarmModel,
        nursery: trio.Nursery,
        limits: ServerLimits = ServerLimits(),
        known: ServerMemory | None = None,
    ) -> None:
        self.trusted = limits.trusted or TrustedServers()
        self._fixed = limits.fixed
        self.swarm = swarm
        self.model = model
        self._nursery = nursery
        self._allowed = frozenset(limits.allowed)
        self._blocked = frozenset(limits.blocked)
        self._require_pledge = limits.require_pledge
        self._known = known or ServerMemory(RoundTrips(swarm, model.num_blocks, nursery, self.trusted.peers))

    def narrowed(self, peers: Collection[str], blocks: int | None) -> TrustedServers:
        """The trusted servers of a session that names `peers` for the first and the last `blocks` blocks. They are
        never others, nor for fewer blocks, than those of all sessions.

        Raises:
            BadInput: they cannot be used, or are others.
        """
        if not peers and blocks is None:
            return self.trusted
        ours = self.trusted
        if ours.peers and not ours.peers.issuperset(peers):
            raise BadInput("only these servers may be trusted: " + ", ".join(sorted(ours.peers)))
        if ours.peers and blocks is not None and blocks < ours.blocks:
            raise BadInput(f"trusted servers compute the first and the last {ours.blocks} blocks, not fewer")
        found = trusted_servers(sorted(peers or ours.peers), blocks, allowed=self._allowed, blocked=self._blocked)
        return found if blocks is not None or not ours.peers else TrustedServers(found.peers, ours.blocks)

    def servers(self) -> tuple[Announcement, ...]:
        """The servers of this model that may be used and take sessions, as far as they are announced here."""
        return tuple(
            server
            for server in self.swarm.view.servers(self.model.version, now=time.time())
            if server.state is ServerState.ONLINE
            and server.num_blocks == self.model.num_blocks
            and server.peer_id not in self._blocked
            and (not self._allowed or server.peer_id in self._allowed)
            and not self.swarm.trust.is_banned(server.peer_id)
            and self._pledges_enough(server)
        )

    def _pledges_enough(self, server: Announcement) -> bool:
        if self._require_pledge is None:
            return True
        if not doubt(server.dtype, server.quantisation, server.device).pledge_counts:
            return False
        points = pledged_points(server, self.swarm.trust.trusted.owners.keys(), now_ms())
        return points is not None and points >= self._require_pledge

    async def candidates(
        self, excluded: Collection[str] = (), adapter: SessionAdapter | None = None
    ) -> tuple[RouteCandidate, ...]:
        """The servers that answer soon, each with its round trip and the blocks that it may compute. Those that failed
        lately come with a penalty.

        If `adapter` cannot be brought to servers, only those that hold it. Where servers are `excluded`, something
        waits for others in their place. Those that were never measured have less time to answer, and are a last resort
        until they have.
        """
        servers = [server for server in self.servers() if server.peer_id not in excluded]
        if adapter is not None and adapter.content is None:
            servers = [server for server in servers if adapter.is_held_by(server)]
        self._known.keep_only(self.swarm.view.records)
        await self._known.round_trips.measure(servers, patient=not excluded, choosy=self._is_choosy())
        # Those whose announcements were old have said what they announce now.
        current = {server.peer_id: server for server in self.servers()}
        servers = [current[server.peer_id] for server in servers if server.peer_id in current]
        now, boundaries = trio.current_time(), self.model.folder.boundaries
        found = []
        for server in servers:
            span = boundaries.usable(server.span)
            rtt = self.round_trip(server.peer_id)
            suspect = self._known.suspects.get(server.peer_id, 0.0) > now
            if rtt is None and excluded and self._known.round_trips.is_under_way(server.peer_id):
                # It may be well, and this machine busy: to ask it is better than to give up.
                rtt, suspect = DEADLINES.rtt, True
            if rtt is not None and span is not None:
                found.append(
                    RouteCandidate(
                        server.peer_id,
                        span,
                        rtt=rtt,
                        step_seconds=server.step_seconds,
                        cache_tokens_free=server.cache_tokens_free,
                        forward_tokens_per_second=server.forward_tokens_per_second,
                        queue_depth=server.queue_depth,
                        seconds_per_byte=self.seconds_per_byte(server.peer_id) or 0.0,
                        rtts=server.rtts,
                        penalty_seconds=(SUSPECT_PENALTY if suspect else 0.0)
                        + self.swarm.trust.penalty_seconds(server.peer_id)
                        + self._known.losses.penalty_seconds(server.peer_id, now)
                        + doubt(server.dtype, server.quantisation, server.device).seconds,
                        max_session_length=server.max_session_length,
                        undivided=boundaries.undivided,
                    )
                )
        return self.trusted.restrict(found, self.model.num_blocks)

    def seconds_per_byte(self, peer_id: str) -> float | None:
        """What a byte to or from this server takes beyond the round trip; None where it was never measured."""
        known = self._known.seconds_per_byte.get(peer_id)
        return None if known is None else known.value

    def round_trip(self, peer_id: str) -> float | None:
        """Seconds to this server and back, as they were measured last; None if they never were, or it is silent."""
        return self._known.round_trips.of(peer_id)

    @property
    def suspected(self) -> Collection[str]:
        """Peer ids of all that have failed or said no."""
        return self._known.suspects.keys()

    def suspect(self, peer_id: str, seconds: float = DEADLINES.suspect) -> None:
        """Notes that a server failed or said no: others are preferred for so long."""
        self._known.suspects[peer_id] = max(self._known.suspects.get(peer_id, 0.0), trio.current_time() + seconds)

    def note_loss(self, peer_id: str, *, admitted: bool = False) -> None:
        """Notes that a server has lost what a session held there; `admitted`: it says so of what it answered for last.
        Who loses much is asked after others, and who admits it again and again is banned."""
        lost = self._known.losses.note(peer_id, trio.current_time(), admitted=admitted)
        if admitted and lost.is_too_much:
            self.swarm.trust.ban(peer_id, "it said again and again that it had lost what a session held", "own")

    def note_transfer(self, timing: HopTiming, nbytes: int) -> None:
        """Learns a server's bandwidth from what is left of a large step after its computing and its round trip."""
        rtt = self.round_trip(timing.peer_id)
        if nbytes < BANDWIDTH_BYTES or rtt is None:
            return
        left = max(0.0, timing.total - timing.queue - timing.compute - rtt) / nbytes
        self._known.seconds_per_byte.setdefault(timing.peer_id, Estimate()).note(left)

    async def refresh(self) -> None:
        """Asks the swarm anew who serves this model. Nobody answering is no error: what is known stays."""
        with suppress(SwarmError):
            version, sample = self.model.version, not self._is_choosy()
            await self.swarm.refresh(model_version=version, sample=sample, timeout=DEADLINES.refresh)

    def _is_choosy(self) -> bool:
        """Whether not any server of a block will do: then all servers have to be known, not some of each block."""
        return bool(self._allowed or self.trusted.peers) or self._require_pledge is not None

    async def route(
        self, spec: SessionSpec, excluded: Collection[str] = (), *, again: Sequence[Hop] = (), held: int = 0
    ) -> tuple[Hop, ...]:
        """The cheapest chain for `spec` without the `excluded` servers. It is that of `again`, which may have kept
        `held` tokens, where that is quicker for the whole session.

        Raises:
            NoChainError: naming the blocks that nobody holds.
            BadInput: a session of this length is more than the servers of the model take.
        """
        if self._fixed is not None:
            return self._fixed.without(excluded)
        candidates = await self.candidates(excluded, spec.adapter)
        # Of all servers, those that are excluded or silent now as well: what remains may be a stranger's only.
        longest = max((server.max_session_length for server in self.servers()), default=spec.max_length)
        if candidates and longest < spec.max_length:
            raise BadInput(
                f"{spec.max_length} tokens in one sequence are wanted, and the servers of {self.model.name} take "
                f"{longest}: ask for less"
            )
        try:
            best = cheapest_chain(candidates, spec.span, self.demand(spec), self._wanted(spec))
        except NoChainError as error:
            raise self.explained(error, bool(candidates) or spec.adapter is not None) from None
        if again and pays_again(again, best, candidates, held, spec.max_length - held, self.demand(spec)):
            return tuple(again)
        return best

    async def standby(
        self, spec: SessionSpec, route: Sequence[Hop], index: int, excluded: Collection[str] = ()
    ) -> tuple[Hop, ...]:
        """The best servers for the blocks of one hop of a running session, without its own and the `excluded`.

        Raises:
            NoChainError: nobody else holds them.
        """
        found = None
        if self._fixed is None:
            candidates = await self.candidates({route[index].peer_id, *excluded}, spec.adapter)
            found = second_best(route, index, candidates, self.demand(spec))
        if found is None:
            blocks = route[index].span
            raise NoChainError(f"nobody else holds blocks {blocks}", tuple(range(blocks.start, blocks.end)))
        return found

    async def stages(self, spec: SessionSpec) -> tuple[list[float], float]:
        """Of the cheapest chain: the seconds that each of its servers announces for a step of one row; those of the way
        through all of them and back, by push. Both are empty while there is no chain."""
        try:
            chain = await self.route(spec)
        except (NoChainError, BadInput):  # opening the session says why
            return [], 0.0
        servers = [self.swarm.view.get(hop.peer_id, time.time()) for hop in chain]
        seconds = [
            server.step_seconds * len(hop.span) / max(1, len(server.span)) if server is not None else 0.0
            for hop, server in zip(chain, servers, strict=True)
        ]
        halves = [(self.round_trip(hop.peer_id) or 0.0) / 2 for hop in chain]
        return seconds, sum(halves) + halves[-1]

    async def codec_that_pays(self, spec: SessionSpec, errors: Mapping[str, float]) -> str:
        """For a session over the cheapest chain; "none" while there is none. `errors` as `choose_codec` has them."""
        try:
            chain = await self.route(spec)
        except (NoChainError, BadInput):  # opening the session says why
            return "none"
        costs = []
        for hop in chain:
            server = self.swarm.view.get(hop.peer_id, time.time())
            if server is None:
                return "none"
            speed = server.forward_tokens_per_second
            token = 1 / speed if speed > 0 else server.step_seconds
            round_trip, per_byte = self.round_trip(hop.peer_id) or 0.0, self.seconds_per_byte(hop.peer_id)
            costs.append(WireCost(server.step_seconds, token, round_trip, per_byte))
        return choose_codec(costs, spec.dtype, self.model.folder.boundaries.width(spec.span.start), errors)

    def _wanted(self, spec: SessionSpec) -> str:
        """What a server must hold, for a person."""
        if spec.adapter is None or spec.adapter.content is not None:
            return self.model.name
        return f"{self.model.name} with the adapter {spec.adapter.name}"

    def demand(self, spec: SessionSpec) -> Demand:
        """What a session asks of a route: a decode step is what it does most."""
        return Demand(
            cache_tokens=spec.batch * spec.max_length,
            max_length=spec.max_length,
            tokens=spec.batch,
            token_bytes=wire_nbytes((self.model.folder.boundaries.width(spec.span.start),), spec.dtype, spec.codec),
            pushed=spec.push,
        )

    def explained(self, error: NoChainError, any_server: bool) -> NoChainError:
        """The same error, or a better one: blocks are missing where only trusted servers compute, or the swarm serves
        other models only."""
        if closed := self.trusted.closed(error.missing, self.model.num_blocks):
            return self._without_trusted(error, closed)
        unused = self._unused()
        if unused:
            return NoChainError(f"{error}. Not used: {'; '.join(unused)}", error.missing, gone=error.gone)
        models = self.swarm.view.models(now=time.time())
        others = {name for version, (name, _) in models.items() if version != self.model.version}
        if any_server or not others:
            return error
        return NoChainError(
            f"nobody in this swarm serves {self.model.name} (version {self.model.version.hex()[:12]}); it serves "
            f"{', '.join(sorted(others))}. Name that model, or join another swarm",
            error.missing,
        )

    def _without_trusted(self, error: NoChainError, closed: Sequence[int]) -> NoChainError:
        """`closed` are the missing blocks that only trusted servers may compute."""
        now, peers, version = time.time(), sorted(self.trusted.peers), self.model.version
        announced = {peer: self.swarm.view.get(peer, now) for peer in peers}
        ours = {peer: said for peer, said in announced.items() if said is not None and said.model_version == version}
        wanted = Span(closed[0], closed[-1] + 1)
        lacking = set(missing_blocks([server.span for server in ours.values()], wanted)).intersection(closed)
        only = f"only trusted servers compute the first and the last {self.trusted.blocks} blocks of {self.model.name}"
        known = "; ".join(self._said_of(peer, announced[peer]) for peer in peers)
        if lacking:
            blocks = describe_blocks(sorted(lacking))
            text = f"{only}, and none of them holds {blocks} (trusted: {known}). Start a server of your own with "
            text += f"`petalnode serve --blocks {min(lacking)}:{max(lacking) + 1}`, and name its peer id as trusted"
        elif str(error).startswith(NOBODY_HOLDS):
            text = f"no trusted server for {describe_blocks(closed)} can be used now, and {only} (trusted: {known})"
        else:
            text = f"{error}. Others were not asked: {only} (trusted: {known})"
        unused = self._unused()
        return NoChainError(text + (f". Not used: {'; '.join(unused)}" if unused else ""), error.missing)

    def _said_of(self, peer_id: str, announced: Announcement | None) -> str:
        """What is known of a trusted server, for a person."""
        if announced is None:
            return f"{peer_id} is not in this swarm"
        if announced.model_version != self.model.version:
            return f"{peer_id} serves another model"
        state = "" if announced.state is ServerState.ONLINE else f", and is {announced.state.name.lower()}"
        return f"{peer_id} holds blocks {announced.span}{state}"

    def _unused(self) -> list[str]:
        """Which servers of the model are left out for what is known of them, and why."""
        servers = self.swarm.view.servers(self.model.version, now=time.time())
        texts = []
        for server in servers:
            ban = self.swarm.trust.ban_of(server.peer_id)
            if ban is not None:
                texts.append(f"{server.peer_id} (blocks {server.span}), because {ban.reason}")
            elif not self._pledges_enough(server):
                texts.append(f"{server.peer_id} (blocks {server.span}) pledges less than {self._require_pledge} points")
        return texts
