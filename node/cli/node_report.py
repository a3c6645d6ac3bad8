"""What a running node prints of itself: how it joined, how others reach it, and the command to join through it."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final

import trio

from ...protocols.framing import PeerError
from ..errors import SwarmError
from ..links.making import LinkWishes, join_command, near_link
from ..swarm.discovery import JoinResult
from ..swarm.swarm import Swarm
from .join import JoinOptions
from .output import Output


@dataclass(frozen=True)
class ClockCheck:
    """How the clock of this machine is compared with those of others."""

    clock_tolerance: float = 10.0
    """Seconds by which readers of announcements let clocks differ."""
    clocks_asked: int = 5
    settle_time: float = 5.0  # seconds


CLOCKS: Final = ClockCheck()
_WAYS = {"remembered": "which is remembered from another run", "neighbours": "found on this network"}


async def _ask_clock(swarm: Swarm, peer_id: str, timeout: float, offsets: list[float]) -> None:
    asked = time.time()
    try:
        told = (await swarm.ask_node(peer_id, timeout=timeout)).time
    except PeerError:
        return
    if told:
        offsets.append(told - (asked + time.time()) / 2)


async def clock_offsets(swarm: Swarm, timeout: float) -> list[float]:
    """By how many seconds peers' clocks are ahead of this machine's, of some peers that answer within `timeout`."""
    offsets: list[float] = []
    async with trio.open_nursery() as nursery:
        for peer_id in swarm.connected()[: CLOCKS.clocks_asked]:
            nursery.start_soon(_ask_clock, swarm, peer_id, timeout, offsets)
    return sorted(offsets)


async def nobody_serves(swarm: Swarm, what: str, advice: str = "") -> SwarmError:
    """The error where no server is known, which may be because this machine refuses all announcements as too old."""
    offsets = await clock_offsets(swarm, CLOCKS.settle_time)
    ahead = -offsets[len(offsets) // 2] if offsets else 0.0
    if abs(ahead) > CLOCKS.clock_tolerance:
        how = "ahead of" if ahead > 0 else "behind"
        advice = (
            f": this machine's clock is {abs(ahead):.0f} s {how} that of the peers; set it (timedatectl set-ntp true)"
        )
    return SwarmError(f"nobody in this swarm serves {what} (yet){advice}")


def how_joined(join: JoinOptions, joined: JoinResult | None) -> str:
    """One line for a person: which swarm a listening node has joined, or that it starts one."""
    if join.peers:
        return f"joined the swarm of {', '.join(join.peers)}"
    if joined is not None:
        return f"joined the swarm of …{joined.peer_id[-8:]}, {_WAYS[joined.way]}"
    if join.new_swarm:
        return "starting a swarm of its own"
    if join.searches:
        return "no --peer was given, and nobody remembered or near answers: starting a swarm"
    return "no --peer was given: starting a swarm of its own"


def how_joined_json(joined: JoinResult | None) -> dict[str, str] | None:
    return None if joined is None else asdict(joined)


def join_by(join: JoinOptions, address: str) -> str:
    """The options with which somebody else joins through this node at that address."""
    key = "" if join.psk is None else f" --swarm-key {shlex.quote(str(join.key_file or 'FILE'))}"
    return f"--peer {address}{key}"


def say_link(swarm: Swarm, join: JoinOptions, output: Output, model: str = "", version: bytes = b"") -> None:
    """Prints the link by which others join through this node and those that it joined by. The key of a private swarm is
    not in it: what is printed may be kept in a log."""
    link = near_link(swarm, LinkWishes(model, version, join.psk))
    if link:
        output.say(f"to invite somebody:  {join_command(link, join.psk)}")
        output.emit(event="link", link=link)


async def report_reachability(
    swarm: Swarm, join: JoinOptions, output: Output, commands: Sequence[str], model: tuple[str, bytes] = ("", b"")
) -> None:
    """Prints the link of this node, and how others reach it, whenever that changes. Runs until it is cancelled.

    `commands` are those with which others join; they and the link, for `model` (name and version), are printed again
    when the address has changed.
    """
    say_link(swarm, join, output, *model)
    reported, address = None, _public_address(swarm)
    while True:
        if swarm.reachability.kind == "unreachable":
            # A relay reservation or a port mapping may still be under way.
            with trio.move_on_after(CLOCKS.settle_time):
                await swarm.wait_reachability_changed()
                continue
        now = swarm.reachability
        if now.kind != "unknown" and now != reported:
            reported = now
            output.say(f"reachability: {now.text}")
            output.emit(event="reachability", **asdict(now), addrs=list(swarm.addrs))
            if _public_address(swarm) != address:
                address = _public_address(swarm)
                for command in commands:
                    output.say(f"to join it from anywhere:  {command} {join_by(join, address)}")
                say_link(swarm, join, output, *model)
        await swarm.wait_reachability_changed()


def _public_address(swarm: Swarm) -> str:
    """The address that others should dial: the host lists public addresses first."""
    return next(iter(swarm.addrs), "")
