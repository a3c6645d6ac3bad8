"""SHA-256 of the parts of a checkpoint, kept so that a model is read once and not at every start."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import accumulate
from pathlib import Path

from ...crypto.canonical import digest
from ...protocols.weights import PIECE_BYTES, Tree, TreeEntry, count_pieces
from ..errors import ModelError
from .cache_dir import cache_dir, keep_json
from .checkpoint import Checkpoint
from .parts import Part
from .progress import Progress, ProgressSum, no_progress

_CHUNK = 4 << 20
_FOLDER = "hashes"
_FORMAT = 2
_ADDING = threading.Lock()


def part_digests(
    checkpoint: Checkpoint, parts: Iterable[Part], progress: Progress = no_progress, what: str = "Checking the weights"
) -> Mapping[Part, bytes]:
    """The digest (32 bytes) of each of `parts`: that of its tree. Raises as `part_trees`."""
    return {part: tree.digest for part, tree in part_trees(checkpoint, parts, progress, what).items()}


def part_trees(
    checkpoint: Checkpoint,
    parts: Iterable[Part],
    progress: Progress = no_progress,
    what: str = "Checking the weights",
    *,
    anew: bool = False,
) -> Mapping[Part, Tree]:
    """What the digest of each of `parts` is made of: its tensors' names, dtypes and shapes, and hashes of pieces.

    The name of a tensor is its key without the wrapper's prefix and without the block's number. So it makes no
    difference how the checkpoint was sharded, or whether it has its base model's prefix. What was hashed before is kept
    while path, sizes and times of the files are the same; `anew` reads it all the same, and keeps nothing.

    Raises:
        ModelError: if a file is missing, malformed, or changes while it is read.
    """
    readers = {part: PartReader(checkpoint, part) for part in parts}
    stamps = {part: _stamp(checkpoint, part) for part in readers}
    known = {} if anew else known_trees(checkpoint, readers)
    missing = {part: reader for part, reader in readers.items() if part not in known}
    if missing:
        hashed = _hash_parts(missing, progress, what)
        for part in missing:
            if _stamp(checkpoint, part) != stamps[part]:
                raise ModelError(f"{checkpoint.folder} changed while it was read. Run it again when it is complete.")
        if not anew:
            note_trees(checkpoint, hashed)
        known.update(hashed)
    return {part: known[part] for part in readers}


def known_trees(checkpoint: Checkpoint, parts: Iterable[Part]) -> dict[Part, Tree]:
    """The trees of those of `parts` that are on this disk and were hashed before; no weights are read."""
    cache = DigestCache(checkpoint.folder)
    found = {}
    for part in parts:
        with suppress(ModelError, OSError):
            pieces = cache.get(str(part), _stamp(checkpoint, part))
            if pieces is not None:
                found[part] = PartReader(checkpoint, part).tree(pieces)
    return found


def cache_stamp(folder: Path) -> list[int]:
    """Changes whenever something of `folder` was hashed; empty as long as nothing was."""
    file = DigestCache.file_of(folder)
    return file_stamp(file) if file.exists() else []


def note_trees(checkpoint: Checkpoint, trees: Mapping[Part, Tree]) -> None:
    """Keeps the trees of parts whose bytes on the disk are known to be those."""
    DigestCache(checkpoint.folder).add(
        {str(part): (_stamp(checkpoint, part), tree.pieces) for part, tree in trees.items()}
    )


class PartReader:
    """The bytes of a part: those of its tensors, one behind the other by name. May be used by several threads.

    Raises:
        ModelError: as `Checkpoint.tensor`.
    """

    def __init__(self, checkpoint: Checkpoint, part: Part) -> None:
        named = zip(map(checkpoint.layout.local_name, checkpoint.parts[part]), checkpoint.tensors(part), strict=True)
        self._tensors = sorted(named, key=lambda named: named[0])
        self._ends = list(accumulate(tensor.nbytes for _, tensor in self._tensors))
        self._form = checkpoint.form
        self._stamps = self._stamp()

    @property
    def nbytes(self) -> int:
        return self._ends[-1] if self._ends else 0

    @property
    def is_unchanged(self) -> bool:
        """Whether the files are as they were when this was made."""
        return self._stamp() == self._stamps

    def _stamp(self) -> list[list[int]]:
        with suppress(OSError):
            return [file_stamp(file) for file in sorted({tensor.file for _, tensor in self._tensors})]
        return []

    def tree(self, pieces: bytes) -> Tree:
        """The tree of the part whose pieces have these hashes."""
        entries = (TreeEntry(name, held.dtype, held.shape, held.nbytes) for name, held in self._tensors)
        return Tree(self._form, tuple(entries), pieces)

    def read(self, piece: int) -> bytearray:
        """The bytes of a piece.

        Raises:
            ModelError: a file cannot be read, or is truncated.
        """
        start = piece * PIECE_BYTES
        data = bytearray(min(PIECE_BYTES, self.nbytes - start))
        place = 0
        number = bisect_right(self._ends, start)
        with memoryview(data) as view:
            while place < len(data):
                tensor = self._tensors[number][1]
                skipped = start + place - (self._ends[number] - tensor.nbytes)
                size = min(tensor.nbytes - skipped, len(data) - place)
                _read_into(tensor.file, tensor.start + skipped, view[place : place + size])
                place += size
                number += 1
        return data


def _read_into(file: Path, start: int, view: memoryview) -> None:
    # read, not mapped: that a file shrinks meanwhile is an error to report, and would kill a process that maps it
    try:
        with file.open("rb", buffering=0) as stream:
            stream.seek(start)
            place = 0
            while place < len(view):
                got = stream.readinto(view[place:])
                if not got:
                    raise ModelError(f"{file} is truncated. Copy or download it again.")
                place += got
    except OSError as error:
        raise ModelError(f"Cannot read {file}: {error.strerror}.") from error


def _hash_pieces(reader: PartReader, pieces: range, count: ProgressSum) -> bytes:
    found = []
    for piece in pieces:
        data = reader.read(piece)
        count.add(len(data))
        found.append(hashlib.sha256(data).digest())
    return b"".join(found)


def _hash_parts(readers: Mapping[Part, PartReader], progress: Progress, what: str) -> dict[Part, Tree]:
    count = ProgressSum(what, sum(reader.nbytes for reader in readers.values()), progress)

    # hashlib lets go of the interpreter's lock, so threads do help
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1), thread_name_prefix="sha256") as pool:
        futures = {
            part: [pool.submit(_hash_pieces, reader, pieces, count) for pieces in _runs(count_pieces(reader.nbytes))]
            for part, reader in readers.items()
        }
        try:
            return {
                part: readers[part].tree(b"".join(future.result() for future in of_part))
                for part, of_part in futures.items()
            }
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _runs(pieces: int) -> Iterator[range]:
    """Some pieces at a time: of a large model one by one, what a thread pool notes of them takes 80 MB."""
    return (range(first, min(first + 16, pieces)) for first in range(0, pieces, 16))


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

    Each is kept with a stamp that changes whenever what was hashed may have changed. Two processes that write at once
    (not two threads) may lose the hashes of one, which then reads a second time.
    """

    def __init__(self, path: Path) -> None:
        self._file = self.file_of(path)
        self._entries = self._load()

    @staticmethod
    def file_of(path: Path) -> Path:
        name = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32]
        return cache_dir() / _FOLDER / f"{name}.json"

    def get(self, name: str, stamp: str) -> bytes | None:
        """The hashes kept under `name`, one behind the other, if they are there and were kept with this stamp."""
        entry = self._entries.get(name)
        return bytes.fromhex(entry[1]) if entry and entry[0] == stamp else None

    def add(self, new: Mapping[str, tuple[str, bytes]]) -> None:
        """Keeps name -> (stamp, hashes) beside what is there."""
        with _ADDING:
            self._add(new)

    def _add(self, new: Mapping[str, tuple[str, bytes]]) -> None:
        entries = {**self._load(), **{name: [stamp, sha.hex()] for name, (stamp, sha) in new.items()}}
        keep_json(self._file, {"format": _FORMAT, "hashes": entries})

    def _load(self) -> dict[str, list[str]]:
        try:
            stored = json.loads(self._file.read_bytes())
            if stored["format"] != _FORMAT:
                return {}
            return {
                name: [stamp, sha]
                for name, (stamp, sha) in stored["hashes"].items()
                if isinstance(stamp, str) and len(bytes.fromhex(sha)) % 32 == 0
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}


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
