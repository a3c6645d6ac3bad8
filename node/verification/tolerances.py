"""How much honest servers differ: the calibration table, and which row of it applies.

The table is `tolerances.json`, a list of rows measured on honest servers (benchmarks/calibration.py). A kind of answer
that is not in it is never called faulty.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, replace
from functools import lru_cache
from importlib.resources import files
from typing import Final, Literal

from ..models.quantisation import is_exact, within_tolerance

Pass = Literal["forward", "backward"]
"""Outputs (of prefill, decode and batches), or gradients."""

CODEC_SLACK: Final = {"none": 0.0, "float16": 1e-3, "bfloat16": 8e-3, "int8-block64": 3.2e-2}
"""The largest rounding error of a codec, relative to a token's answer. Of int8-block64 it is half a step in 63 of 64
values, where the largest one is 127 steps and nearly all of the norm: sqrt(63) / 254."""


@dataclass(frozen=True)
class Margins:
    """By how much an error has to pass the tolerance."""

    ok: float = 2.0
    faulty_mean: float = 2.5
    faulty_worst: float = 4.0
    """Multiples of the worst distance that was measured: single tokens scatter more than their mean."""
    unproven_seconds: float = 0.01  # Added in routing to the cost of a server whose wrong answers nobody could prove
    least: float = 2.5e-5
    """The least distance that counts as measured. Other processors than the measured ones add up in another order,
    and no server gains anything by an error as small as this."""
    scatter: float = 2.5  # The worst token of an honest answer, as a multiple of the mean over all of them


MARGINS: Final = Margins()


@dataclass(frozen=True)
class Calibration:
    """One row of the table: the worst distances of `samples` honest answers from recomputations elsewhere.

    `dtype` and `quantisation` are what server and validator computed in; `server_device` and `own_device` kinds of
    devices ("cpu", "cuda", "mps"), in any order; `blocks` the number of blocks of the longest measured span. `worst`
    and `mean` are as in `judging.Distance`. `source` is the command that measured it.
    """

    dtype: str
    quantisation: str
    server_device: str
    own_device: str
    direction: Pass
    blocks: int
    worst: float
    mean: float
    samples: int
    source: str


@dataclass(frozen=True)
class Tolerance:
    """Up to `ok_...` an answer is right; above either `faulty_...` it is wrong; between, it is inconclusive."""

    ok_worst: float
    ok_mean: float
    faulty_worst: float
    faulty_mean: float

    def plus(self, slack: float) -> Tolerance:
        """The same with `slack` added to every limit."""
        return Tolerance(*(limit + slack for limit in astuple(self)))


def tolerance_of(row: Calibration, blocks: int) -> Tolerance:
    """The tolerance for a span of `blocks` blocks by one row of the table.

    Errors of blocks add up like a random walk, so a span longer than the measured ones gets more. A shorter one does
    not get less, because the error of one block can dominate.
    """
    longer = math.sqrt(max(1.0, blocks / row.blocks))
    worst, mean = longer * max(row.worst, MARGINS.least), longer * max(row.mean, MARGINS.least)
    return Tolerance(
        ok_worst=MARGINS.ok * worst,
        ok_mean=MARGINS.ok * mean,
        faulty_worst=MARGINS.faulty_worst * worst,
        faulty_mean=MARGINS.faulty_mean * mean,
    )


@dataclass(frozen=True)
class Kind:
    """What kind of answer is judged.

    `dtype` and `quantisation` are what the server declares, and what the answer is recomputed in; `blocks` is how many
    blocks computed it; `codec` how it was encoded. An empty `server_device` is an unknown one, and "cpu+cuda" both.
    """

    dtype: str
    quantisation: str
    direction: Pass = "forward"
    blocks: int = 1
    codec: str = "none"
    server_device: str = "cpu"
    own_device: str = "cpu"


def find_tolerance(kind: Kind, table: Sequence[Calibration] | None = None) -> Tolerance | None:
    """The tolerance for answers of this kind; None if nobody measured it. If the server's device is unknown, the widest
    that was measured against `own_device`; of several kinds of devices the widest, if all were measured."""
    quantisation = within_tolerance(kind.quantisation)
    matching: list[Tolerance] = []
    for device in kind.server_device.split("+"):
        rows = [
            tolerance_of(row, kind.blocks).plus(CODEC_SLACK[kind.codec])
            for row in (calibrations() if table is None else table)
            if (row.dtype, row.quantisation, row.direction) == (kind.dtype, quantisation, kind.direction)
            and _is_between(row, device, kind.own_device)
        ]
        if not rows:
            return None
        matching += rows
    return Tolerance(*(max(limits) for limits in zip(*map(astuple, matching), strict=True)))


@dataclass(frozen=True)
class Doubt:
    """What it costs a server if nobody can judge its answers.

    Attributes:
        seconds: added to its cost in routing.
        pledge_counts: whether points that it pledges count. Nobody could take them for a wrong answer.
        earns: whether tokens that it serves count for its reputation.
    """

    seconds: float = 0.0
    pledge_counts: bool = True
    earns: bool = True


NO_DOUBT: Final = Doubt()
UNPROVEN: Final = Doubt(MARGINS.unproven_seconds, pledge_counts=False, earns=False)


@lru_cache(maxsize=1024)
def doubt(dtype: str, quantisation: str, device: str, table: tuple[Calibration, ...] | None = None) -> Doubt:
    """What a server pays for announcing this kind of computation: nothing if honest servers of the kind were measured
    on any of a validator's devices: wrong answers can be proved; else every other kind of device, real or made up, and
    every other dtype, pays the same.

    An empty `device` is judged by the widest tolerance; an empty `dtype` is that of a server which is still loading.
    """
    if not dtype:
        return NO_DOUBT
    if is_exact(quantisation) and dtype != "float32":
        return UNPROVEN  # it cannot be recomputed: nothing else is the same everywhere
    measured = {""}
    for row in calibrations() if table is None else table:
        if (row.dtype, row.quantisation, row.direction) == (dtype, within_tolerance(quantisation), "forward"):
            measured |= {row.server_device, row.own_device}
    return NO_DOUBT if len(measured) > 1 and measured.issuperset(device.split("+")) else UNPROVEN


def noise_of(kind: Kind) -> float:
    """Relative noise which, added before every block, makes about as much as honest servers of this kind differ by;
    0 if nobody measured that. Of independent errors the squares add up."""
    tolerance = find_tolerance(replace(kind, codec="none"))
    if tolerance is None:
        return 0.0
    return min(tolerance.ok_mean, tolerance.ok_worst / MARGINS.scatter) / MARGINS.ok / math.sqrt(kind.blocks)


def _is_between(row: Calibration, server_device: str, own_device: str) -> bool:
    devices = {row.server_device, row.own_device}
    return own_device in devices if not server_device else devices == {server_device, own_device}


@lru_cache(maxsize=1)
def calibrations() -> tuple[Calibration, ...]:
    """The shipped table."""
    rows = json.loads(files(__package__).joinpath("tolerances.json").read_text())
    return tuple(Calibration(**row) for row in rows)


def to_json(rows: Sequence[Calibration]) -> str:
    """The text of `tolerances.json`: one row per line, for readable diffs."""
    return "[\n" + ",\n".join("  " + json.dumps(asdict(row)) for row in rows) + "\n]\n"
