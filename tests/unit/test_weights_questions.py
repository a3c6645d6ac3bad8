"""What an asker of weights takes for an answer, and what it does not."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from petalnode.node.testing.memory_stream import message_streams
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.framing import PeerError, ProtocolError
from petalnode.protocols.weights import (
    WEIGHTS,
    WEIGHTS_LIMITS,
    BadTree,
    Offer,
    Tree,
    TreeEntry,
    WeightsStream,
    ask_offer,
    ask_piece,
    ask_trees,
    receive_piece,
)

VERSION, BLOCKS = bytes(range(32)), 4
DATA = b"sixteen bytes or"
TREE = Tree("safetensors", (TreeEntry("a", "F32", (2, 2), 16),), hashlib.sha256(DATA).digest())
PIECE = wire.WeightsFrame(piece=wire.WeightsPiece(), tensors=[wire.Tensor(shape=[16], dtype="int8", codec="none")])
Ask = Callable[[WeightsStream], Awaitable[object]]


async def offer(stream: WeightsStream) -> object:
    return await ask_offer(stream, VERSION, BLOCKS, timeout=10)


async def trees(stream: WeightsStream) -> object:
    return await ask_trees(stream, VERSION, [(1, TREE.digest)], timeout=10)


async def piece(stream: WeightsStream) -> object:
    await ask_piece(stream, VERSION, 1, 0, timeout=10)
    return await receive_piece(stream, timeout=10)


async def answered(ask: Ask, *answers: tuple[wire.WeightsFrame, bytes]) -> object:
    """What comes of a question that is answered so."""
    ours, theirs = message_streams(WEIGHTS, "asker", "holder")
    for frame, payload in answers:
        await theirs.send(frame, [payload] if frame.tensors else [], timeout=10)
    return await ask(ours)


def error(code: wire.ErrorCode.ValueType) -> wire.WeightsFrame:
    return wire.WeightsFrame(error=wire.Error(code=code))


@pytest.mark.parametrize("ask", [offer, trees, piece])
async def test_what_peer_does_not_have_is_no_error(ask: Ask) -> None:
    for code in (wire.ERROR_NOT_FOUND, wire.ERROR_NOT_ALLOWED):
        assert not await answered(ask, (error(code), b""))
    with pytest.raises(PeerError, match="hands on nothing now"):
        await answered(ask, (error(wire.ERROR_BUSY), b""))


@pytest.mark.parametrize("ask", [offer, trees, piece])
async def test_an_answer_to_another_question_is_none(ask: Ask) -> None:
    others = {
        offer: wire.WeightsFrame(tree=TREE.to_wire()),
        trees: wire.WeightsFrame(offer=wire.WeightsOffer(parts=b"\1")),
        piece: wire.WeightsFrame(offer=wire.WeightsOffer(parts=b"\1")),
    }
    with_bytes = wire.WeightsFrame(tensors=PIECE.tensors)
    if ask is offer:
        with_bytes.offer.parts = b"\1"
    else:
        with_bytes.tree.CopyFrom(TREE.to_wire())
    for frame in (others[ask], with_bytes):
        with pytest.raises(ProtocolError, match="answered no"):
            await answered(ask, (frame, DATA))


async def test_offer_tree_and_piece_come_as_they_are() -> None:
    said = Offer(frozenset({0, 2}), blocks="model.layers.", base="model.")
    assert await answered(offer, (wire.WeightsFrame(offer=said.to_wire()), b"")) == said
    assert await answered(trees, (wire.WeightsFrame(tree=TREE.to_wire()), b"")) == {1: TREE}
    assert await answered(piece, (PIECE, DATA)) == DATA


async def test_a_tree_of_other_bytes_is_not_believed() -> None:
    other = replace(TREE, pieces=hashlib.sha256(b"others").digest())
    with pytest.raises(ProtocolError, match="another part"):
        await answered(trees, (wire.WeightsFrame(tree=other.to_wire()), b""))


async def test_impossible_offer_or_tree_is_the_peers_fault() -> None:
    with pytest.raises(ProtocolError):
        await answered(offer, (wire.WeightsFrame(offer=wire.WeightsOffer(parts=bytes(9))), b""))
    with pytest.raises(ProtocolError):
        await answered(trees, (wire.WeightsFrame(tree=wire.PartTree(form="pickle")), b""))


LARGEST = (1 << 48) - 1


@pytest.mark.parametrize(
    ("change", "taken"),
    [
        ({"nbytes": LARGEST + 1}, False),
        ({"shape": (LARGEST,)}, True),
        ({"shape": (LARGEST + 1,)}, False),
        ({"dtype": "F" * 16}, True),
        ({"dtype": "F\n"}, False),
    ],
)
def test_sizes_have_a_bound(change: dict[str, object], taken: bool) -> None:
    entries = (TREE.entries[0], replace(TREE.entries[0], name="b", **change))  # type: ignore[arg-type]
    message = Tree("safetensors", entries, TREE.pieces).to_wire()
    if taken:
        assert Tree.from_wire(message).entries == entries
        return
    with pytest.raises(BadTree):
        Tree.from_wire(message)


class Unread(list[object]):
    def __iter__(self) -> Iterator[object]:
        raise AssertionError("each of them takes a while")


def test_too_many_entries_are_not_looked_through() -> None:
    """4 MiB of empty ones took 8 s of the loop."""
    many: Any = SimpleNamespace(form="text", tensors=Unread([wire.TreeTensor()] * (WEIGHTS_LIMITS.max_tensors + 1)))
    with pytest.raises(BadTree, match="more tensors"):
        Tree.from_wire(many)
    named: Any = SimpleNamespace(parts=b"", blocks="", base="", bare=Unread([""] * (WEIGHTS_LIMITS.max_bare + 1)))
    with pytest.raises(BadTree, match="more than the model has"):
        Offer.from_wire(named, BLOCKS)
