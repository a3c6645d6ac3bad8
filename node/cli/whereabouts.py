"""How a node came into its swarm, how others reach it, and with which command they join through it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import trio

from ..swarm.discovery import Joined
from ..swarm.swarm import Swarm
from .join import JoinOptions
from .output import Output

_SETTLES = 5.0  # seconds
_WAYS = {"remembered": "which is remembered from another run", "neighbours": "found on this network"}


def how_joined(join: JoinOptions, joined: Joined | None) -> str:
    """One line: whose swarm a node that listens is in."""
    if join.peers:
        return f"joined the swarm of {', '.join(join.peers)}"
    if joined is not None:
        return f"joined the swarm of …{joined.peer_id[-8:]}, {_WAYS[joined.way]}"
    if join.new_swarm:
        return "starting a swarm of its own"
    if join.searches:
        return "no --peer was given, and nobody remembered or near answers: starting a swarm"
    return "no --peer was given: starting a swarm of its own"


def how_joined_json(joined: Joined | None) -> dict[str, str] | None:
    return None if joined is None else asdict(joined)


def join_by(join: JoinOptions, address: str) -> str:
    """The options with which somebody else joins through this node at that address."""
    return f"--peer {address}" + (f" --swarm-key {join.swarm_key}" if join.swarm_key is not None else "")


async def tell_reachability(swarm: Swarm, join: JoinOptions, output: Output, commands: Sequence[str]) -> None:
    """Says how others reach this node, when that is known and whenever it changes, until cancelled.

    `commands` are those with which others join, printed once more when the address for it has changed.
    """
    told, address = None, _outermost(swarm)
    while True:
        if swarm.reachability.kind == "unreachable":
            # A relay may be about to take it, and a router to forward its port.
            with trio.move_on_after(_SETTLES):
                await swarm.wait_reachability_changed()
                continue
        now = swarm.reachability
        if now.kind != "unknown" and now != told:
            told = now
            output.say(f"reachability: {now.text}")
            output.emit(event="reachability", **asdict(now), addrs=list(swarm.addrs))
            if _outermost(swarm) != address:
                address = _outermost(swarm)
                for command in commands:
                    output.say(f"to join it from anywhere:  {command} {join_by(join, address)}")
        await swarm.wait_reachability_changed()


def _outermost(swarm: Swarm) -> str:
    """The address that others shall use; the host lists those from outside first."""
    return next(iter(swarm.addrs), "")
