"""A server while it holds one span: measures, announces, serves, and drains when it stops or goes elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import trio

from ....protocols import wire_pb2 as wire
from ....protocols.adapter import ADAPTER
from ....protocols.announcement import ANNOUNCEMENT, Announcement, ServerState
from ....protocols.framing import MessageStream
from ....protocols.ids import Span, StreamProtocol
from ....protocols.inference import INFERENCE, PUSH, Refusal
from ....protocols.training import BACKWARD, FORWARD
from ...blocks.span import BlockSpan
from ...errors import ModelError, PetalnodeError
from ...models.cache_dir import cache_dir
from ...placement.plan import Move
from ...swarm.swarm import Swarm
from ..budget import MemoryBudget
from ..compute_thread import ComputeThread
from ..requests.adapters import Adapters
from ..requests.admission import Hosted
from ..requests.pushes import PushConnector
from ..requests.request import RequestContext
from ..requests.service import SERVICE, RequestService
from ..tallies import Serving
from .context import ServerContext
from .memory import MEMORY_SHARES, cache_tokens_that_fit, check_cache_fits, claim, device_memory, return_memory, unused
from .other_servers import keep_measured, keep_rtts, measure_network
from .pausing import Pause
from .pledging import Pledging
from .rebalancing import next_move
from .speed import SpanSpeed

log = logging.getLogger(__name__)

OnReady = Callable[[dict[str, object]], None]
"""Called with the fields of the ready event."""


@dataclass(frozen=True)
class ServingTimes:
    """Seconds of what a server does beside computing."""

    announce_interval: float = 2.0
    """Free cache and queue depth change with every session; the swarm hears of it at most this often."""
    gap_drain: float = 3.0
    """Seconds that sessions have to leave when blocks are missing elsewhere: no other session works till they are
    there."""
    refuse_timeout: float = 5.0
    retry_pause: float = 60.0
    look_at_files: float = 5.0
    network_timeout: float = 4.0  # Seconds that measuring the network may hold up the first announcement


SERVING: Final = ServingTimes()


async def serve_span(
    context: ServerContext,
    announcement: Announcement,
    blocks: BlockSpan,
    load_seconds: float,
    on_ready: OnReady,
    stop: trio.Event,
) -> Move | None:
    """Serves `blocks` until `stop` is set (then None) or the swarm needs this server elsewhere.

    `load_seconds` is what loading a block took. When this returns all sessions have left or had the time to. Nothing
    here holds the blocks any more.
    """
    compute = ComputeThread(blocks, context.parts.tallies, context.swarm.host)
    compute.start()
    try:
        speed = await SpanSpeed.measured(compute, context.speed_key, context.options.throughput)
        if not speed.byte_seconds and not context.options.throughput:
            version, timeout = announcement.model_version, SERVING.network_timeout
            if seconds := await measure_network(context.swarm, version, timeout=timeout):
                await speed.network_measured(seconds)
        tokens = context.options.cache_tokens
        # A server that has changed its blocks keeps what it had promised.
        if tokens is None or not context.parts.tallies.block_changes:
            tokens = await trio.to_thread.run_sync(_cache_tokens, blocks, tokens)
        server = SpanServer(context, replace(announcement, load_seconds=load_seconds), compute, speed, tokens)
        return await server.run(on_ready, stop)
    finally:
        context.parts.tallies.serving = None
        with trio.CancelScope(shield=True):
            _refuse(context.swarm)
            await compute.stop()


def _mapped_weights() -> dict[Path, tuple[int, int, int]]:
    """The files of weights that this process has mapped, as they are now. On Linux, and without petalnode's own, which
    are written once."""
    with suppress(OSError):
        lines = Path("/proc/self/maps").read_text().splitlines()
        files = {Path(line.split(maxsplit=5)[5]) for line in lines if line.endswith(".safetensors")}
        return {file: _written(file) for file in files if cache_dir() not in file.parents}
    return {}


def _written(file: Path) -> tuple[int, int, int]:
    """The file's number, its size, and when it was written to. What is mapped stays so when another takes its name."""
    try:
        stat = file.stat()
    except OSError:
        return 0, 0, 0
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


