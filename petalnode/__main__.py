"""`petalnode` and `python -m petalnode`."""

from __future__ import annotations

import gc
import os
import sys
from typing import NoReturn


def main() -> NoReturn:
    """Runs the command line; see `node.cli.app`, which takes a while to import, and may be interrupted then."""
    from .node.cli import process

    process.prepare()
    # What is imported lives as long as the process: looking through it for garbage takes a tenth of the start.
    gc.disable()
    try:
        if sys.argv[1:] == ["--version"]:
            from .node.version import __version__

            print(__version__, flush=True)
            os._exit(0)
        from .node.cli import deferred

        deferred.defer()
        from .node.cli.app import main as run
    except BaseException as error:
        code = process.exit_code(error)
        if code is None:
            raise
        os._exit(code)
    run()


if __name__ == "__main__":
    main()
