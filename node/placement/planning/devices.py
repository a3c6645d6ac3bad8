"""Kinds of devices that a plan knows: how much memory they have, and how fast they read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MEMORY_SHARE: Final = 0.8
"""Part of a device's memory that blocks may take; caches and activations need the rest."""
BANDWIDTH_SHARE: Final = 0.75
"""Part of the memory's bandwidth that a decode step reaches, which reads every weight once and does little else. Of
the devices in table 2 of the Berkeley report (EECS-2024-111): A100 0.70, RTX 3090 0.84, A10G 0.76."""


@dataclass(frozen=True)
class Device:
    """`memory` in bytes, None where it differs from one to another; `bandwidth` of it in bytes per second."""

    memory: float | None
    bandwidth: float

    def block_seconds(self, block_bytes: float) -> float:
        """One block of a decode step."""
        return block_bytes / (self.bandwidth * BANDWIDTH_SHARE)


def _gigabytes(memory: float | None, bandwidth: float) -> Device:
    return Device(None if memory is None else memory * 1e9, bandwidth * 1e9)


DEVICES: Final = {
    "a100-40": _gigabytes(40, 1555),
    "a100-80": _gigabytes(80, 2039),
    "a10g": _gigabytes(24, 600),
    "h100": _gigabytes(80, 3350),
    "h200": _gigabytes(141, 4800),
    "l4": _gigabytes(24, 300),
    "l40s": _gigabytes(48, 864),
    "rtx3060": _gigabytes(12, 360),
    "rtx3090": _gigabytes(24, 936),
    "rtx4060": _gigabytes(8, 272),
    "rtx4090": _gigabytes(24, 1008),
    "rtx5090": _gigabytes(32, 1792),
    "t4": _gigabytes(16, 320),
    "v100": _gigabytes(16, 900),
    "m1": _gigabytes(None, 68),
    "m2": _gigabytes(None, 100),
    "m3": _gigabytes(None, 100),
    "m4": _gigabytes(None, 120),
    "cpu": _gigabytes(None, 40),
}
"""By the makers' data sheets; a laptop's processor with two channels of memory for `cpu`."""
