"""Who may use the API: keys, of which only hashes are kept.

A key is 32 random bytes, so a plain SHA-256 of it cannot be searched, and a slow hash would be of no more use.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from ....crypto.identity import write_private
from ...errors import BadInput, MachineError

_PREFIX: Final = "pn-"
_LINE: Final = re.compile(r"sha256:([0-9a-f]{64})(?:\s+(\S.*))?")
_NO_NAME: Final = "key"


def hash_of_key(key: str) -> str:
    """Hexadecimal SHA-256."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


class ApiKeys:
    """The keys that are accepted, by their hashes, with the name of each one's owner."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = dict(names)

    def __len__(self) -> int:
        """How many owners there are."""
        return len({*self._names.values()})

    def owner(self, key: str) -> str | None:
        """The name that goes with `key`; None if it is not one of them."""
        return self._names.get(hash_of_key(key))

    @classmethod
    def read(cls, path: Path) -> ApiKeys:
        """From a file with a line `sha256:HASH NAME` for each key; empty lines and those that begin with # say nothing.

        Raises:
            BadInput: a line is no hash, or there is none.
            MachineError: it cannot be read.
        """
        names: dict[str, str] = {}
        for number, line in enumerate(_read(path).splitlines(), 1):
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            found = _LINE.fullmatch(line)
            if found is None:
                raise BadInput(
                    f"{path}, line {number} is no hash of a key: lines are `sha256:HASH NAME`, as "
                    f"`petalnode api --new-api-key NAME --api-key-file {path}` writes them"
                )
            names[found[1]] = found[2] or f"{_NO_NAME}-{number}"
        if not names:
            raise BadInput(f"{path} has no key: `petalnode api --new-api-key NAME --api-key-file {path}` makes one")
        return cls(names)


def add_key(path: Path, name: str) -> str:
    """Makes a new key, writes its hash to `path` (which only its owner can read) and returns the key.

    Raises:
        BadInput: `name` is empty or has several lines.
        MachineError: the file cannot be read or written.
    """
    name = name.strip()
    if not name or not name.isprintable():
        raise BadInput("--new-api-key takes the name of whom the key is for, on one line")
    key = _PREFIX + secrets.token_urlsafe(32)
    text = _read(path) if path.exists() else ""
    text += "" if text.endswith("\n") or not text else "\n"
    try:
        write_private(path, f"{text}sha256:{hash_of_key(key)} {name}\n".encode())
    except OSError as error:
        raise MachineError(f"cannot write {path}: {error.strerror}") from error
    return key


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise BadInput(
            f"there is no file {path}: `petalnode api --new-api-key NAME --api-key-file {path}` makes it"
        ) from None
    except UnicodeDecodeError:
        raise BadInput(f"{path} is no text") from None
    except OSError as error:
        raise MachineError(f"cannot read {path}: {error.strerror}") from error
