"""The memory of this machine: how much a node lets strangers take of it, and giving back what is not used any more."""

from __future__ import annotations

import ctypes
import math
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import psutil
import trio

_MIB: Final = 1 << 20
_UNLIMITED: Final = 1 << 60
_V2: Final = ("memory.max", "memory.current", "")
_V1: Final = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
_LOOK: Final = 15.0  # seconds between two looks at what could be given back
_WORTH: Final = 32 * _MIB  # bytes, for which a trim of some ms pays
_MOVED: Final = 4 * _MIB  # bytes, by which the heap has changed where a trim is worth its time after two looks


@dataclass(frozen=True)
class Budgets:
    """Bytes that peers may have a node hold, over all connections.

    Attributes:
        ungranted: not read yet, on streams whose handler has granted nothing.
        unread: not read yet, on all other streams.
        unread_of_peer: either of one peer.
        received: messages received in part, or worked with, beside one of any size.
        view: announcements of servers, at 16 KiB for each.
        values: kept for others in Kademlia.
    """

    ungranted: int
    unread: int
    unread_of_peer: int
    received: int
    view: int
    values: int


def _part(memory: int, divisor: int, least: int, most: int) -> int:
    """In bytes; `least` and `most` in MiB."""
    return min(max(memory // divisor, least * _MIB), most * _MIB)


def budgets_of(memory: int) -> Budgets:
    """What a machine, or a container, with `memory` bytes has for its peers: a fortieth, all budgets together, but
    enough for one largest prompt, and no more than a core can use."""
    unread = _part(memory, 128, 48, 1024)
    return Budgets(
        ungranted=_part(memory, 512, 16, 128),
        unread=unread,
        unread_of_peer=unread // 2,
        received=_part(memory, 256, 64, 1024),
        view=_part(memory, 64, 32, 160),
        values=_part(memory, 1024, 4, 16),
    )


@cache
def own_budgets() -> Budgets:
    """Those of this machine, or of the control group that this process runs in."""
    limits = [limit for _free, limit in group_limits()]
    return budgets_of(min([psutil.virtual_memory().total, *limits]))


def group_limits(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> list[tuple[int, int]]:
    """What each control group that limits this process has left, and may use; none if it is not limited.

    Pages of files, read once or several times, count as left: the system gives them to who needs memory.
    """
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
        with suppress(OSError, ValueError):
            limit = int((parent / names[0]).read_text())
            used = int((parent / names[1]).read_text())
            for line in (parent / "memory.stat").read_text().splitlines():
                kind, _, nbytes = line.partition(" ")
                if kind.removeprefix(names[2]) in ("active_file", "inactive_file") and kind.startswith(names[2]):
                    used -= int(nbytes)
            if limit < _UNLIMITED:
                found.append((max(0, limit - used), limit))
    return found


# --- giving back


@dataclass(frozen=True)
class HeapUse:
    """Bytes that the C library keeps for later, that the process uses, and that it has of the system."""

    kept: int
    used: int
    resident: int

    def has_moved(self, other: HeapUse) -> bool:
        return max(abs(self.used - other.used), abs(self.resident - other.resident)) >= _MOVED


def worth_trimming(use: HeapUse, last: HeapUse, least_resident: int, since: float) -> bool:
    """Whether much may be given back; `last` is how the heap was after that had been done `since` seconds ago.

    The C library keeps it, and the process has grown as much since its least or last return. What it keeps in
    parts of pages cannot be given back, and is not tried again and again: but when a burst is over, what lay between
    its bytes is whole pages. What the C library says that it keeps has those that were given back already.
    """
    if use.kept < _MOVED:
        return False
    return (use.kept >= _WORTH and use.resident >= least_resident + _WORTH) or (
        since >= 2 * _LOOK and use.has_moved(last)
    )


class _Mallinfo2(ctypes.Structure):
    _names = ("_0", "_1", "_2", "_3", "mapped", "_5", "_6", "used", "free", "_9")
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names)


class Heap:
    """The heap of glibc.

    It gives back only what is free at the end of the heap. What was taken behind a large burst keeps all of it.

    Raises:
        OSError, AttributeError: another C library, which this leaves alone.
    """

    def __init__(self) -> None:
        library = ctypes.CDLL("libc.so.6")  # calls release the interpreter's lock
        self._info, self._trim = library.mallinfo2, library.malloc_trim
        self._info.restype = _Mallinfo2
        self._trim.argtypes = [ctypes.c_size_t]
        self._process = psutil.Process()

    def use(self) -> HeapUse:
        found = self._info()
        return HeapUse(found.free, found.used + found.mapped, self._process.memory_info().rss)

    def trim(self) -> None:
        self._trim(0)

    async def give_back(self) -> None:
        """Gives back to the system what strangers made this process take, soon after it is free, for ever."""
        last, trimmed = self.use(), -math.inf
        least = last.resident
        while True:
            await trio.sleep(_LOOK)
            use = await trio.to_thread.run_sync(self.use)
            if worth_trimming(use, last, least, trio.current_time() - trimmed):
                await trio.to_thread.run_sync(self.trim)
                trimmed = trio.current_time()
                last = await trio.to_thread.run_sync(self.use)
                least = last.resident
            least = min(least, use.resident)


def own_heap() -> Heap | None:
    """None where the C library is another one."""
    with suppress(OSError, AttributeError):
        return Heap() if sys.platform == "linux" else None
    return None
