from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiny_models import save_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny model of an architecture, made once."""
    made: dict[str, Path] = {}

    def folder(architecture: str) -> Path:
        if architecture not in made:
            made[architecture] = save_tiny(architecture, tmp_path_factory.mktemp("model") / architecture)
        return made[architecture]

    return folder
