"""A server while it holds one span: measures, announces, serves, and drains when it stops or goes elsewhere."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import trio

from ....crypto.identity import Identity
from ....protocols import wire_pb2 as wire
from ....protocols.adapter import MAX_HEADER as MAX_ADAPTER_HEADER
from ....protocols.announcement import MAX_ISSUERS, Announcement, ServerState
from ....protocols.ids import ADAPTER, BACKWARD, FORWARD, INFERENCE, PUSH, Span
from ....protocols.inference import MAX_STEP_BYTES, Refusal
from ....protocols.training import MAX_HEADER as MAX_WORK_HEADER
from ....protocols.training import PIECE_BYTES
from ...credits.wallet import Wallet
from ...models import ModelFolder
from ...placement.plan import Move
from ...swarm.swarm import Swarm
from .memory import cache_tokens_that_fit, claim, device_memory, return_memory, unused
from .mover import next_move
from .options import OnEvent, ServerOptions
from .other_servers import ServerConnector, keep_measured, keep_rtts, measure_network
from .placing import Placing
from .pledging import Pledging
from .speed import BlockSpeed, LiveSpeed, SpeedKey, keep_speed, measure_speed, recall_speed

if TYPE_CHECKING:
    from ...blocks.span import BlockSpan
    from ...models.adapter import Adapter
    from ..compute_thread import ComputeThread

log = logging.getLogger(__name__)

_ANNOUNCE_INTERVAL: Final = 2.0
"""Free cache and queue depth change with every session; the swarm hears of it at most this often."""
_CORRECT_INTERVAL: Final = 30.0
_GAP_DRAIN: Final = 3.0
"""Seconds that sessions have to leave when blocks are missing elsewhere: no other session works till they are there."""
_REFUSE_TIMEOUT: Final = 5.0
_FIRST_IDLE, _NEXT_IDLE = 60.0, 600.0
"""Seconds in which nobody has used a server, after which it measures itself anew: nobody will use one that says that it
is slow. Steps of real sessions know better what they take than the best of some that it makes by itself."""
_RETRY_PAUSE: Final = 60.0
_NETWORK_TIMEOUT: Final = 4.0
"""Seconds that measuring the network may hold up the first announcement."""


@dataclass(frozen=True)
class Post:
    """Where and as what a server serves: the same from span to span, but for `announcement`'s span.

    `speed_key` says what a measured speed is kept under; `placing` is how this server sees the swarm;
    `adapters` are those of its owner.
    """

    swarm: Swarm
    identity: Identity
    options: ServerOptions
    on_event: OnEvent
    folder: ModelFolder
    placing: Placing
    speed_key: SpeedKey
    adapters: tuple[Adapter, ...] = ()


async def host_span(
    post: Post,
    announcement: Announcement,
    blocks: BlockSpan,
    load_seconds: float,
    on_ready: Callable[[dict[str, object]], None],
    stop: trio.Event,
) -> Move | None:
    """Serves `blocks` until `stop` is set (then None) or the swarm needs this server elsewhere.

    `load_seconds` is what loading a block took. `on_ready` gets the fields of the ready event. When this returns all
    sessions have left or had the time to, and nothing here holds the blocks any more.
    """
    from ..compute_thread import ComputeThread

    compute = ComputeThread(blocks)
    compute.start()
    hosting = _Hosting(post, announcement, compute, load_seconds)
    try:
        return await hosting.run(on_ready, stop)
    finally:
        with trio.CancelScope(shield=True):
            hosting.refuse()
            await compute.stop()


class _Hosting:
    def __init__(self, post: Post, announcement: Announcement, compute: ComputeThread, load_seconds: float) -> None:
        self._post = post
        self._announcement = announcement
        self._compute = compute
        self._load_seconds = load_seconds
        self._changed = trio.Event()
        self._next_span: Span | None = None
        self._rtts: dict[str, float] = {}

    async def run(self, on_ready: Callable[[dict[str, object]], None], stop: trio.Event) -> Move | None:
        from ...credits.payment_verifier import PaymentVerifier
        from ..budget import MemoryBudget
        from ..requests.adapters import Adapters
        from ..requests.admission import Hosted
        from ..requests.opening import RequestContext
        from ..requests.service import RequestService

        post, options, blocks = self._post, self._post.options, self._compute.blocks
        speed = await self._speed()
        self._byte_seconds = 0.0 if options.throughput else speed.byte_seconds
        self._live = LiveSpeed(
            1 / options.throughput if options.throughput else speed.step_seconds * len(blocks.span),
            speed.token_seconds * len(blocks.span),
        )
        self._tokens: int = options.cache_tokens or 0
        if not self._tokens:
            self._tokens = await trio.to_thread.run_sync(self._fitting_cache)
        self._hosted = hosted = Hosted(
            model_version=self._announcement.model_version,
            model_name=post.folder.name,
            num_blocks=post.folder.num_blocks,
            span=self._announcement.span,
            hidden_size=blocks.hidden_size,
            dtype=str(blocks.dtype).removeprefix("torch."),
            quantisation=blocks.quantisation,
            max_length=blocks.max_positions,
        )
        pledging = Pledging(post.identity, hosted, options.pledge)
        self._pledger = pledging.current
        context = RequestContext(
            hosted, self._compute, post.identity, frozenset(options.allow_clients), pledging.current
        )
        self._context = context
        self._adapters = Adapters(context)
        await self._adapters.load(post.adapters)
        self._service = RequestService(
            context,
            MemoryBudget(self._tokens),
            ServerConnector(post.swarm, hosted.model_version),
            self._adapters,
            PaymentVerifier(post.identity.peer_id, self._issuers()),
            self._on_change,
        )
        self._serve()
        self._compute.on_decode = self._live.note_decode
        self._compute.on_prefill = self._live.note_prefill
        await self._compute.call(return_memory)
        post.swarm.announce(self._current())
        on_ready(self._ready())
        move: Move | None = None
        async with trio.open_nursery() as nursery:

            async def watch_stop() -> None:
                await stop.wait()
                nursery.cancel_scope.cancel()

            async def watch_swarm() -> None:
                nonlocal move
                load = self._load_seconds * len(blocks.span)
                while move is None:
                    try:
                        move = await next_move(post.swarm, post.placing, load, self._say)
                    except Exception:  # an error of ours here must not end the sessions of a server that works
                        log.exception("choosing other blocks failed")
                        await trio.sleep(_RETRY_PAUSE)
                nursery.cancel_scope.cancel()

            # Rather than in the loop of watch_stop: an announcement must not be lost when it is left.
            nursery.start_soon(self._keep_announced)
            nursery.start_soon(keep_rtts, post.swarm, self._announcement, self._rtts, self._on_change)
            if not options.throughput:
                nursery.start_soon(self._keep_speed_true)
                nursery.start_soon(self._measure_when_idle)
                known = bool(self._byte_seconds)
                nursery.start_soon(keep_measured, post.swarm, hosted.model_version, known, self._network_measured)
            if not options.stays:
                nursery.start_soon(watch_swarm)
            if options.pledge and options.deposit_at is not None:
                purse = Wallet(post.swarm, post.identity, options.deposit_at)
                nursery.start_soon(pledging.keep_deposited, purse, self._on_change)
            nursery.start_soon(watch_stop)
        if stop.is_set():
            move = None
        await self._leave(move)
        return move

    async def _leave(self, move: Move | None) -> None:
        """Takes no new work, tells the clients of the present sessions, and waits until they have moved."""
        timeout = self._post.options.drain_timeout
        self._context.draining = True
        self._next_span = move.target if move is not None else None
        if move is None:
            self._post.on_event("stopping", sessions=self._service.sessions)
        else:
            if self._post.placing.gaps():
                timeout = min(timeout, _GAP_DRAIN)
            self._post.on_event(
                "moving",
                blocks=[move.source.start, move.source.end],
                to=[move.target.start, move.target.end],
                reason=self._post.placing.reason,
                sessions=self._service.sessions,
            )
        if self._service.sessions or move is not None:
            self._post.swarm.announce(self._current())
        with trio.move_on_after(timeout):
            await self._service.wait_idle()

    async def _speed(self) -> BlockSpeed:
        """What was measured in an earlier run, else now."""
        blocks, key = self._compute.blocks, self._post.speed_key
        known = await trio.to_thread.run_sync(recall_speed, key)
        speed = known
        if speed is None:
            speed = await self._compute.call(lambda: measure_speed(blocks))
        if not speed.byte_seconds and not self._post.options.throughput:
            version = self._announcement.model_version
            seconds = await measure_network(self._post.swarm, version, timeout=_NETWORK_TIMEOUT)
            speed = replace(speed, byte_seconds=seconds)
        if speed != known:
            await trio.to_thread.run_sync(keep_speed, key, speed)
        return speed

    def _fitting_cache(self) -> int:
        """Tokens of attention cache to offer; claims their memory, and that of the weights."""
        blocks = self._compute.blocks
        memory, weights = device_memory(self._post.options.device), blocks.weight_bytes
        free = memory.free - unused(weights) if memory.shared else memory.free
        tokens = cache_tokens_that_fit(max(0, free), blocks.cache_bytes_per_token)
        if memory.shared:
            claim(weights + tokens * blocks.cache_bytes_per_token)
        return tokens

    def _serve(self) -> None:
        swarm, service = self._post.swarm, self._service
        swarm.set_handler(INFERENCE, wire.InferenceFrame, service.handle_session, max_payload=MAX_STEP_BYTES)
        swarm.set_handler(PUSH, wire.PushFrame, service.handle_push, max_payload=MAX_STEP_BYTES)
        for protocol, handler, max_header in (
            (FORWARD, service.handle_forward, MAX_WORK_HEADER),
            (BACKWARD, service.handle_backward, MAX_WORK_HEADER),
            (ADAPTER, self._adapters.handle, MAX_ADAPTER_HEADER),
        ):
            swarm.set_handler(protocol, wire.BatchFrame, handler, max_header=max_header, max_payload=PIECE_BYTES)

    def refuse(self) -> None:
        """From now on says that nobody is served; the services, and what they hold, can be forgotten."""
        refusal = Refusal(wire.ERROR_DRAINING, "this server has left its blocks and loads others").to_wire()
        swarm = self._post.swarm

        async def inference(stream: object) -> None:
            await stream.send(wire.InferenceFrame(error=refusal), timeout=_REFUSE_TIMEOUT)  # type: ignore[attr-defined]

        async def push(stream: object) -> None:
            await stream.send(wire.PushFrame(error=refusal), timeout=_REFUSE_TIMEOUT)  # type: ignore[attr-defined]

        async def work(stream: object) -> None:
            await stream.send(wire.BatchFrame(error=refusal), timeout=_REFUSE_TIMEOUT)  # type: ignore[attr-defined]

        swarm.set_handler(INFERENCE, wire.InferenceFrame, inference)
        swarm.set_handler(PUSH, wire.PushFrame, push)
        for protocol in (FORWARD, BACKWARD, ADAPTER):
            swarm.set_handler(protocol, wire.BatchFrame, work)

    # --- what is announced

    def _current(self) -> Announcement:
        return replace(
            self._announcement,
            state=ServerState.DRAINING if self._context.draining else ServerState.ONLINE,
            step_seconds=self._live.step_seconds,
            forward_tokens_per_second=1 / self._live.token_seconds,
            dtype=self._hosted.dtype,
            cache_tokens=self._tokens,
            cache_tokens_free=self._service.cache.free,
            queue_depth=self._compute.depth,
            rtts=dict(self._rtts),
            max_session_length=self._hosted.max_length,
            network_seconds=self._byte_seconds * self._compute.blocks.hidden_size * self._compute.blocks.dtype.itemsize,
            load_seconds=self._load_seconds,
            next_span=self._next_span,
            pledge=self._pledger(),
            device=self._compute.blocks.device.type,
            credits_of=self._issuers(),
            adapters=self._adapters.announced,
        )

    def _issuers(self) -> tuple[str, ...]:
        """The validators whose points are taken."""
        return tuple(self._post.swarm.trust.trusted.owners)[:MAX_ISSUERS]

    def _ready(self) -> dict[str, object]:
        swarm, span = self._post.swarm, self._announcement.span
        return {
            "peer_id": swarm.peer_id,
            "addrs": list(swarm.addrs),
            "model": self._hosted.model_name,
            "blocks": [span.start, span.end],
            "num_blocks": self._hosted.num_blocks,
            "model_version": self._hosted.model_version.hex(),
            "dtype": self._hosted.dtype,
            "quantisation": self._hosted.quantisation,
            "device": str(self._compute.blocks.device),
            "cache_tokens": self._tokens,
            "throughput": round(1 / self._live.step_seconds, 2),
            "adapters": [adapter.name for adapter in self._post.adapters],
        }

    def _on_change(self) -> None:
        self._changed.set()

    def _say(self, next_span: Span | None) -> None:
        self._next_span = next_span
        self._post.swarm.announce(self._current())

    async def _keep_announced(self) -> None:
        while True:
            await self._changed.wait()
            self._changed = trio.Event()
            self._post.swarm.announce(self._current())
            await trio.sleep(_ANNOUNCE_INTERVAL)

    async def _keep_speed_true(self) -> None:
        """Announces, and keeps for the next run, what steps really take."""
        while True:
            await trio.sleep(_CORRECT_INTERVAL)
            if self._live.correct():
                await self._keep_speed()

    async def _measure_when_idle(self) -> None:
        pause, count = _FIRST_IDLE, len(self._hosted.span)
        while True:
            await trio.sleep(pause * random.uniform(0.8, 1.2))
            pause = _NEXT_IDLE
            if not self._live.was_used() and not self._service.sessions and not self._compute.depth:
                measured = await self._compute.call(lambda: measure_speed(self._compute.blocks))
                if self._live.measured(measured.step_seconds * count, measured.token_seconds * count):
                    await self._keep_speed()

    async def _network_measured(self, byte_seconds: float) -> None:
        self._byte_seconds = byte_seconds
        await self._keep_speed()

    async def _keep_speed(self) -> None:
        count = len(self._hosted.span)
        speed = BlockSpeed(self._live.step_seconds / count, self._live.token_seconds / count, self._byte_seconds)
        await trio.to_thread.run_sync(keep_speed, self._post.speed_key, speed)
        self._on_change()
