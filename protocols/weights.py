"""`/petalnode/weights/1`: whoever holds parts of a model version hands them on, piece by piece.

On one stream the asker sends any of these, several at once, and gets the answers in order:

- WeightsQuery: WeightsOffer says which parts the peer holds.
- TreeQuery: PartTree, whose digest the manifest has. So the tree can be checked, and by it each piece alone.
- PieceQuery: WeightsPiece with the bytes of one piece.

An Error answers what the peer does not hold, or does not hand on.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from ..crypto.canonical import Field, digest
from . import wire_pb2 as wire
from .framing import MessageStream, PeerError, ProtocolError
from .ids import StreamProtocol

PIECE_BYTES: Final = 1 << 20
_DOMAIN: Final = "petalnode/model/part/2"
_SHA_BYTES: Final = 32
TEXT_FORM: Final = "text"
_FORM: Final = re.compile(r"safetensors|text|gguf [a-z0-9_.-]{1,48}")


@dataclass(frozen=True)
class WeightsLimits:
    """The sizes of messages about weights."""

    max_tensors: int = 65_536  # of a part
    max_name: int = 512  # characters
    max_dimensions: int = 16
    max_bare: int = 64  # names in an offer
    question: int = 256  # bytes


WEIGHTS_LIMITS: Final = WeightsLimits()
WEIGHTS: Final = StreamProtocol(
    "/petalnode/weights/1",
    wire.WeightsFrame,
    max_header=4 << 20,  # of a tree: 32 bytes for each piece, so a part has at most about 100 GiB
    max_payload=PIECE_BYTES,
)
WeightsStream = MessageStream[wire.WeightsFrame]


class BadTree(ValueError):
    """A tree that is none, or an offer out of range; says why."""


@dataclass(frozen=True)
class TreeEntry:
    """One tensor of a part, or one file of the tokenizer. `dtype` and `shape` are in the words of the form."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    def fields(self) -> list[Field]:
        return [self.name, self.dtype, list(self.shape), self.nbytes]


@dataclass(frozen=True)
class Tree:
    """What the digest of a part is made of.

    Attributes:
        form: how the tensors are stored: "safetensors", "gguf ARCHITECTURE", "text".
        entries: by name. Their bytes, one behind the other, are the bytes of the part.
        pieces: the SHA-256 of each `PIECE_BYTES` of these; the last piece is shorter.
    """

    form: str
    entries: tuple[TreeEntry, ...]
    pieces: bytes

    @cached_property
    def digest(self) -> bytes:
        """What a manifest has of the part: 32 bytes."""
        return digest(_DOMAIN, self.form, [entry.fields() for entry in self.entries], self.pieces)

    @cached_property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)

    def __len__(self) -> int:
        """How many pieces there are."""
        return count_pieces(self.nbytes)

    def size_of(self, piece: int) -> int:
        return min(PIECE_BYTES, self.nbytes - piece * PIECE_BYTES)

    def has(self, piece: int, data: bytes | bytearray) -> bool:
        """Whether these are the bytes of the piece."""
        expected = self.pieces[piece * _SHA_BYTES : (piece + 1) * _SHA_BYTES]
        return len(data) == self.size_of(piece) and hashlib.sha256(data).digest() == expected

    def to_wire(self) -> wire.PartTree:
        tensors = [
            wire.TreeTensor(name=entry.name, dtype=entry.dtype, shape=entry.shape, nbytes=entry.nbytes)
            for entry in self.entries
        ]
        return wire.PartTree(form=self.form, tensors=tensors, pieces=self.pieces)

    @classmethod
    def from_wire(cls, message: wire.PartTree) -> Tree:
        """
        Raises:
            BadTree: it is malformed, or out of range.
        """
        if len(message.tensors) > WEIGHTS_LIMITS.max_tensors:  # before they are looked at: an empty one is two bytes
            raise BadTree("more tensors than any part has")
        entries = tuple(
            TreeEntry(tensor.name, tensor.dtype, tuple(tensor.shape), tensor.nbytes) for tensor in message.tensors
        )
        tree = cls(message.form, entries, message.pieces)
        if _FORM.fullmatch(tree.form) is None:
            raise BadTree("an unknown form of weights")
        if not all(map(_sound, entries)):
            raise BadTree("tensors that are out of range")
        names = [entry.name for entry in entries]
        if names != sorted(set(names)):
            raise BadTree("tensors that are not in the order of their names")
        if len(tree.pieces) != len(tree) * _SHA_BYTES:
            raise BadTree(f"{len(tree.pieces)} bytes of digests for {len(tree)} pieces")
        return tree


def _sound(entry: TreeEntry) -> bool:
    return (
        0 < len(entry.name) <= WEIGHTS_LIMITS.max_name
        and entry.name.isprintable()
        and len(entry.dtype) <= 16
        and entry.dtype.isprintable()
        and len(entry.shape) <= WEIGHTS_LIMITS.max_dimensions
        and entry.nbytes < 1 << 48
        and all(size < 1 << 48 for size in entry.shape)
    )


