"""A server from start to stop: joins, chooses blocks, loads, measures, announces, serves, says goodbye."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import psutil
import trio

from ...crypto.identity import Identity
from ...protocols import wire_pb2 as wire
from ...protocols.announcement import Announcement, ServerState
from ...protocols.framing import PeerError
from ...protocols.ids import BACKWARD, FORWARD, INFERENCE, PUSH, Span
from ...protocols.inference import MAX_STEP_BYTES
from ...protocols.training import MAX_HEADER as MAX_WORK_HEADER
from ...protocols.training import PIECE_BYTES
from ..errors import BadInput, ModelError, SwarmError
from ..models import Checkpoint, Manifest, ModelFolder, compute_manifest, resolve, verify_part
from ..models.progress import Progress
from ..models.quantisation import Quantisation, held_bytes
from ..planning.cost import steps_per_second
from ..swarm.swarm import Swarm
from .placement import Held, blocks_that_fit, cache_tokens_that_fit, most_needed

if TYPE_CHECKING:
    from ..blocks.span import BlockSpan
    from .pushes import PushStream
    from .service import InferenceService

T = TypeVar("T")

REFRESH_TIMEOUT: Final = 5.0
ANNOUNCE_INTERVAL: Final = 2.0
"""Free cache and queue depth change with every session; the swarm hears of it at most this often."""
PUSH_OPEN_TIMEOUT: Final = 5.0
RTT_TIMEOUT: Final = 3.0
NEIGHBOUR_INTERVAL: Final = 60.0
MAX_NEIGHBOURS: Final = 16
STOP_GRACE: Final = 3.0


@dataclass(frozen=True)
class ServerOptions:
    """What a person asked for; None means: decide. `throughput` in decode steps per second, `drain_timeout` seconds.

    `allow_clients` are the peer ids that may use this server; none lets everybody.
    """

    model: str
    blocks: Span | None = None
    num_blocks: int | None = None
    device: str = "auto"
    dtype: str = "auto"
    quant: Quantisation = "none"
    cache_tokens: int | None = None
    throughput: float | None = None
    name: str = ""
    revision: str | None = None
    offline: bool = False
    drain_timeout: float = 30.0
    allow_clients: tuple[str, ...] = ()


OnEvent = Callable[..., None]
"""Called with the event's name and its fields: "status" (text), "ready", "stopping"."""


async def run_server(
    swarm: Swarm,
    identity: Identity,
    options: ServerOptions,
    on_event: OnEvent,
    progress: Progress,
    stop: trio.Event,
) -> None:
    """Serves until `stop` is set or the task is cancelled, and tells the swarm goodbye.

    Raises:
        BadInput, ModelError: the model or the blocks that were asked for cannot be.
        MachineError: this machine cannot hold them.
        SwarmError: no manifest for a model of which only a part is here.
    """
    started = time.perf_counter()
    async with trio.open_nursery() as nursery:
        # Two seconds of imports, while the network and the disk are asked.
        imported = _Background(_import_blocks)
        nursery.start_soon(imported.run)
        folder = await _in_thread(
            lambda: resolve(
                options.model,
                need="config",
                progress=progress,
                revision=options.revision,
                offline=options.offline,
            )
        )
        _check_blocks(options, folder)
        with suppress(SwarmError):  # nobody answers just now; what was heard at joining has to do
            await swarm.refresh(timeout=REFRESH_TIMEOUT)
        folder, manifest, span = await _choose(swarm, folder, options, progress)
        swarm.serve_manifest(manifest.version, manifest.to_wire())
        announcement = _announcement(swarm, folder, manifest, span, options)
        swarm.announce(announcement)
        on_event("status", text=f"loading blocks {span} of {folder.num_blocks} of {folder.name}")
        await imported.wait()
        blocks = await _load(folder.path, span, options, progress)
        await _serve(swarm, identity, options, on_event, folder, announcement, blocks, started, stop, nursery)
        nursery.cancel_scope.cancel()


