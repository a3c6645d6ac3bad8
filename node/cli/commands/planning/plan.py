"""`petalnode plan`: which machine should serve which blocks, and the speed to expect."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import trio
import typer
from rich.table import Table

from .....protocols.announcement import Announcement
from .....protocols.ids import Boundaries, Span
from ....client.deadlines import DEADLINES
from ....errors import BadInput, ModelError, NoChainError, SwarmError
from ....models import ALIASES, resolve
from ....models.inventory import local_models
from ....placement.planning.machines_file import MACHINES, Fleet, MachinesFile, fleet_of, read_machines
from ....placement.planning.model_sizes import known_model
from ....placement.planning.plans import FleetPlan, busiest_plan, fastest_plan, fleet_of_servers, present_plan
from ....placement.planning.trusted import together_in
from ....swarm.swarm import Swarm
from ....swarm.view import is_online
from ...join import JoinOptions, joined, joins_swarm
from ...model_choice import is_named, served_by
from ...option import option
from ...output import Output, ProgressBars
from ...terminal import choose_model
from .fit import measured, say_fit_here, stored_bytes


@joins_swarm
def plan(
    model: Annotated[
        str | None, typer.Argument(help="The model, for the number and size of its blocks. Default: that of the swarm.")
    ] = None,
    machines: Path | None = option(
        None, "Plan for the machines in this JSON or CSV file, not for servers of a swarm.", "FILE"
    ),
    num_blocks: int | None = option(None, "Blocks of the model.", min=1, max=MACHINES.max_blocks),
    block_mb: float | None = option(None, "Megabytes of a block of the model.", min=0.001),
    trusted_blocks: int | None = option(
        None,
        "Only machines that FILE marks as trusted hold the first and the last N blocks. Default: 2, if it marks any.",
        "N",
        min=1,
        max=MACHINES.max_blocks,
    ),
    seconds: float = option(1.0, "Search at most this many seconds for a faster plan.", "S", min=0.01, max=3600),
    *,
    join: JoinOptions,
) -> None:
    """Plan which machine should serve which blocks: for the lowest latency, and for the highest throughput."""
    output = Output(join.json)
    if machines is None:
        if num_blocks is not None or block_mb is not None:
            raise BadInput("--num-blocks and --block-mb go with --machines FILE: a swarm announces its model")
        if trusted_blocks is not None:
            raise BadInput("--trusted-blocks goes with --machines FILE, which marks the machines that are your own")
        join.check()
        try:
            trio.run(_plan_swarm, model, seconds, join, output)
        except (SwarmError, BadInput) as error:
            searched = isinstance(error, SwarmError) or not join.searches
            here = {one.name: str(one.path) for one in local_models() if one.whole} if model is None else {model: model}
            if join.peers or not here or not searched:
                raise
            output.note(f"{str(error).rstrip('.')}. On this machine alone:")
            say_fit_here(here, output)
        return
    file = read_machines(machines)
    planned = _model(model, file, num_blocks, None if block_mb is None else block_mb * 1e6, output)
    fleet = fleet_of(file, planned.num_blocks, planned.block_bytes, trusted_blocks)
    _print(output, planned, replace(fleet, boundaries=planned.boundaries), seconds)


@dataclass(frozen=True)
class _Planned:
    """A model, and what is known of it: bytes of a block, those that a client holds, where machines may part."""

    name: str
    num_blocks: int
    block_bytes: float | None = None
    client_bytes: float | None = None
    boundaries: Boundaries | None = None


def _model(
    model: str | None, file: MachinesFile, num_blocks: int | None, block_bytes: float | None, output: Output
) -> _Planned:
    """From the options, else the file, else the model."""
    boundaries, ends = None, None
    num_blocks = num_blocks or file.num_blocks
    block_bytes = block_bytes or file.block_bytes
    known = None if model is None or model in ALIASES else known_model(model)  # an alias is planned as it is stored
    if known is not None:
        num_blocks, block_bytes = num_blocks or known.blocks, block_bytes or known.block_bytes("bf16")
        ends = known.client_bytes("bf16")
    elif model is not None and num_blocks is not None and block_bytes is not None:
        return replace(_known_here(model, num_blocks), block_bytes=block_bytes)
    if model is not None and (num_blocks is None or block_bytes is None):
        with ProgressBars(output.errors) as bars:
            folder = resolve(model, need="config", progress=bars)
        from ....blocks.architecture import open_skeleton  # with torch: two seconds, where a model is named

        open_skeleton(folder.path)
        num_blocks = num_blocks or folder.num_blocks
        stored, ends = stored_bytes(folder.path, folder.num_blocks)
        block_bytes = block_bytes or stored
        boundaries = folder.boundaries if num_blocks == folder.num_blocks else None
    if num_blocks is not None and num_blocks > MACHINES.max_blocks:
        raise BadInput(f"{model} has {num_blocks} blocks; a plan can have at most {MACHINES.max_blocks}")
    if num_blocks is None:
        raise BadInput(
            'how many blocks has the model? Name a MODEL, or give --num-blocks, or "model": {"blocks": ..} in the file'
        )
    return _Planned(model or str(file.path), num_blocks, block_bytes, ends, boundaries)


def _known_here(name: str, num_blocks: int) -> _Planned:
    """What the files of a model tell that are on this machine, if any are."""
    try:
        folder = resolve(name, need="config", offline=True)
    except (ModelError, BadInput):
        return _Planned(name, num_blocks)
    if folder.num_blocks != num_blocks:
        return _Planned(name, num_blocks)
    return _Planned(name, num_blocks, None, stored_bytes(folder.path, num_blocks)[1], folder.boundaries)


async def _plan_swarm(model: str | None, seconds: float, join: JoinOptions, output: Output) -> None:
    async with joined(join, output, role="plan", listens=False) as (swarm, _):
        view, now = await swarm.refresh(timeout=DEADLINES.refresh), time.time()
        models = view.models(now=now)
        if model is None:
            models = served_by(swarm.named, models, view.servers(now=now))
        models = {version: named for version, named in models.items() if is_named(model, named[0], version)}
        if not models:
            raise SwarmError(f"nobody in this swarm serves {'any model' if model is None else model} (yet)")
        if len({name for name, _ in models.values()}) > 1:
            version = await choose_model(models, view.servers(now=now), output)
            models = {version: models[version]}
        failures = []
        for version, (name, num_blocks) in sorted(models.items()):
            servers = [one for one in view.servers(version, now=time.time()) if is_online(one, num_blocks)]
            try:
                await _plan_servers(swarm, name, num_blocks, servers, seconds, output)
            except (BadInput, SwarmError) as error:  # anybody may announce another version of that name
                failures.append(error)
        if len(failures) == len(models):
            raise failures[0]
        for failure in failures:
            output.note(f"left out: {failure}")


async def _plan_servers(
    swarm: Swarm, name: str, num_blocks: int, servers: list[Announcement], seconds: float, output: Output
) -> None:
    if num_blocks > MACHINES.max_blocks:
        raise BadInput(f"{name} has {num_blocks} blocks; a plan can have at most {MACHINES.max_blocks}")
    rtts = await measured(swarm, servers, output)
    answering = [server for server in servers if server.peer_id in rtts]
    if not answering:
        raise SwarmError(f"no server of {name} answers: try again in a while")
    planned = await trio.to_thread.run_sync(_known_here, name, num_blocks)
    fleet = replace(fleet_of_servers(answering, rtts), boundaries=planned.boundaries)
    await trio.to_thread.run_sync(_print, output, planned, fleet, seconds, answering)


def _print(
    output: Output, model: _Planned, fleet: Fleet, seconds: float, servers: list[Announcement] | None = None
) -> None:
    num_blocks, together = model.num_blocks, together_in(fleet)
    present = _present(fleet, num_blocks) if servers is not None else None
    busiest = busiest_plan(fleet, num_blocks)
    known = [plan for plan in (present, busiest) if plan is not None]
    fastest = fastest_plan(fleet, num_blocks, seconds=seconds, known=known)
    plans = {"now": present, "fastest": fastest, "busiest": busiest}
    peers = None if servers is None else [server.peer_id for server in servers]
    output.emit(
        model=model.name,
        num_blocks=num_blocks,
        **({"client_bytes": round(model.client_bytes)} if model.client_bytes else {}),
        **({"together": [together.start, together.end]} if together else {}),
        **({"trusted_blocks": fleet.trusted_blocks} if fleet.trusted_blocks else {}),
        **{name: _as_json(plan, fleet, peers) for name, plan in plans.items() if plan is not None},
    )
    if output.as_json:
        return
    if servers is not None:
        told = "not all blocks are served" if present is None else _expectation(present)
        output.say(f"{model.name}, {num_blocks} blocks, as it is served now: {told}")
        output.say("a plan below moves blocks among these servers; each could hold as many as it does now")
        output.say("")
    if fleet.trusted_blocks:
        output.say(
            f"the first and the last {fleet.trusted_blocks} blocks are for trusted machines (*); "
            "their outputs go to others through the client"
        )
    if together:
        output.say(f"one machine holds all of the blocks {together}, which share keys and values")
    output.say(f"least time per token: {_expectation(fastest)}", style="bold")
    output.say(_how_good(fastest))
    output.table(_table(fastest, fleet))
    output.say(f"most tokens a second: {_expectation(busiest)}", style="bold")
    output.say(f"no placement of these machines gives more than {busiest.most_tokens_per_second or 0.0:.1f} tokens/s")
    output.table(_table(busiest, fleet))
    if model.client_bytes:
        output.say(
            f"the client holds {model.client_bytes / 1e9:.2g} GB: embeddings, head, and an MTP head if there is one"
        )
    if not fleet.client_seconds:
        output.say("embeddings and head, which the client computes, come on top of the times")


def _present(fleet: Fleet, num_blocks: int) -> FleetPlan | None:
    try:
        return present_plan(fleet, num_blocks)
    except NoChainError:
        return None


def _expectation(plan: FleetPlan) -> str:
    return (
        f"{1000 * plan.seconds:.1f} ms per token for one client ({1 / plan.seconds:.2f} tokens/s), "
        f"{plan.tokens_per_second:.1f} tokens/s for many together"
    )


def _how_good(plan: FleetPlan) -> str:
    if plan.proved:
        return "there is no faster chain of these machines"
    if not plan.least_seconds:
        return "the best that was found"
    return (
        f"the best that was found; none is faster than {1000 * plan.least_seconds:.1f} ms, and more --seconds may tell"
    )


def _table(plan: FleetPlan, fleet: Fleet) -> Table:
    table = Table()
    table.add_column("blocks", justify="right")
    table.add_column("machine", no_wrap=True)
    table.add_column("computes, ms", justify="right")
    table.add_column("tokens/s", justify="right")
    table.add_column("on the route", justify="center")
    times = fleet.block_seconds()
    for placed in plan.placed:
        seconds = float(times[placed.machine]) * len(placed.span)
        used = [visit.span for visit in plan.route if visit.machine == placed.machine]
        route = "yes" if used == [placed.span] else ", ".join(map(str, used))
        table.add_row(
            str(placed.span), _name(fleet, placed.machine), f"{1000 * seconds:.2f}", f"{1 / seconds:.1f}", route
        )
    return table


def _name(fleet: Fleet, number: int) -> str:
    machine = fleet.machines[number]
    return f"{machine.name} *" if machine.trusted else machine.name


def _described(fleet: Fleet, peers: list[str] | None, machine: int, span: Span) -> dict[str, Any]:
    who = {} if peers is None else {"peer_id": peers[machine]}
    own = {"trusted": True} if fleet.machines[machine].trusted else {}
    return {"name": fleet.machines[machine].name, **who, "blocks": [span.start, span.end], **own}


def _as_json(plan: FleetPlan, fleet: Fleet, peers: list[str] | None) -> dict[str, Any]:
    found: dict[str, Any] = {
        "ms_per_token": round(1000 * plan.seconds, 4),
        "tokens_per_second": round(plan.tokens_per_second, 4),
        "machines": [_described(fleet, peers, placed.machine, placed.span) for placed in plan.placed],
        "route": [_described(fleet, peers, visit.machine, visit.span) for visit in plan.route],
    }
    if plan.most_tokens_per_second is not None:
        found["most_tokens_per_second"] = round(plan.most_tokens_per_second, 4)
    elif plan.least_seconds:
        found |= {"least_ms_per_token": round(1000 * plan.least_seconds, 4), "proved": plan.proved}
    return found
