"""`petalnode doctor`: what can go wrong on this machine and between it and the swarm, and what to do about it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Final

import platformdirs
import trio
import typer

from ....crypto.identity import IdentityError, IdentityLocked, held_identity
from ....protocols.framing import PeerError
from ...errors import ExitCode, PetalnodeError
from ...models.cache_dir import cache_dir
from ...network.nat.reachability import NOBODY_ASKED
from ...swarm.swarm import Swarm
from ..join import JoinOptions, joined, joins_swarm, kept_port
from ..output import Output
from . import doctor_checks as checks
from .doctor_checks import Finding

_REACHABILITY_WAIT: Final = 20.0  # seconds: asking others to dial back takes 5, finding no router 4, a relay 1
_ANSWER_WAIT: Final = 5.0
_PEERS_ASKED: Final = 5
_MARKS: Final = {"ok": ("ok", "green"), "warning": ("!", "yellow"), "problem": ("NO", "red")}


@joins_swarm
def doctor(*, join: JoinOptions) -> None:
    """Check this machine and its way to the swarm: versions, device, memory, disk, port, clock, reachability."""
    trio.run(_doctor, join)


async def _doctor(join: JoinOptions) -> None:
    output = Output(join.json)
    findings: list[Finding] = []

    def tell(finding: Finding) -> None:
        findings.append(finding)
        mark, style = _MARKS[finding.verdict]
        output.say(f"{mark:>3}  {finding.check:<13}{finding.text}", style=None if finding.verdict == "ok" else style)
        if finding.advice:
            output.say(f"     {'':<13}-> {finding.advice}")
        output.emit(event="check", **asdict(finding))

    for finding in await trio.to_thread.run_sync(lambda: list(_machine())):
        tell(finding)
    for finding in await _network(join, output):
        tell(finding)
    problems = sum(finding.verdict == "problem" for finding in findings)
    warnings = sum(finding.verdict == "warning" for finding in findings)
    counted = f"{_count(problems, 'problem')}, {_count(warnings, 'warning')}"
    output.say(counted if problems + warnings else "all is well")
    raise typer.Exit(ExitCode.RESULT_SAYS_NO if problems else ExitCode.DONE)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _machine() -> Iterator[Finding]:
    yield checks.check_versions()
    yield from checks.check_devices()
    yield checks.check_memory()
    try:
        yield checks.check_disk(cache_dir(), "models", "PETALNODE_CACHE")
    except PetalnodeError as error:
        yield Finding("disk", "problem", str(error))
    data = platformdirs.user_data_path("petalnode", appauthor=False)
    yield checks.check_disk(data, "keys and remembered peers", "XDG_DATA_HOME")
    yield checks.check_open_files()
    try:
        with held_identity(None, "serve", data) as identity:
            yield checks.check_port(kept_port(identity))
    except (IdentityError, IdentityLocked) as error:
        yield Finding("identity", "problem", str(error))


async def _network(join: JoinOptions, output: Output) -> list[Finding]:
    """Joins the swarm as a server would, and looks back from there."""
    output.say("  ..  joining the swarm, and asking others to dial back ...", style="dim")
    try:
        async with joined(join, output, role="serve", listens=True) as (swarm, _):
            if not join.peers and swarm.joined is None:
                text = "no other node is known, so nobody can be asked to dial back"
                return [Finding("swarm", "warning", text, "give --peer MULTIADDR (every node prints its own)")]
            return [await _swarm(swarm), await _clock(swarm), await _reachability(swarm)]
    except PetalnodeError as error:
        return [Finding("swarm", "problem", str(error), "check the addresses, the network, and that these nodes run")]


async def _swarm(swarm: Swarm) -> Finding:
    servers = (await swarm.refresh(timeout=_ANSWER_WAIT)).servers(now=time.time())
    return Finding("swarm", "ok", f"joined; {len(servers)} servers are known")


async def _clock(swarm: Swarm) -> Finding:
    offsets: list[float] = []

    async def ask(peer_id: str) -> None:
        asked = time.time()
        try:
            told = (await swarm.ask_node(peer_id, timeout=_ANSWER_WAIT)).time
        except PeerError:
            return
        if told:
            offsets.append(told - (asked + time.time()) / 2)

    async with trio.open_nursery() as nursery:
        for peer_id in swarm.connected()[:_PEERS_ASKED]:
            nursery.start_soon(ask, peer_id)
    return checks.judge_clock(offsets)


async def _reachability(swarm: Swarm) -> Finding:
    with trio.move_on_after(_REACHABILITY_WAIT):
        # "unreachable" may be followed by a relay's place.
        while swarm.reachability == NOBODY_ASKED or swarm.reachability.kind == "unreachable":
            await swarm.wait_reachability_changed()
    seen = swarm.reachability
    if seen.kind == "unreachable":
        advice = "forward the port in the router and say --announce, or join by a --peer that relays"
        return Finding("reachability", "problem", seen.text, advice)
    if seen.kind == "unknown":
        return Finding(
            "reachability", "warning", seen.text, "listen on all interfaces, and ask when more nodes are there"
        )
    return Finding("reachability", "ok", seen.text)
