"""A model folder with the weights that its quantised blocks stand for: what they must compute exactly."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from petalnode.node.blocks.quantisation.matrix import Int8Matrix, QuantisedMatrix, nf4_kind
from petalnode.node.blocks.quantisation.slots import matrix_slots
from tests.tiny_models import NUM_BLOCKS, load_whole


@torch.no_grad()
def save_dequantised(folder: Path, target: Path, quantisation: str) -> Path:
    """Writes to `target` the model of `folder`, each matrix of its blocks quantised and back again."""
    model = load_whole(folder)
    blocks = next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == NUM_BLOCKS)
    for block in blocks:
        for place in matrix_slots(block):
            weight = place.weight(block)
            kind: type[QuantisedMatrix] = Int8Matrix
            if quantisation == "nf4":
                kind = nf4_kind(place.shape, weight.device)
            weight.copy_(kind.quantise(weight).rows(0, place.shape[0], torch.float32))
    model.save_pretrained(target)
    return target
