"""A placement that leaves no block out, where the search's single steps find none."""

from __future__ import annotations

import numpy as np

from .holder import Ints


def tiled(starts: Ints, lengths: Ints, movable: Ints, num_blocks: int) -> Ints:
    """Starts with as few gaps as this finds: the movable servers, from the left, fill what the others leave open.

    If nobody is fixed and there are enough blocks in all, no gap is left.
    """
    held = np.zeros(num_blocks, bool)
    fixed = np.setdiff1d(np.arange(len(starts)), movable)
    for index in fixed:
        held[starts[index] : starts[index] + lengths[index]] = True
    found = starts.copy()
    waiting = sorted(movable.tolist(), key=lambda index: (starts[index], index))
    while waiting and not held.all():
        first = int(np.argmin(held))
        open_run = int(np.argmax(held[first:])) if held[first:].any() else num_blocks - first
        # Of those that fit into the opening whole the first, else the smallest that closes it.
        fitting = [index for index in waiting if lengths[index] <= open_run]
        chosen = fitting[0] if fitting else min(waiting, key=lambda index: lengths[index])
        waiting.remove(chosen)
        found[chosen] = min(first, num_blocks - int(lengths[chosen]))
        held[found[chosen] : found[chosen] + lengths[chosen]] = True
    return found
