"""What can go wrong on this machine before a node runs: each check looks at one thing and says what to do about it."""

from __future__ import annotations

import shutil
import socket
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final, Literal

import psutil
from packaging.requirements import Requirement

Verdict = Literal["ok", "warning", "problem"]

_GIB: Final = 1 << 30
# A server of the default model needs 0.6 GB beside its weights; below the second nothing can be expected to load.
_MEMORY_WANTED: Final = 4 * _GIB
_MEMORY_NEEDED: Final = 1 * _GIB
_DISK_WANTED: Final = 5 * _GIB
_DISK_NEEDED: Final = _GIB // 2
_FILES_WANTED: Final = 1024
# Announcements carry times; readers allow for 10 s of difference, and a third of that is a clock that is not kept.
_CLOCK_WARNING: Final = 3.0
_CLOCK_PROBLEM: Final = 10.0


@dataclass(frozen=True)
class Finding:
    """What one check saw. `advice` says what to do about anything but "ok"."""

    check: str
    verdict: Verdict
    text: str
    advice: str = ""


def check_versions() -> Finding:
    """Whether Python and every package are of a version that this release was made for."""
    wrong = list(_unmet(metadata.requires("petalnode") or ()))
    packages = ", ".join(f"{name} {metadata.version(name)}" for name in ("libp2p", "trio", "torch", "transformers"))
    text = f"petalnode {metadata.version('petalnode')}, Python {sys.version.split()[0]}, {packages}"
    if wrong:
        return Finding(
            "versions", "problem", f"{text}; {'; '.join(wrong)}", "install petalnode anew, in an environment of its own"
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
    """Whether torch computes, on each device that it finds: a driver that does not fit shows only then."""
    import torch

    names = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    if torch.backends.mps.is_available():
        names.append("mps")
    for name in names:
        try:
            square = torch.ones(64, 64, device=name)
            right = float((square @ square).sum()) == 64.0**3
        except RuntimeError as error:
            reason = (str(error).splitlines() or ["no reason given"])[0]
            advice = f"check the driver (nvidia-smi), or serve with --device {names[0]}"
            yield Finding("device", "problem", f"{name} does not compute: {reason}", advice)
            continue
        if not right:
            yield Finding("device", "problem", f"{name} computes wrong", "check the driver and the memory")
        elif name == "cpu":
            yield Finding("device", "ok", f"cpu, {torch.get_num_threads()} threads")
        else:
            free = torch.cuda.mem_get_info(name)[0] if name.startswith("cuda") else torch.mps.recommended_max_memory()
            yield Finding("device", "ok", f"{name}, {free / _GIB:.1f} GiB free")


def check_memory() -> Finding:
    memory = psutil.virtual_memory()
    text = f"{memory.available / _GIB:.1f} of {memory.total / _GIB:.1f} GiB free"
    if memory.available < _MEMORY_NEEDED:
        return Finding("memory", "problem", text, "close other programs: not even a small model's blocks have room")
    if memory.available < _MEMORY_WANTED:
        return Finding("memory", "warning", text, "serve few blocks (--num-blocks), or close other programs")
    return Finding("memory", "ok", text)


def check_disk(folder: Path, purpose: str, variable: str) -> Finding:
    """Whether `folder`, where `purpose` is kept, can be written and has room. `variable` moves it."""
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
    if free < _DISK_WANTED:
        return Finding("disk", "warning", text, f"enough for small models; {variable} moves it to another disk")
    return Finding("disk", "ok", text)


def check_port(port: int) -> Finding:
    """Whether the port that a server takes by default is free; as servers do it, on all interfaces."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
        except OSError as error:
            advice = "fine if it is your running node; else serve with --listen /ip4/0.0.0.0/tcp/ANOTHER"
            return Finding("port", "warning", f"port {port} cannot be taken: {error.strerror}", advice)
    return Finding("port", "ok", f"port {port} is free")


def check_open_files() -> Finding:
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return Finding("open files", "ok", "no limit")
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and limit < _FILES_WANTED:
        return Finding(
            "open files",
            "warning",
            f"{limit} at once, each peer takes one",
            f"ulimit -n {min(4096, hard) if hard > 0 else 4096}, or LimitNOFILE= in the unit",
        )
    return Finding("open files", "ok", "no limit" if limit == resource.RLIM_INFINITY else f"{limit} at once")


def judge_clock(offsets: Iterable[float]) -> Finding:
    """From the differences to peers' clocks, in seconds (positive: theirs are ahead): the one in the middle counts."""
    ordered = sorted(offsets)
    if not ordered:
        return Finding("clock", "ok", f"{time.strftime('%Y-%m-%d %H:%M:%S %Z')}; no peer to compare it with")
    middle = ordered[len(ordered) // 2]
    text = f"{abs(middle):.1f} s {'behind' if middle > 0 else 'ahead of'} the peers' ({len(ordered)} asked)"
    advice = "set the clock, and let the system keep it (timedatectl set-ntp true)"
    if abs(middle) > _CLOCK_PROBLEM:
        return Finding("clock", "problem", text, f"others refuse what this node announces: {advice}")
    if abs(middle) > _CLOCK_WARNING:
        return Finding("clock", "warning", text, advice)
    return Finding("clock", "ok", text)
