"""Clients that generate on the machines of a lab: the other side of `generating_client.py`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.nat.lab import Host
from tests.nat.nodes import LabNodes

PROMPT = [5, 6, 7, 8, 9]


class Client:
    """A `generating_client` on a machine."""

    def __init__(self, nodes: LabNodes, host: Host, folder: Path, *peers: str) -> None:
        command = [sys.executable, "-m", "tests.nat.generating_client", str(folder), *peers]
        self.process = nodes.program(host, command)

    def order(self, tokens: int = 24, **fields: Any) -> None:
        assert self.process.process.stdin is not None
        self.process.process.stdin.write(json.dumps({"ids": PROMPT, "tokens": tokens, **fields}) + "\n")
        self.process.process.stdin.flush()

    def token(self, number: int = 1) -> dict[str, Any]:
        """The `number`-th token from now on."""
        for _ in range(number):
            found = self._next("token")
        return found

    def rest(self) -> Iterator[dict[str, Any]]:
        """All tokens until the order is done."""
        while (found := self._next("token", "done"))["event"] == "token":
            yield found

    def first(self) -> float:
        """Seconds from the order to the first token: of the first order, those of joining the swarm as well."""
        return float(self._next("first")["seconds"])

    def done(self) -> dict[str, Any]:
        return self._next("done")

    def _next(self, *names: str) -> dict[str, Any]:
        while True:
            found: dict[str, Any] = json.loads(self.process.line())
            assert found["event"] != "failed", found
            if found["event"] in names:
                return found
