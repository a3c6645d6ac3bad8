"""`petalnode bootstrap`: a meeting point without a model."""

from __future__ import annotations

import trio
import typer

from ...network.nat.limits import RelayLimits
from ..join import JoinOptions, joined, joins_swarm
from ..output import Output
from ..relay_options import RelayCircuits, RelayRate, RelayReservations, relay_limits
from ..signals import StopSignal
from ..whereabouts import how_joined, how_joined_json, join_by, tell_reachability


@joins_swarm
def bootstrap(
    relay_reservations: RelayReservations = None,
    relay_circuits: RelayCircuits = None,
    relay_rate: RelayRate = None,
    *,
    join: JoinOptions,
) -> None:
    """Run a meeting point and relay: other nodes find and reach each other through it. Needs no model."""
    trio.run(_bootstrap, join, relay_limits(relay_reservations, relay_circuits, relay_rate))


async def _bootstrap(join: JoinOptions, limits: RelayLimits) -> None:
    output = Output(join.json)
    stop = StopSignal()
    async with trio.open_nursery() as nursery:
        await nursery.start(stop.watch)
        async with joined(join, output, role="bootstrap", listens=True, relay_limits=limits) as (swarm, _):
            addrs = list(swarm.addrs)
            output.say(how_joined(join, swarm.joined))
            output.say(f"ready: {swarm.peer_id}")
            for address in addrs:
                output.say(f"to join through it:  petalnode serve {join_by(join, address)}")
            output.emit(event="ready", peer_id=swarm.peer_id, addrs=addrs, joined=how_joined_json(swarm.joined))
            nursery.start_soon(tell_reachability, swarm, join, output, ["petalnode serve"])
            await stop.event.wait()
        nursery.cancel_scope.cancel()
    raise typer.Exit(stop.exit_code)
