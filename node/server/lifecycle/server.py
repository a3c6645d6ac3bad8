"""A server from start to stop: joins, chooses blocks, loads, serves, changes its blocks, retracts its announcement."""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import trio

from ....protocols.announcement import Announcement, ServerState
from ....protocols.ids import Span
from ...blocks.kernels.library import library
from ...errors import MachineError, PetalnodeError, SwarmError, reason_of
from ...models import ModelFolder
from ...models.cache_dir import size
from ...models.disk_limit import in_use, keep_within, note_use
from ...placement.plan import DEFAULT
from ...swarm.swarm import Swarm
from ...version import __version__
from ...weights.holder import hand_on
from .context import ServerContext
from .devices import cut, plan_memory
from .exactness import exact_unasked
from .memory import Sizing, has_accelerator, return_memory
from .options import ServerOptions, ServerParts, check_blocks, read_adapters
from .other_servers import serve_transfers
from .rebalancing import PlacementState, join_where_needed
from .source import ModelSource, find_folder, find_source, in_thread
from .speed import SpeedKey, cpu_name, cpu_threads, keep_trial, recall_speed, recall_trial

if TYPE_CHECKING:
    from ...blocks.span import BlockSpan


log = logging.getLogger(__name__)

REFRESH_TIMEOUT: Final = 5.0
STOP_GRACE: Final = 3.0


async def run_server(swarm: Swarm, options: ServerOptions, parts: ServerParts, stop: trio.Event) -> None:
    """Serves until `stop` is set or the task is cancelled, and retracts its announcement.

    Raises:
        BadInput, ModelError: the model or the blocks that were asked for cannot be.
        MachineError: this machine cannot hold them.
        SwarmError: no manifest for a model of which only a part is here.
    """
    started = time.perf_counter()
    async with trio.open_nursery() as nursery:
        # Two seconds of imports, while the network and the disk are asked.
        imported = trio.Event()
        nursery.start_soon(_import_blocks, imported)
        folder, remote = await find_folder(swarm, options, parts.progress)
        check_blocks(options, folder)
        with suppress(SwarmError):  # nobody answers just now; what was heard at joining has to do
            await swarm.refresh(timeout=REFRESH_TIMEOUT)
        await imported.wait()
        sizing = await in_thread(lambda: _plan_memory(folder, options))  # before minutes are spent on reading weights
        source = await find_source(swarm, folder, options, parts.progress, remote)
        adapters = await in_thread(lambda: read_adapters(options.adapters, source.manifest.version, folder.name))
        swarm.serve_manifest(source.manifest.version, source.manifest.to_wire())
        serve_transfers(swarm)
        hand_on(swarm, source.manifest, source.folder, options.share_weights)
        gain = DEFAULT.gain if options.gain is None else options.gain
        policy = replace(DEFAULT, gain=gain, boundaries=folder.boundaries)
        chosen = await in_thread(lambda: exact_unasked(options, folder))
        context = ServerContext(
            swarm,
            chosen,
            parts,
            source,
            PlacementState(swarm, source.manifest.version, folder.num_blocks, policy),
            _speed_key(source, chosen),
            tuple(adapters),
        )
        try:
            await Server(context, started, sizing, options).run(stop)
        finally:
            with trio.CancelScope(shield=True), trio.move_on_after(STOP_GRACE):
                await swarm.retract()
        nursery.cancel_scope.cancel()


