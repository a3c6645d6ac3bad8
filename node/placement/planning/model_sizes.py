"""How large models are, and which fit on which machines in which weights. Pure; no weights are read."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

from ....protocols.ids import Boundaries
from ....protocols.inference import STEP_TOKENS
from ...errors import SwarmError
from ...models import ALIASES
from .machines_file import DEVICES, MACHINES, Fleet, Machine
from .plans import busiest_plan, fastest_plan

_TABLE: Final = Path(__file__).with_name("models.csv")
WEIGHTS: Final[Mapping[str, float]] = {"bf16": 16.0, "Q8_0": 8.5, "Q4_K_M": 4.85}
"""Bits that a weight takes, scales included: checkpoints as published, and two kinds of GGUF files (of Q4_K_M the mean
of its Q4_K and Q6_K)."""
_FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    "blocks": ("num_hidden_layers", "n_layer"),
    "hidden": ("hidden_size", "n_embd"),
    "heads": ("num_attention_heads", "n_head"),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "width": ("moe_intermediate_size", "intermediate_size", "n_inner"),
    "vocab": ("vocab_size",),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "active": ("num_experts_per_tok",),
    "mtp": ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers"),
}


@dataclass(frozen=True)
class ModelSize:
    """What a model's size follows from. `width` is that of the MLP, or of each of the `experts`, of which a token uses
    `active`; `tied`: embeddings and head are one matrix. `mtp`: heads that predict the token after the next one, of
    which a client holds the first. `stored`: bits of a weight of the local file or folder, as a server holds it.
    `stored_ends` are the bytes of what a client holds of it; 0 if there is none. `boundaries` of its blocks, if
    known."""

    name: str
    blocks: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    vocab: int
    tied: bool
    experts: int = 0
    active: int = 0
    mtp: int = 0
    stored: float = 0.0
    stored_ends: int = 0
    boundaries: Boundaries | None = None

    @property
    def _attention(self) -> int:
        return 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)

    @property
    def block_parameters(self) -> int:
        return self._attention + 3 * self.hidden * self.width * max(1, self.experts) + self.hidden * self.experts

    @property
    def active_parameters(self) -> int:
        """Those of a block that one token uses."""
        return self._attention + 3 * self.hidden * self.width * (self.active or 1) + self.hidden * self.experts

    @property
    def parameters(self) -> int:
        return self.blocks * self.block_parameters + self._ends

    @property
    def _ends(self) -> int:
        per_block = 0 if self.boundaries is None else self.boundaries.per_block
        return self.vocab * (self.hidden * (1 if self.tied else 2) + self.blocks * per_block)

    def block_bytes(self, weights: str) -> float:
        return self.block_parameters * WEIGHTS.get(weights, self.stored) / 8

    def active_bytes(self, weights: str) -> float:
        """What a decode step reads of a block."""
        return self.active_parameters * WEIGHTS.get(weights, self.stored) / 8

    def client_bytes(self, weights: str) -> float:
        """What a client holds: embeddings, head, and an MTP head, which is a block and a projection."""
        if self.stored_ends and weights not in WEIGHTS:
            return self.stored_ends
        held = self._ends + (self.block_parameters + 2 * self.hidden**2 if self.mtp else 0)
        return held * WEIGHTS.get(weights, self.stored) / 8

    def head_bytes(self, weights: str) -> float:
        """What a client reads for each token."""
        return self.vocab * self.hidden * WEIGHTS.get(weights, self.stored) / 8


@cache
def known_models() -> tuple[ModelSize, ...]:
    """The models of the table, the smallest first; models.csv has the source."""
    with _TABLE.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    found = [_of_row(row) for row in rows]
    return tuple(sorted(found, key=lambda model: model.parameters))


def _of_row(row: Mapping[str, str]) -> ModelSize:
    numbers: dict[str, Any] = {name: int(row.get(name, 0)) for name in _FIELDS}
    return ModelSize(row["name"], tied=row["tied"] == "1", **numbers)


def known_model(name: str) -> ModelSize | None:
    """The model of the table that is called so, with or without its publisher, or that of an alias."""
    if name in ALIASES:
        return size_by_config(name, ALIASES[name].config)
    wanted = name.lower()
    return next((one for one in known_models() if wanted in (one.name.lower(), one.name.lower().split("/")[1])), None)


def size_by_config(name: str, config: Mapping[str, Any], boundaries: Boundaries | None = None) -> ModelSize | None:
    """The size that a model's config.json tells; None if it does not tell enough. It is a stranger's: any value is
    taken for a number only if it is one. `boundaries` of its blocks, if known."""
    for part in ("text_config", "llm_config", "language_config"):
        if isinstance(config.get(part), Mapping):
            config = config[part]
    found: dict[str, Any] = {field: _number(config, names) for field, names in _FIELDS.items()}
    found["kv_heads"] = found["kv_heads"] or found["heads"]
    found["head_dim"] = found["head_dim"] or found["hidden"] // max(1, found["heads"])
    found["width"] = found["width"] or 4 * found["hidden"]
    if not found["experts"]:
        found["active"] = 0
        found["width"] = _number(config, _FIELDS["width"][1:]) or 4 * found["hidden"]
    if not all(found[field] for field in ("blocks", "hidden", "heads", "vocab")):
        return None
    return ModelSize(name, tied=config.get("tie_word_embeddings") is True, boundaries=boundaries, **found)


def _number(config: Mapping[str, Any], names: tuple[str, ...]) -> int:
    values = (config.get(name) for name in names)
    return next((value for value in values if isinstance(value, int) and 0 < value < 1 << 32 and value is not True), 0)


SEARCH_SECONDS: Final = 0.2
_FLOAT: Final = 4  # bytes of a value of the cache, as a server on a CPU keeps it


@dataclass(frozen=True)
class MachineCapacity:
    """A machine, whatever the model: bytes for blocks, and the bytes of weights that a step reads per second. Where it
    `computes` in the same memory, attention caches and what a prefill takes are beside the blocks."""

    name: str
    memory: float
    bandwidth: float
    computes: bool = False

    def holds(self, model: ModelSize, weights: str) -> int:
        """How many blocks of a model: as a server chooses, if it computes in the same memory."""
        if not self.computes:
            return int(self.memory // model.block_bytes(weights))
        computing = STEP_TOKENS * model.hidden * _FLOAT * MACHINES.copies
        cache = 2 * model.kv_heads * model.head_dim * _FLOAT * MACHINES.cache_tokens
        return max(0, int((self.memory - computing) // (model.block_bytes(weights) + cache)))


@dataclass(frozen=True)
class Fit:
    """How a model goes onto machines, in these weights.

    Attributes:
        tokens_per_second: of one client alone with a short conversation, its own part included, about; 0 if it does not
            fit.
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


