"""How the pages are looked at in Chromium."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.import_graph import ROOT

OUT = ROOT / "build/web-check"
AXE = OUT / "node_modules/axe-core/axe.min.js"
SIZES = {"phone": (390, 844), "desk": (1440, 900)}
SCHEMES = ("light", "dark")
PATIENCE = 120_000  # milliseconds

Opener = Callable[..., Any]
"""Opens a page of an address."""
