"""A limit for what petalnode keeps of models on this disk (`--max-disk`): least recently used goes first.

What counts: models imported into petalnode's cache, its quantised blocks, and the weights that it fetched into the
hub's cache, shard by shard. A note of ours says which these are: what other programs keep there is not touched.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from ...protocols.ids import Span
from ..errors import BadInput
from .cache_dir import began_at, cache_dir, still_runs
from .checkpoint import Checkpoint

log = logging.getLogger(__name__)

_USED: Final = "used"
_OWN: Final = ("models", "quantised")
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
BeforeDownload: TypeAlias = Callable[[Mapping[Path, int], Collection[Path]], None]
"""Called with the files that will be downloaded, and their bytes; and with all that are needed, which have to stay."""


@dataclass(frozen=True)
class CacheEntry:
    """Something that may be removed as a whole; `used` in seconds since 1970."""

    path: Path
    nbytes: int
    used: float


def to_remove(entries: Sequence[CacheEntry], limit: int, keep: Collection[Path] = ()) -> tuple[CacheEntry, ...]:
    """The least recently used entries whose removal leaves at most `limit` bytes; never those in `keep`."""
    excess = sum(entry.nbytes for entry in entries) - limit
    going = []
    for entry in sorted(entries, key=lambda entry: (entry.used, str(entry.path))):
        if excess <= 0:
            break
        if entry.path not in keep:
            going.append(entry)
            excess -= entry.nbytes
    return tuple(going)


def note_fetched(shards: Iterable[Path]) -> None:
    """Notes that these shards in the hub's cache come there for us, now: they may be removed again. That a note cannot
    be written is no error."""
    now = time.time()
    every = [shard.absolute() for shard in shards]
    for folder in {shard.parent for shard in every}:
        names = [shard.name for shard in every if shard.parent == folder]
        _write_note(folder, {**_noted(_note(folder)), **dict.fromkeys(names, now)})


def evict_for_download(limit: int | None) -> BeforeDownload:
    """A callback that removes old entries so that all stays within `limit` bytes. It notes the new files as ours."""

    def before_download(coming: Mapping[Path, int], needed: Collection[Path]) -> None:
        if limit is not None:
            keep_within(limit - sum(coming.values()), needed)
        note_fetched(coming)

    return before_download


def no_disk_limit(coming: Mapping[Path, int], needed: Collection[Path]) -> None:
    """Where there is no limit."""


def note_use(used: Collection[Path]) -> None:
    """Notes that these models, or shards in the hub's cache, are used now. Of shards that did not come there for us
    nothing is noted."""
    now = time.time()
    for path in used:
        folder = path.absolute().parent
        if not is_snapshot(folder):
            _write_note(path.absolute(), {}, by_us=True)
        else:
            noted = _noted(_note(folder))
            _write_note(folder, {**noted, path.name: now} if path.name in noted else noted, by_us=True)


def users_of(folder: Path) -> list[int]:
    """The processes that have noted that they use the model in `folder`, and still run."""
    import psutil

    found = []
    for pid, started in _users(_note(folder)):
        with suppress(psutil.Error):
            if still_runs(pid, started):
                found.append(pid)
    return found


def _users(note: Path) -> list[tuple[int, float]]:
    try:
        return [(int(pid), float(started)) for pid, started in json.loads(note.read_bytes())["by"]]
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return []


def _write_note(folder: Path, files: Mapping[str, float], by_us: bool = False) -> None:
    import psutil

    note = _note(folder)
    with suppress(OSError):
        note.parent.mkdir(exist_ok=True)
        by = [user for user in _users(note) if psutil.pid_exists(user[0]) and user[0] != os.getpid()]
        if by_us:
            by.append((os.getpid(), began_at(os.getpid())))
        note.write_text(json.dumps({"path": str(folder), "files": files, "by": by}))


def in_use(folder: Path, num_blocks: int, span: Span) -> tuple[Path, ...]:
    """What a server of `span` uses of the model in `folder`: the shards with its blocks, or all where it is no snapshot
    of the hub.

    Raises:
        ModelError: the weights are not there, or damaged.
    """
    if not is_snapshot(folder.absolute()):
        return (folder,)
    checkpoint = Checkpoint(folder, num_blocks)
    names = {checkpoint.file_of[key] for block in range(span.start, span.end) for key in checkpoint.parts[block]}
    return tuple(folder.absolute() / name for name in sorted(names))


def keep_within(limit: int, keep: Collection[Path] = ()) -> int:
    """Removes models that were not used for longest, until all are within `limit` bytes; how many bytes remain.

    A file that another process has open stays usable for it, where the system allows that, else it stays.
    """
    entries = tuple(_all_entries())
    remaining = sum(entry.nbytes for entry in entries)
    staying = {path.absolute() for path in keep}
    for entry in to_remove(entries, limit, staying):
        try:
            _remove(entry.path, staying)
        except OSError as error:
            log.warning("cannot remove %s to keep within --max-disk: %s", entry.path, error)
            continue
        remaining -= entry.nbytes
        log.info("removed %s, not used for longest, to keep within --max-disk", entry.path)
    return remaining


def parse_size(text: str, option: str) -> int:
    """Bytes of "500M", "50G", "1.5TiB"; multiples of 1024.

    Raises:
        BadInput: it is no size.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None or float(found[1]) <= 0:
        raise BadInput(f"{option} {text}: give a size such as 500M, 50G or 1T")
    return int(float(found[1]) * _UNITS[found[2].upper()])


