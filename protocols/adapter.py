"""`/petalnode/adapter/1`: what changes a server's blocks for the sessions of one client.

    client                                server
    Adapter (model version, span, hash) ->
                                       <- AdapterState | Error
    pieces, if it is not held ->
                                       <- AdapterState (held) | Error
    Close, or nothing more

An adapter is a set of small tensors: "3.self_attn.q_proj.lora_A" [rank, in] and "3.self_attn.q_proj.lora_B" [out, rank]
make a linear layer of block 3 return B A x more. Any scaling is in B already. "3.prompts" [prefix, hidden] is added to
the first `prefix` positions of what enters block 3. It has a hash for each block and one over these, so that a server
can check its part alone. An `Open` of `/petalnode/inference/1` names an adapter by that hash: one that the server's
owner has loaded, or one that this client has brought. The server keeps the latter while the stream on which it came is
open, and while sessions use it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ..crypto.canonical import digest
from . import wire_pb2 as wire
from .ids import Span
from .training import FORWARD, LORA_PARTS, PROMPTS, LoraName

ADAPTER: Final = replace(FORWARD, id="/petalnode/adapter/1", max_header=1 << 20)
"""As batches; the names of the tensors take the most of a header."""
MAX_ADAPTER_BYTES: Final = 256 << 20
"""Of an adapter's tensors, all blocks together."""
MAX_ADAPTER_TENSORS: Final = 1 << 14
_ADAPTER_DOMAIN: Final = "petalnode/adapter/1"
_BLOCK_DOMAIN: Final = "petalnode/adapter-block/1"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HASH: Final = re.compile(r"[0-9a-f]{64}")

Shape = tuple[int, ...]
Linears = Mapping[int, Mapping[str, tuple[int, int]]]
"""(values in, values out) of the linear layers of blocks, by the block's number and the layer's path in it."""


@dataclass(frozen=True)
class TensorDigest:
    """One tensor of an adapter as its hash sees it; `sha256` is of its bytes, little-endian and contiguous."""

    name: str
    shape: Shape
    dtype: str
    sha256: bytes


def block_of(name: str) -> int | None:
    """The number of the block that a tensor of this name belongs to. None if it is no such name."""
    lora = LoraName.parse(name)
    if lora is not None:
        return lora.block
    number, _, rest = name.partition(".")
    return int(number) if rest == PROMPTS and number.isdecimal() and len(number) <= 9 else None


def hash_of_block(tensors: Iterable[TensorDigest]) -> bytes:
    """Names the tensors of one block, in whatever order they come."""
    entries = sorted((tensor.name, tensor.shape, tensor.dtype, tensor.sha256) for tensor in tensors)
    return digest(_BLOCK_DOMAIN, tuple(entries))


def hash_of_adapter(blocks: Sequence[tuple[int, bytes]]) -> bytes:
    """Names an adapter by (number, hash) of all blocks that it changes."""
    return digest(_ADAPTER_DOMAIN, tuple(sorted(blocks)))


def hashes_of_blocks(tensors: Iterable[TensorDigest]) -> tuple[tuple[int, bytes], ...]:
    """(number, hash) of every block that these tensors belong to, in order; all names are of some block."""
    of_block: dict[int, list[TensorDigest]] = {}
    for tensor in tensors:
        number = block_of(tensor.name)
        assert number is not None
        of_block.setdefault(number, []).append(tensor)
    return tuple((number, hash_of_block(of_block[number])) for number in sorted(of_block))


def digests_match(offer: wire.Adapter, tensors: Iterable[TensorDigest]) -> bool:
    """Whether these are the tensors of the offer's blocks; its own hash was checked."""
    hashes = dict(hashes_of_blocks(tensors))
    return all(hashes.get(block.block) == block.hash for block in offer.blocks if block.block in hashes)


def check_tensors(shapes: Mapping[str, Shape], span: Span, linears: Linears, hidden_size: int) -> None:
    """Whether tensors of these names and shapes can change blocks of `span`; `linears` are the layers of those.

    Raises:
        ValueError: with a sentence.
    """
    prefixes: dict[int, int] = {}
    for name, shape in shapes.items():
        block = block_of(name)
        if block is None:
            raise ValueError(f"nothing of a block is called {name[:100]!r}")
        if block not in span:
            raise ValueError(f"{name[:100]} is not of blocks {span}")
        if name.endswith(f".{PROMPTS}") and LoraName.parse(name) is None:
            if len(shape) != 2 or shape[1] != hidden_size or not shape[0]:
                raise ValueError(f"{name} takes [prefix, {hidden_size}], not {list(shape)}")
            prefixes[block] = shape[0]
        else:
            check_lora(LoraName.parse(name), shapes, linears[block])
    if prefixes and (len(set(prefixes.values())) > 1 or len(prefixes) < len(span)):
        raise ValueError("deep prompts are for all blocks, and as many for each")


def check_lora(name: LoraName | None, shapes: Mapping[str, Shape], layers: Mapping[str, tuple[int, int]]) -> None:
    """Whether one LoRA tensor of `shapes` fits the linear layers of its block, and the other half is there.

    Raises:
        ValueError: with a sentence.
    """
    assert name is not None
    layer = layers.get(name.path)
    if layer is None:
        raise ValueError(f"block {name.block} has no linear layer {name.path[:100]!r}; it has {', '.join(layers)}")
    a, b = (shapes.get(str(replace(name, part=part)), ()) for part in LORA_PARTS)
    rank = a[0] if a else 0
    if a != (rank, layer[0]) or b != (layer[1], rank) or not rank:
        raise ValueError(f"{name}: lora_A takes [rank, {layer[0]}] and lora_B [{layer[1]}, rank], not {a} and {b}")


@dataclass(frozen=True)
class AnnouncedAdapter:
    """An adapter that a server holds for everybody, as its announcement names it: "name@hash in hexadecimal digits"."""

    name: str
    hash: bytes

    def __str__(self) -> str:
        return f"{self.name}@{self.hash.hex()}"

    @classmethod
    def parse(cls, text: str) -> AnnouncedAdapter | None:
        """None if it is nothing of this kind."""
        name, at, hexadecimal = text.rpartition("@")
        if not at or not is_name(name) or not _HASH.fullmatch(hexadecimal):
            return None
        return cls(name, bytes.fromhex(hexadecimal))


def is_name(text: str) -> bool:
    """Whether an adapter may be called this: up to 64 letters, digits, ".", "_" and "-"."""
    return _NAME.fullmatch(text) is not None