async def _serve(
    swarm: Swarm,
    identity: Identity,
    options: ServerOptions,
    on_event: OnEvent,
    folder: ModelFolder,
    announcement: Announcement,
    blocks: BlockSpan,
    started: float,
    stop: trio.Event,
    nursery: trio.Nursery,
) -> None:
    from .admission import Hosted
    from .cache_budget import CacheBudget
    from .compute import ComputeThread
    from .measure import measure_speed
    from .memory import return_memory
    from .service import InferenceService
    from .training import TrainingService

    compute = ComputeThread(blocks)
    compute.start()
    try:
        speed = await compute.call(lambda: measure_speed(blocks))
        tokens = options.cache_tokens or cache_tokens_that_fit(
            psutil.virtual_memory().available, blocks.cache_bytes_per_token
        )
        changed = trio.Event()
        rtts: dict[str, float] = {}
        hosted = Hosted(
            model_version=announcement.model_version,
            model_name=folder.name,
            num_blocks=folder.num_blocks,
            span=announcement.span,
            hidden_size=blocks.hidden_size,
            dtype=str(blocks.dtype).removeprefix("torch."),
            quantisation=blocks.quantisation,
            max_length=blocks.max_positions,
        )

        def on_change() -> None:
            changed.set()

        service = InferenceService(
            hosted,
            compute,
            CacheBudget(tokens),
            identity,
            _Neighbours(swarm, announcement.model_version),
            on_change,
            options.allow_clients,
        )
        swarm.set_handler(INFERENCE, wire.InferenceFrame, service.handle, max_payload=MAX_STEP_BYTES)
        swarm.set_handler(PUSH, wire.PushFrame, service.handle_push, max_payload=MAX_STEP_BYTES)
        training = TrainingService(hosted, compute, identity, blocks.can_backward, options.allow_clients)
        for protocol, handler in ((FORWARD, training.handle_forward), (BACKWARD, training.handle_backward)):
            swarm.set_handler(protocol, wire.WorkFrame, handler, max_header=MAX_WORK_HEADER, max_payload=PIECE_BYTES)
        step_seconds = 1 / options.throughput if options.throughput else speed.step_seconds

        def current() -> Announcement:
            return replace(
                announcement,
                state=ServerState.DRAINING if service.draining else ServerState.ONLINE,
                step_seconds=step_seconds,
                forward_tokens_per_second=speed.forward_tokens_per_second,
                dtype=hosted.dtype,
                cache_tokens=tokens,
                cache_tokens_free=service.budget.free,
                queue_depth=compute.depth,
                rtts=dict(rtts),
                max_session_length=hosted.max_length,
            )

        await compute.call(return_memory)
        swarm.announce(current())
        on_event(
            "ready",
            peer_id=swarm.peer_id,
            addrs=list(swarm.addrs),
            model=folder.name,
            blocks=[announcement.span.start, announcement.span.end],
            num_blocks=folder.num_blocks,
            model_version=announcement.model_version.hex(),
            dtype=hosted.dtype,
            quantisation=hosted.quantisation,
            device=str(blocks.device),
            cache_tokens=tokens,
            throughput=round(1 / step_seconds, 2),
            seconds=round(time.perf_counter() - started, 2),
        )

        async def keep_announced() -> None:
            nonlocal changed
            while True:
                await changed.wait()
                changed = trio.Event()
                swarm.announce(current())
                await trio.sleep(ANNOUNCE_INTERVAL)

        nursery.start_soon(keep_announced)
        nursery.start_soon(_measure_neighbours, swarm, announcement, rtts, on_change)
        await stop.wait()
        training.draining = True
        on_event("stopping", sessions=service.sessions)
        await _drain(service, swarm, current, options.drain_timeout)
        with trio.move_on_after(options.drain_timeout):
            await training.wait_idle()
    finally:
        with trio.CancelScope(shield=True), trio.move_on_after(STOP_GRACE):
            await swarm.retract()
            await compute.stop()


class _Neighbours:
    """Reaches the servers to which this one pushes."""

    def __init__(self, swarm: Swarm, model_version: bytes) -> None:
        self._swarm = swarm
        self._model_version = model_version

    async def open_push(self, peer_id: str, *, direct: bool = False) -> PushStream:
        if not self._swarm.is_connected(peer_id) and peer_id not in self._swarm.view.records:
            with suppress(SwarmError):  # the client has heard of a server that we have not
                await self._swarm.refresh(model_version=self._model_version, timeout=REFRESH_TIMEOUT)
        return await self._swarm.new_stream(
            peer_id, PUSH, wire.PushFrame, timeout=PUSH_OPEN_TIMEOUT, max_payload=MAX_STEP_BYTES, direct=direct
        )

    def watch_direct(self, peer_id: str) -> trio.Event:
        return self._swarm.watch_direct(peer_id)


async def _measure_neighbours(
    swarm: Swarm, own: Announcement, rtts: dict[str, float], on_change: Callable[[], None]
) -> None:
    """Keeps `rtts` filled with the round trips to servers that may come next in a chain, for routes that push."""

    async def measure(peer_id: str) -> None:
        try:
            rtts[peer_id] = await swarm.measure_rtt(peer_id, timeout=RTT_TIMEOUT)
        except PeerError:
            rtts.pop(peer_id, None)

    while True:
        servers = swarm.view.servers(own.model_version, now=time.time())
        following = [
            each.peer_id
            for each in servers
            if each.peer_id != swarm.peer_id and each.span.start <= own.span.end < each.span.end
        ]
        for gone in rtts.keys() - set(following):
            del rtts[gone]
        async with trio.open_nursery() as nursery:
            for peer_id in random.sample(following, min(len(following), MAX_NEIGHBOURS)):
                nursery.start_soon(measure, peer_id)
        on_change()
        await trio.sleep(NEIGHBOUR_INTERVAL * random.uniform(0.8, 1.2))


