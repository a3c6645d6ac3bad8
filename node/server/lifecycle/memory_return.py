"""Gives memory back to the system that loading and measuring a model has left behind."""

from __future__ import annotations

import ctypes
import gc


def return_memory() -> None:
    """Returns freed memory of this process to the system, where the C library can (glibc); elsewhere does nothing."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):
        pass  # another C library keeps or returns it by rules of its own
