"""When somebody last used keyboard or mouse, as far as the system tells."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
import time
from typing import Final

_PATIENCE: Final = 5.0
"""Seconds for the system's own program to answer."""


def untouched_seconds() -> float | None:
    """Seconds since somebody used keyboard, mouse or a terminal of this machine; None where it does not tell."""
    try:
        if sys.platform == "win32":
            return _by_windows()
        if sys.platform == "darwin":
            return by_registry(_printed("ioreg", "-c", "IOHIDSystem", "-d", "4"))
        return by_logind(_printed("loginctl", "show", "-p", "IdleHint", "-p", "IdleSinceHint"), time.time())
    except (OSError, subprocess.SubprocessError):
        return None


def by_logind(text: str, now: float) -> float | None:
    """What systemd's logind says of all sessions; `now` in seconds since 1970. Without any, nobody is there."""
    said = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    since = said.get("IdleSinceHint", "")
    if said.get("IdleHint") == "no":
        return 0.0
    return max(0.0, now - int(since) / 1e6) if said.get("IdleHint") == "yes" and since.isdigit() else None


def by_registry(text: str) -> float | None:
    """What macOS's registry of devices says, in nanoseconds."""
    found = re.search(r'"HIDIdleTime"\s*=\s*(\d+)', text)
    return None if found is None else int(found[1]) / 1e9


def _printed(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE, check=True).stdout


class _LastInput(ctypes.Structure):
    """Windows' LASTINPUTINFO."""

    _fields_ = (("size", ctypes.c_uint), ("tick", ctypes.c_uint))


def _by_windows() -> float | None:
    windows = getattr(ctypes, "windll")  # noqa: B009  (not on this system)
    last = _LastInput(ctypes.sizeof(_LastInput), 0)
    if not windows.user32.GetLastInputInfo(ctypes.byref(last)):
        return None
    ticks = int(windows.kernel32.GetTickCount())  # milliseconds, which begin anew
    return float((ticks - last.tick) & 0xFFFFFFFF) / 1000