class SpanServer:
    """Serves one span with `cache_tokens` of attention cache. `announcement` is what is announced from the start."""

    def __init__(
        self,
        context: ServerContext,
        announcement: Announcement,
        compute: ComputeThread,
        speed: SpanSpeed,
        cache_tokens: int,
    ) -> None:
        self._context = context
        self._announcement = announcement
        self._compute = compute
        self._speed = speed
        self._move: Move | None = None  # that ends the serving
        self._next_span: Span | None = None
        self._away = False  # paused, and nobody is left: not announced
        self._choosing = trio.CancelScope()  # of other blocks
        self._rtts: dict[str, float] = {}
        blocks = compute.blocks
        self._hosted = Hosted(
            model_version=announcement.model_version,
            model_name=context.folder.name,
            num_blocks=context.folder.num_blocks,
            span=announcement.span,
            hidden_size=blocks.hidden_size,
            boundaries=blocks.stack.boundaries,
            takes_positions=blocks.stack.takes_positions,
            takes_groups=blocks.takes_groups,
            features=blocks.features,
            dtype=str(blocks.dtype).removeprefix("torch."),
            quantisation=blocks.quantisation,
            max_length=blocks.max_positions,
        )
        self._pledging = Pledging(context.swarm.identity, self._hosted, context.options.pledge)
        self._requests = RequestContext(
            self._hosted,
            compute,
            context.swarm.identity,
            frozenset(context.options.allow_clients),
            self._pledging.current,
            tallies=context.parts.tallies,
            prefix_cache=context.options.prefix_cache,
            origins=context.swarm.host,
            changed=speed.changed,
        )
        self._adapters = Adapters(self._requests)
        self._service = RequestService(
            self._requests,
            MemoryBudget(cache_tokens),
            PushConnector(context.swarm, announcement.model_version),
            self._adapters,
            context.parts.payments(self._issuers()),
        )

    async def run(self, on_ready: OnReady, stop: trio.Event) -> Move | None:
        await self._adapters.load(self._context.adapters)
        self._set_handlers()
        self._compute.steps.on_decode = self._speed.live.note_decode
        self._compute.steps.on_prefill = self._speed.live.note_prefill
        if not self._context.parts.shared:
            await self._compute.call(return_memory)
        self._requests.draining = self._context.parts.pause.wanted
        self._announce()
        self._context.parts.tallies.serving = self.serving
        mapped = await trio.to_thread.run_sync(_mapped_weights)
        on_ready(self._ready())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._keep_announced)
            self._start_measuring(nursery)
            nursery.start_soon(self._obey_pause)
            nursery.start_soon(self._watch_files, mapped)
            if not self._context.options.stays:
                nursery.start_soon(self._watch_swarm, nursery.cancel_scope)
            if self._context.options.pledge and self._context.parts.depositor is not None:
                depositor, changed = self._context.parts.depositor, self._speed.changed
                nursery.start_soon(self._pledging.keep_deposited, depositor, changed)
            await stop.wait()
            nursery.cancel_scope.cancel()
        move = None if stop.is_set() else self._move
        await self._leave(move)
        return move

    async def _watch_swarm(self, serving: trio.CancelScope) -> None:
        self._move = await self._next_move()
        serving.cancel()

    def _start_measuring(self, nursery: trio.Nursery) -> None:
        swarm, version = self._context.swarm, self._announcement.model_version
        nursery.start_soon(keep_rtts, swarm, self._announcement, self._rtts, self._speed.changed)
        if self._context.options.throughput:
            return
        known = bool(self._speed.byte_seconds)
        nursery.start_soon(self._speed.keep_corrected)
        nursery.start_soon(self._speed.measure_when_idle, self._service, self._context.parts.pause)
        nursery.start_soon(keep_measured, swarm, version, known, self._speed)

    async def _next_move(self) -> Move:
        """Where the swarm needs this server, which has fetched the blocks that it will load there."""
        load = self._announcement.load_seconds * len(self._announcement.span)
        while True:
            await self._context.parts.pause.wait(False)
            try:
                with trio.CancelScope() as self._choosing:
                    move = await next_move(self._context.placement, load, self._announce_move)
                    await self._context.source.weights(move.target)
                    if self._context.placement.may_go(move):  # fetching took long, and others may have left
                        return move
                    self._announce_move(None)
            except PetalnodeError as error:
                self._context.parts.on_event("status", text=f"stays with its blocks: {error}")
                await self._rest()
            except Exception:  # an error of ours here must not end the sessions of a server that works
                log.exception("choosing other blocks failed")
                await self._rest()

    async def _rest(self) -> None:
        self._announce_move(None)
        await trio.sleep(SERVING.retry_pause)

    async def _obey_pause(self) -> None:
        """Takes no new requests while a pause is wanted, and is not announced once all sessions have moved or ended."""
        pause, on_event = self._context.parts.pause, self._context.parts.on_event
        while True:
            await pause.wait(True)
            self._requests.draining = True
            self._choosing.cancel()
            self._next_span = None
            on_event("pausing", sessions=self._service.sessions, reason=pause.reason)
            self._announce()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_cancel_when_resumed, pause, nursery.cancel_scope)
                await self._service.wait_idle()
                self._away = True
                await self._context.swarm.retract()
                on_event("paused", reason=pause.reason)
                await pause.wait(False)
            self._away = self._requests.draining = False
            self._announce()
            on_event("resumed")

    async def _watch_files(self, served: Mapping[Path, tuple[int, int, int]]) -> None:
        """
        Raises:
            ModelError: somebody writes to one of the files, whose mapped bytes are weights.
        """
        while served:
            await trio.sleep(SERVING.look_at_files)
            for file, before in served.items():
                now = _written(file)
                if now[0] == before[0] and now != before:
                    raise ModelError(f"{file} was written to while it was served: run it again when it is complete")

    async def _leave(self, move: Move | None) -> None:
        """Takes no new requests, tells the clients of the present sessions, and waits until they have moved."""
        timeout, placement, sessions = (
            self._context.options.drain_timeout,
            self._context.placement,
            self._service.sessions,
        )
        self._requests.draining = True
        self._next_span = move.target if move is not None else None
        if move is None:
            self._context.parts.on_event("stopping", sessions=sessions)
        else:
            if placement.gaps():
                timeout = min(timeout, SERVING.gap_drain)
            self._context.parts.on_event(
                "moving",
                blocks=[move.source.start, move.source.end],
                to=[move.target.start, move.target.end],
                reason=placement.reason,
                sessions=sessions,
            )
        if sessions or move is not None:
            self._announce()
        with trio.move_on_after(timeout):
            await self._service.wait_idle()
        if move is None:
            self._context.parts.on_event("stopped", sessions=self._service.sessions)
        self._requests.end()

    def _set_handlers(self) -> None:
        swarm, service = self._context.swarm, self._service
        most = 2 * SERVICE.most_sessions  # two while a session moves
        swarm.set_handler(INFERENCE, service.handle_session, in_turn=False, max_streams=most)
        swarm.set_handler(PUSH, service.handle_push, in_turn=False, max_streams=most)
        swarm.set_handler(FORWARD, service.handle_forward, in_turn=False)
        swarm.set_handler(BACKWARD, service.handle_backward, in_turn=False)
        swarm.set_handler(ADAPTER, self._adapters.handle, in_turn=False)

    # --- what is announced

    def _announce(self) -> None:
        if not self._away:
            self._context.swarm.announce(self._current())

    def _current(self) -> Announcement:
        blocks, live = self._compute.blocks, self._speed.live
        return replace(
            self._announcement,
            state=ServerState.DRAINING if self._requests.draining else ServerState.ONLINE,
            step_seconds=live.step_seconds,
            forward_tokens_per_second=1 / live.token_seconds,
            dtype=self._hosted.dtype,
            cache_tokens=self._service.cache.capacity,
            cache_tokens_free=self._service.cache.free,
            queue_depth=self._compute.depth,
            rtts=dict(self._rtts),
            max_session_length=self._hosted.max_length,
            network_seconds=self._speed.byte_seconds * blocks.stack.width() * blocks.dtype.itemsize,
            next_span=self._next_span,
            pledge=self._pledging.current(),
            device=_device_kind(blocks),
            credits_of=self._issuers(),
            adapters=self._adapters.announced,
        )

    def serving(self) -> Serving:
        """What is served now."""
        hosted, service = self._hosted, self._service
        return Serving(
            model=hosted.model_name,
            num_blocks=hosted.num_blocks,
            span=hosted.span,
            state="paused" if self._away else "draining" if self._requests.draining else "online",
            dtype=hosted.dtype,
            quantisation=hosted.quantisation,
            device=_device_kind(self._compute.blocks),
            sessions=service.sessions,
            batch_streams=service.batch_streams,
            cache_capacity=service.cache.capacity,
            cache_free=service.cache.free,
            waiting=service.cache.waiting,
            queue_depth=self._compute.depth,
            steps_per_second=1 / self._speed.live.step_seconds,
            experts=self._compute.blocks.expert_counts,
        )

    def _issuers(self) -> tuple[str, ...]:
        """The validators whose points are taken."""
        return tuple(self._context.swarm.trust.trusted.owners)[: ANNOUNCEMENT.max_issuers]

    def _ready(self) -> dict[str, object]:
        swarm, span, parts = self._context.swarm, self._announcement.span, self._compute.blocks.parts
        return {
            "peer_id": swarm.peer_id,
            "addrs": list(swarm.addrs),
            "model": self._hosted.model_name,
            "blocks": [span.start, span.end],
            "num_blocks": self._hosted.num_blocks,
            "model_version": self._hosted.model_version.hex(),
            "dtype": self._hosted.dtype,
            "quantisation": self._hosted.quantisation,
            "device": "+".join(str(part.device) for part in parts),
            "devices": [{"device": str(part.device), "blocks": [part.span.start, part.span.end]} for part in parts],
            "kernels": self._compute.blocks.kernels,
            "experts_on_disk": self._compute.blocks.disk_bytes > 0,
            "cache_tokens": self._service.cache.capacity,
            "cache_dtype": self._compute.blocks.cache_dtype,
            "cache_bytes_per_token": self._compute.blocks.cache_bytes_per_token,
            "throughput": round(1 / self._speed.live.step_seconds, 2),
            "adapters": [adapter.name for adapter in self._context.adapters],
        }

    def _announce_move(self, next_span: Span | None) -> None:
        self._next_span = next_span
        self._announce()

    async def _keep_announced(self) -> None:
        while True:
            await self._speed.changed.wait()
            self._announce()
            await trio.sleep(SERVING.announce_interval)


