"""`petalnode` whose pieces of weights are false: `python -m tests.swarm.false_weights ARGUMENTS`."""

from __future__ import annotations

import sys
from typing import Any

from petalnode.__main__ import main
from petalnode.node.weights import holder


def install() -> None:
    """Changes the last byte of every piece of weights that this process hands on."""
    honest = holder._read

    def read(source: Any, tree: Any, piece: int) -> bytes | None:
        data = honest(source, tree, piece)
        if data is None or tree.form == "text":
            return None if data is None else bytes(data)
        return bytes(data[:-1]) + bytes([data[-1] ^ 1])

    holder._read = read


if __name__ == "__main__":
    install()
    sys.argv = ["petalnode", *sys.argv[1:]]
    main()
