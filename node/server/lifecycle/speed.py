"""How fast this machine computes a block, and how fast its network is, kept from run to run: a small JSON file in
petalnode's cache."""

from __future__ import annotations

import json
import math
import platform
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Final

from ....crypto.canonical import digest
from ...models.cache_dir import cache_dir

_FILE: Final = "speeds.json"
_DOMAIN: Final = "petalnode/speed/1"
_FORMAT: Final = 2
_KEPT: Final = 200
_OLD: Final = 30 * 24 * 3600.0
"""Seconds after which it is measured anew: other programs, dust in the fan."""
_LIBRARIES: Final = ("torch", "transformers", "petalnode")


@dataclass(frozen=True)
class BlockSpeed:
    """Seconds for one block: of a decode step of one row, and of a token of a long prefill; and for a byte into this
    machine and out of it, 0 if that was not measured."""

    step_seconds: float
    token_seconds: float
    byte_seconds: float = 0.0


@dataclass(frozen=True)
class SpeedKey:
    """All that decides how fast a block is. `hardware` names the device, `threads` those that compute on a CPU."""

    model_version: bytes
    dtype: str
    quantisation: str
    hardware: str
    threads: int

    def name(self) -> str:
        libraries = " ".join(f"{each} {version(each)}" for each in _LIBRARIES)
        return digest(
            _DOMAIN, self.model_version, self.dtype, self.quantisation, self.hardware, self.threads, libraries
        ).hex()[:32]


def cpu_name() -> str:
    """What kind of processor this is, and how many cores."""
    import os

    name = platform.processor() or platform.machine()
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    return f"{name} x{os.cpu_count()}"


def recall(key: SpeedKey, now: float | None = None) -> BlockSpeed | None:
    """What was measured with this key, if it is not too old. `now` in seconds since 1970."""
    entry = _load().get(key.name())
    if entry is None or not 0 <= (time.time() if now is None else now) - entry[0] < _OLD:
        return None
    return BlockSpeed(*entry[1:])


def keep(key: SpeedKey, speed: BlockSpeed, now: float | None = None) -> None:
    """Keeps what was measured. That it cannot be written is no error: it is measured again then."""
    entries = _load()
    entries[key.name()] = (
        time.time() if now is None else now,
        speed.step_seconds,
        speed.token_seconds,
        speed.byte_seconds,
    )
    latest = sorted(entries.items(), key=lambda entry: entry[1])[-_KEPT:]
    with suppress(OSError):
        file = cache_dir() / _FILE
        with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=_FILE, suffix=".tmp", delete=False) as stream:
            json.dump({"format": _FORMAT, "speeds": dict(latest)}, stream)
        Path(stream.name).replace(file)


def _load() -> dict[str, tuple[float, float, float, float]]:
    try:
        stored = json.loads((cache_dir() / _FILE).read_bytes())
        if stored["format"] != _FORMAT:
            return {}
        found = {
            str(name): (float(at), float(step), float(token), float(byte))
            for name, (at, step, token, byte) in stored["speeds"].items()
        }
        return {name: each for name, each in found.items() if _is_usable(each)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _is_usable(entry: tuple[float, float, float, float]) -> bool:
    return all(map(math.isfinite, entry)) and min(entry[1:3]) > 0 and entry[3] >= 0
