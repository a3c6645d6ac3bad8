"""The events that a training yields, and early stopping."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class StepDone:
    """`step` of `steps` is done; `tokens_per_second` counts tokens that are not padding."""

    step: int
    steps: int
    loss: float
    learning_rate: float
    tokens_per_second: float


@dataclass(frozen=True)
class Evaluated:
    """The mean loss over what is held out after `step` steps; `accuracy` of classifiers."""

    step: int
    loss: float
    accuracy: float | None
    improved: bool


@dataclass(frozen=True)
class WaitingForServers:
    """No chain covers the model; the training retries."""

    reason: str


@dataclass(frozen=True)
class StoppedEarly:
    """`evaluations` in a row were no better than the best."""

    step: int
    evaluations: int


Event = StepDone | Evaluated | WaitingForServers | StoppedEarly


@dataclass(frozen=True)
class EarlyStop:
    """State of early stopping. Lower losses are better.

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
