"""Starts announcer.py as real processes, and ends every one of them whatever happens."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

ANNOUNCER = Path(__file__).with_name("announcer.py")


class Node:
    """One running announcer. `ready` blocks until it has said so."""

    def __init__(self, **options: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(ANNOUNCER), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.peer_id = ""
        self.addrs: list[str] = []

    def ready(self) -> Node:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(f"the node did not start: {self.process.communicate(timeout=10)[1]}")
        event = json.loads(line)
        self.peer_id, self.addrs = event["peer_id"], event["addrs"]
        return self

    @property
    def addr(self) -> str:
        return self.addrs[0]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def stop(self) -> tuple[int, str, str]:
        """Asks it to end; returns its exit code, the rest of its output and its errors."""
        self.process.send_signal(signal.SIGTERM)
        out, err = self.process.communicate(timeout=20)
        return self.process.returncode, out, err


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
            if node.process.poll() is None:
                node.process.kill()
        for node in self._nodes:
            node.process.communicate(timeout=10)
