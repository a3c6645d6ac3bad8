"""Targets that are matrices which somebody has quantised: the configuration that says how, and what stands beside."""

from __future__ import annotations

import json
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, Final

import torch

from petalnode.node.blocks.kernels.library import library
from petalnode.node.blocks.kernels.tiles import STORED, TiledMatrix, held_as
from petalnode.node.blocks.quantisation.stored import StoredQuantised
from petalnode.node.errors import ModelError
from petalnode.node.models.checkpoint import Checkpoint
from petalnode.node.models.stored_scheme import stored_scheme
from tests.fuzz.files import Files, as_json, file_target
from tests.fuzz.harness import Target
from tests.fuzz.mutation import Mutator
from tests.quantised_checkpoints import LAYOUTS

Held = dict[str, tuple[str, tuple[int, ...], bytes]]
"""By key: dtype, shape and bytes of a tensor."""
SHAPE: Final = (16, 64)
MATRIX: Final = "model.layers.0.self_attn.q_proj"
_DTYPES: Final = {
    torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int8: "I8", torch.int32: "I32",
    torch.int64: "I64", torch.float8_e4m3fn: "F8_E4M3",
}  # fmt: skip
_ALIKE: Final = {1: ("I8", "U8", "F8_E4M3", "F8_E5M2"), 2: ("F16", "BF16", "I16"), 4: ("F32", "I32"), 8: ("I64", "F64")}
_BYTES: Final = {dtype: width for width, alike in _ALIKE.items() for dtype in alike}


@cache
def quantised(layout: str) -> Held:
    torch.manual_seed(7)
    made, _ = LAYOUTS[layout][1](torch.randn(SHAPE))
    made["bias"] = torch.zeros(SHAPE[0])
    return {
        f"{MATRIX}.{name}": (
            _DTYPES[part.dtype],
            tuple(part.shape),
            part.reshape(-1).view(torch.uint8).numpy().tobytes(),
        )
        for name, part in made.items()
    }


def _shape(mutator: Mutator, count: int) -> tuple[int, ...]:
    """Another one of as many values."""
    sides: list[int] = []
    while count > 1 and mutator.chance(0.7):
        side = mutator.random.choice([size for size in range(1, count + 1) if count % size == 0])
        sides.append(side)
        count //= side
    return mutator.random.choice(((*sides, count), (count, *sides), (*sides, 1, count)))


def changed(mutator: Mutator, held: Held) -> Held:
    """With another shape, dtype, length or value of one of its tensors, or without it; the header stays a true one."""
    key = mutator.random.choice(list(held))
    dtype, shape, data = held[key]
    others = {name: part for name, part in held.items() if name != key}
    width = _BYTES[dtype]
    match mutator.random.randrange(6):
        case 0:
            return others
        case 1:
            return others | {key: (dtype, _shape(mutator, prod(shape)), data)}
        case 2:
            return others | {key: (mutator.random.choice(_ALIKE[width]), shape, data)}
        case 3:
            values = mutator.random.choice((0, 1, 2, 3, 8, 15, 17))
            shape = _shape(mutator, values) if values else (0, 4)
            return others | {key: (dtype, shape, data[: width * values].ljust(width * values, b"\1"))}
        case 4:
            return others | {key: (dtype, shape, mutator.random.randbytes(len(data)))}
    other = mutator.random.choice(list(held))
    return held | {key: held[other], other: held[key]}


def files_of(stated: Any, held: Held) -> Files:
    entries, body = {}, b""
    for key, (dtype, shape, data) in held.items():
        entries[key] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    header = json.dumps(entries).encode()
    return {
        "stated.json": json.dumps(stated).encode() if not isinstance(stated, bytes) else stated,
        "model.safetensors": len(header).to_bytes(8, "little") + header + body,
    }


def _files(mutator: Mutator) -> Files:
    layout = mutator.random.choice(list(LAYOUTS))
    stated, held = LAYOUTS[layout][0], quantised(layout)
    if mutator.chance(0.3):
        return files_of(as_json(mutator, stated), held)
    if mutator.chance(0.2):
        stated = LAYOUTS[mutator.random.choice(list(LAYOUTS))][0]
    for _ in range(mutator.random.randrange(1, 4)):
        held = changed(mutator, held) or held
    return files_of(stated, held)


def read(folder: Path) -> None:
    """Values as they are opened, and matrices as the kernels hold them."""
    try:
        stated = json.loads((folder / "stated.json").read_bytes())
    except (ValueError, RecursionError):
        return
    if not isinstance(stated, dict):
        return
    with Checkpoint(folder, 1) as weights:
        stored = StoredQuantised(weights, stored_scheme(stated), {f"{MATRIX}.weight": "weight"}, {"weight": SHAPE})
        kind = stored.kind("weight") if f"{MATRIX}.weight" in stored.sources else None
        if kind is not None:
            (rows,) = stored.pieces("weight", None, 1)
            _, _, inputs, nbytes = STORED[kind]
            assert rows.shape == (SHAPE[0], SHAPE[1] // inputs * nbytes)
            if library() is not None and held_as(kind, SHAPE) is not None:
                TiledMatrix.of_stored(kind, [rows], SHAPE).rows(0, SHAPE[0], torch.float32)
        for key in stored.sources:
            stored.values(key)


TARGETS: Final[tuple[Target, ...]] = (file_target("quantised weights", 8, _files, read, ModelError),)
