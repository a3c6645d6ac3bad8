"""Speeds as a person writes them: 10MB, 500 kB/s."""

from __future__ import annotations

import re
from typing import Final

from ..errors import BadInput

_UNITS: Final = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_LEAST: Final = 10_000
"""Bytes per second with which the messages that keep a node in its swarm get through in time."""


def parse_rate(text: str | None, option: str) -> int | None:
    """Bytes per second; None for no limit. `option` is named in errors.

    Raises:
        BadInput: the text is no speed, one in bits, or too little to take part.
    """
    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)(?:/s)?", text.strip())
    unit = found[2] if found else ""
    if found is None or (unit or "B").lower() not in _UNITS:
        raise BadInput(f"{option} {text}: give bytes per second, such as 10MB or 500kB")
    if unit.endswith("b"):
        raise BadInput(f"{option} {text}: a small b means bits; give bytes, such as 10MB")
    rate = int(float(found[1]) * _UNITS[(unit or "B").lower()])
    if rate < _LEAST:
        raise BadInput(f"{option} {text}: a node needs {_LEAST // 1000}kB per second at least")
    return rate
