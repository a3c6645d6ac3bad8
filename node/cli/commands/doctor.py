"""`petalnode doctor`: checks of this machine and of its connection to the swarm, with advice."""

from __future__ import annotations

import shutil
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Final, Literal

import psutil
import trio
import typer
from multiaddr import Multiaddr
from packaging.requirements import Requirement

from ....crypto.identity import IdentityError, IdentityLocked, held_identity
from ...blocks.kernels.library import TO_HAVE, WITHOUT, library
from ...errors import ExitCode, PetalnodeError, SwarmError, reason_of
from ...models.cache_dir import cache_dir, data_folder
from ...network.addresses import ip_of, parse_peer
from ...network.nat.reachability import NOBODY_ASKED
from ...network.shares import middle
from ...swarm.swarm import Swarm
from ..join import JoinOptions, joined, joins_swarm, kept_port
from ..node_report import CLOCKS, clock_offsets
from ..output import Output
from .planning.fit import largest_here

Verdict = Literal["ok", "warning", "problem"]

_GIB: Final = 1 << 30


@dataclass(frozen=True)
class Wanted:
    """What a machine should have, and how long others have to answer."""

    memory: int = 4 * _GIB
    memory_needed: int = 1 * _GIB  # a server of the default model needs 0.6 GB beside its weights
    disk: int = 5 * _GIB
    files: int = 1024
    clock_warning: float = 3.0
    reachability_wait: float = 20.0  # seconds: asking others to dial back takes 5, finding no router 4, a relay 1
    answer_wait: float = 5.0


WANTED: Final = Wanted()
_DISK_NEEDED: Final = _GIB // 2
_MARKS: Final = {"ok": ("ok", "green"), "warning": ("!", "yellow"), "problem": ("NO", "red")}


@dataclass(frozen=True)
class Finding:
    """The result of one check; `advice` is what to do about a warning or problem."""

    check: str
    verdict: Verdict
    text: str
    advice: str = ""


@joins_swarm
def doctor(*, join: JoinOptions) -> None:
    """Check this machine and its connection to the swarm: versions, device, memory, disk, port, clock, reachability."""
    join.check()
    trio.run(_doctor, join)


async def _doctor(join: JoinOptions) -> None:
    output = Output(join.json)
    findings: list[Finding] = []
    for finding in await trio.to_thread.run_sync(lambda: list(machine_findings()), abandon_on_cancel=True):
        findings.append(finding)
        _report(output, finding)
    output.say("  ..  joining the swarm, and asking others to dial back ...", style="dim")
    for finding in await check_network(join, output):
        findings.append(finding)
        _report(output, finding)
    problems = sum(finding.verdict == "problem" for finding in findings)
    warnings = sum(finding.verdict == "warning" for finding in findings)
    counted = f"{_count(problems, 'problem')}, {_count(warnings, 'warning')}"
    output.say(counted if problems + warnings else "all is well")
    output.say(await trio.to_thread.run_sync(largest_here, abandon_on_cancel=True))
    raise typer.Exit(ExitCode.RESULT_SAYS_NO if problems else ExitCode.DONE)


def _report(output: Output, finding: Finding) -> None:
    mark, style = _MARKS[finding.verdict]
    output.say(f"{mark:>3}  {finding.check:<13}{finding.text}", style=None if finding.verdict == "ok" else style)
    if finding.advice:
        output.say(f"     {'':<13}-> {finding.advice}")
    output.emit(event="check", **asdict(finding))


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def machine_findings() -> Iterator[Finding]:
    """What can be checked without a network."""
    yield check_versions()
    yield from check_devices()
    yield check_memory()
    try:
        yield check_disk(cache_dir(), "models", "PETALNODE_CACHE")
    except PetalnodeError as error:
        yield Finding("disk", "problem", str(error))
    data = data_folder()
    yield check_disk(data, "keys and remembered peers", "XDG_DATA_HOME")
    yield check_open_files()
    try:
        with held_identity(None, "serve", data) as identity:
            yield check_port(kept_port(identity))
    except (IdentityError, IdentityLocked) as error:
        yield Finding("identity", "problem", str(error))


