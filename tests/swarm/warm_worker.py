"""Stands in for Python where xdist starts its workers: `warm_worker.py SOCKET -u -c CODE` runs a warm copy instead.

Pipes, environment, folder and exit code are those of this process, which waits for the copy. If it is killed, so is
the copy.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.swarm import warm_python


def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C at a terminal reaches the copy as well
    address, *flags, option, code = sys.argv[1:]
    assert option == "-c" and set(flags) <= {"-u", "-B"}, sys.argv
    warm_python.share(Path(address))
    process = warm_python.start(
        [sys.executable, "-c", code], warm_python.python_environment(), stdin=0, stdout=1, stderr=2
    )
    # Whoever reads from the copy learns of its end at once.
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    sys.exit(process.wait())


if __name__ == "__main__":
    _main()
