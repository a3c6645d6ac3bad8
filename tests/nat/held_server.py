"""The `petalnode` command, but that it punches only once a file is there, so that a session is relayed at first.

python -m tests.nat.held_server FILE serve ...
"""

from __future__ import annotations

import sys
from pathlib import Path

import trio

from petalnode.__main__ import main
from tests.node_inspection import hold_punching


def hold(go: Path) -> None:
    """Changes this process only."""

    async def wait() -> None:
        while not await trio.Path(go).exists():  # noqa: ASYNC110  (the file is made by another process)
            await trio.sleep(0.02)

    hold_punching(wait)


if __name__ == "__main__":
    hold(Path(sys.argv.pop(1)))
    main()
