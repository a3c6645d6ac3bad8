"""Model folders that petalnode makes in its cache: each is made once, and is there as a whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from ..cache_dir import cache_dir, disk_errors
from ..progress import Progress

_FOLDER = "models"


def imported_folder(key: str) -> Path:
    """Where the folder `key` is, or will be."""
    return cache_dir() / _FOLDER / key


def import_once(key: str, what: str, build: Callable[[Path], None], progress: Progress) -> Path:
    """Returns the folder `key` of the cache; makes it by `build(empty folder)` if it is not there.

    The folder gets its name only when it is complete, and what was begun is removed if `build` raises. If
    another process is making it, this one waits for it: that process holds a lock which its end releases.

    Raises:
        MachineError: if the disk is full or cannot be written.
        Exception: what `build` raises.
    """
    from filelock import FileLock, Timeout

    target = imported_folder(key)
    if target.is_dir():
        return target
    with disk_errors(target.parent, what):
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(target.parent / f"{key}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            progress(f"Waiting for another process: {what}", 0, None)
            lock.acquire()
        try:
            if target.is_dir():
                return target
            partial = target.parent / f"{key}.partial"
            shutil.rmtree(partial, ignore_errors=True)  # what a killed process left: nobody else has the lock
            partial.mkdir()
            try:
                build(partial)
                _sync(partial)
                partial.rename(target)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
            _sync_one(target.parent)
            return target
        finally:
            lock.release()


def _sync(folder: Path) -> None:
    """Brings the files to the disk before the rename does: a power cut must not leave a named folder of zeros."""
    for entry in folder.rglob("*"):
        if entry.is_file():
            _sync_one(entry)
    _sync_one(folder)


def _sync_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
