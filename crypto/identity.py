"""A node's identity: an Ed25519 key, whose public half is the peer id; its file, and other private files.

A libp2p peer id of an Ed25519 key contains the whole public key (an identity multihash). So whoever knows the peer id
can check the node's signatures without asking anyone.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Final

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from filelock import FileLock, Timeout

from .canonical import canonical

# Multihash code 0 (identity), length 36; then libp2p's PublicKey message: type 1 (Ed25519), 32 bytes of data.
_PEER_ID_HEAD: Final = bytes.fromhex("002408011220")
# libp2p's PrivateKey message: type 1, 64 bytes of data: seed, then public key. What other libp2p tools write too.
_KEY_FILE_HEAD: Final = bytes.fromhex("08011240")
_ROLE_SLOTS: Final = 1000


class IdentityError(Exception):
    """The identity file cannot be used; the text says which file and why."""


class IdentityLocked(IdentityError):
    """Another running process uses this identity: two nodes with one key would break each other."""


class Identity:
    """A node's key pair. Immutable; safe to use from any thread."""

    def __init__(self, private_key: Ed25519PrivateKey) -> None:
        self._private_key = private_key
        self._public_key = private_key.public_key().public_bytes_raw()
        self._peer_id = peer_id_from_bytes(_PEER_ID_HEAD + self._public_key)

    def __repr__(self) -> str:
        return f"Identity({self._peer_id})"

    @classmethod
    def generate(cls) -> Identity:
        return cls.from_seed(secrets.token_bytes(32))

    @classmethod
    def from_seed(cls, seed: bytes) -> Identity:
        """The key pair of this 32-byte secret.

        Raises:
            ValueError: if it is not 32 bytes.
        """
        return cls(Ed25519PrivateKey.from_private_bytes(seed))

    @classmethod
    def load(cls, path: Path) -> Identity:
        """Reads a file written by `save`.

        Raises:
            IdentityError: if it is missing, unreadable or no Ed25519 key.
        """
        try:
            data = path.read_bytes()
        except OSError as error:
            raise IdentityError(f"cannot read the identity {path}: {error.strerror}") from error
        if len(data) != len(_KEY_FILE_HEAD) + 64 or not data.startswith(_KEY_FILE_HEAD):
            raise IdentityError(f"{path} is no Ed25519 identity file; remove it to get a new identity")
        seed, public_key = data[4:36], data[36:68]
        identity = cls.from_seed(seed)
        if identity.public_key != public_key:
            raise IdentityError(f"{path} is damaged: its two halves do not belong together")
        return identity

    def save(self, path: Path) -> None:
        """Writes the secret key, readable by the owner only, all of it or nothing.

        Raises:
            IdentityError: if the file cannot be written.
        """
        try:
            make_private_folder(path.parent)
            write_private(path, _KEY_FILE_HEAD + self.seed + self._public_key)
        except OSError as error:
            raise IdentityError(f"cannot write the identity {path}: {error.strerror}") from error

    @property
    def peer_id(self) -> str:
        """The base58 peer id, such as 12D3KooW..."""
        return self._peer_id

    @property
    def public_key(self) -> bytes:
        return self._public_key

    @property
    def seed(self) -> bytes:
        """The 32-byte secret."""
        return self._private_key.private_bytes_raw()

    def sign(self, domain: str, message: bytes) -> bytes:
        """64 bytes of Ed25519 signature that hold for this domain only."""
        return self._private_key.sign(canonical(domain, message))


def verify(peer_id: str, domain: str, message: bytes, signature: bytes) -> bool:
    """Whether `peer_id` signed `message` for `domain`. A malformed peer id or signature is a no."""
    try:
        _public_key(peer_id).verify(signature, canonical(domain, message))
    except (InvalidSignature, ValueError):
        return False
    return True


@lru_cache(maxsize=4096)
def _public_key(peer_id: str) -> Ed25519PublicKey:
    return Ed25519PublicKey.from_public_bytes(peer_id_to_bytes(peer_id)[len(_PEER_ID_HEAD) :])


