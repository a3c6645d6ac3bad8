"""The async client of one model in a swarm: which servers there are, and sessions through the best of them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Final

import trio

from ...protocols import wire_pb2 as wire
from ...protocols.announcement import Announcement, ServerState
from ...protocols.framing import PeerError
from ...protocols.ids import INFERENCE
from ..errors import BadInput, ModelError, NoChainError, ServerFailed, SwarmError
from ..models import Manifest, ModelFolder, Progress, compute_manifest, verify_part
from ..models.progress import no_progress
from ..swarm.swarm import Swarm
from .deadlines import (
    CHEATED_SECONDS,
    MEASURE_TIMEOUT,
    OPEN_TIMEOUT,
    REFRESH_TIMEOUT,
    RTT_LIFETIME,
    RTT_TIMEOUT,
    SUSPECT_SECONDS,
)
from .promise import Promise
from .receipt_log import SHARED_BYTES, ReceiptArchive
from .routing import Candidate, Hop, cheapest_chain, second_best
from .saved_session import SavedSession
from .server_session import HopTiming, InferenceStream, SessionSpec
from .session import ClientSession
from .work_pool import WorkPool

BANDWIDTH_BYTES: Final = 1 << 16
"""Steps below this say more of the round trip than of the bandwidth."""
BYTES_PER_VALUE: Final = {"float32": 4, "float16": 2, "bfloat16": 2}
SUSPECT_PENALTY: Final = 60.0
"""A server that failed seems this many seconds farther away for so long: it is asked only if nobody else is left."""


@dataclass(frozen=True)
class SwarmModel:
    """The model that a client uses: `folder` holds at least embeddings, norm and head."""

    version: bytes
    folder: ModelFolder

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def num_blocks(self) -> int:
        return self.folder.num_blocks


async def identify_model(swarm: Swarm, folder: ModelFolder, progress: Progress = no_progress) -> SwarmModel:
    """Finds out which model version `folder` is.

    From its own weights where it has them all; else by the manifest of a server that announces a model of this name,
    against which the client's part is then checked.

    Raises:
        ModelError: the folder's part is not that of the swarm's model.
        SwarmError: the folder holds a part only, and no server tells what the whole is.
    """
    try:
        manifest = await trio.to_thread.run_sync(compute_manifest, folder, progress)
        return SwarmModel(manifest.version, folder)
    except ModelError:
        # Not the whole model: that is how it is on a laptop that uses a model which it cannot hold.
        pass
    view = await swarm.refresh(timeout=REFRESH_TIMEOUT)
    mismatch: ModelError | None = None
    for server in view.servers(now=time.time()):
        if server.model_name != folder.name or server.num_blocks != folder.num_blocks:
            continue
        try:
            data = await swarm.fetch_manifest(server.peer_id, server.model_version, timeout=REFRESH_TIMEOUT)
            if data is None:
                continue
            manifest = Manifest.from_wire(data, server.model_version)
            await trio.to_thread.run_sync(verify_part, folder, manifest, "client", progress)
        except ModelError as error:
            mismatch = error
        except (PeerError, SwarmError):
            continue
        else:
            return SwarmModel(manifest.version, folder)
    if mismatch is not None:
        raise mismatch
    raise SwarmError(
        f"{folder.path} holds only a part of {folder.name}, and no server of the swarm can tell what the whole is: "
        "check --peer, or start a server of this model"
    )


@asynccontextmanager
async def open_client(
    swarm: Swarm,
    model: SwarmModel,
    *,
    allowed: Collection[str] = (),
    blocked: Collection[str] = (),
    share_receipts: Sequence[str] = (),
) -> AsyncIterator[SwarmClient]:
    """A client for the length of the block. `allowed` and `blocked` are peer ids; no `allowed` allows everybody.

    `share_receipts` are auditors, multiaddrs with /p2p, that may see what is sent and received (`sharing`).
    """
    async with trio.open_nursery() as nursery:
        client = SwarmClient(swarm, model, nursery, allowed=allowed, blocked=blocked)
        if share_receipts:
            client.receipts = ReceiptArchive(SHARED_BYTES)
            nursery.start_soon(_share, swarm, client.receipts, share_receipts)
        nursery.start_soon(client.candidates)  # so that the first session finds the round trips measured
        yield client
        nursery.cancel_scope.cancel()


async def _share(swarm: Swarm, archive: ReceiptArchive, auditors: Sequence[str]) -> None:
    from .sharing import share_receipts

    await share_receipts(swarm, archive, auditors)


class SwarmClient:
    """Opens sessions of one model, and runs batches without a cache (`works`); made by `open_client`."""

    def __init__(
        self,
        swarm: Swarm,
        model: SwarmModel,
        nursery: trio.Nursery,
        *,
        allowed: Collection[str] = (),
        blocked: Collection[str] = (),
    ) -> None:
        self._nursery = nursery
        self.swarm = swarm
        self.model = model
        self._allowed = frozenset(allowed)
        self._blocked = frozenset(blocked)
        self._rtts: dict[str, tuple[float, float]] = {}
        self._measures: dict[str, trio.Event] = {}
        self._suspects: dict[str, float] = {}
        self._seconds_per_byte: dict[str, float] = {}
        self.receipts = ReceiptArchive()
        self.works = WorkPool(self)

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
        )

    async def candidates(self, excluded: Collection[str] = ()) -> tuple[Candidate, ...]:
        """The servers that answer soon, each with its round trip. Those that failed lately come with a penalty."""
        servers = [server for server in self.servers() if server.peer_id not in excluded]
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
                    Candidate(
                        server.peer_id,
                        server.span,
                        rtt=rtt,
                        step_seconds=server.step_seconds,
                        cache_tokens_free=server.cache_tokens_free,
                        forward_tokens_per_second=server.forward_tokens_per_second,
                        queue_depth=server.queue_depth,
                        seconds_per_byte=self._seconds_per_byte.get(server.peer_id, 0.0),
                        rtts=server.rtts,
                        penalty_seconds=SUSPECT_PENALTY if suspect else 0.0,
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

    def promised(self, peer_id: str) -> Promise | None:
        """What this server has announced; None if nothing is known of it."""
        announced = self.swarm.view.get(peer_id, time.time())
        return None if announced is None else Promise.of(announced)

    def accuse(self, peer_id: str, reason: str) -> None:
        """Notes that a server signed something else than it did, or nothing: it is not used for long."""
        self.suspect(peer_id, CHEATED_SECONDS)

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
        candidates = await self.candidates(excluded)
        longest = max((each.max_session_length or 0 for each in candidates), default=spec.max_length)
        if longest < spec.max_length:
            raise BadInput(
                f"{spec.max_length} tokens in one sequence are wanted, and the servers of {self.model.name} take "
                f"{longest}: ask for less"
            )
        try:
            return cheapest_chain(candidates, spec.span, model_name=self.model.name, **self._demand(spec))
        except NoChainError as error:
            raise self.explained(error, bool(candidates)) from None

    async def standby(self, spec: SessionSpec, route: Sequence[Hop], index: int) -> tuple[Hop, ...]:
        """The best servers for the blocks of one hop of a running session, without that hop's own.

        Raises:
            NoChainError: nobody else holds them.
        """
        found = second_best(route, index, await self.candidates(), **self._demand(spec))
        if found is None:
            blocks = route[index].span
            raise NoChainError(f"nobody else holds blocks {blocks}", tuple(range(blocks.start, blocks.end)))
        return found

    def _demand(self, spec: SessionSpec) -> dict[str, Any]:
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
        models = self.swarm.view.models(now=time.time())
        others = {name for version, (name, _) in models.items() if version != self.model.version}
        if any_server or not others:
            return error
        return NoChainError(
            f"nobody in this swarm serves {self.model.name} (version {self.model.version.hex()[:12]}); it serves "
            f"{', '.join(sorted(others))}. Name that model, or join another swarm",
            error.missing,
        )

    async def connect(self, hop: Hop, *, direct: bool = False) -> InferenceStream:
        """A stream to the server of `hop`; with `direct`, only on a connection that there is, without a relay.

        Raises:
            ServerFailed: it cannot be reached.
        """
        try:
            return await self.swarm.new_stream(
                hop.peer_id, INFERENCE, wire.InferenceFrame, timeout=OPEN_TIMEOUT, direct=direct
            )
        except PeerError as error:
            raise ServerFailed(
                f"server {hop.peer_id} (blocks {hop.span}) cannot be reached: {error}", hop.peer_id
            ) from error

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
    ) -> AsyncIterator[ClientSession]:
        """Opens a session over the best servers that will have it, and closes it on the way out.

        Takes up `saved` instead, if all of its servers still hold it. `spec.model_version` is filled in. With `wait`,
        a swarm that cannot serve is asked again until it can.

        Raises:
            NoChainError: no chain covers the span; `missing` and the text name the blocks, and who refused.
            BadInput: no server takes a session like this.
        """
        session = ClientSession(self, replace(spec, model_version=self.model.version), wait)
        if saved is None or saved.max_length != spec.max_length or not await session.resume(saved):
            await session.open()
        try:
            yield session
        finally:
            await session.close()
