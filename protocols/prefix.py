"""Names of what sessions have computed, by which one may begin with what an earlier one left at a server.

A block is 32 tokens of all rows. Its name is a hash over two things: the name of the block before it, and the hidden
states of its tokens at the span's input, as on the wire. Before the first one stands a hash of all else that keys and
values follow from. vLLM's automatic prefix caching has such chains. So a name stands for everything up to its block,
and only who knows the inputs can make it. A server makes these names from the inputs that it was sent, never from what
a client says.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from ..crypto.canonical import digest
from .ids import PLAIN, Layout, Span

BLOCK_TOKENS: Final = 32
MAX_BLOCKS: Final = 1024
"""Names in one message: 32,768 tokens of a row."""
MAX_SALT: Final = 64
LEAST_SHARED_SALT: Final = 16
"""Bytes of a salt that nobody guesses: by which, where a server allows it, several peers share what it keeps."""
PREFIX_DOMAIN: Final = "petalnode/prefix/1"
PREFIX_CODECS: Final = frozenset({"none", "float16", "bfloat16"})
"""Under which each token's bytes stand for themselves. Under others, nothing is shared."""


@dataclass(frozen=True, kw_only=True)
class PrefixTerms:
    """The terms of a session from which keys and values follow, beside its inputs."""

    model_version: bytes
    span: Span
    batch: int
    left_padding: Sequence[int]
    codec: str
    dtype: str
    adapter: bytes
    salt: bytes

    def root(self) -> bytes:
        """The hash that stands before the first block."""
        span, padding = (self.span.start, self.span.end), tuple(self.left_padding) if any(self.left_padding) else ()
        terms = self.model_version, span, self.batch, padding, self.codec, self.dtype, self.adapter, self.salt
        return digest(PREFIX_DOMAIN, *terms)


def token_digests(
    payload: bytes | bytearray | memoryview,
    rows: int,
    tokens: int,
    *,
    long_factors: bool = False,
    layout: Layout = PLAIN,
) -> list[bytes]:
    """SHA-256 of each token of hidden states [rows, tokens, hidden] as on the wire, all rows of it.

    Tokens of steps with `long_factors`, or not laid out as text, have other ones: their keys are others. Those of a
    group follow from all of it.
    """
    if layout.positions or layout.groups:
        plain = token_digests(payload, rows, tokens, long_factors=long_factors)
        return _laid_out(plain, layout, rows)
    if long_factors:
        return [digest(PREFIX_DOMAIN, "long factors", plain) for plain in token_digests(payload, rows, tokens)]
    view = memoryview(payload)
    size = len(view) // (rows * tokens)
    if rows == 1:
        return [hashlib.sha256(view[start : start + size]).digest() for start in range(0, tokens * size, size)]
    hashes = [hashlib.sha256() for _ in range(tokens)]
    for row in range(rows):
        for token, hashed in enumerate(hashes):
            start = (row * tokens + token) * size
            hashed.update(view[start : start + size])
    return [hashed.digest() for hashed in hashes]


def _laid_out(plain: Sequence[bytes], layout: Layout, rows: int) -> list[bytes]:
    tokens = len(plain)
    made = []
    for start, end in pairwise(layout.cuts(rows, tokens)):
        group = digest(PREFIX_DOMAIN, "tokens", *plain[start:end]) if end > start + 1 else b""
        for token in range(start, end):
            positions, groups = layout.column(token, tokens)
            if group:
                made.append(digest(PREFIX_DOMAIN, "group", positions, groups, group, plain[token]))
            elif positions:
                made.append(digest(PREFIX_DOMAIN, "positions", positions, plain[token]))
            else:
                made.append(plain[token])
    return made


class PrefixNames:
    """The names of the blocks that one session holds at one server; follows its steps.

    Attributes:
        names: of the whole blocks, in order.
    """

    def __init__(self, root: bytes) -> None:
        self.names: list[bytes] = []
        self._root = root
        self._digests: list[bytes] = []

    def append(self, digests: Sequence[bytes]) -> None:
        """Takes the next tokens, as `token_digests` has them."""
        self._digests += digests
        for start in range(len(self.names) * BLOCK_TOKENS, len(self._digests) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            before = self.names[-1] if self.names else self._root
            block = b"".join(self._digests[start : start + BLOCK_TOKENS])
            self.names.append(digest(PREFIX_DOMAIN, before, block))

    def digests_of(self, number: int) -> tuple[bytes, ...]:
        """Of the tokens of a whole block, counted from 0."""
        return tuple(self._digests[number * BLOCK_TOKENS : (number + 1) * BLOCK_TOKENS])

    def rollback(self, tokens: int) -> None:
        """Forgets all from the token number `tokens` on."""
        del self._digests[tokens:]
        del self.names[tokens // BLOCK_TOKENS :]
