"""The pages of the documentation."""

from __future__ import annotations

from pathlib import Path

from tests.import_graph import ROOT

PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()
