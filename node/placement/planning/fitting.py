"""Which models fit on which machines, in which weights, and what is missing where none does. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from ...errors import SwarmError
from .machines_file import MACHINES, Fleet, Machine
from .model_sizes import WEIGHTS, ModelSize
from .plans import busiest_plan, fastest_plan

SEARCH_SECONDS: Final = 0.2


@dataclass(frozen=True)
class Host:
    """A machine, whatever the model: bytes for blocks, and the bytes of weights that a step reads per second."""

    name: str
    memory: float
    bandwidth: float


@dataclass(frozen=True)
class Fit:
    """How a model goes onto machines, in these weights.

    Attributes:
        tokens_per_second: of one client alone, about; 0 if it does not fit.
        most_tokens_per_second: of many clients together.
        missing: bytes that all machines together lack; 0 if it fits.
        machines: how many more like the largest would suffice; 0 if it fits.
    """

    model: ModelSize
    weights: str
    tokens_per_second: float = 0.0
    most_tokens_per_second: float = 0.0
    missing: float = 0.0
    machines: int = 0

    @property
    def fits(self) -> bool:
        return not self.missing

    @property
    def nbytes(self) -> float:
        """Of all blocks."""
        return self.model.blocks * self.model.block_bytes(self.weights)


def fit_of(hosts: Sequence[Host], around: Fleet, model: ModelSize, weights: str) -> Fit:
    """Whether a model fits onto `hosts`, and how fast it is there. `around` has the ways between the same machines."""
    block, read = model.block_bytes(weights), model.active_bytes(weights)
    machines = tuple(
        Machine(host.name, min(model.blocks, int(host.memory // block)), read / host.bandwidth) for host in hosts
    )
    lacking = model.blocks - sum(machine.blocks for machine in machines)
    if lacking > 0:
        largest = max((int(host.memory // block) for host in hosts), default=0)
        return Fit(model, weights, missing=lacking * block, machines=math.ceil(lacking / largest) if largest else 0)
    fleet = replace(around, machines=machines)
    try:
        fastest = fastest_plan(fleet, model.blocks, seconds=SEARCH_SECONDS)
        busiest = busiest_plan(fleet, model.blocks)
    except SwarmError:  # trusted machines are too small for the ends
        return Fit(model, weights, missing=block)
    return Fit(model, weights, 1 / fastest.seconds, busiest.tokens_per_second)


def best_fit(hosts: Sequence[Host], around: Fleet, model: ModelSize) -> Fit:
    """The fit in the weights of most bits that fit; if none do, what is missing of those of fewest."""
    fits = (fit_of(hosts, around, model, weights) for weights in WEIGHTS)
    found = Fit(model, "bf16")
    for found in fits:
        if found.fits:
            break
    return found


def hosts_of(fleet: Fleet, block_bytes: float) -> list[Host]:
    """The machines of a fleet for a model whose blocks have so many bytes, for other models."""
    return [
        Host(machine.name, machine.blocks * block_bytes, block_bytes / max(machine.block_seconds, 1e-9))
        for machine in fleet.machines
    ]


def usable(memory: float) -> float:
    """Of the memory of a device, what blocks may take."""
    return memory * MACHINES.memory_share
