"""Who keeps a model cache within a limit hears of weights before they are downloaded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TypeAlias

MakeRoom: TypeAlias = Callable[[Mapping[Path, int], Collection[Path]], None]
"""Called with the files that will come, and their bytes; and with all that are needed, which have to stay."""


def no_room_needed(coming: Mapping[Path, int], needed: Collection[Path]) -> None:
    """Where there is no limit."""
