"""`petalnode bootstrap`: a meeting point without a model."""

from __future__ import annotations

import trio
import typer

from .join import JoinOptions, joined, joins_swarm
from .output import Output
from .signals import StopSignal


@joins_swarm
def bootstrap(*, join: JoinOptions) -> None:
    """Run a meeting point: other nodes find each other through it. Needs no model and little memory."""
    trio.run(_bootstrap, join)


async def _bootstrap(join: JoinOptions) -> None:
    output = Output(join.json)
    stop = StopSignal()
    async with trio.open_nursery() as nursery:
        await nursery.start(stop.watch)
        async with joined(join, output, role="bootstrap", listens=True) as (swarm, _):
            addrs = list(swarm.addrs)
            output.say(f"ready: {swarm.peer_id}")
            for address in addrs:
                output.say(f"to join through it:  petalnode serve --peer {address}")
            output.emit(event="ready", peer_id=swarm.peer_id, addrs=addrs)
            await stop.event.wait()
        nursery.cancel_scope.cancel()
    raise typer.Exit(stop.exit_code)
