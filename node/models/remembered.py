"""Hashes of files on this disk, remembered for as long as the files are the same."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from .cache_dir import cache_dir

_FOLDER = "hashes"
_FORMAT = 1


class Remembered:
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
        # to remember is a favour: a cache that cannot be written must not stop a node that is otherwise ready
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


def file_stamp(file: Path) -> list[int]:
    """Size and times of a file: change whenever it may have been written to."""
    stat = file.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
