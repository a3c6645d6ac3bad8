"""`petalnode bootstrap` and `petalnode swarm-key`: a node without a model, and the key of a private swarm."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import trio
import typer

from ....crypto.swarm_key import SwarmKeyError, make_swarm_key
from ...errors import BadInput
from ...network.nat.relay import RelayLimits
from ..join import JoinOptions, RelayOptions, joined, joins_swarm
from ..metrics import MetricsOptions, add_node, metrics_served
from ..node_report import how_joined, how_joined_json, join_by, report_reachability
from ..option import JsonFlag
from ..output import Output
from ..terminal import StopSignal


@joins_swarm
def bootstrap(*, relay_options: RelayOptions, metrics_options: MetricsOptions, join: JoinOptions) -> None:
    """Run a DHT node and relay without a model: other nodes join and reach each other through it."""
    join.check()
    trio.run(_bootstrap, join, relay_options.limits(), metrics_options)


async def _bootstrap(join: JoinOptions, limits: RelayLimits, metrics_options: MetricsOptions) -> None:
    output = Output(join.json)
    stop = StopSignal()
    async with trio.open_nursery() as nursery:
        await nursery.start(stop.watch)
        async with (
            metrics_served(metrics_options, output) as metrics,
            joined(join, output, role="bootstrap", listens=True, relay_limits=limits) as (swarm, _),
        ):
            add_node(metrics, swarm, "bootstrap")
            addrs = list(swarm.addrs)
            output.say(how_joined(join, swarm.joined))
            output.say(f"ready: {swarm.peer_id}")
            for address in addrs:
                output.say(f"to join through it:  petalnode serve {join_by(join, address)}")
            output.emit(event="ready", peer_id=swarm.peer_id, addrs=addrs, joined=how_joined_json(swarm.joined))
            nursery.start_soon(report_reachability, swarm, join, output, ["petalnode serve"])
            await stop.event.wait()
        nursery.cancel_scope.cancel()
    stop.leave()


def swarm_key(
    file: Annotated[Path, typer.Argument(help="File to create; never replaces a file.")] = Path("swarm.key"),
    as_json: JsonFlag = False,
) -> None:
    """Create the key of a private swarm, which only nodes with a copy of this file can join."""
    output = Output(as_json)
    try:
        make_swarm_key(file)
    except SwarmKeyError as error:
        raise BadInput(str(error)) from error
    output.say(f"a new swarm key is in {file}. Copy it over a safe channel to everybody who may join, and start")
    output.say(f"  petalnode serve --swarm-key {shlex.quote(str(file))}")
    output.emit(file=str(file))
