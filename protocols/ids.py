"""Names and small values that all protocols share."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Final, Generic, TypeVar

from google.protobuf.message import Message

PROTOCOL_VERSION: Final = 1
F = TypeVar("F", bound=Message)


@dataclass(frozen=True)
class StreamProtocol(Generic[F]):
    """What both sides of a stream have to agree on.

    Attributes:
        id: by which the stream is opened.
        frame: one of the generated `*Frame` messages: a `oneof body`, and the `tensors` whose bytes follow.
        max_header: bytes of a frame.
        max_payload: bytes of all tensors of a message together.
    """

    id: str
    frame: type[F]
    max_header: int = 64 * 1024
    max_payload: int = 64 << 20


@dataclass(frozen=True, order=True)
class Span:
    """A half-open range of transformer blocks: `start` .. `end - 1`. Never empty, never negative.

    Raises:
        ValueError: if it would be.
    """

    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end:
            raise ValueError(f"{self.start}:{self.end} is no span of blocks: it takes 0 <= start < end")

    def __len__(self) -> int:
        return self.end - self.start

    def __contains__(self, block: int) -> bool:
        return self.start <= block < self.end

    def __str__(self) -> str:
        return f"{self.start}:{self.end}"

    def covers(self, other: Span) -> bool:
        """Whether every block of `other` is in this span."""
        return self.start <= other.start and other.end <= self.end

    def overlaps(self, other: Span) -> bool:
        return self.start < other.end and other.start < self.end

    @classmethod
    def parse(cls, text: str) -> Span:
        """Reads "A:B", blocks A .. B-1.

        Raises:
            ValueError: with a sentence that a person can act on.
        """
        start, colon, end = text.strip().partition(":")
        if not colon or not start.isdecimal() or not end.isdecimal():
            raise ValueError(f"{text!r} is no span of blocks: write A:B for blocks A to B-1, such as 0:15")
        return cls(int(start), int(end))


# --- keys of provider records in Kademlia

VERSION_DIGITS: Final = 12
"""Hexadecimal digits of a model version in a key. What a person has to give at least to say which one is meant."""
MAX_RANGES: Final = 8
"""Ranges that the blocks of a model are divided into, at most."""
_LEAST_RANGE: Final = 4  # blocks


def blocks_of_range(num_blocks: int) -> int:
    """How many blocks a range has, in a model of `num_blocks`; the last one may have fewer."""
    return max(_LEAST_RANGE, -(-num_blocks // MAX_RANGES))


def ranges_of(span: Span, num_blocks: int) -> range:
    """The numbers of the ranges that have blocks of this span."""
    size = blocks_of_range(num_blocks)
    return range(span.start // size, (span.end - 1) // size + 1)


def blocks_key(version: str, number: int) -> bytes:
    """Where servers of a range of blocks list themselves; `version` is hexadecimal, of `VERSION_DIGITS` or more."""
    return _provider_key(f"petalnode/blocks/{version[:VERSION_DIGITS]}/{number}")


def model_key(name: str, num_blocks: int) -> bytes:
    """Where servers of any version of a model of this name list themselves."""
    return _provider_key(f"petalnode/model/{num_blocks}/{name}")


def directory_key(shard: int) -> bytes:
    """Where servers list themselves that may be asked for others."""
    return _provider_key(f"petalnode/directory/{shard}")


def _provider_key(text: str) -> bytes:
    """A multihash (SHA-256), as all Kademlia nodes of libp2p want provider keys to be."""
    return b"\x12\x20" + hashlib.sha256(text.encode()).digest()


# --- ids of traces (OpenTelemetry, W3C Trace Context), which client and servers derive from a session's nonces
#
# A client that makes traces draws 8 bytes for a session, and the nonces of all its servers end in them; before stand
# four random bytes, and four of a checksum, by which a server that makes traces knows that the client does. All spans
# of the session are one trace then, the span of each server below the client's span for that server. Any other nonce
# gives a trace of its own.

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


# --- what is between blocks


ID_DIGITS: Final = (1, 64, 4096, 262144)
"""What the digits of a token's id count for. Half precision has them without an error."""