def _device_kind(blocks: BlockSpan) -> str:
    """As it is announced: of several devices every kind."""
    return "+".join(sorted({part.device.type for part in blocks.parts}))


def _cache_tokens(blocks: BlockSpan, asked: int | None) -> int:
    """Tokens of attention cache to offer, as many as fit on each device; claims the memory of all programs that they,
    and the weights there, take.

    Raises:
        MachineError: fewer fit than were asked for, now that it is known what a token takes.
    """
    own = [[part] for part in blocks.parts if part.device.type == "cuda"]
    shared = [part for part in blocks.parts if part.device.type != "cuda"]
    tokens = asked or MEMORY_SHARES.max_cache_tokens
    for parts in filter(None, [*own, shared]):
        memory = device_memory(str(parts[0].device))
        weights = sum(part.weight_bytes - part.disk_bytes for part in parts)
        per_token = sum(part.cache_bytes_per_token for part in parts)
        free = memory.free - unused(weights) if memory.shared else memory.free
        if asked is not None:
            check_cache_fits(memory, free, asked, per_token)
        else:
            tokens = min(tokens, cache_tokens_that_fit(max(0, free), per_token))
        if memory.shared:  # the last one, so that it is known how many tokens all have
            claim(weights + tokens * per_token)
    return tokens


def _refuse(swarm: Swarm) -> None:
    """From now on says that nobody is served; the services, and what they hold, can be forgotten."""
    error = Refusal(wire.ERROR_DRAINING, "this server has left its blocks and loads others").to_wire()
    served: tuple[StreamProtocol[Any], ...] = (INFERENCE, PUSH, FORWARD, BACKWARD, ADAPTER)
    for protocol in served:
        swarm.set_handler(protocol, partial(_send_refusal, protocol.frame(error=error)))


async def _send_refusal(refusal: Any, stream: MessageStream[Any]) -> None:
    await stream.send(refusal, timeout=SERVING.refuse_timeout)


async def _cancel_when_resumed(pause: Pause, scope: trio.CancelScope) -> None:
    await pause.wait(False)
    scope.cancel()
