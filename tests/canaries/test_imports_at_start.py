"""If it fails: docs/decisions/deferred-imports.md."""

from __future__ import annotations

import subprocess
import sys

_USED = "import sys, libp2p.peer.id; assert 'aioquic' in sys.modules and 'requests' in sys.modules"


def test_libp2p_imports_all_its_transports() -> None:
    done = subprocess.run([sys.executable, "-c", _USED], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"libp2p imports less: take it out of node/cli/deferred.py {done.stderr}"