@lru_cache(maxsize=4096)
def peer_id_to_bytes(peer_id: str) -> bytes:
    """The 38 bytes of a base58 peer id on the wire.

    Raises:
        ValueError: if it is not the id of an Ed25519 key.
    """
    if len(peer_id) > 64:  # base58 takes quadratic time
        raise ValueError("this is no peer id: too long")
    try:
        data = bytes(base58.b58decode(peer_id))
    except ValueError as error:
        raise ValueError(f"{peer_id!r} is no peer id: {error}") from error
    _check_peer_id(data)
    return data


@lru_cache(maxsize=4096)
def peer_id_from_bytes(data: bytes) -> str:
    """The base58 form of a peer id's bytes.

    Raises:
        ValueError: if they are not the id of an Ed25519 key.
    """
    _check_peer_id(data)
    return str(base58.b58encode(data).decode())


def any_peer_id_to_bytes(peer_id: str) -> bytes:
    """As `peer_id_to_bytes`, of keys of all kinds that libp2p has: a relay carries for them, too.

    Raises:
        ValueError: it is none.
    """
    if len(peer_id) > 64:
        raise ValueError("this is no peer id: too long")
    data = bytes(base58.b58decode(peer_id))
    any_peer_id_from_bytes(data)
    return data


def any_peer_id_from_bytes(data: bytes) -> str:
    """Raises ValueError as `any_peer_id_to_bytes`."""
    if len(data) < 2 or data[0] not in (0x00, 0x12) or data[1] != len(data) - 2 or len(data) > 44:
        raise ValueError("this is no peer id: neither a key itself nor the SHA-256 of one")
    return str(base58.b58encode(data).decode())


def _check_peer_id(data: bytes) -> None:
    if len(data) != len(_PEER_ID_HEAD) + 32 or not data.startswith(_PEER_ID_HEAD):
        raise ValueError("this is no peer id of an Ed25519 key (they look like 12D3KooW...)")


@contextlib.contextmanager
def held_identity(path: Path | None, role: str, data_dir: Path) -> Iterator[Identity]:
    """Loads an identity, makes it at first use, and keeps every other process from using it meanwhile.

    Without `path` it is `data_dir/<role>.key`, or `<role>-2.key` and so on where another process holds that. So several
    nodes on one machine keep an identity each from run to run.

    Raises:
        IdentityLocked: if another process holds the file given by `path`.
        IdentityError: if a file cannot be read, written or locked.
    """
    if path is not None:
        lock = _try_lock(path)
        if lock is None:
            raise IdentityLocked(
                f"the identity {path} is in use by another process: stop that one, or give this one another file"
            )
    else:
        names = [f"{role}.key", *(f"{role}-{n}.key" for n in range(2, _ROLE_SLOTS))]
        for name in names:
            path = data_dir / name
            lock = _try_lock(path)
            if lock is not None:
                break
        else:
            raise IdentityLocked(f"all {_ROLE_SLOTS} identities of the role {role} in {data_dir} are in use")
    assert path is not None and lock is not None
    try:
        if path.exists():
            identity = Identity.load(path)
        else:
            identity = Identity.generate()
            identity.save(path)
        yield identity
    finally:
        lock.release()


def _try_lock(path: Path) -> FileLock | None:
    # The lock's file stays behind on purpose: removing it would let two processes hold two different files.
    lock = FileLock(path.with_name(path.name + ".lock"), timeout=0)
    try:
        make_private_folder(path.parent)
        lock.acquire()
    except Timeout:
        return None
    except OSError as error:
        raise IdentityError(f"cannot lock the identity {path}: {error.strerror}") from error
    return lock


def make_private_folder(path: Path) -> None:
    """Makes a folder that only its owner can look into, if there is none.

    Raises:
        OSError: it cannot be made.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)


def make_private_file(path: Path) -> None:
    """Makes an empty file that only its owner can read, if there is none.

    Raises:
        OSError: it cannot be made.
    """
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))


def others_can_read(path: Path) -> bool:
    """Whether other users of this machine may read a file. False if it is not there, or the system does not tell."""
    try:
        return os.name == "posix" and bool(path.stat().st_mode & 0o077)
    except OSError:
        return False


def write_private(path: Path, data: bytes) -> None:
    """Puts `data` in the place of `path`, mode 0600. Its folder must exist; a crash leaves what was there before.

    Raises:
        OSError: the file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