def _all_entries() -> Iterator[CacheEntry]:
    root = cache_dir()
    for name in _OWN:
        with suppress(OSError):
            for path in (root / name).iterdir():
                if not path.name.endswith((".lock", ".partial", ".tmp")):
                    yield CacheEntry(path, disk_bytes(path), last_use(path))
    with suppress(OSError):
        for note in (root / _USED).glob("*.json"):
            with suppress(OSError, ValueError, KeyError, TypeError):
                folder = Path(json.loads(note.read_bytes())["path"])
                if is_snapshot(folder):
                    for name, used in _noted(note).items():
                        if Path(name).name == name and (folder / name).exists():
                            yield CacheEntry(folder / name, disk_bytes(folder / name), used)


def _noted(note: Path) -> dict[str, float]:
    """When the shards of a snapshot were used, by name, as far as it is noted."""
    try:
        files = json.loads(note.read_bytes())["files"]
        return {str(name): float(at) for name, at in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def is_snapshot(path: Path) -> bool:
    """Whether this is a model at one commit in the hub's cache: .../models--org--name/snapshots/commit."""
    return path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--")


def last_use(path: Path) -> float:
    """Seconds since 1970."""
    try:
        return _note(path).stat().st_mtime
    except OSError:
        with suppress(OSError):
            return path.stat().st_mtime
        return time.time()


def _note(path: Path) -> Path:
    return cache_dir() / _USED / f"{hashlib.sha256(os.fsencode(path.absolute())).hexdigest()[:32]}.json"


def disk_bytes(path: Path) -> int:
    """Of a file, or of all files of a folder."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    total = 0
    for file in files:
        with suppress(OSError):
            total += file.stat().st_size
    return total


def _remove(path: Path, staying: Collection[Path]) -> None:
    """`staying` are files that are or will be there: their snapshot stays, too, though it may have no weights."""
    if not is_snapshot(path.parent):
        if path.is_file():
            path.unlink()
        else:
            shutil.rmtree(path)
        _note(path).unlink(missing_ok=True)
        return
    _remove_link(path)
    folder = path.parent
    if not any(folder.glob("*.safetensors")) and not any(file.parent == folder for file in staying):
        for file in list(folder.iterdir()):
            if not file.is_dir():
                _remove_link(file)
        shutil.rmtree(folder)
        _note(folder).unlink(missing_ok=True)


def _remove_link(file: Path) -> None:
    """Removes a file of a snapshot, which is a link; its blob stays if another snapshot shares it."""
    blob, folder = file.resolve(), file.parent
    shared = any(
        other.resolve() == blob
        for snapshot in folder.parent.iterdir()
        for other in snapshot.rglob("*")
        if other != file
    )
    if file.is_symlink() and not shared and blob.parent == folder.parent.parent / "blobs":
        blob.unlink(missing_ok=True)
    file.unlink()
