"""The async client of one model in a swarm: which servers there are, and sessions through the best of them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import trio

from ...crypto.credits import Clearing
from ...crypto.receipts import Receipt
from ...protocols import wire_pb2 as wire
from ...protocols.adapter import MAX_HEADER as MAX_ADAPTER_HEADER
from ...protocols.announcement import Announcement, ServerState
from ...protocols.framing import F, MessageStream, PeerError
from ...protocols.ids import ADAPTER, INFERENCE
from ...protocols.training import MAX_HEADER as MAX_BATCH_HEADER
from ...protocols.training import PIECE_BYTES, BatchFrames
from ..errors import BadInput, NoChainError, ServerFailed, SwarmError
from ..swarm.routing import Hop, RouteCandidate, cheapest_chain, second_best
from ..swarm.swarm import Swarm
from ..trust.bundle import equivocation_bundle
from ..trust.receipt_log import SHARED_BYTES, ReceiptArchive
from .batch.batch_client import BatchClient
from .deadlines import (
    MEASURE_TIMEOUT,
    OPEN_TIMEOUT,
    REFRESH_TIMEOUT,
    RETRY_INTERVAL,
    RTT_LIFETIME,
    RTT_TIMEOUT,
    SUSPECT_SECONDS,
)
from .request import ServerClaims, close_stream, pledged_points
from .router import Payments
from .session.session import ClientSession, SavedSession
from .session.stream import HopTiming, InferenceStream, SessionSpec
from .session_adapter import SessionAdapter, bring, named, names_held
from .swarm_model import SwarmModel

if TYPE_CHECKING:
    import torch

    from ..models.adapter import Adapter
    from .session.compared_session import ComparedSession
    from .session.disjoint import Disagreement

BANDWIDTH_BYTES: Final = 1 << 16
"""Steps below this say more of the round trip than of the bandwidth."""
BYTES_PER_VALUE: Final = {"float32": 4, "float16": 2, "bfloat16": 2}
SUSPECT_PENALTY: Final = 60.0
"""A server that failed seems this many seconds farther away for so long: it is asked only if nobody else is left."""


@asynccontextmanager
async def open_client(
    swarm: Swarm,
    model: SwarmModel,
    *,
    allowed: Collection[str] = (),
    blocked: Collection[str] = (),
    share_receipts: Sequence[str] = (),
    adapter: Adapter | str | None = None,
    require_pledge: int | None = None,
    compare_chains: int = 1,
) -> AsyncIterator[SwarmClient]:
    """A client for the length of the block.

    `allowed` and `blocked` are peer ids; no `allowed` allows everybody. `share_receipts` are auditors, multiaddrs with
    /p2p, that may see what is sent and received (`sharing`). `adapter` changes the blocks for all sessions that name
    none: one that is brought to servers, or the name of one that they hold.
    Servers that do not pledge at least `require_pledge` points are not used; None: whether they pledge or not.
    From 2 on, sessions run through `compare_chains` chains that share no server and compare them (`compared_session`).

    Raises:
        BadInput: the adapter was trained for another version of the model.
    """
    changes = _session_adapter(adapter, model)
    async with trio.open_nursery() as nursery:
        client = SwarmClient(
            swarm,
            model,
            nursery,
            allowed=allowed,
            blocked=blocked,
            require_pledge=require_pledge,
            adapter=changes,
            compare_chains=compare_chains,
        )
        if share_receipts:
            client.receipts = ReceiptArchive(SHARED_BYTES)
            nursery.start_soon(_share, swarm, client.receipts, share_receipts)
        nursery.start_soon(client.candidates)  # so that the first session finds the round trips measured
        yield client
        nursery.cancel_scope.cancel()


async def _share(swarm: Swarm, archive: ReceiptArchive, auditors: Sequence[str]) -> None:
    from .sharing import share_receipts

    await share_receipts(swarm, archive, auditors)


def _session_adapter(adapter: Adapter | str | None, model: SwarmModel) -> SessionAdapter | str | None:
    """What sessions are changed by; an adapter that is only a prompt changes no blocks, and a name is looked up later.

    Raises:
        BadInput: it was trained for another version of the model.
    """
    if adapter is None or isinstance(adapter, str):
        return adapter
    adapter.check_model(model.version, model.name)
    return SessionAdapter.of(adapter) if adapter.hash else None


class SwarmClient:
    """Opens sessions of one model, and runs batches without a cache (`batches`); made by `open_client`.

    Attributes:
        disagreements: of chains that were compared, in all sessions so far.
    """

    def __init__(
        self,
        swarm: Swarm,
        model: SwarmModel,
        nursery: trio.Nursery,
        *,
        allowed: Collection[str] = (),
        blocked: Collection[str] = (),
        adapter: SessionAdapter | str | None = None,
        require_pledge: int | None = None,
        compare_chains: int = 1,
    ) -> None:
        self._adapter = adapter
        self._compare_chains = compare_chains
        self._nursery = nursery
        self.swarm = swarm
        self.model = model
        self._allowed = frozenset(allowed)
        self._blocked = frozenset(blocked)
        self._require_pledge = require_pledge
        self._rtts: dict[str, tuple[float, float]] = {}
        self._measures: dict[str, trio.Event] = {}
        self._suspects: dict[str, float] = {}
        self._seconds_per_byte: dict[str, float] = {}
        self.payments: Payments | None = None
        self.receipts = ReceiptArchive()
        self.batches = BatchClient(self)
        self.disagreements: list[Disagreement] = []

    @property
    def peer_id(self) -> str:
        return self.swarm.peer_id

    def servers(self) -> tuple[Announcement, ...]:
        """The servers of this model that may be used and take sessions, as far as this node has heard."""
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
        points = pledged_points(server, self.swarm.trust.trusted.owners.keys(), time.time_ns() // 1_000_000)
        return points is not None and points >= self._require_pledge

    async def candidates(
        self, excluded: Collection[str] = (), adapter: SessionAdapter | None = None
    ) -> tuple[RouteCandidate, ...]:
        """The servers that answer soon, each with its round trip. Those that failed lately come with a penalty.

        If `adapter` cannot be brought to servers, only those that hold it.
        """
        servers = [server for server in self.servers() if server.peer_id not in excluded]
        if adapter is not None and adapter.content is None:
            servers = [server for server in servers if adapter.is_held_by(server)]
        measuring = [self._measuring(server.peer_id) for server in servers if self._rtt(server.peer_id) is None]
        with trio.move_on_after(RTT_TIMEOUT):
            for done in measuring:
                await done.wait()
        now = trio.current_time()
        found = []
        for server in servers:
            rtt = self._rtt(server.peer_id)
            if rtt is not None:
                suspect = self._suspects.get(server.peer_id, 0.0) > now
                found.append(
                    RouteCandidate(
                        server.peer_id,
                        server.span,
                        rtt=rtt,
                        step_seconds=server.step_seconds,
                        cache_tokens_free=server.cache_tokens_free,
                        forward_tokens_per_second=server.forward_tokens_per_second,
                        queue_depth=server.queue_depth,
                        seconds_per_byte=self._seconds_per_byte.get(server.peer_id, 0.0),
                        rtts=server.rtts,
                        penalty_seconds=(SUSPECT_PENALTY if suspect else 0.0)
                        + self.swarm.trust.penalty_seconds(server.peer_id),
                        max_session_length=server.max_session_length,
                    )
                )
        return tuple(found)

    def _rtt(self, peer_id: str) -> float | None:
        """The round trip to a peer, if it was measured lately."""
        measured = self._rtts.get(peer_id)
        return None if measured is None or trio.current_time() - measured[1] > RTT_LIFETIME else measured[0]

    def _measuring(self, peer_id: str) -> trio.Event:
        """Set when the round trip to a peer is measured, or cannot be. Goes on when nobody waits for it any more: where
        a connection takes long, through a relay far away, the next look finds it made."""
        done = self._measures.get(peer_id)
        if done is None:
            done = self._measures[peer_id] = trio.Event()
            self._nursery.start_soon(self._measure, peer_id, done)
        return done

    async def _measure(self, peer_id: str, done: trio.Event) -> None:
        try:
            rtt = await self.swarm.measure_rtt(peer_id, timeout=MEASURE_TIMEOUT)
        except (PeerError, SwarmError):
            self._rtts.pop(peer_id, None)
        else:
            self._rtts[peer_id] = (rtt, trio.current_time())
        finally:
            del self._measures[peer_id]
            done.set()

    def suspect(self, peer_id: str, seconds: float = SUSPECT_SECONDS) -> None:
        """Notes that a server failed or said no: others are preferred for so long."""
        self._suspects[peer_id] = max(self._suspects.get(peer_id, 0.0), trio.current_time() + seconds)

    def claims_of(self, peer_id: str) -> ServerClaims | None:
        """What this server has announced; None if nothing is known of it."""
        announced = self.swarm.view.get(peer_id, time.time())
        return None if announced is None else ServerClaims.of(announced)

    def accuse(self, peer_id: str, reason: str, proof: tuple[Receipt, Receipt] | None = None) -> None:
        """Notes that a server signed something else than it did, or nothing: it is not used for long.

        `proof`, two receipts that contradict each other, is shown to others.
        """
        self.swarm.trust.ban(peer_id, reason, "own")
        if proof is not None:
            bundle = equivocation_bundle(self.swarm.identity, peer_id, *proof)
            self.start_soon(partial(self.swarm.publish_evidence, bundle, recomputed=False))

    def note_tokens(self, peer_id: str, tokens: int) -> None:
        """Hears of tokens that a server answered with a receipt in order."""
        self.swarm.trust.note_tokens(peer_id, tokens)

    def note_transfer(self, timing: HopTiming, nbytes: int) -> None:
        """Learns a server's bandwidth from what is left of a large step after its computing and its round trip."""
        measured = self._rtts.get(timing.peer_id)
        if nbytes < BANDWIDTH_BYTES or measured is None:
            return
        left = max(0.0, timing.total - timing.queue - timing.compute - measured[0]) / nbytes
        before = self._seconds_per_byte.get(timing.peer_id, left)
        self._seconds_per_byte[timing.peer_id] = 0.8 * before + 0.2 * left

    async def route(self, spec: SessionSpec, excluded: Collection[str] = ()) -> tuple[Hop, ...]:
        """The cheapest chain for `spec` without the `excluded` servers.

        Raises:
            NoChainError: naming the blocks that nobody holds.
            BadInput: a session of this length is more than the servers of the model take.
        """
        candidates = await self.candidates(excluded, spec.adapter)
        longest = max((each.max_session_length or 0 for each in candidates), default=spec.max_length)
        if longest < spec.max_length:
            raise BadInput(
                f"{spec.max_length} tokens in one sequence are wanted, and the servers of {self.model.name} take "
                f"{longest}: ask for less"
            )
        try:
            return cheapest_chain(candidates, spec.span, model_name=self._wanted(spec), **self.demand(spec))
        except NoChainError as error:
            raise self.explained(error, bool(candidates) or spec.adapter is not None) from None

    async def standby(
        self, spec: SessionSpec, route: Sequence[Hop], index: int, excluded: Collection[str] = ()
    ) -> tuple[Hop, ...]:
        """The best servers for the blocks of one hop of a running session, without that hop's own and the `excluded`.

        Raises:
            NoChainError: nobody else holds them.
        """
        found = second_best(route, index, await self.candidates(excluded, spec.adapter), **self.demand(spec))
        if found is None:
            blocks = route[index].span
            raise NoChainError(f"nobody else holds blocks {blocks}", tuple(range(blocks.start, blocks.end)))
        return found

    def _wanted(self, spec: SessionSpec) -> str:
        """What a server must hold, for a person."""
        if spec.adapter is None or spec.adapter.content is not None:
            return self.model.name
        return f"{self.model.name} with the adapter {spec.adapter.name}"

    def demand(self, spec: SessionSpec) -> dict[str, Any]:
        """What a session asks of a route: a decode step is what it does most."""
        return {
            "cache_tokens": spec.batch * spec.max_length,
            "max_length": spec.max_length,
            "tokens": spec.batch,
            "token_bytes": self.model.folder.hidden_size * BYTES_PER_VALUE[spec.dtype],
            "pushed": spec.push,
        }

    def explained(self, error: NoChainError, any_server: bool) -> NoChainError:
        """The same error, or a better one if the swarm serves other models only."""
        unused = self._unused()
        if unused:
            return NoChainError(f"{error}. Not used: {'; '.join(unused)}", error.missing)
        models = self.swarm.view.models(now=time.time())
        others = {name for version, (name, _) in models.items() if version != self.model.version}
        if any_server or not others:
            return error
        return NoChainError(
            f"nobody in this swarm serves {self.model.name} (version {self.model.version.hex()[:12]}); it serves "
            f"{', '.join(sorted(others))}. Name that model, or join another swarm",
            error.missing,
        )

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

    async def connect(self, hop: Hop, *, direct: bool = False) -> InferenceStream:
        """A stream to the server of `hop`; with `direct`, only on a connection that there is, without a relay.

        Raises:
            ServerFailed: it cannot be reached.
        """
        return await self._stream(hop, INFERENCE, wire.InferenceFrame, direct=direct)

    async def batch_stream(self, hop: Hop, protocol: str) -> BatchFrames:
        """A stream for batches to the server of `hop`; `protocol` says of which kind.

        Raises:
            ServerFailed: it cannot be reached.
        """
        return await self._stream(hop, protocol, wire.BatchFrame, max_header=MAX_BATCH_HEADER, max_payload=PIECE_BYTES)

    async def _stream(self, hop: Hop, protocol: str, frame: type[F], **options: Any) -> MessageStream[F]:
        try:
            return await self.swarm.new_stream(hop.peer_id, protocol, frame, timeout=OPEN_TIMEOUT, **options)
        except PeerError as error:
            text = f"server {hop.peer_id} (blocks {hop.span}) cannot be reached: {error}"
            raise ServerFailed(text, hop.peer_id) from error

    @asynccontextmanager
    async def adapter_at(self, hop: Hop, spec: SessionSpec) -> AsyncIterator[None]:
        """Within it, the server of `hop` holds the adapter of `spec`, if there is one: it is brought there if need be.

        Raises:
            ServerFailed: the server cannot be reached, or will not have it.
        """
        adapter = spec.adapter
        record = self.swarm.view.records.get(hop.peer_id)
        if adapter is None or adapter.content is None or (record is not None and adapter.is_held_by(record.content)):
            yield
            return
        stream = await self._stream(
            hop, ADAPTER, wire.BatchFrame, max_header=MAX_ADAPTER_HEADER, max_payload=PIECE_BYTES
        )
        try:
            await bring(stream, adapter, hop, self.model.version)
            yield
        finally:
            await close_stream(stream, wire.BatchFrame(close=wire.Close()))

    @property
    def changes(self) -> Mapping[str, torch.Tensor]:
        """The tensors that change the blocks where a call or session names nothing else.

        Raises:
            BadInput: only servers have them.
        """
        if isinstance(self._adapter, str) or (self._adapter is not None and self._adapter.content is None):
            raise BadInput(
                "an adapter that only servers hold is for sessions, as generate() makes them: give the path of its "
                "folder to use it without a cache, or to train behind it"
            )
        return self._adapter.content.tensors if self._adapter is not None and self._adapter.content is not None else {}

    async def adapter(self, *, wait: bool = False) -> SessionAdapter | None:
        """What changes the blocks of sessions that name nothing else; with `wait`, as soon as servers hold it.

        Raises:
            NoChainError: no server holds an adapter of this name.
            BadInput: servers hold several.
        """
        if not isinstance(self._adapter, str):
            return self._adapter
        while True:
            found = named(self._adapter, self.servers())
            if found is None:
                await self.refresh()
                found = named(self._adapter, self.servers())
            if found is not None:
                self._adapter = found
                return found
            if not wait:
                held = ", ".join(names_held(self.servers())) or "none"
                raise NoChainError(
                    f"no server of the swarm holds an adapter {self._adapter} for {self.model.name}; held are: {held}. "
                    "Start one with `petalnode serve --adapter PATH`, or give the path of its folder",
                    tuple(range(self.model.num_blocks)),
                )
            await trio.sleep(RETRY_INTERVAL)

    async def payment(self, hop: Hop, spec: SessionSpec) -> Clearing | None:
        """Points for the server of `hop`, if it is busy and this client has any for it. Never raises."""
        if self.payments is None:
            return None
        announced = self.swarm.view.get(hop.peer_id, time.time())
        return await self.payments.pay(announced, spec.batch, spec.max_length)

    def paid(self, payment: Clearing) -> None:
        """Notes that a server has taken points."""
        if self.payments is not None:
            self.payments.spent(payment)

    def watch_direct(self, peer_id: str) -> trio.Event:
        """Set when there is a connection to this peer without a relay."""
        return self.swarm.watch_direct(peer_id)

    def start_soon(self, function: Callable[..., Awaitable[Any]], *args: Any) -> None:
        """Runs `function` in the background for as long as the client lives."""
        self._nursery.start_soon(function, *args)

    async def refresh(self) -> None:
        """Asks the swarm anew who serves this model. Nobody answering is no error: what is known stays."""
        with suppress(SwarmError):
            await self.swarm.refresh(model_version=self.model.version, timeout=REFRESH_TIMEOUT)

    @asynccontextmanager
    async def session(
        self, spec: SessionSpec, *, wait: bool = False, saved: SavedSession | None = None
    ) -> AsyncIterator[ClientSession | ComparedSession]:
        """Opens a session over the best servers that will have it, and closes it on the way out.

        Takes up `saved` instead, if all of its servers still hold it. `spec.model_version` is filled in, and the
        client's adapter if `spec` names none. With `wait`, a swarm that cannot serve is asked again until it can.

        Raises:
            NoChainError: no chain covers the span; `missing` and the text name the blocks, and who refused.
            BadInput: no server takes a session like this.
        """
        adapter = spec.adapter or await self.adapter(wait=wait)
        spec = replace(spec, model_version=self.model.version, adapter=adapter)
        session: ClientSession | ComparedSession
        if self._compare_chains > 1:
            from .session.compared_session import ComparedSession

            session = ComparedSession(self, spec, self._compare_chains, wait)
        else:
            session = ClientSession(self, spec, wait)
        if saved is None or saved.max_length != spec.max_length or not await session.resume(saved):
            await session.open()
        try:
            yield session
        finally:
            await session.close()
