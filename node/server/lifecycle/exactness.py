"""Whether a server computes to the bit (docs/exact.md) without being told to: by what that costs on this machine, which
`petalnode self-test` measures. What others announce is not asked: anybody may announce anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from ....protocols.ids import Span
from ...blocks.kernels.library import library
from ...models import ModelFolder
from ...models.quantisation import Numerics, Quantisation
from .memory import has_accelerator
from .options import ServerOptions
from .speed import BlockSpeed, SpeedKey, cpu_name, cpu_threads, keep_speed, measure_speed, recall_speed


@dataclass(frozen=True)
class ExactRule:
    """`most`: of the time that a step or a prompt takes otherwise. `weights` are measured, `rounds` times in turns."""

    most: float = 1.05
    weights: tuple[Quantisation, ...] = ("none", "nf4")
    rounds: int = 2


RULE: Final = ExactRule()
KINDS: Final = tuple(Numerics(weights, exact=exact) for weights in RULE.weights for exact in (False, True))


@dataclass(frozen=True)
class ExactCost:
    """By what exactness multiplies the time of a step, and of a token of a prompt."""

    step: float
    prompt: float

    @property
    def is_small(self) -> bool:
        return max(self.step, self.prompt) <= RULE.most


def cost_of(speeds: Mapping[Numerics, BlockSpeed]) -> ExactCost | None:
    """Of the weights with which it costs the most; None if a kind was not measured."""
    if not set(KINDS) <= set(speeds):
        return None
    pairs = [(speeds[replace(kind, exact=False)], speeds[kind]) for kind in KINDS if kind.exact]
    steps = [exact.step_seconds / usual.step_seconds for usual, exact in pairs]
    return ExactCost(max(steps), max(exact.token_seconds / usual.token_seconds for usual, exact in pairs))


def exact_unasked(options: ServerOptions, folder: ModelFolder) -> ServerOptions:
    """The options with exactness where it costs little, and nothing else that was asked for would change."""
    said = [folder.config, folder.config.get("text_config") or {}]
    saved = {str(part.get("dtype") or part.get("torch_dtype") or "float32").removeprefix("torch.") for part in said}
    computes = options.dtype == "float32" or (options.dtype == "auto" and saved == {"float32"})
    wanted = options.exact_if_cheap and computes and options.kernels != "torch"
    if not wanted or any(map(has_accelerator, options.devices)):
        return options
    cost = recall_cost()
    if cost is None or not cost.is_small:
        return options
    devices = ("cpu",) * len(options.devices)
    return replace(options, exact=True, devices=devices, dtype="float32", kernels="native")


def measured(folder: Path) -> dict[Numerics, BlockSpeed]:
    """How fast the blocks of a small model are by each kind, the best of several."""
    from ...blocks.span import load_span

    spans = {
        kind: load_span(folder, Span(0, 1), device="cpu", dtype="float32", quantisation=str(kind), kernels="auto")
        for kind in KINDS
    }
    found: dict[Numerics, BlockSpeed] = {}
    for _ in range(RULE.rounds):
        for kind, blocks in spans.items():
            now = measure_speed(blocks)
            best = found.get(kind, now)
            steps = min(best.step_seconds, now.step_seconds)
            found[kind] = BlockSpeed(steps, min(best.token_seconds, now.token_seconds))
    return found


def keep_cost(speeds: Mapping[Numerics, BlockSpeed]) -> None:
    """For servers that start on this machine within a month."""
    for kind, speed in speeds.items():
        keep_speed(_key(kind), speed)


def recall_cost() -> ExactCost | None:
    """What was measured here with these kernels; None if nothing was, or long ago."""
    speeds = {kind: recall_speed(_key(kind)) for kind in KINDS}
    return cost_of({kind: speed for kind, speed in speeds.items() if speed is not None})


def _key(kind: Numerics) -> SpeedKey:
    found = library()
    hardware = f"{cpu_name()}, kernels {'none' if found is None else found.isa}"
    return SpeedKey(b"self-test", "float32", str(kind), hardware, cpu_threads())
