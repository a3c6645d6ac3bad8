"""All that decides what a training ends with, beside the model and the data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from ..errors import BadInput
from .schedule import Shape
from .tuned import MethodOptions


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
        """What must be the same when a training goes on: all but how often a checkpoint is written."""
        found = asdict(self)
        del found["checkpoint_every"]
        found["method"]["target_modules"] = list(self.method.target_modules)
        return found