class Server:
    """Serves one span after the other, as `context` has it; `sizing` says how many blocks. Where the first ones cannot
    be loaded so, all are as `asked`."""

    def __init__(self, context: ServerContext, started: float, sizing: Sizing, asked: ServerOptions) -> None:
        self._context = context
        self._asked = asked
        self._sizing = sizing
        self._started = started
        self._count_reason = self._blocks_reason = ""

    async def run(self, stop: trio.Event) -> None:
        span = await self._first_span()
        came_from: Span | None = None
        while not stop.is_set():
            began = time.perf_counter()
            try:
                blocks = await self._load(span)
            except Exception as error:
                if came_from is not None:
                    # The blocks that were here a minute ago can be had again. Others would fail at each look.
                    log.debug("blocks %s cannot be loaded", span, exc_info=error)
                    self._status(f"cannot change to blocks {span}, stays with {came_from}: {reason_of(error)}")
                    self._asked = replace(self._asked, gain=None)
                    self._context = replace(self._context, options=replace(self._context.options, gain=None))
                    span, came_from = came_from, None
                    continue
                if not isinstance(error, PetalnodeError) or self._context.options == self._asked:
                    raise
                key = _speed_key(self._context.source, self._asked)
                self._context = replace(self._context, options=self._asked, speed_key=key)
                self._status(f"not exact to the bit: {error}")
                continue
            from .span_server import serve_span  # with torch: 2 s, which passed while the network was asked

            load_seconds = (time.perf_counter() - began) / len(span)
            since, event = (self._started, "ready") if came_from is None else (began, "moved")
            on_ready = partial(self._on_ready, event, since)
            move = await serve_span(self._context, self._joining(span), blocks, load_seconds, on_ready, stop)
            del blocks
            if move is None:
                return
            span, came_from = move.target, move.source
            self._context.parts.tallies.block_changes += 1
            self._blocks_reason = self._context.placement.reason

    def _on_ready(self, event: str, since: float, fields: dict[str, object]) -> None:
        reasons = {"count_reason": self._count_reason, "blocks_reason": self._blocks_reason}
        self._context.parts.on_event(event, **fields, **reasons, seconds=round(time.perf_counter() - since, 2))

    async def _first_span(self) -> Span:
        options, folder = self._context.options, self._context.folder
        if self._sizing.reason:
            self._count_reason = self._sizing.reason
            self._status(self._sizing.reason)
        if options.blocks is not None:
            return options.blocks
        count = self._sizing.count
        throughput = options.throughput
        if throughput is None:
            known = await in_thread(lambda: recall_speed(self._context.speed_key))
            throughput = 1 / (known.step_seconds * count) if known is not None else None

        span = await join_where_needed(self._context.placement, count, throughput, self._announce_choice)
        self._blocks_reason = self._context.placement.reason
        self._status(f"taking blocks {span} of {folder.num_blocks} of {folder.name}: {self._blocks_reason}")
        return span

    def _announce_choice(self, span: Span) -> None:
        self._context.swarm.announce(replace(self._joining(span), next_span=span))

    async def _load(self, span: Span) -> BlockSpan:
        folder = self._context.folder
        self._context.swarm.announce(self._joining(span))
        self._status(f"loading blocks {span} of {folder.num_blocks} of {folder.name}")
        path = await self._context.source.weights(span)
        await in_thread(lambda: self._keep_disk(path, span))
        return await in_thread(lambda: self._read_blocks(path, span))

    def _read_blocks(self, path: Path, span: Span) -> BlockSpan:
        from ...blocks.span import Loading, load
        from ...blocks.split import SplitSpan

        options, parts, loaded = self._context.options, self._context.parts, []
        if not parts.shared:
            return_memory()  # of imports, digests and the blocks before
        cuts = cut(span, self._sizing.rooms, self._context.folder.boundaries)
        for device, own in zip(options.devices, cuts, strict=True):
            key = _speed_key(self._context.source, replace(options, devices=(device,)))
            known = parts.known[key] = parts.known.get(key) or recall_trial(key)
            kind = device, options.dtype, str(options.numerics), options.kernels
            how = Loading(*kind, parts.progress, experts_on_disk=self._sizing.on_disk, known=known)
            loaded.append(load(path, own, how))
            keep_trial(key, known)
        blocks = loaded[0] if len(loaded) == 1 else SplitSpan(loaded)
        if options.cache_dtype == "float32" and blocks.cache_dtype != "float32":
            raise MachineError(
                f"--cache-dtype float32 computes in float32, not in {blocks.cache_dtype}: add --dtype float32"
            )
        return blocks if parts.computing is None else parts.computing(blocks)

    def _keep_disk(self, path: Path, span: Span) -> None:
        used = in_use(path, self._context.folder.num_blocks, span)
        note_use(used)
        limit = self._context.options.max_disk
        if limit is not None and (remaining := keep_within(limit, used)) > limit:
            self._status(
                f"these blocks alone take {size(remaining)} of the disk, more than --max-disk {size(limit)}: all else "
                "was removed"
            )

    def _joining(self, span: Span) -> Announcement:
        options, swarm = self._context.options, self._context.swarm
        known = None if options.throughput else recall_speed(self._context.speed_key)
        return Announcement(
            peer_id=swarm.peer_id,
            model_version=self._context.source.manifest.version,
            model_name=self._context.folder.name,
            num_blocks=self._context.folder.num_blocks,
            span=span,
            state=ServerState.JOINING,
            software_version=__version__,
            public_name=options.name,
            quantisation=str(options.numerics),
            fixed=options.stays,
            step_seconds=(
                1 / options.throughput if options.throughput else known.step_seconds * len(span) if known else 0.0
            ),
        )

    def _status(self, text: str) -> None:
        self._context.parts.on_event("status", text=text)


def _speed_key(source: ModelSource, options: ServerOptions) -> SpeedKey:
    hardware = " and ".join(map(_hardware, options.devices))
    if options.kernels != "torch" and (found := library()) is not None:
        hardware = f"{hardware}, kernels {options.kernels} {found.isa} {found.name}"
    return SpeedKey(source.manifest.version, options.dtype, str(options.numerics), hardware, cpu_threads())


def _hardware(device: str) -> str:
    if has_accelerator(device):
        import torch

        from ...blocks.config import choose_device

        chosen = choose_device(device)
        if chosen.type != "cpu":
            return f"{chosen.type} {torch.cuda.get_device_name(chosen) if chosen.type == 'cuda' else cpu_name()}"
    return cpu_name()


def _plan_memory(folder: ModelFolder, options: ServerOptions) -> Sizing:
    """As `plan_memory`, which imports the model's own modules."""
    from ...blocks import collector_paused

    with collector_paused():
        return plan_memory(folder, options)


async def _import_blocks(imported: trio.Event) -> None:
    await in_thread(_import_span_server)
    imported.set()


def _import_span_server() -> None:
    from ...blocks import collector_paused

    with collector_paused():
        from . import span_server  # noqa: F401