@dataclass(frozen=True)
class Boundaries:
    """What stands between two blocks of a model, and where servers may part.

    Attributes:
        hidden: values of a token in one stream of hidden states.
        num_blocks: of the model.
        streams: of hidden states beside each other (AltUp, arXiv 2301.13310).
        per_block: values of a token which a block gets for itself alone (per-layer inputs). Those of all blocks that
            are still to come stand behind the streams, in the order of the blocks.
        undivided: blocks that share keys and values, or the tokens that the first of them chose for attention. One
            server holds all or none of each span. In order; they do not overlap.
        carried: blocks before this number get beside hidden states what entered the first block (Zamba, arXiv
            2405.16712). It travels behind the streams.
        axis: where blocks have that of the streams: 0, before rows; 2, behind tokens; 3, nowhere, since they take the
            streams as they travel, one behind the other.
        ids: blocks before this number get the ids of tokens, which travel behind the streams, digit by digit.
    """

    hidden: int
    num_blocks: int
    streams: int = 1
    per_block: int = 0
    undivided: tuple[Span, ...] = ()
    carried: int = 0
    axis: int = 0
    ids: int = 0

    @property
    def of_streams(self) -> int:
        """Values of a token without what is for single blocks."""
        return self.streams * self.hidden

    def width(self, block: int) -> int:
        """Of what enters the block of this number; behind the last one, of what leaves the model's blocks."""
        carried = self.hidden if block < self.carried else 0
        digits = len(ID_DIGITS) if block < self.ids else 0
        return self.of_streams + carried + digits + self.per_block * (self.num_blocks - block)

    def left_by(self, span: Span) -> int:
        """By how much narrower leaves these blocks what enters them."""
        return self.width(span.start) - self.width(span.end)

    def may_part(self, block: int) -> bool:
        """Whether one server may end before the block of this number, and another begin with it."""
        return block not in self._inside

    @cached_property
    def _inside(self) -> frozenset[int]:
        """Before these blocks no server ends."""
        return frozenset(block for span in self.undivided for block in range(span.start + 1, span.end))

    def refusal(self, span: Span) -> str | None:
        """Why no server takes just these blocks, None if one does."""
        if self.may_part(span.start) and self.may_part(span.end):
            return None
        cut = [one for one in self.undivided if one.start < span.start < one.end or one.start < span.end < one.end]
        inner, outer = self.usable(span), Span(min(span.start, cut[0].start), max(span.end, cut[-1].end))
        return (
            f"one server holds all of the blocks {' and '.join(map(str, cut))}, which share keys and values, or a "
            f"choice of tokens: {span} cannot be served, take {outer if inner is None else f'{inner} or {outer}'}"
        )

    def usable(self, span: Span) -> Span | None:
        """What of these blocks, which somebody claims to hold, can be used."""
        if not self.undivided:
            return span
        parts = [block for block in range(span.start, span.end + 1) if self.may_part(block)]
        return Span(parts[0], parts[-1]) if len(parts) > 1 else None

    def most(self, count: int) -> int:
        """How many blocks at most, and no more than `count`, one server may hold, 0 if none.

        Servers keep their number of blocks when they move. So it is one that fits at half of the model's blocks, or at
        half of those where a smaller number fits.
        """
        if not self.undivided:
            return count
        parts = set(filter(self.may_part, range(self.num_blocks + 1)))
        covered = dict[int, int]()
        for length in range(1, min(count, self.num_blocks) + 1):
            starts = sorted(start for start in parts if start + length in parts)
            covered[length] = sum(min(length, after - start) for start, after in pairwise([*starts, self.num_blocks]))
        half = max(covered.values(), default=0) / 2
        return max((length for length, blocks in covered.items() if blocks and blocks >= half), default=0)

    @property
    def named(self) -> str:
        """The undivided spans, for a message; of many the first two."""
        first, more = ", ".join(map(str, self.undivided[:2])), len(self.undivided) - 2
        return f"{first} and {more} more" if more > 0 else first

    @property
    def longest(self) -> Span | None:
        """Of the undivided spans: some server has to have room for it. None: there are none."""
        return max(self.undivided, key=len, default=None)


ALIKE: Final = Boundaries(0, 0)
"""Of blocks between which nothing but hidden states goes."""

# --- how the tokens of a step are laid out

AXES: Final = 3
"""Along which M-RoPE counts positions: time, height and width."""
MAX_GROUP: Final = 1120
"""Tokens of a group: those of Gemma 4's largest picture. They are computed at once."""


