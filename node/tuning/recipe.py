"""The hyperparameters of a training, its schedule and its end, pure functions of the steps done; and its events."""

from __future__ import annotations

import math
import random
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Literal

from ..errors import BadInput
from ..models.adapter_note import Method


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


Shape = Literal["cosine", "linear", "constant"]
SHAPES: Final[tuple[Shape, ...]] = ("cosine", "linear", "constant")


@dataclass(frozen=True)
class MethodOptions:
    """
    Attributes:
        virtual_tokens: of prompts.
        rank, alpha, target_modules: of LoRA; without modules, those that are usual for the architecture.
    """

    method: Method = "prompt"
    virtual_tokens: int = 16
    rank: int = 8
    alpha: float = 16.0
    target_modules: tuple[str, ...] = ()


@dataclass(frozen=True)
class Recipe:
    """
    Attributes:
        steps: to do in all.
        batch_size: rows of a step.
        peak: the highest learning rate.
        warmup: steps until then.
        evaluate_every, checkpoint_every: in steps.
        patience: evaluations without a better loss before it stops early; None never does.
        clip: the longest gradient, all weights together.
    """

    steps: int
    batch_size: int = 8
    peak: float = 1e-2
    warmup: int = 0
    shape: Shape = "cosine"
    evaluate_every: int = 50
    checkpoint_every: int = 50
    patience: int | None = None
    seed: int = 0
    weight_decay: float = 0.0
    clip: float = 1.0
    method: MethodOptions = field(default_factory=MethodOptions)

    def __post_init__(self) -> None:
        if self.patience is not None and self.patience < 1:
            raise BadInput("a patience of less than 1 evaluation stops before anything is learned")

    def fixed(self) -> dict[str, Any]:
        """What has to be the same when a training is resumed: all but how often a checkpoint is written."""
        found = asdict(self)
        del found["checkpoint_every"]
        found["method"]["target_modules"] = list(self.method.target_modules)
        return found


def steps_of_epoch(rows: int, batch_size: int) -> int:
    return -(-rows // batch_size)


def rows_of_step(step: int, rows: int, batch_size: int, seed: int) -> list[int]:
    """The indices of the rows in the batch of step 0, 1, ...: a random permutation for every epoch, whose last batch
    may be smaller.
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
