"""`petalnode` and `python -m petalnode`."""

from __future__ import annotations

from .node.cli.app import main

if __name__ == "__main__":
    main()
