"""A limit for what petalnode keeps of models on this disk: what was not used for longest goes first.

What counts: models imported into petalnode's cache, its quantised blocks, and models that it fetched into the hub's
cache, which are known by a note of their own: what other programs keep there is not touched.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..errors import BadInput
from .cache_dir import cache_dir

log = logging.getLogger(__name__)

_USED: Final = "used"
_OWN: Final = ("models", "quantised")
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True)
class Kept:
    """Something that may be removed as a whole; `used` in seconds since 1970."""

    path: Path
    nbytes: int
    used: float


def to_remove(kept: Sequence[Kept], limit: int, keep: Collection[Path] = ()) -> tuple[Kept, ...]:
    """What has to go for the rest to be at most `limit` bytes: what was not used for longest, never those in `keep`."""
    excess = sum(each.nbytes for each in kept) - limit
    going = []
    for each in sorted(kept, key=lambda each: (each.used, str(each.path))):
        if excess <= 0:
            break
        if each.path not in keep:
            going.append(each)
            excess -= each.nbytes
    return tuple(going)


def note_use(folder: Path) -> None:
    """Notes that the model in `folder` is used now. That the note cannot be written is no error."""
    note = _note(folder)
    with suppress(OSError):
        note.parent.mkdir(exist_ok=True)
        note.write_text(json.dumps({"path": str(folder.absolute())}))


def keep_within(limit: int, keep: Collection[Path] = ()) -> int:
    """Removes models that were not used for longest, until all are within `limit` bytes; how many bytes remain.

    A file that another process has open stays usable for it, where the system allows that, else it stays.
    """
    kept = tuple(_all_kept())
    remaining = sum(each.nbytes for each in kept)
    for each in to_remove(kept, limit, {path.absolute() for path in keep}):
        try:
            _remove(each.path)
        except OSError as error:
            log.warning("cannot remove %s to keep within --max-disk: %s", each.path, error)
            continue
        remaining -= each.nbytes
        log.info("removed %s, not used for longest, to keep within --max-disk", each.path)
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


def _all_kept() -> Iterator[Kept]:
    root = cache_dir()
    for name in _OWN:
        with suppress(OSError):
            for path in (root / name).iterdir():
                if not path.name.endswith((".lock", ".partial", ".tmp")):
                    yield Kept(path, _nbytes(path), _last_use(path))
    with suppress(OSError):
        for note in (root / _USED).glob("*.json"):
            with suppress(OSError, ValueError, KeyError, TypeError):
                path = Path(json.loads(note.read_bytes())["path"])
                if _is_snapshot(path) and path.is_dir():
                    yield Kept(path, _nbytes(path), note.stat().st_mtime)


def _is_snapshot(path: Path) -> bool:
    """Whether this is a model at one commit in the hub's cache: .../models--org--name/snapshots/commit."""
    return path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--")


def _last_use(path: Path) -> float:
    try:
        return _note(path).stat().st_mtime
    except OSError:
        with suppress(OSError):
            return path.stat().st_mtime
        return time.time()


def _note(path: Path) -> Path:
    return cache_dir() / _USED / f"{hashlib.sha256(os.fsencode(path.absolute())).hexdigest()[:32]}.json"


def _nbytes(path: Path) -> int:
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    total = 0
    for file in files:
        with suppress(OSError):
            total += file.stat().st_size
    return total


def _remove(path: Path) -> None:
    if path.is_file():
        path.unlink()
    elif _is_snapshot(path):
        # The snapshot is links; what they lead to may be shared with another snapshot of the same model.
        shared = {file.resolve() for other in path.parent.iterdir() if other != path for file in other.rglob("*")}
        for file in list(path.rglob("*")):
            blob = file.resolve()
            if file.is_symlink() and blob not in shared and blob.parent == path.parent.parent / "blobs":
                blob.unlink(missing_ok=True)
        shutil.rmtree(path)
    else:
        shutil.rmtree(path)
    _note(path).unlink(missing_ok=True)
