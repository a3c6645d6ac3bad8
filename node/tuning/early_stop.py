"""When to stop because nothing gets better any more."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class EarlyStop:
    """What evaluations have said so far. Lower losses are better.

    Attributes:
        patience: evaluations in a row without a new best loss after which to stop; None never stops.
        best: the best loss.
        worse: evaluations since then.
    """

    patience: int | None = None
    best: float = math.inf
    worse: int = 0

    def after(self, loss: float) -> EarlyStop:
        if loss < self.best:
            return replace(self, best=loss, worse=0)
        return replace(self, worse=self.worse + 1)

    @property
    def improved(self) -> bool:
        """Whether the last evaluation was the best one."""
        return self.worse == 0 and self.best < math.inf

    @property
    def is_over(self) -> bool:
        return self.patience is not None and self.worse >= self.patience
