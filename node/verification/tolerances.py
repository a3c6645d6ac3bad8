"""How much honest servers differ: the calibration table, and which row of it applies.

The table is a file of this package, `tolerances.json`, a list of rows. It is made by measuring honest servers; nothing
in it is guessed, and a kind that is not in it is never called faulty.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Final, Literal

Pass = Literal["forward", "backward"]
"""Which direction: outputs (prefill and decode alike), or gradients."""

CODEC_SLACK: Final = {"none": 0.0, "float16": 1e-3, "bfloat16": 8e-3, "int8-block64": 2e-2}
"""What a codec rounds away of an answer, relative to it, and of the truth another time in another direction."""
MARGIN_OK: Final = 2.0
MARGIN_FAULTY_MEAN: Final = 2.5
MARGIN_FAULTY_WORST: Final = 4.0
"""Times the worst that was measured: single tokens scatter more than their mean."""
LEAST: Final = 2.5e-5
"""What is measured counts for so much at least. Other processors than the measured ones add up in another order, and no
server gains anything by an error as small as this."""


@dataclass(frozen=True)
class Calibration:
    """One row of the table: the worst distances of `samples` honest answers from a truth computed elsewhere.

    `dtype` and `quantisation` are what server and validator computed in; `server_device` and `own_device` kinds of
    devices ("cpu", "cuda", "mps"), in any order; `blocks` how many blocks the measured spans had at most. `worst` and
    `mean` as in `judging.Distance`. `source` says by which command.
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
    """Up to `ok_...` an answer is right; above either `faulty_...` it is wrong; between, nothing is said."""

    ok_worst: float
    ok_mean: float
    faulty_worst: float
    faulty_mean: float

    def plus(self, slack: float) -> Tolerance:
        """The same with so much more for every limit."""
        return Tolerance(*(limit + slack for limit in astuple(self)))


def tolerance_of(row: Calibration, blocks: int) -> Tolerance:
    """What `row` says of a span of `blocks` blocks.

    Errors of blocks add up like a random walk, and a longer span than was measured may go on so; a shorter one is not
    held to less, because what one block does can dominate.
    """
    longer = math.sqrt(max(1.0, blocks / row.blocks))
    worst, mean = longer * max(row.worst, LEAST), longer * max(row.mean, LEAST)
    return Tolerance(
        ok_worst=MARGIN_OK * worst,
        ok_mean=MARGIN_OK * mean,
        faulty_worst=MARGIN_FAULTY_WORST * worst,
        faulty_mean=MARGIN_FAULTY_MEAN * mean,
    )


@dataclass(frozen=True)
class Kind:
    """What kind of answer is judged.

    `dtype` and `quantisation` are what the server says that it computed in, and what the truth is computed in;
    `blocks` how many the answer went through; `codec` under which it came (the truth has none). An empty
    `server_device` is an unknown one.
    """

    dtype: str
    quantisation: str
    direction: Pass = "forward"
    blocks: int = 1
    codec: str = "none"
    server_device: str = "cpu"
    own_device: str = "cpu"


def find_tolerance(kind: Kind, table: Sequence[Calibration] | None = None) -> Tolerance | None:
    """The tolerance for answers of this kind; None if nobody measured it. For an unknown server's device, the widest
    that was measured against one's own."""
    matching = [
        tolerance_of(row, kind.blocks).plus(CODEC_SLACK[kind.codec])
        for row in (calibrations() if table is None else table)
        if (row.dtype, row.quantisation, row.direction) == (kind.dtype, kind.quantisation, kind.direction)
        and _is_between(row, kind)
    ]
    if not matching:
        return None
    return Tolerance(*(max(limits) for limits in zip(*map(astuple, matching), strict=True)))


def _is_between(row: Calibration, kind: Kind) -> bool:
    devices = {row.server_device, row.own_device}
    if not kind.server_device:
        return kind.own_device in devices
    return devices == {kind.server_device, kind.own_device}


@lru_cache(maxsize=1)
def calibrations() -> tuple[Calibration, ...]:
    """The table that this package ships."""
    rows = json.loads(files(__package__).joinpath("tolerances.json").read_text())
    return tuple(Calibration(**row) for row in rows)


def to_json(rows: Sequence[Calibration]) -> str:
    """The text of `tolerances.json`: a row on a line, so that changes of it can be read."""
    return "[\n" + ",\n".join("  " + json.dumps(asdict(row)) for row in rows) + "\n]\n"
