"""Ids of traces (OpenTelemetry, W3C Trace Context) that client and servers derive from a session's nonces, by
themselves. Pure.

A client that makes traces draws 8 bytes for a session, and the nonces of all its servers end in them; before stand four
random bytes, and four of a checksum, by which a server that makes traces knows that the client does. All spans of the
session are one trace then, the span of each server below the client's span for that server. Any other nonce gives a
trace of its own.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from typing import Final

SEED_BYTES: Final = 8
_RANDOM_BYTES: Final = 4
_CHECK_BYTES: Final = 4


@dataclass(frozen=True)
class TraceIds:
    """Of one server's part in a session.

    Attributes:
        trace: of 128 bits.
        session, hop: spans of the client, of 64 bits; 0 if it makes no traces.
    """

    trace: int
    session: int
    hop: int


def new_seed() -> bytes:
    """What the nonces of one session end in."""
    return os.urandom(SEED_BYTES)


def traced_nonce(seed: bytes) -> bytes:
    """A nonce for one server of the session."""
    own = os.urandom(_RANDOM_BYTES)
    return own + _check(own, seed) + seed


def trace_ids(nonce: bytes) -> TraceIds:
    """The ids that a nonce stands for, whoever chose it."""
    own, check, seed = nonce[:_RANDOM_BYTES], nonce[_RANDOM_BYTES:-SEED_BYTES], nonce[-SEED_BYTES:]
    if check != _check(own, seed):
        return TraceIds(_number("trace", nonce, 16), 0, 0)
    return TraceIds(_number("trace", seed, 16), _number("session", seed, 8), _number("hop", nonce, 8))


def _check(own: bytes, seed: bytes) -> bytes:
    return _hash("check", own + seed)[:_CHECK_BYTES]


def _hash(kind: str, data: bytes) -> bytes:
    return hashlib.sha256(b"petalnode/trace/1/" + kind.encode() + b"/" + data).digest()


def _number(kind: str, data: bytes, size: int) -> int:
    return int.from_bytes(_hash(kind, data)[:size], "big") or 1