async def _drain(service: InferenceService, swarm: Swarm, current: Callable[[], Announcement], timeout: float) -> None:
    """Takes no new sessions, tells the clients of the present ones, and waits until they have moved."""
    service.draining = True
    if service.sessions:
        swarm.announce(current())
        with trio.move_on_after(timeout):
            await service.wait_idle()


def _check_blocks(options: ServerOptions, folder: ModelFolder) -> None:
    """
    Raises:
        BadInput: blocks that the model does not have.
    """
    if options.blocks is not None and options.blocks.end > folder.num_blocks:
        raise BadInput(
            f"--blocks {options.blocks}: {folder.name} has {folder.num_blocks} blocks, so the most is "
            f"0:{folder.num_blocks}"
        )
    if options.num_blocks is not None and not 1 <= options.num_blocks <= folder.num_blocks:
        raise BadInput(f"--num-blocks {options.num_blocks}: {folder.name} has {folder.num_blocks} blocks")


async def _choose(
    swarm: Swarm, folder: ModelFolder, options: ServerOptions, progress: Progress
) -> tuple[ModelFolder, Manifest, Span]:
    """The folder with the weights of the span that this server takes, and the manifest that they were checked by."""

    def fetch(need: Any) -> ModelFolder:
        return resolve(options.model, need=need, progress=progress, revision=options.revision, offline=options.offline)

    try:
        manifest = await _in_thread(lambda: compute_manifest(folder, progress))
        span = options.blocks or _most_needed(swarm, folder, manifest.version, options)
        return folder, manifest, span
    except ModelError:
        # Only a part is on this disk: what the whole is, somebody else must say.
        remote = await _manifest_of_swarm(swarm, folder)
    if remote is None:
        # The first server of a swarm makes the manifest, for which it needs the whole model once.
        whole = await _in_thread(lambda: fetch("all"))
        manifest = await _in_thread(lambda: compute_manifest(whole, progress))
        return whole, manifest, options.blocks or _most_needed(swarm, whole, manifest.version, options)
    span = options.blocks or _most_needed(swarm, folder, remote.version, options)
    part = await _in_thread(lambda: fetch(span))
    await _in_thread(lambda: verify_part(part, remote, span, progress))
    return part, remote, span


async def _manifest_of_swarm(swarm: Swarm, folder: ModelFolder) -> Manifest | None:
    for server in swarm.view.servers(now=time.time()):
        if server.model_name == folder.name and server.num_blocks == folder.num_blocks:
            try:
                data = await swarm.fetch_manifest(server.peer_id, server.model_version, timeout=REFRESH_TIMEOUT)
                if data is not None:
                    return Manifest.from_wire(data, server.model_version)
            except (PeerError, SwarmError, ModelError):
                continue
    return None


def _most_needed(swarm: Swarm, folder: ModelFolder, version: bytes, options: ServerOptions) -> Span:
    held = [
        Held(server.span, steps_per_second(server.step_seconds))
        for server in swarm.view.servers(version, now=time.time())
        if server.peer_id != swarm.peer_id and server.state in (ServerState.ONLINE, ServerState.JOINING)
    ]
    count = options.num_blocks
    if count is None:
        tensors = Checkpoint(folder.path, folder.num_blocks).tensors(0)
        block_bytes = sum(held_bytes(options.quant, tensor.shape, tensor.nbytes) for tensor in tensors)
        # While a block is quantised it is there as it was, too.
        at_once = 0 if options.quant == "none" else sum(tensor.nbytes for tensor in tensors)
        free = max(0, psutil.virtual_memory().available - at_once)
        count = blocks_that_fit(free, block_bytes, folder.num_blocks)
    return most_needed(held, folder.num_blocks, count)


def _announcement(
    swarm: Swarm, folder: ModelFolder, manifest: Manifest, span: Span, options: ServerOptions
) -> Announcement:
    from ... import __version__

    return Announcement(
        peer_id=swarm.peer_id,
        model_version=manifest.version,
        model_name=folder.name,
        num_blocks=folder.num_blocks,
        span=span,
        state=ServerState.JOINING,
        software_version=__version__,
        public_name=options.name,
        quantisation=options.quant,
    )


async def _load(path: Path, span: Span, options: ServerOptions, progress: Progress) -> BlockSpan:
    from ..blocks.span import load_span

    return await _in_thread(
        lambda: load_span(
            path, span, device=options.device, dtype=options.dtype, quantisation=options.quant, progress=progress
        )
    )


def _import_blocks() -> None:
    from ..blocks.collector import collector_paused

    with collector_paused():
        from ..blocks import span  # noqa: F401
        from . import service  # noqa: F401


async def _in_thread(function: Callable[[], T]) -> T:
    """Runs `function` in a worker thread, which is left behind if we are told to stop meanwhile."""
    return await trio.to_thread.run_sync(function, abandon_on_cancel=True)


class _Background:
    """A function in a worker thread, whose end somebody awaits later."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function
        self._done = trio.Event()

    async def run(self) -> None:
        await _in_thread(self._function)
        self._done.set()

    async def wait(self) -> None:
        await self._done.wait()
