"""What a training says while it runs."""

from __future__ import annotations

from dataclasses import dataclass


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
class Waiting:
    """The swarm cannot go on just now; it is asked again and again."""

    reason: str


@dataclass(frozen=True)
class StoppedEarly:
    """`evaluations` in a row were no better than the best."""

    step: int
    evaluations: int


Event = StepDone | Evaluated | Waiting | StoppedEarly
