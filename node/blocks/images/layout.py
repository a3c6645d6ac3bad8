"""How the tokens of a prompt with pictures are laid out, as tensors.

By M-RoPE (Qwen2-VL, arXiv 2409.12191, section 2.1) text has its number on all axes. The tokens of a picture stand at a
time, a height and a width. What follows goes on behind the largest of them: so the tokens behind a picture have smaller
positions than their numbers in the row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

from ....protocols.ids import AXES, Layout, LayoutNeeds
from ...errors import BadInput


@dataclass(frozen=True, eq=False)
class TokenLayout:
    """Of some tokens of rows beside each other.

    Attributes:
        positions: int64 [axes, rows, tokens] where tokens are not counted; else None.
        groups: int64 [rows, tokens], as `protocols.ids` has them; None: there are none.
        features: [rows, tokens, blocks, hidden size], added to the outputs of the first blocks, 0 at tokens of text;
            None: nothing is.
    """

    positions: torch.Tensor | None = None
    groups: torch.Tensor | None = None
    features: torch.Tensor | None = None

    @property
    def is_text(self) -> bool:
        return self.positions is None and self.groups is None and self.features is None

    @property
    def blocks(self) -> int:
        """How many add features."""
        return 0 if self.features is None else self.features.shape[2]

    @property
    def needs(self) -> LayoutNeeds:
        return LayoutNeeds(self.positions is not None, self.groups is not None, self.blocks)

    def check(self, hidden: torch.Tensor) -> None:
        """Raises BadInput: it is not of these hidden states [rows, tokens, hidden size]."""
        rows, tokens, size = hidden.shape
        wanted = (AXES, rows, tokens), (rows, tokens), (rows, tokens, self.blocks, size)
        for given, shape in zip((self.positions, self.groups, self.features), wanted, strict=True):
            if given is not None and given.shape != shape:
                raise BadInput(f"a layout of {list(given.shape)} for hidden states of {list(hidden.shape)}")

    def part(self, start: int, tokens: int) -> TokenLayout:
        """Of `tokens` tokens from `start` on, or of all that there are; without features where all are 0."""
        features = None if self.features is None else self.features[:, start : start + tokens]
        return TokenLayout(
            None if self.positions is None else self.positions[:, :, start : start + tokens],
            None if self.groups is None else self.groups[:, start : start + tokens],
            features if features is not None and bool(features.any()) else None,
        )

    def of_rows(self, rows: int) -> TokenLayout:
        """Each row several times, so that there are `rows`: those of beams."""
        given = ((self.positions, 1), (self.groups, 0), (self.features, 0))
        return TokenLayout(
            *(None if one is None else one.repeat_interleave(rows // one.shape[dim], dim=dim) for one, dim in given)
        )

    def widened(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states with the features behind them."""
        if self.features is None:
            return hidden
        return torch.cat([hidden, self.features.flatten(2).to(hidden.device, hidden.dtype)], dim=2)

    def on_wire(self) -> Layout:
        return Layout(_flat(self.positions), _flat(self.groups), self.blocks)


TEXT: Final = TokenLayout()


def takes_positions(decoder: nn.Module) -> bool:
    """Whether the rotary embeddings of a decoder have axes."""
    return any(hasattr(module, "mrope_section") for module in decoder.modules())


def placed(prompt: torch.Tensor, position: int, tokens: int) -> torch.Tensor:
    """The positions of some tokens of a text.

    Args:
        prompt: int64 [axes, rows, tokens of the prompt].
        position: tokens of a row before these.

    Returns:
        int64 [axes, rows, tokens]; those behind the prompt count on from its largest position.
    """
    own = prompt[:, :, position : position + tokens]
    begin, count = max(position - prompt.shape[2], 0), tokens - own.shape[2]
    following = prompt.amax(dim=(0, 2)).unsqueeze(1) + torch.arange(begin + 1, begin + count + 1)
    return torch.cat([own, following.expand(len(prompt), -1, -1)], dim=2)


def _flat(numbers: torch.Tensor | None) -> tuple[int, ...]:
    return () if numbers is None else tuple(numbers.flatten().tolist())