async def check_network(join: JoinOptions, output: Output) -> list[Finding]:
    """Joins the swarm as a server would, and has other nodes dial back."""
    try:
        async with joined(join, output, role="serve", listens=True) as (swarm, _):
            if not join.peers and swarm.joined is None:
                text = "no other node is known, so nobody can be asked to dial back"
                return [Finding("swarm", "warning", text, "give --peer MULTIADDR (every node prints its own)")]
            return [
                await _swarm(swarm),
                judge_clock(await clock_offsets(swarm, WANTED.answer_wait)),
                await check_reachability(swarm, are_here(join.peers)),
            ]
    except PetalnodeError as error:
        return [not_joined(error)]


def not_joined(error: PetalnodeError) -> Finding:
    """Why the swarm could not be joined: by what the network lacks, or this machine."""
    if isinstance(error, SwarmError):
        return Finding("swarm", "problem", str(error), "check the addresses, the network, and that these nodes run")
    return Finding("swarm", "problem", f"not joined: {error}", "solve this first, then run the doctor again")


async def _swarm(swarm: Swarm) -> Finding:
    servers = (await swarm.refresh(everything=True, timeout=WANTED.answer_wait)).servers(now=time.time())
    return Finding("swarm", "ok", f"joined; servers that are known: {len(servers)}")


def are_here(peers: Sequence[str]) -> bool:
    """Whether all of these addresses are of this machine, so that they say nothing of how others reach it."""
    hosts = [ip_of(Multiaddr(parse_peer(peer)[1])) for peer in peers]
    return bool(hosts) and all(host is not None and host.is_loopback for host in hosts)


async def check_reachability(swarm: Swarm, asked_here: bool) -> Finding:
    if asked_here:
        return Finding(
            "reachability",
            "warning",
            "it cannot be told: the nodes that could dial back run on this machine",
            "give the --peer address of a node on another machine",
        )
    with trio.move_on_after(WANTED.reachability_wait):
        # "unreachable" may change once a relay grants a reservation.
        while swarm.reachability == NOBODY_ASKED or swarm.reachability.kind == "unreachable":
            await swarm.wait_reachability_changed()
    seen = swarm.reachability
    if seen.kind == "unreachable":
        advice = "forward the port in the router and say --announce, or join by a --peer that relays"
        return Finding("reachability", "problem", seen.text, advice)
    if seen.kind == "unknown":
        return Finding(
            "reachability", "warning", seen.text, "listen on all interfaces, and ask again when the swarm is larger"
        )
    return Finding("reachability", "ok", seen.text)


def check_versions() -> Finding:
    """Whether the versions of all packages satisfy the requirements of this release."""
    wrong = list(_unmet(metadata.requires("petalnode") or ()))
    packages = ", ".join(f"{name} {metadata.version(name)}" for name in ("libp2p", "trio", "torch", "transformers"))
    text = f"petalnode {metadata.version('petalnode')}, Python {sys.version.split()[0]}, {packages}"
    if wrong:
        return Finding(
            "versions", "problem", f"{text}; {'; '.join(wrong)}", "reinstall petalnode in its own virtual environment"
        )
    return Finding("versions", "ok", text)


def _unmet(requirements: Iterable[str]) -> Iterator[str]:
    for requirement in map(Requirement, requirements):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            found = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            yield f"{requirement.name} is missing"
            continue
        if not requirement.specifier.contains(found, prereleases=True):
            yield f"{requirement.name} is {found}, wanted {requirement.specifier}"


