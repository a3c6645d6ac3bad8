"""Targets that are weights from peers: the side that hands them on, and the side that asks."""

from __future__ import annotations

import json
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any, Final, cast

import trio

from petalnode.node.errors import ModelError
from petalnode.node.models import Manifest, compute_manifest
from petalnode.node.models.folder import open_folder
from petalnode.node.models.part_headers import gguf_header, safetensors_header
from petalnode.node.swarm.swarm import Swarm
from petalnode.node.weights.holder import WeightsHolder
from petalnode.node.weights.store import check_texts, config_of
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.weights import (
    WEIGHTS,
    BadTree,
    Offer,
    Tree,
    TreeEntry,
    ask_offer,
    ask_piece,
    ask_trees,
    receive_piece,
)
from tests.fuzz.corpus import VERSION
from tests.fuzz.harness import Target, parser
from tests.fuzz.mutation import Mutator
from tests.fuzz.parsers import parsed
from tests.fuzz.streams import Conversation, Frame, Handlers, Talk, asking, conversation
from tests.node_inspection import logged

BLOCKS: Final = 2
_CONFIG: Final = {"model_type": "llama", "num_hidden_layers": BLOCKS, "hidden_size": 2, "vocab_size": 4}
_KEYS: Final = (
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.1.self_attn.q_proj.weight",
    "model.norm.weight",
)
_TREE: Final = Tree(
    "safetensors", (TreeEntry("a.weight", "F32", (2, 2), 16), TreeEntry("b.weight", "F32", (2,), 8)), bytes(32)
)
_FEW_BITS: Final = Tree("gguf llama", (TreeEntry("a.weight", "Q4_0", (2, 32), 36),), bytes(32))
_TEXTS: Final = Tree("text", (TreeEntry("tokenizer.json", "", (), 40),), bytes(32))


def _tree(mutator: Mutator) -> bytes:
    return mutator.message(mutator.random.choice((_TREE, _FEW_BITS, _TEXTS)).to_wire())


def _read_tree(data: bytes) -> None:
    """As far as it goes before bytes of the part come."""
    message = parsed(wire.PartTree, data)
    if message is None:
        return
    tree = Tree.from_wire(message)
    assert Tree.from_wire(tree.to_wire()).digest == tree.digest
    keys = [f"model.layers.0.{entry.name}" for entry in tree.entries]
    if tree.form == "text":
        check_texts(tree)
    elif tree.form == "safetensors":
        safetensors_header(tree.entries, keys)
    else:
        gguf_header(tree.entries, keys, tree.form.removeprefix("gguf "))
    manifest = Manifest(json.dumps(_CONFIG).encode(), bytes(32), (bytes(32),) * BLOCKS, bytes(32))
    config_of(manifest, {0: tree})


def _write_model(path: Path) -> None:
    entries: dict[str, Any] = {
        key: {"dtype": "F32", "shape": [2, 2], "data_offsets": [16 * place, 16 * place + 16]}
        for place, key in enumerate(_KEYS)
    }
    header = json.dumps(entries).encode()
    data = len(header).to_bytes(8, "little") + header + bytes(16 * len(_KEYS))
    (path / "model.safetensors").write_bytes(data)
    (path / "config.json").write_text(json.dumps(_CONFIG))
    (path / "tokenizer.json").write_text("{}")


@cache
def _manifest() -> Manifest:
    with tempfile.TemporaryDirectory() as folder:
        _write_model(Path(folder))
        return compute_manifest(open_folder(Path(folder), "fuzzed"))


@asynccontextmanager
async def _holder() -> AsyncIterator[Talk]:
    handlers = Handlers()
    with tempfile.TemporaryDirectory() as path:
        _write_model(Path(path))
        folder = open_folder(Path(path), "fuzzed")
        held = WeightsHolder(cast(Swarm, handlers.streams), compute_manifest(folder), folder)
        held.start()
        await trio.lowlevel.checkpoint()
        state = lambda: {"places": held.taken}  # noqa: E731
        yield Talk(lambda protocol: handlers.by_protocol[protocol], state, logged(handlers.streams))


@cache
def _questions() -> tuple[Frame, ...]:
    stream, version = f"{WEIGHTS.id} 1", _manifest().version
    frames = (
        wire.WeightsFrame(query=wire.WeightsQuery(model_version=version)),
        wire.WeightsFrame(tree_query=wire.TreeQuery(model_version=version, part=1)),
        wire.WeightsFrame(piece_query=wire.PieceQuery(model_version=version, part=1, piece=0)),
        wire.WeightsFrame(tree_query=wire.TreeQuery(model_version=version, part=BLOCKS + 2)),
        wire.WeightsFrame(piece_query=wire.PieceQuery(model_version=version, part=BLOCKS + 2, piece=0)),
        wire.WeightsFrame(query=wire.WeightsQuery(model_version=VERSION)),
    )
    return tuple(Frame(stream, frame) for frame in frames)


def _to_holder(mutator: Mutator) -> Conversation:
    return conversation(mutator, _questions(), shares=0.4)


async def _ask(stream: Any) -> None:
    await ask_offer(stream, VERSION, BLOCKS, timeout=10.0)
    await ask_trees(stream, VERSION, [(1, _TREE.digest)], timeout=10.0)
    await ask_piece(stream, VERSION, 1, 0, timeout=10.0)
    data = await receive_piece(stream, timeout=10.0)
    assert data is None or not _TREE.has(0, data)


def _answers(mutator: Mutator) -> list[tuple[Any, bytes]]:
    offer = Offer(frozenset({0, 1}), "model.layers.", "model.", ("lm_head.weight",), bytes(32))
    piece = wire.WeightsFrame(piece=wire.WeightsPiece(), tensors=[wire.Tensor(nbytes=24)])
    frames = [wire.WeightsFrame(offer=offer.to_wire()), wire.WeightsFrame(tree=_TREE.to_wire())]
    return [*((frame, b"") for frame in frames), (piece, bytes(24))]


TARGETS: Final[tuple[Target, ...]] = (
    parser("tree of weights", 12, _tree, _read_tree, BadTree, ModelError),
    Target("questions about weights", 3, _to_holder, _holder, 400.0, peak=4 << 20),
    asking("asked for weights", 3, _ask, _answers, WEIGHTS, max_header=WEIGHTS.max_header),
)
