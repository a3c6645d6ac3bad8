"""`petalnode fit`: which models fit on this machine, those of a file or a swarm, and how fast. Nothing is fetched."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

import numpy as np
import psutil
import trio
import typer
from rich.table import Table

from .....protocols.announcement import Announcement
from .....protocols.framing import PeerError
from ....client.deadlines import DEADLINES
from ....client.round_trips import measure_rtts
from ....errors import BadInput, ModelError, PetalnodeError
from ....models import Checkpoint, resolve
from ....models.parts import EMBEDDINGS, HEAD
from ....placement.planning.machines_file import DEVICES, MACHINES, SHARED, Fleet, Machine, fleet_of, read_machines
from ....placement.planning.model_sizes import (
    WEIGHTS,
    Fit,
    MachineCapacity,
    ModelSize,
    best_fit,
    fit_of,
    hosts_of,
    known_model,
    known_models,
    size_by_config,
)
from ....placement.planning.plans import fleet_of_servers
from ....server.lifecycle.memory import MEMORY_SHARES, Memory, device_memory, unused
from ....server.lifecycle.pausing import MachineMeter
from ....swarm.swarm import Swarm
from ....swarm.view import is_online
from ...join import JoinOptions, joined, joins_swarm
from ...option import option
from ...output import Output


async def measured(swarm: Swarm, servers: Sequence[Announcement], output: Output) -> dict[str, float]:
    """Seconds of a round trip by peer id, of the servers that answer."""
    rtts: dict[str, float] = {}
    found = await measure_rtts(swarm, [server.peer_id for server in servers], timeout=DEADLINES.rtt)
    for peer_id, seconds in found.items():
        if isinstance(seconds, PeerError):
            output.note(f"left out: {seconds}")
        else:
            rtts[peer_id] = seconds
    return rtts


_READ: Final = 64 << 20  # bytes that each core reads, to see how quick the memory is
_TRIES: Final = 25
_BUSY: Final = 0.2  # of all processors, used by other programs: from here on it is told
_HELD: Final = {"none": "bf16", "int8": "Q8_0", "nf4": "Q4_K_M"}
"""What the quantisations that servers announce take about as much memory as."""


@joins_swarm
def fit(
    model: Annotated[
        str | None, typer.Argument(help="One model: of the table, or a folder or hub id that is on this machine.")
    ] = None,
    machines: Path | None = option(None, "The machines of this file (docs/planning.md).", "FILE"),
    *,
    join: JoinOptions,
) -> None:
    """Say which models fit, on this machine, those of --machines, or with --peer those of a swarm, and how fast."""
    output = Output(join.json)
    models = known_models() if model is None else [size_as_here(_named(model), model)]
    if machines is not None:
        hosts, fleet = hosts_of_file(machines)
        where = str(machines)
    elif join.peers:
        join.check()
        hosts, fleet = trio.run(_of_swarm, join, output)
        where = "the servers of this swarm"
    else:
        here, busy = here_now()
        hosts, fleet, where = [here], alone(), "this machine"
        if busy:
            output.note(busy)
    told = ", ".join(f"{host.name} {host.memory / 1e9:.1f} GB at {host.bandwidth / 1e9:.0f} GB/s" for host in hosts[:8])
    output.say(f"{where}: {told}{' and more' if len(hosts) > 8 else ''}")
    if model is None:
        _say([best_fit(hosts, fleet, one) for one in models], output)
    else:
        _say(_every_fit(hosts, fleet, models[0]), output)


def say_fit_here(models: Mapping[str, str], output: Output) -> None:
    """Says how models fit on this machine, given by what each is called and what it is found by. Those whose size is
    not known are left out; BadInput if it is the only one."""
    (host, busy), fits = here_now(), list[Fit]()
    for name, found_by in models.items():
        known = _size_in(found_by) if len(models) > 1 else _named(found_by)
        if known is None:
            continue
        size = size_as_here(known, found_by)
        fits += _every_fit([host], alone(), size if name == found_by else replace(size, name=name))
    if busy:
        output.note(busy)
    _say(fits, output)


def _every_fit(hosts: Sequence[MachineCapacity], fleet: Fleet, model: ModelSize) -> list[Fit]:
    """In the weights of the table, and in those that are here, if there are any."""
    return [fit_of(hosts, fleet, model, weights) for weights in (*WEIGHTS, *(["as it is"] if model.stored else []))]


def size_as_here(size: ModelSize, model: str) -> ModelSize:
    """The size with what a server holds of the weights that are on this machine, if they are."""
    try:
        folder = resolve(model, need="config", offline=True)
        from ....blocks.architecture import block_sizes  # with torch: two seconds, where there are weights

        held = max(block_sizes(folder.path, "auto", "none", "auto").held)
    except PetalnodeError:
        return size
    ends = stored_bytes(folder.path, folder.num_blocks)[1] or 0
    return replace(size, stored=8 * held / size.block_parameters, stored_ends=ends)


def stored_bytes(path: Path, num_blocks: int) -> tuple[int | None, int | None]:
    """Of the largest block, and of what a client needs, as far as these are here; no guess is made."""
    try:
        checkpoint = Checkpoint(path, num_blocks)
    except ModelError:
        return None, None
    blocks: list[int] = []
    ends: list[int] = []
    for part in checkpoint.parts:
        try:
            (ends if part in (EMBEDDINGS, HEAD) else blocks).append(checkpoint.nbytes(part))
        except ModelError:
            continue
    return max(blocks, default=None), sum(ends) if len(ends) == 2 else None


def _say(fits: Sequence[Fit], output: Output) -> None:
    for found in fits:
        output.emit(**_as_json(found))
    if not output.as_json:
        output.table(_table(fits))
        output.say(
            "sizes and speeds are estimates, the latter of short conversations; what the client holds (embeddings, "
            "head, an MTP head) comes on top of GB"
        )


def _named(model: str) -> ModelSize:
    """
    Raises:
        BadInput: it is neither in the table nor here.
    """
    found = known_model(model)
    if found is None:
        try:
            folder = resolve(model, need="config", offline=True)
        except ModelError:
            folder = None
        found = None if folder is None else size_by_config(folder.name, folder.config, folder.boundaries)
    if found is None:
        raise BadInput(
            f"the size of {model} is not known: `petalnode fit` lists the models of the table; others have to be here"
        )
    return found


# --- the machines


def alone() -> Fleet:
    """One machine, and the client beside it."""
    return Fleet((Machine("here", 0, 1.0),), np.zeros((1, 1)), np.zeros(1))


def this_machine() -> MachineCapacity:
    """What is free here now, and how quick it is: of a known card by its data sheet, else as measured."""
    memory = device_memory("auto")
    if not memory.shared:
        card = memory.place.lower().replace(" ", "").replace("-", "")
        known = [bandwidth for name, (_, bandwidth) in DEVICES.items() if name.partition("-")[0] in card]
        speed = max(known, default=DEVICES["t4"][1]) * 1e9 * MACHINES.bandwidth_share
    else:
        speed = measured_bandwidth()
    taken = unused(MEMORY_SHARES.server) if memory.shared else 0
    return _serving("this machine", replace(memory, free=max(0, memory.free - taken)), speed)


def here_now() -> tuple[MachineCapacity, str]:
    """This machine, and what to say where other programs use so much of it that a server would be slower; else ""."""
    meter = MachineMeter()
    host = this_machine()
    others = meter.use().others
    if others < _BUSY:
        return host, ""
    return host, f"other programs use {others:.0%} of the processors now: while they do, tokens take longer than this"


def _serving(name: str, memory: Memory, bandwidth: float) -> MachineCapacity:
    """A machine with what is free there once a server runs."""
    return MachineCapacity(name, memory.free - memory.reserve, bandwidth, computes=True)


def measured_bandwidth() -> float:
    """Bytes per second that a decode step reads from memory: its part of what all cores together read in the mean,
    beside whatever else they do now."""
    cores = min(16, psutil.cpu_count(logical=False) or 1)
    pieces = [np.ones(_READ // 8) for _ in range(cores)]
    took = []
    with ThreadPoolExecutor(cores) as pool:
        for _ in range(_TRIES):
            began = time.perf_counter()
            list(pool.map(np.max, pieces))
            took.append(time.perf_counter() - began)
    # The first one meets pages that are not there yet.
    return cores * _READ / statistics.mean(took[1:]) * MACHINES.bandwidth_share


def hosts_of_file(path: Path) -> tuple[list[MachineCapacity], Fleet]:
    """
    Raises:
        BadInput: the file cannot be read, or counts in blocks of an unknown size.
    """
    file = read_machines(path)
    counted = [row.name for row in file.rows if row.blocks is not None or row.block_seconds is not None]
    if counted and file.block_bytes is None:
        raise BadInput(
            f'{path}: {counted[0]} counts in blocks: say how large one is, "model": {{"block_mb": ..}}, or give '
            "memory_gb and a device"
        )
    unit = file.block_bytes or 1e6  # any, where nothing is counted in it
    fleet = fleet_of(file, 1 << 31, unit)
    hosts = hosts_of(fleet, unit)
    for number, row in enumerate(file.rows):
        if row.device in SHARED and row.blocks is None:  # caches and computing are in the same memory
            total = int(hosts[number].memory)
            hosts[number] = _serving(
                row.name, Memory(max(0, total - MEMORY_SHARES.server), total), hosts[number].bandwidth
            )
    return hosts, fleet


async def _of_swarm(join: JoinOptions, output: Output) -> tuple[list[MachineCapacity], Fleet]:
    """Servers with as much memory as they use for blocks now, as quick as they announce.

    Raises:
        BadInput: the size of none of their models is known.
    """
    async with joined(join, output, role="plan", listens=False) as (swarm, _):
        view, now = await swarm.refresh(timeout=DEADLINES.refresh), time.time()
        known: list[tuple[Announcement, float]] = []
        for version, (name, num_blocks) in view.models(now=now).items():
            size = _size_in(name)
            if size is None or size.blocks != num_blocks:
                output.note(f"left out: servers of {name}, whose size is not known")
                continue
            for server in view.servers(version, now=now):
                held = _HELD.get(server.quantisation.partition("/")[0])
                if is_online(server, num_blocks) and server.step_seconds and held is not None:
                    known.append((server, size.block_bytes(held)))
        rtts = await measured(swarm, [server for server, _ in known], output)
    answering = [(server, block) for server, block in known if server.peer_id in rtts]
    if not answering:
        raise BadInput("the size of no model that answers in this swarm is known: give --machines FILE")
    servers = [server for server, _ in answering]
    fleet = replace(fleet_of_servers(servers, rtts), client_bandwidth=measured_bandwidth())
    both = zip(fleet.machines, answering, strict=True)
    hosts = [hosts_of(Fleet((machine,), np.zeros((1, 1))), block)[0] for machine, (_, block) in both]
    return hosts, fleet


def _size_in(name: str) -> ModelSize | None:
    try:
        return _named(name)
    except BadInput:
        return None


# --- what is said


def in_words(found: Fit) -> str:
    """What is missing, for a person."""
    if found.fits:
        return "fits"
    more = f", or {found.machines} more like the largest" if found.machines else ""
    return f"{found.missing / 1e9:.1f} GB missing{more}"


def _table(fits: Sequence[Fit]) -> Table:
    table = Table()
    table.add_column("model")
    for name in ("10⁹ weights", "in", "GB", "client's GB", "tokens/s", "for many"):
        table.add_column(name, justify="right")
    table.add_column("")
    for found in fits:
        speeds = (_rounded(found.tokens_per_second), _rounded(found.most_tokens_per_second)) if found.fits else ("", "")
        table.add_row(
            found.model.name,
            f"{found.model.parameters / 1e9:.1f}",
            found.weights,
            f"{found.nbytes / 1e9:.1f}",
            f"{found.model.client_bytes(found.weights) / 1e9:.1f}",
            *speeds,
            in_words(found),
        )
    return table


def _rounded(speed: float) -> str:
    """Two digits: more would be a promise."""
    return f"{round(speed, 1 - math.floor(math.log10(speed))):g}" if speed > 0 else "0"


def _as_json(found: Fit) -> dict[str, object]:
    return {
        "model": found.model.name,
        "parameters": found.model.parameters,
        "weights": found.weights,
        "bytes": round(found.nbytes),
        "client_bytes": round(found.model.client_bytes(found.weights)),
        "fits": found.fits,
        "tokens_per_second": round(found.tokens_per_second, 2),
        "most_tokens_per_second": round(found.most_tokens_per_second, 2),
        "missing_bytes": round(found.missing),
        "machines_missing": found.machines,
    }


def largest_here() -> str:
    """One line: the largest model of the table that fits on this machine."""
    host, busy = here_now()
    fits = [found for found in (best_fit([host], alone(), model) for model in known_models()) if found.fits]
    if not fits:
        return "no known model fits in the memory that is free; with others it does (petalnode fit)"
    found, advice = fits[-1], f"; {busy}" if busy else ""
    return (
        f"the largest known model that fits here is {found.model.name} in {found.weights}, at about "
        f"{_rounded(found.tokens_per_second)} tokens/s (petalnode fit has others){advice}"
    )