def fit_of(hosts: Sequence[MachineCapacity], around: Fleet, model: ModelSize, weights: str) -> Fit:
    """Whether a model fits onto `hosts`, and how fast it is there. `around` has the ways between the same machines."""
    block, read = model.block_bytes(weights), model.active_bytes(weights)
    rooms = [min(model.blocks, host.holds(model, weights)) for host in hosts]
    shared = (model.boundaries and model.boundaries.longest) or ()
    usable = [room if model.boundaries is None else model.boundaries.most(room) for room in rooms]
    lacking, largest = model.blocks - sum(usable), max(rooms, default=0)
    if largest < len(shared):  # more machines like these do not help
        return Fit(model, weights, missing=max(lacking, len(shared) - largest) * block)
    if lacking > 0:
        return Fit(model, weights, missing=lacking * block, machines=math.ceil(lacking / largest) if largest else 0)
    machines = tuple(Machine(host.name, room, read / host.bandwidth) for host, room in zip(hosts, rooms, strict=True))
    seconds = _client_seconds(hosts, around, model, weights)
    fleet = replace(around, machines=machines, client_seconds=seconds, boundaries=model.boundaries)
    try:
        fastest = fastest_plan(fleet, model.blocks, seconds=SEARCH_SECONDS)
        busiest = busiest_plan(fleet, model.blocks)
    except SwarmError:  # trusted machines are too small for the ends
        return Fit(model, weights, missing=block)
    return Fit(model, weights, 1 / fastest.seconds, busiest.tokens_per_second)


def _client_seconds(hosts: Sequence[MachineCapacity], around: Fleet, model: ModelSize, weights: str) -> float:
    """A client's part of a token: it reads its head, and handles the answer and the next step. Where nothing is known
    of it, it is as the slowest machine, and no more than an ordinary computer."""
    if around.client_seconds:
        return around.client_seconds
    ordinary = DEVICES["cpu"][1] * 1e9 * MACHINES.bandwidth_share
    bandwidth = around.client_bandwidth or min([ordinary, *(host.bandwidth for host in hosts)])
    return model.head_bytes(weights) / bandwidth + MACHINES.client_seconds


def best_fit(hosts: Sequence[MachineCapacity], around: Fleet, model: ModelSize) -> Fit:
    """The fit in the weights of most bits that fit; if none do, what is missing of those of fewest."""
    fits = (fit_of(hosts, around, model, weights) for weights in WEIGHTS)
    found = Fit(model, "bf16")
    for found in fits:
        if found.fits:
            break
    return found


def hosts_of(fleet: Fleet, block_bytes: float) -> list[MachineCapacity]:
    """The machines of a fleet for a model whose blocks have `block_bytes`, for other models."""
    return [
        MachineCapacity(machine.name, machine.blocks * block_bytes, block_bytes / max(machine.block_seconds, 1e-9))
        for machine in fleet.machines
    ]
