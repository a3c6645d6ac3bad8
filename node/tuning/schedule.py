"""When what happens in training: pure functions of the number of steps done, so that it can go on anywhere."""

from __future__ import annotations

import math
import random
from typing import Final, Literal

Shape = Literal["cosine", "linear", "constant"]
SHAPES: Final[tuple[Shape, ...]] = ("cosine", "linear", "constant")


def steps_of_epoch(rows: int, batch_size: int) -> int:
    return -(-rows // batch_size)


def rows_of_step(step: int, rows: int, batch_size: int, seed: int) -> list[int]:
    """The numbers of the rows in the batch of step 0, 1, ...: each once in an epoch, in an order by chance.

    The last batch of an epoch has what is left.
    """
    epoch, index = divmod(step, steps_of_epoch(rows, batch_size))
    order = list(range(rows))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order[index * batch_size : (index + 1) * batch_size]


def learning_rate(step: int, steps: int, *, peak: float, warmup: int, shape: Shape) -> float:
    """For step 0 .. steps-1: rises over `warmup` steps to `peak`, then falls to 0 at `steps`, or stays."""
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    if shape == "constant":
        return peak
    left = (steps - step) / max(1, steps - warmup)
    return peak * (left if shape == "linear" else 0.5 * (1 - math.cos(math.pi * left)))


def is_due(step: int, every: int, steps: int) -> bool:
    """Whether after `step` steps it is time for what is done at the start, every `every` steps and at the end."""
    return step % every == 0 or step == steps
