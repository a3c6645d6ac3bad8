"""How large a model's blocks are in memory, known before any of its weights are here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..models.quantisation import Quantisation, held_bytes
from .config import choose_dtype, read_config
from .skeleton import build


@dataclass(frozen=True)
class BlockSize:
    """Bytes: of a block as a server holds it, before it is quantised, and of one value of an attention cache."""

    held: int
    whole: int
    item: int


def largest_block(folder: Path, dtype: str, quantisation: Quantisation) -> BlockSize:
    """The largest block of the model in `folder`, of which only the configuration has to be there.

    Raises:
        ModelError, BadInput: as `load_span`.
    """
    config = read_config(folder)
    skeleton = build(config, choose_dtype(dtype, config))
    held, whole = [0], [0]
    for block in skeleton.blocks:
        values = list(block.parameters())
        whole.append(sum(value.nbytes for value in values))
        held.append(sum(held_bytes(quantisation, tuple(value.shape), value.nbytes) for value in values))
    return BlockSize(max(held), max(whole), skeleton.dtype.itemsize)
