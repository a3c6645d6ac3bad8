"""SHA-256 of the parts of a checkpoint, kept so that a model is read once and not at every start."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...crypto.canonical import digest
from ..errors import ModelError
from .cache_dir import cache_dir
from .checkpoint import Checkpoint, StoredTensor
from .parts import Part
from .progress import Progress, no_progress

_DOMAIN = "petalnode/model/part/1"
_CHUNK = 4 << 20
_FOLDER = "hashes"
_FORMAT = 1


def part_digests(
    checkpoint: Checkpoint, parts: Iterable[Part], progress: Progress = no_progress, what: str = "Checking the weights"
) -> Mapping[Part, bytes]:
    """The digest (32 bytes) of each of `parts`: over its tensors' names within the part, dtypes, shapes and bytes.

    The name of a tensor is its key without the wrapper's prefix and without the block's number, so it makes
    no difference how the checkpoint was sharded or whether it was saved with or without its base model's
    prefix. What was hashed before is kept for as long as path, sizes and times of the files are the same.

    Raises:
        ModelError: if a file is missing, malformed, or changes while it is read.
    """
    parts = tuple(parts)
    cache = DigestCache(checkpoint.folder)
    stamps = {part: _stamp(checkpoint, part) for part in parts}
    known = {part: found for part in parts if (found := cache.get(str(part), stamps[part])) is not None}
    missing = [part for part in parts if part not in known]
    if missing:
        hashed = _hash_parts(checkpoint, missing, progress, what)
        for part in missing:
            if _stamp(checkpoint, part) != stamps[part]:
                raise ModelError(f"{checkpoint.folder} changed while it was read. Run it again when it is complete.")
        known.update(hashed)
        cache.add({str(part): (stamps[part], hashed[part]) for part in missing})
    return {part: known[part] for part in parts}


def _hash_parts(checkpoint: Checkpoint, parts: list[Part], progress: Progress, what: str) -> dict[Part, bytes]:
    tensors = {part: checkpoint.tensors(part) for part in parts}
    count = _Count(what, sum(map(checkpoint.nbytes, parts)), progress)
    # hashlib lets go of the interpreter's lock, so threads do help
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1), thread_name_prefix="sha256") as pool:
        futures = {part: [pool.submit(_hash_tensor, tensor, count) for tensor in ts] for part, ts in tensors.items()}
        try:
            hashes = {part: [future.result() for future in of_part] for part, of_part in futures.items()}
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return {part: digest(_DOMAIN, _entries(checkpoint, part, tensors[part], hashes[part])) for part in parts}


def _entries(checkpoint: Checkpoint, part: Part, tensors: Iterable[StoredTensor], hashes: list[bytes]) -> list[Any]:
    """What the digest of a part is made of: name, dtype, shape and hash of its tensors, by name."""
    names = map(checkpoint.layout.local_name, checkpoint.parts[part])
    entries = [
        [name, tensor.dtype, list(tensor.shape), sha] for name, tensor, sha in zip(names, tensors, hashes, strict=True)
    ]
    return sorted(entries, key=lambda entry: str(entry[0]))


def _hash_tensor(tensor: StoredTensor, count: _Count) -> bytes:
    # read, not mapped: that a file shrinks meanwhile is an error to report, and would kill a process that maps it
    sha = hashlib.sha256()
    left = tensor.nbytes
    buffer = memoryview(bytearray(min(_CHUNK, left)))
    try:
        with tensor.file.open("rb", buffering=0) as stream:
            stream.seek(tensor.start)
            while left:
                got = stream.readinto(buffer[: min(_CHUNK, left)])
                if not got:
                    raise ModelError(f"{tensor.file} is truncated. Copy or download it again.")
                sha.update(buffer[:got])
                left -= got
                count.add(got)
    except OSError as error:
        raise ModelError(f"Cannot read {tensor.file}: {error.strerror}.") from error
    return sha.digest()


class _Count:
    """Adds up what several threads have done, and reports it one call at a time."""

    def __init__(self, what: str, total: int, progress: Progress) -> None:
        self._what, self._total, self._progress = what, total, progress
        self._done = 0
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            self._progress(self._what, self._done, self._total)


def _stamp(checkpoint: Checkpoint, part: Part) -> str:
    """Changes whenever the files of `part` may have changed."""
    files = sorted({tensor.file for tensor in checkpoint.tensors(part)})
    return digest(
        "petalnode/model/part-stamp/1",
        [[file.name, *file_stamp(file)] for file in files],
        list(checkpoint.parts[part]),
    ).hex()


class DigestCache:
    """SHA-256 hashes that belong to one path: a small JSON file in the cache, replaced as a whole.

    Each is kept with a stamp that changes whenever what was hashed may have changed. Two processes that write
    at once may lose one's hashes, which costs that one a second reading.
    """

    def __init__(self, path: Path) -> None:
        name = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32]
        self._file = cache_dir() / _FOLDER / f"{name}.json"
        self._entries = self._load()

    def get(self, name: str, stamp: str) -> bytes | None:
        """The 32 bytes kept under `name`, if they are there and were kept with this stamp."""
        entry = self._entries.get(name)
        return bytes.fromhex(entry[1]) if entry and entry[0] == stamp else None

    def add(self, new: Mapping[str, tuple[str, bytes]]) -> None:
        """Keeps name -> (stamp, hash) beside what is there."""
        entries = {**self._load(), **{name: [stamp, sha.hex()] for name, (stamp, sha) in new.items()}}
        # A cache that cannot be written must not stop a node that is otherwise ready.
        with suppress(OSError):
            self._file.parent.mkdir(exist_ok=True)
            with tempfile.NamedTemporaryFile(
                "w", dir=self._file.parent, prefix=self._file.stem, suffix=".tmp", delete=False
            ) as stream:
                json.dump({"format": _FORMAT, "hashes": entries}, stream)
            Path(stream.name).replace(self._file)

    def _load(self) -> dict[str, list[str]]:
        try:
            stored = json.loads(self._file.read_bytes())
            if stored["format"] != _FORMAT:
                return {}
            return {
                name: [stamp, sha]
                for name, (stamp, sha) in stored["hashes"].items()
                if isinstance(stamp, str) and len(bytes.fromhex(sha)) == 32
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}


def known_file_digest(file: Path) -> bytes | None:
    """SHA-256 of a whole file if it was computed before; the file is not read."""
    return DigestCache(file).get("file", _whole_file_stamp(file))


def file_digest(file: Path, progress: Progress) -> bytes:
    """SHA-256 of a whole file, kept for as long as its path, size and times are the same."""
    found = known_file_digest(file)
    if found is None:
        stamp = _whole_file_stamp(file)
        found = sha256_of(file, file.name, progress)
        DigestCache(file).add({"file": (stamp, found)})
    return found


def _whole_file_stamp(file: Path) -> str:
    return digest("petalnode/model/file-stamp/1", file_stamp(file)).hex()


def sha256_of(file: Path, name: str, progress: Progress) -> bytes:
    """SHA-256 of a whole file, which `progress` calls `name`."""
    sha, done, total = hashlib.sha256(), 0, file.stat().st_size
    with file.open("rb", buffering=0) as stream:
        while chunk := stream.read(_CHUNK):
            sha.update(chunk)
            done += len(chunk)
            progress(f"Checking {name}", done, total)
    return sha.digest()


def file_stamp(file: Path) -> list[int]:
    """Size and times of a file: change whenever it may have been written to."""
    stat = file.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
