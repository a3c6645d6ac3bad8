"""Memory of a session's cache that goes back to the system while the session goes on, without moving the rest.

A block with a window looks at the last tokens only. What is behind them, and behind what a session may still be rolled
back by, is let go page by page: buffers keep their layout, and what was let go reads as zeros. Linux can do that.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from dataclasses import dataclass
from typing import Final

import torch


@dataclass(frozen=True)
class WindowLimits:
    """Tokens that blocks keep behind a window, from the start of a step on.

    Attributes:
        back: by which a session can be rolled back; farther, its inputs are computed again. More than most answers
            have, so that another one to the same question needs none.
        at_once: that are let go together, at the least.
    """

    back: int = 512
    at_once: int = 256


WINDOWS: Final = WindowLimits()


def lets_go(device: torch.device) -> bool:
    """Whether memory of buffers on this device can be given back in part."""
    return device.type == "cpu" and sys.platform == "linux"


def let_go(buffer: torch.Tensor, start: int, end: int) -> None:
    """Gives back the memory of the tokens `start` .. `end` of a contiguous buffer [rows, heads, tokens, width], but for
    pages that other tokens have a part of."""
    madvise = ctypes.CDLL(None).madvise
    pitch = buffer.stride(2) * buffer.itemsize
    for part in buffer.flatten(0, 1):
        first = part.data_ptr() + start * pitch
        first += -first % mmap.PAGESIZE
        nbytes = (part.data_ptr() + end * pitch) // mmap.PAGESIZE * mmap.PAGESIZE - first
        if nbytes > 0:  # where it fails, as for locked memory, nothing changes
            madvise(ctypes.c_void_p(first), ctypes.c_size_t(nbytes), mmap.MADV_DONTNEED)
