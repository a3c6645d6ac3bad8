"""The key that a private swarm shares, in the file format of other libp2p software, and its cipher.

libp2p specifications, pnet/Private-Networks-PSK-V1.md: three lines, of which the last is the key in hexadecimal.
"""

from __future__ import annotations

import os
import re
import secrets
import struct
from pathlib import Path
from typing import Final

from Crypto.Cipher import Salsa20
from Crypto.Cipher.Salsa20 import Salsa20Cipher as Salsa20Cipher

_HEAD = "/key/swarm/psk/1.0.0/"
_BASE16 = "/base16/"
_DIGITS = "[0-9a-fA-F]{64}"
_MAX_FILE = 4096  # bytes
_COLUMNS: Final = ((0, 4, 8, 12), (5, 9, 13, 1), (10, 14, 2, 6), (15, 3, 7, 11))
_ROWS: Final = ((0, 1, 2, 3), (5, 6, 7, 4), (10, 11, 8, 9), (15, 12, 13, 14))


class SwarmKeyError(Exception):
    """A swarm key that cannot be used, read or written; the text says which, why, and what to do."""


def check_swarm_key(text: str) -> str:
    """The key in the form that the swarm takes, of 64 hexadecimal digits in any case.

    Raises:
        SwarmKeyError: it is none.
    """
    if not is_swarm_key(text):
        raise SwarmKeyError("a swarm key is 64 hexadecimal digits; make one with `petalnode swarm-key`")
    return text.lower()


def is_swarm_key(text: str) -> bool:
    """Whether the text is a key itself, and no file's name."""
    return re.fullmatch(_DIGITS, text) is not None


def load_swarm_key(path: Path) -> str:
    """Reads a key file; returns the key's 64 hexadecimal digits.

    Raises:
        SwarmKeyError: it cannot be read, or is no such file.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE)
    except OSError as error:
        raise SwarmKeyError(f"cannot read the swarm key {path}: {error.strerror}") from error
    lines = data.decode(errors="replace").split()
    if not lines or lines[0] != _HEAD:
        raise SwarmKeyError(f"{path} is no swarm key: its first line is not {_HEAD} (`petalnode swarm-key` makes one)")
    if len(lines) != 3 or lines[1] != _BASE16:
        raise SwarmKeyError(f"the swarm key {path} has to have three lines: {_HEAD}, {_BASE16}, and the key")
    try:
        return check_swarm_key(lines[2])
    except SwarmKeyError as error:
        raise SwarmKeyError(f"the third line of {path} is no key: {error}") from None


def find_swarm_key(given: str | os.PathLike[str]) -> str:
    """The key that a person gave either itself, as 64 hexadecimal digits, or by its file.

    Raises:
        SwarmKeyError: as `load_swarm_key`.
    """
    text = os.fspath(given)
    return text.lower() if is_swarm_key(text) else load_swarm_key(Path(text))


def make_swarm_key(path: Path) -> None:
    """Writes a new key, readable by the owner only. Never replaces a file.

    Raises:
        SwarmKeyError: there is a file, or it cannot be written.
    """
    text = "\n".join([_HEAD, _BASE16, secrets.token_hex(32), ""])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        if not path.exists():
            raise SwarmKeyError(f"cannot write the swarm key {path}: {error.strerror}") from error
        raise SwarmKeyError(
            f"{path} is there already, and a swarm that uses it would be lost with it: give another file"
        ) from None
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def xsalsa20(key: bytes, nonce: bytes) -> Salsa20Cipher:
    """XSalsa20 with 32 bytes of key and 24 of nonce: Salsa20 with what HSalsa20 makes of the key and the nonce's first
    16 bytes (Bernstein, "Extending the Salsa20 nonce")."""
    sigma, words = struct.unpack("<4I", b"expand 32-byte k"), struct.unpack("<8I", key)
    x = [sigma[0], *words[:4], sigma[1], *struct.unpack("<4I", nonce[:16]), sigma[2], *words[4:], sigma[3]]
    for a, b, c, d in (_COLUMNS + _ROWS) * 10:
        for target, one, other, bits in ((b, a, d, 7), (c, b, a, 9), (d, c, b, 13), (a, d, c, 18)):
            total = (x[one] + x[other]) & 0xFFFFFFFF
            x[target] ^= (total << bits | total >> (32 - bits)) & 0xFFFFFFFF
    derived = struct.pack("<8I", *(x[place] for place in (0, 5, 10, 15, 6, 7, 8, 9)))
    return Salsa20.new(key=derived, nonce=nonce[16:])
