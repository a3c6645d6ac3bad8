"""Round trips between cloud regions, for plans whose file gives none."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from functools import cache
from pathlib import Path

_TABLE = Path(__file__).with_name("regions.csv")


@cache
def region_rtts() -> Mapping[tuple[str, str], float]:
    """Seconds of a round trip by pair of regions, in both orders, one with itself too; regions.csv has the source."""
    with _TABLE.open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(line for line in file if not line.startswith("#")))
    names = rows[0][1:]
    found = {
        (row[0], name): float(value) / 1000 for row in rows[1:] for name, value in zip(names, row[1:], strict=True)
    }
    # Measured from either side: the mean of both.
    return {(one, other): (found[one, other] + found[other, one]) / 2 for one, other in found}
