"""How much memory the device that is to hold the blocks has left."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil

from ...models.cache_dir import cache_dir
from .memory import Memory

_CLAIMS: Final = "claims"
_UNLIMITED: Final = 1 << 60
_V2: Final = ("memory.max", "memory.current", "inactive_file")
_V1: Final = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def has_accelerator(device: str) -> bool:
    """Whether this may be about another device than the CPU; quick, and without torch."""
    return device != "cpu" and (sys.platform != "linux" or Path("/dev/nvidia0").exists() or device != "auto")


def device_memory(device: str) -> Memory:
    """Of the device of this name (auto: of the one that is chosen).

    That of a CPU is what programs can have without swapping, within the limit of a container, and without what other
    servers on this machine have claimed, but not used yet.
    """
    if has_accelerator(device):
        import torch

        from ...blocks.config import choose_device

        chosen = choose_device(device)
        if chosen.type == "cuda":
            free, total = torch.cuda.mem_get_info(chosen)
            return Memory(free, total, f"the memory of {torch.cuda.get_device_name(chosen)}", False)
    memory = psutil.virtual_memory()
    free, total = memory.available, memory.total
    limit = container_limit()
    if limit is not None and limit.total < total:
        free, total = min(free, limit.free), limit.total
    return Memory(max(0, free - claimed_by_others()), total)


def unused(nbytes: int) -> int:
    """Of so many bytes that this process will use: those that still count as free, because they are mapped files."""
    return max(0, nbytes - _private(psutil.Process()))


def container_limit(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> Memory | None:
    """What the control group of this process may use, and has left; None if it is not limited."""
    groups: dict[str, str] = {}
    with suppress(OSError):
        for line in own.read_text().splitlines():
            _number, controllers, group = line.split(":", 2)
            groups[controllers] = group.lstrip("/")
    folder, names = (root / "memory", _V1) if "memory" in groups else (root, _V2)
    path = folder / groups.get("memory", groups.get("", ""))
    found = []
    # Any group above may be the one that is limited; in a container only what is its own can be seen.
    for parent in (path, *path.parents):
        if parent.is_relative_to(folder):
            with suppress(OSError, ValueError):
                limit = int((parent / names[0]).read_text())
                used = int((parent / names[1]).read_text())
                for line in (parent / "memory.stat").read_text().splitlines():
                    if line.startswith(f"{names[2]} "):
                        used -= int(line.split()[1])
                if limit < _UNLIMITED:
                    found.append(Memory(max(0, limit - used), limit))
    return min(found, key=lambda memory: memory.free, default=None)


def claim(nbytes: int) -> None:
    """Tells other servers on this machine that this process will use so much in all.

    That it cannot be written is no error: then the others go by what is in use.
    """
    process = psutil.Process()
    with suppress(OSError):
        folder = cache_dir() / _CLAIMS
        folder.mkdir(exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".tmp", delete=False) as stream:
            json.dump({"started": process.create_time(), "bytes": nbytes}, stream)
        Path(stream.name).replace(folder / f"{process.pid}.json")


def claimed_by_others() -> int:
    """Bytes that other processes have claimed and do not use yet. Claims of processes that are gone are removed."""
    total = 0
    for file in _files(cache_dir() / _CLAIMS):
        with suppress(OSError, ValueError, KeyError, TypeError):
            claimed = json.loads(file.read_bytes())
            pid = int(file.stem)
            if pid == os.getpid():
                continue
            try:
                process = psutil.Process(pid)
                if abs(process.create_time() - float(claimed["started"])) > 1:
                    raise psutil.NoSuchProcess(pid)
                total += max(0, int(claimed["bytes"]) - _private(process))
            except psutil.NoSuchProcess:
                file.unlink()
            except psutil.AccessDenied:
                total += int(claimed["bytes"])
    return total


def _files(folder: Path) -> list[Path]:
    with suppress(OSError):
        return sorted(folder.glob("*.json"))
    return []


def _private(process: psutil.Process) -> int:
    """Bytes that are in use and counted as such; mapped files are not, they count as free."""
    memory = process.memory_info()
    return int(memory.rss - getattr(memory, "shared", 0))
