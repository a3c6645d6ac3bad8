"""Where tokens stand: their number in a row, or on three axes by M-RoPE (Qwen2-VL, arXiv 2409.12191, section 2.1).

Text has its number on all axes. The tokens of a picture stand at a time, a height and a width, and what follows goes on
behind the largest of them: so the tokens behind a picture have smaller positions than their numbers in the row.
"""

from __future__ import annotations

import torch
from torch import nn


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
