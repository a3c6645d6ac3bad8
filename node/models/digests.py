"""SHA-256 of the parts of a checkpoint, remembered so that a model is read once and not at every start."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

from ...crypto.canonical import digest
from ..errors import ModelError
from .checkpoint import Checkpoint
from .parts import Part
from .progress import Progress, no_progress
from .remembered import Remembered, file_stamp
from .safetensors_file import StoredTensor

_DOMAIN = "petalnode/model/part/1"
_CHUNK = 4 << 20


def part_digests(
    checkpoint: Checkpoint, parts: Iterable[Part], progress: Progress = no_progress, what: str = "Checking the weights"
) -> Mapping[Part, bytes]:
    """The digest (32 bytes) of each of `parts`: over its tensors' names within the part, dtypes, shapes and bytes.

    The name of a tensor is its key without the wrapper's prefix and without the block's number, so it makes
    no difference how the checkpoint was sharded or whether it was saved with or without its base model's
    prefix. What was hashed before is remembered for as long as path, sizes and times of the files are the same.

    Raises:
        ModelError: if a file is missing, malformed, or changes while it is read.
    """
    parts = tuple(parts)
    remembered = Remembered(checkpoint.folder)
    stamps = {part: _stamp(checkpoint, part) for part in parts}
    known = {part: found for part in parts if (found := remembered.get(str(part), stamps[part])) is not None}
    missing = [part for part in parts if part not in known]
    if missing:
        hashed = _hash_parts(checkpoint, missing, progress, what)
        for part in missing:
            if _stamp(checkpoint, part) != stamps[part]:
                raise ModelError(f"{checkpoint.folder} changed while it was read. Run it again when it is complete.")
        known.update(hashed)
        remembered.add({str(part): (stamps[part], hashed[part]) for part in missing})
    return {part: known[part] for part in parts}


def _hash_parts(checkpoint: Checkpoint, parts: list[Part], progress: Progress, what: str) -> dict[Part, bytes]:
    tensors = {part: checkpoint.tensors(part) for part in parts}
    count = _Count(what, sum(t.nbytes for ts in tensors.values() for t in ts), progress)
    # hashlib lets go of the interpreter's lock, so threads do help
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1), thread_name_prefix="sha256") as pool:
        futures = {part: [pool.submit(_hash_tensor, tensor, count) for tensor in ts] for part, ts in tensors.items()}
        try:
            hashes = {part: [future.result() for future in each] for part, each in futures.items()}
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return {
        part: digest(
            _DOMAIN,
            [
                [name, tensor.dtype, list(tensor.shape), sha]
                for name, tensor, sha in sorted(
                    zip(
                        map(checkpoint.layout.local_name, checkpoint.parts[part]),
                        ts,
                        hashes[part],
                        strict=True,
                    ),
                    key=lambda entry: entry[0],
                )
            ],
        )
        for part, ts in tensors.items()
    }


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
