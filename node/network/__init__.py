"""A libp2p peer: its host, DHT, gossip and mDNS, with `transport` (connections) and `nat` (reachability) inside.
Knows no models and no servers. May use `errors`.
"""

import sys
from pathlib import Path

_BUNDLED = Path(__file__).parents[2] / "bundled"
"""In an installed wheel (packaging/build_backend.py): libp2p, and in `fallback` a stand-in for fastecdsa."""


def _add_to_path(bundled: Path, path: list[str]) -> None:
    """Has libp2p imported from the wheel that petalnode came with, where it came so; a checkout uses what is installed.

    The faults that this room cures are those of one version, so an installed libp2p comes second.
    """
    if bundled.is_dir() and str(bundled) not in path:
        path.insert(0, str(bundled))
        path.append(str(bundled / "fallback"))


_add_to_path(_BUNDLED, sys.path)