def count_pieces(nbytes: int) -> int:
    return -(-nbytes // PIECE_BYTES)


# --- numbers of parts


def part_numbers(num_blocks: int) -> int:
    """How many parts a model has on the wire; the last number is that of the tokenizer's files."""
    return num_blocks + 3


@dataclass(frozen=True)
class Offer:
    """What a peer says that it holds. The peer alone vouches for all of it but what the trees prove.

    Attributes:
        parts: the numbers of the parts that it hands on.
        blocks, base, bare: the keys of a safetensors checkpoint, as `wire.proto` says. The version has no such names.
        texts: the digest of the tokenizer's files, 32 bytes; empty if there are none.
        restricted: only who is told to should hand this on.
    """

    parts: frozenset[int]
    blocks: str = ""
    base: str = ""
    bare: tuple[str, ...] = ()
    texts: bytes = b""
    restricted: bool = False

    @property
    def naming(self) -> tuple[str, str, tuple[str, ...]]:
        return self.blocks, self.base, self.bare

    def to_wire(self) -> wire.WeightsOffer:
        bits = sum(1 << part for part in self.parts)
        return wire.WeightsOffer(
            parts=bits.to_bytes((bits.bit_length() + 7) // 8, "little"),
            blocks=self.blocks,
            base=self.base,
            bare=self.bare,
            texts=self.texts,
            restricted=self.restricted,
        )

    @classmethod
    def from_wire(cls, message: wire.WeightsOffer, num_blocks: int) -> Offer:
        """
        Raises:
            BadTree: it is out of range.
        """
        count = part_numbers(num_blocks)
        if len(message.parts) > (count + 7) // 8 or len(message.bare) > WEIGHTS_LIMITS.max_bare:
            raise BadTree("an offer of more than the model has")
        names = (message.blocks, message.base, *message.bare)
        if not all(len(name) <= WEIGHTS_LIMITS.max_name and (name == "" or name.isprintable()) for name in names):
            raise BadTree("an offer with names that are none")
        if len(message.texts) not in (0, _SHA_BYTES):
            raise BadTree("an offer with a digest that is none")
        bits = int.from_bytes(message.parts, "little")
        parts = frozenset(part for part in range(count) if bits >> part & 1)
        bare = tuple(sorted(set(message.bare)))
        return cls(parts, message.blocks, message.base, bare, message.texts, message.restricted)


# --- answering


def check_question(frame: wire.WeightsFrame) -> None:
    """Before anything that follows is read.

    Raises:
        ProtocolError: questions have no tensors.
    """
    if frame.tensors:
        raise ProtocolError("a question about weights has no tensors", "")


# --- asking


async def ask_offer(stream: WeightsStream, version: bytes, num_blocks: int, *, timeout: float) -> Offer | None:
    """What the peer holds of a model version; None if nothing, or if it hands nothing on.

    Raises:
        PeerError: no answer within `timeout` seconds, or none that fits.
    """
    await stream.send(wire.WeightsFrame(query=wire.WeightsQuery(model_version=version)), timeout=timeout)
    frame, _ = await _answer(stream, "offer", timeout)
    try:
        return None if frame is None else Offer.from_wire(frame.offer, num_blocks)
    except BadTree as error:
        raise ProtocolError(f"{stream.peer_id} sent {error}", stream.peer_id) from None


async def ask_trees(
    stream: WeightsStream, version: bytes, wanted: Iterable[tuple[int, bytes]], *, timeout: float
) -> dict[int, Tree]:
    """The trees of parts, each given by number and digest, that the peer has; all are checked. `timeout` is for each.

    Raises:
        PeerError: an answer that is late, or none, or of another part.
    """
    found: dict[int, Tree] = {}
    for part, expected in wanted:
        query = wire.TreeQuery(model_version=version, part=part)
        await stream.send(wire.WeightsFrame(tree_query=query), timeout=timeout)
        frame, _ = await _answer(stream, "tree", timeout)
        if frame is None:
            continue
        try:
            tree = Tree.from_wire(frame.tree)
        except BadTree as error:
            raise ProtocolError(f"{stream.peer_id} sent {error}", stream.peer_id) from None
        if tree.digest != expected:
            raise ProtocolError(f"{stream.peer_id} sent the tree of another part", stream.peer_id)
        found[part] = tree
    return found


async def ask_piece(stream: WeightsStream, version: bytes, part: int, piece: int, *, timeout: float) -> None:
    """Asks for a piece; `receive_piece` gets it, in the order of the questions."""
    query = wire.PieceQuery(model_version=version, part=part, piece=piece)
    await stream.send(wire.WeightsFrame(piece_query=query), timeout=timeout)


async def receive_piece(stream: WeightsStream, *, timeout: float) -> bytes | None:
    """The bytes of a piece, not yet checked; None if the peer does not have it.

    Raises:
        PeerError: no answer within `timeout` seconds, or none that fits.
    """
    frame, payloads = await _answer(stream, "piece", timeout, payloads=1)
    return None if frame is None else payloads[0]


async def _answer(
    stream: WeightsStream, body: str, timeout: float, *, payloads: int = 0
) -> tuple[wire.WeightsFrame | None, list[bytes]]:
    """The answer, with as many payloads as it has to have; no frame if the peer does not have what was asked for."""
    frame, came = await stream.receive(timeout=timeout)
    if frame.WhichOneof("body") == "error":
        if frame.error.code not in (wire.ERROR_NOT_FOUND, wire.ERROR_NOT_ALLOWED):
            raise PeerError(f"{stream.peer_id} hands on nothing now", stream.peer_id)
        return None, []
    if frame.WhichOneof("body") != body or len(came) != payloads:
        raise ProtocolError(f"{stream.peer_id} answered no {body}", stream.peer_id)
    return frame, came
