"""Starts announcer.py as real processes, and ends every one of them whatever happens."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

from tests.swarm import warm_python
from tests.swarm.processes import Running

ANNOUNCER = Path(__file__).with_name("announcer.py")


class Node(Running):
    """One running announcer. `ready` blocks until it has said so."""

    def __init__(self, **options: Any) -> None:
        super().__init__([sys.executable, str(ANNOUNCER), json.dumps(options)], warm_python.environment())
        self.peer_id = ""
        self.addrs: list[str] = []

    def ready(self) -> Node:
        event = self.event("ready")
        self.peer_id, self.addrs = event["peer_id"], event["addrs"]
        return self

    @property
    def addr(self) -> str:
        return self.addrs[0]

    def freeze(self) -> None:
        self.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.signal(signal.SIGCONT)


class Nodes:
    """All processes of a test: a context manager."""

    def __init__(self) -> None:
        self._nodes: list[Node] = []

    def start(self, **options: Any) -> Node:
        """Starts one, not yet waited for."""
        node = Node(**options)
        self._nodes.append(node)
        return node

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *_: object) -> None:
        for node in self._nodes:
            node.kill()