@dataclass(frozen=True)
class Layout:
    """Of the tokens of a step.

    Attributes:
        positions: [axes, rows, tokens], flat; empty: tokens are counted.
        groups: [rows, tokens], flat: for a token of a group, all of which see each other, how many are left with this
            one. 0 for a token that sees those before it. Empty: all are such.
        features: of how many of the first blocks, all of which one server holds. They stand behind the hidden states of
            each token, which are 1 + `features` times as wide. They are added to what leaves these blocks (DeepStack,
            arXiv 2406.04334).
    """

    positions: tuple[int, ...] = ()
    groups: tuple[int, ...] = ()
    features: int = 0

    def part(self, rows: int, tokens: int, start: int, end: int) -> Layout:
        """Of the tokens `start` .. `end` of each row of `tokens`."""
        positions, groups = (_columns(numbers, tokens, start, end) for numbers in (self.positions, self.groups))
        return Layout(positions, groups, self.features)

    def behind(self, blocks: int) -> Layout:
        """Of what leaves the first of these blocks, `blocks` of them."""
        return Layout(self.positions, self.groups, max(self.features - blocks, 0))

    def is_like(self, other: Layout) -> bool:
        """Whether the tokens of both may be in one step."""
        return bool(self.positions) == bool(other.positions) and self.features == other.features

    @classmethod
    def joined(cls, parts: Sequence[tuple[Layout, int]], rows: int) -> Layout:
        """Of the tokens of all parts, each with its number of tokens of a row, one behind the other."""
        grouped = any(layout.groups for layout, _ in parts)
        return cls(
            _joined([(layout.positions, tokens) for layout, tokens in parts]),
            _joined([(layout.groups or (0,) * (rows * tokens), tokens) for layout, tokens in parts]) if grouped else (),
            parts[0][0].features,
        )

    def column(self, token: int, tokens: int) -> tuple[tuple[int, ...], ...]:
        """What is said of one token of each row of `tokens`."""
        return self.positions[token::tokens], self.groups[token::tokens]

    def cuts(self, rows: int, tokens: int) -> list[int]:
        """Where no group is cut, in rising order: 0, the ends of groups, tokens outside of them, and `tokens`."""
        if not self.groups:
            return list(range(tokens + 1))
        end, cuts = 0, [0]
        for token in range(tokens):
            end = max(end, token + max(1, *self.groups[token::tokens]))
            if end == token + 1:
                cuts.append(end)
        return cuts

    def problem(self, rows: int, tokens: int, max_position: int) -> str | None:
        """What is wrong with it for a step of `rows` rows of `tokens`; None if nothing is."""
        if self.positions and (len(self.positions) != AXES * rows * tokens or max(self.positions) >= max_position):
            return f"positions take one number below {max_position} along {AXES} axes for each token"
        if not self.groups:
            return None
        if len(self.groups) != rows * tokens or max(self.groups) > MAX_GROUP:
            return f"groups take one number of at most {MAX_GROUP} for each token"
        for row in range(0, rows * tokens, tokens):
            if any(left > 1 and after != left - 1 for left, after in pairwise([*self.groups[row : row + tokens], 0])):
                return "a group of tokens that see each other is cut"
        return None


PLAIN: Final = Layout()
"""Of text."""


@dataclass(frozen=True)
class LayoutNeeds:
    """What servers have to know for a session with pictures: `positions`, `groups`, and how many of the model's first
    blocks add features."""

    positions: bool = False
    groups: bool = False
    features: int = 0

    def unmet(self, known: LayoutNeeds, span: Span) -> str | None:
        """What a server of these blocks does not know, None if nothing."""
        if self.positions and not known.positions:
            return "positions of pictures"
        if self.groups and not known.groups:
            return "groups of tokens that see each other"
        if span.start < self.features and not (span.start == 0 and known.features == self.features <= span.end):
            return f"features of pictures, which a server of the first {self.features} blocks adds"
        return None

    def cover(self, other: LayoutNeeds) -> bool:
        """Whether a session that was opened with these serves one with the others."""
        known = (self.positions or not other.positions) and (self.groups or not other.groups)
        return known and other.features in (0, self.features)


TEXT_NEEDS: Final = LayoutNeeds()


def next_cut(cuts: Iterable[int], least: int) -> int:
    """The first of them that is not less."""
    return next(cut for cut in cuts if cut >= least)


def _columns(numbers: tuple[int, ...], tokens: int, start: int, end: int) -> tuple[int, ...]:
    return tuple(number for row in range(0, len(numbers), tokens) for number in numbers[row + start : row + end])


def _joined(parts: Sequence[tuple[tuple[int, ...], int]]) -> tuple[int, ...]:
    numbers, tokens = parts[0]
    rows = range(len(numbers) // tokens)
    return tuple(number for row in rows for part, count in parts for number in part[row * count : (row + 1) * count])