def check_devices() -> Iterator[Finding]:
    """Whether torch computes on every device that it finds: a wrong driver shows only when it is used."""
    import torch

    names = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    if torch.backends.mps.is_available():
        names.append("mps")
    for name in names:
        try:
            square = torch.ones(64, 64, device=name)
            right = float((square @ square).sum()) == 64.0**3
        except RuntimeError as error:
            advice = f"check the driver (nvidia-smi), or serve with --device {names[0]}"
            yield Finding("device", "problem", f"{name} does not compute: {reason_of(error)}", advice)
            continue
        if not right:
            yield Finding("device", "problem", f"{name} computes wrong", "check the driver and the memory")
        elif name == "cpu":
            kernels = library()
            text = f"cpu, {torch.get_num_threads()} threads"
            if kernels is not None:
                yield Finding("device", "ok", f"{text}, compiled kernels for {kernels.isa}")
            else:
                yield Finding("device", "ok" if names[1:] else "warning", f"{text}; {WITHOUT}", TO_HAVE)
        else:
            free = torch.cuda.mem_get_info(name)[0] if name.startswith("cuda") else torch.mps.recommended_max_memory()
            yield Finding("device", "ok", f"{name}, {free / _GIB:.1f} GiB free")


def check_memory() -> Finding:
    memory = psutil.virtual_memory()
    text = f"{memory.available / _GIB:.1f} of {memory.total / _GIB:.1f} GiB free"
    if memory.available < WANTED.memory_needed:
        return Finding("memory", "problem", text, "close other programs: not even a small model's blocks have room")
    if memory.available < WANTED.memory:
        return Finding("memory", "warning", text, "serve few blocks (--num-blocks), or close other programs")
    return Finding("memory", "ok", text)


def check_disk(folder: Path, purpose: str, variable: str) -> Finding:
    """Whether `folder`, which holds `purpose`, is writable and has free space. `variable` sets another folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".petalnode-doctor"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        text = f"{purpose} cannot be written to {folder}: {error.strerror}"
        return Finding("disk", "problem", text, f"make it writable, or set {variable} to another folder")
    free = shutil.disk_usage(folder).free
    text = f"{free / _GIB:.1f} GiB free for {purpose} in {folder}"
    if free < _DISK_NEEDED:
        return Finding("disk", "problem", text, f"make room, or set {variable} to a folder on another disk")
    if free < WANTED.disk:
        return Finding("disk", "warning", text, f"enough for small models; {variable} moves it to another disk")
    return Finding("disk", "ok", text)


def check_port(port: int) -> Finding:
    """Whether the default port of a server is free on all interfaces."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
        except OSError as error:
            advice = "fine if it is your running node; else serve with --listen /ip4/0.0.0.0/tcp/ANOTHER"
            return Finding("port", "warning", f"port {port} is not available: {error.strerror}", advice)
    return Finding("port", "ok", f"port {port} is free")


def check_open_files() -> Finding:
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return Finding("open files", "ok", "no limit")
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and limit < WANTED.files:
        return Finding(
            "open files",
            "warning",
            f"{limit} at once, each peer takes one",
            f"ulimit -n {min(4096, hard) if hard > 0 else 4096}, or LimitNOFILE= in the unit",
        )
    return Finding("open files", "ok", "no limit" if limit == resource.RLIM_INFINITY else f"{limit} at once")


def judge_clock(offsets: Iterable[float]) -> Finding:
    """Judges the median of the differences to peers' clocks, in seconds; positive: theirs are ahead."""
    asked = list(offsets)
    if not asked:
        return Finding("clock", "ok", f"{time.strftime('%Y-%m-%d %H:%M:%S %Z')}; no peer to compare it with")
    usual = middle(asked)
    text = f"{abs(usual):.1f} s {'behind' if usual > 0 else 'ahead of'} the peers' ({len(asked)} asked)"
    advice = "set the clock, and let the system keep it (timedatectl set-ntp true)"
    if abs(usual) > CLOCKS.clock_tolerance:
        return Finding("clock", "problem", text, f"other nodes refuse this node's announcements: {advice}")
    if abs(usual) > WANTED.clock_warning:
        return Finding("clock", "warning", text, advice)
    return Finding("clock", "ok", text)
