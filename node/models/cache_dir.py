"""petalnode's cache on this machine: where it is, and model folders that are made in it once, whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from ..errors import MachineError
from .progress import Progress

_GIB, _MIB = 1 << 30, 1 << 20
_OF_RUST: Final = re.compile(r"\(os error (\d{1,3})\)$")
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)
_PATH_ERRORS = (errno.EIO, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.EEXIST)
_CACHE_ADVICE = "Make room or set PETALNODE_CACHE to a folder that can be written, then run it again."
_SPACE_ADVICE = "Make room, or choose another disk (PETALNODE_CACHE for imported models, HF_HOME for hub downloads)."
_PROBE_BYTES = 1 << 16


def cache_dir() -> Path:
    """The root of petalnode's cache: `PETALNODE_CACHE`, else the platform's folder for caches.

    It is made if it is not there.

    Raises:
        MachineError: if it cannot be made.
    """
    given = os.environ.get("PETALNODE_CACHE")
    if given:
        root = Path(given).expanduser().absolute()
    else:
        from platformdirs import user_cache_path

        root = user_cache_path("petalnode", appauthor=False)
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MachineError(
            f"Cannot make the cache folder {root}: {error.strerror}. Set PETALNODE_CACHE to a folder that "
            "can be written."
        ) from error
    return root


def data_folder() -> Path:
    """Where keys, conversations, remembered peers and faults of servers are kept: the platform's folder for data."""
    from platformdirs import user_data_path

    return user_data_path("petalnode", appauthor=False)


def keep_json(file: Path, value: object) -> None:
    """Puts `value` into a file of the cache, whole or not at all. That it cannot be written is no error.

    What a process that was killed an hour ago or earlier left unfinished in the folder is removed.
    """
    with suppress(OSError):
        file.parent.mkdir(exist_ok=True)
        for unfinished in file.parent.glob("*.tmp"):
            if time.time() - unfinished.stat().st_mtime > 3600:
                unfinished.unlink(missing_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".tmp", delete=False) as stream:
            json.dump(value, stream)
        Path(stream.name).replace(file)


def began_at(pid: int) -> float:
    """When the process began, to tell it from others of its number: on Linux in seconds since the machine did.

    No change of the clock moves that, which machines without a battery for it put right after their start.

    Raises:
        psutil.Error: it is gone, or nothing is told of it.
    """
    import psutil

    began: float = psutil.Process(pid).create_time()
    return began - psutil.boot_time() if sys.platform == "linux" else began


def still_runs(pid: int, began: float) -> bool:
    """Whether the process of this number is the one that began then (`began_at`, which says what is raised)."""
    return abs(began_at(pid) - began) < 2  # the system tells whole seconds


def check_writable(folder: Path, purpose: str, advice: str = _CACHE_ADVICE) -> Path:
    """Checks that files can be made in `folder`, or that it can be made itself; leaves nothing behind.

    Returns:
        The folder that exists: `folder`, or the nearest one above it.

    Raises:
        MachineError: the disk is full, or the folder cannot be written.
    """
    with disk_errors(folder, purpose, advice):
        there = folder.absolute()
        while not there.exists():
            there = there.parent
        with tempfile.NamedTemporaryFile(dir=there, prefix=".petalnode-") as probe:
            probe.write(bytes(_PROBE_BYTES))
            probe.flush()
            os.fsync(probe.fileno())
    return there


def require_space(folder: Path, nbytes: int, purpose: str, advice: str = _SPACE_ADVICE) -> None:
    """Checks that the disk of `folder` (which must exist) has room for `nbytes` more.

    Raises:
        MachineError: if not, with both sizes.
    """
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise MachineError(
            f"{purpose} needs {size(nbytes)} on the disk of {folder}, which has {size(free)} free. {advice}"
        )


def is_disk_error(error: BaseException) -> bool:
    """Whether this is about a disk that cannot be written: full, over quota, read-only, not permitted."""
    return isinstance(error, OSError) and error.errno in _DISK_ERRORS


@contextmanager
def disk_errors(folder: Path, purpose: str, advice: str = _CACHE_ADVICE) -> Iterator[None]:
    """Turns a disk that is full, read-only or over quota, and an impossible path, into a MachineError naming
    `folder`."""
    try:
        yield
    except Exception as error:
        number = _system_error(error)
        if number not in (*_DISK_ERRORS, *_PATH_ERRORS):
            raise
        raise MachineError(f"{purpose} failed: {os.strerror(number or 0)} ({folder}). {advice}") from error


def _system_error(error: Exception) -> int | None:
    """The number of the system's error that this is about: libraries in Rust, such as tokenizers, raise their own."""
    if isinstance(error, OSError):
        return error.errno
    said = _OF_RUST.search(str(error))
    return int(said[1]) if said else None


def size(nbytes: int) -> str:
    """Bytes for a person."""
    if nbytes >= _GIB:
        return f"{nbytes / _GIB:.1f} GiB"
    return f"{nbytes / _MIB:.0f} MiB" if nbytes >= _MIB else f"{nbytes / 1024:.0f} KiB"


_FOLDER = "models"


def imported_folder(key: str) -> Path:
    """Where the folder `key` is, or will be."""
    return cache_dir() / _FOLDER / key


def import_once(key: str, what: str, build: Callable[[Path], None], progress: Progress) -> Path:
    """Returns the folder `key` of the cache; makes it by `build(empty folder)` if it is not there.

    The folder gets its name only when it is complete, and an incomplete folder is removed if `build` raises. If
    another process is making it, this one waits for it: that process holds a lock which its end releases.

    Raises:
        MachineError: if the disk is full or cannot be written.
        Exception: what `build` raises.
    """
    target = imported_folder(key)
    if target.is_dir():
        return target
    with disk_errors(target.parent, what):
        target.parent.mkdir(parents=True, exist_ok=True)
        with one_at_a_time(target.parent / f"{key}.lock", what, progress):
            if target.is_dir():
                return target
            partial = target.parent / f"{key}.partial"
            shutil.rmtree(partial, ignore_errors=True)  # of a killed process: this one holds the lock
            partial.mkdir()
            try:
                build(partial)
                _sync(partial)
                partial.rename(target)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
            sync_one(target.parent)
            return target


@contextmanager
def one_at_a_time(file: Path, what: str, progress: Progress) -> Iterator[None]:
    """Entered by one process after the other; says so where it waits. The end of a process releases the lock `file`."""
    from filelock import FileLock, Timeout

    lock = FileLock(file)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        progress(f"Waiting for another process: {what}", 0, None)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _sync(folder: Path) -> None:
    """Brings the files to the disk before the rename does: a power cut must not leave a named folder of zeros."""
    for entry in folder.rglob("*"):
        if entry.is_file():
            sync_one(entry)
    sync_one(folder)


def sync_one(path: Path) -> None:
    """Brings a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
