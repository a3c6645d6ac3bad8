"""A full garbage collection of a server looks at what peers have caused, and not at the modules that it has loaded."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from tests.swarm.processes import LOOPBACK, Nodes, Running
from tests.tiny_models import save_tiny

MOST: Final = 20_000
"""Tracked objects, each of which costs a full collection about 0.3 microseconds of the event loop."""
_COUNTED: Final = """
import atexit, gc, json
from petalnode.__main__ import main
atexit.register(lambda: print(json.dumps({"event": "tracked", "objects": len(gc.get_objects())}), flush=True))
main()
"""


def test_loaded_weights_are_no_part_of_full_collections(node_starter: Nodes, tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "model")
    options = ("--new-swarm", "--listen", LOOPBACK, "--cache-tokens", "2000", "--until-eof", "--json")
    # `-W` keeps the process from being a copy of one that has imported everything.
    command = [sys.executable, "-W", "ignore", "-c", _COUNTED, "serve", str(tmp_path / "model"), *options]
    server = Running(command, node_starter.env)
    try:
        server.event("ready")
        server.close_stdin()
        assert server.event("tracked")["objects"] < MOST
        assert server.wait() == 0
    finally:
        server.kill()
