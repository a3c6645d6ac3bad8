"""A libp2p peer: its host, DHT, gossip and mDNS, with `transport` (connections) and `nat` (reachability) inside.
Knows no models and no servers. May use `errors`.
"""

import sys
from pathlib import Path


def _bundles(package: Path, path: list[str]) -> list[Path]:
    """Where libp2p may be that was brought along, with a stand-in for fastecdsa in `fallback`.

    packaging/build_backend.py puts it into the wheel. `package` may be a checkout: then an editable install left it in
    build/bundled, or the wheel that is installed has it.
    """
    return [
        package / "bundled",
        package / "build" / "bundled",
        *(Path(entry, "petalnode", "bundled") for entry in path),
    ]


def _add_to_path(bundles: list[Path], path: list[str]) -> None:
    """Has libp2p imported from the first of the folders that there is, or else from where it is installed.

    The faults that this room cures are those of one version, so an installed libp2p comes second.
    """
    bundled = next((folder for folder in bundles if folder.is_dir()), None)
    if bundled is not None and str(bundled) not in path:
        path.insert(0, str(bundled))
        path.append(str(bundled / "fallback"))


_add_to_path(_bundles(Path(__file__).parents[2], sys.path), sys.path)
