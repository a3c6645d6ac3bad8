"""Programs on the machines of a lab: the `petalnode` command, and light nodes without a model.

All of them end with their test; a light node and everything that runs with --until-eof also when pytest is killed.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import sleep
from typing import Any

from tests.nat.lab import Host
from tests.patience import Patience
from tests.swarm.processes import START_TIMEOUT, STOP_TIMEOUT, Node, Outcome, ReadyNode, Running, environment, petalnode

_ROOT = Path(__file__).parents[2]
LISTEN = "/ip4/0.0.0.0/tcp/31330"
LISTEN6 = "/ip6/::/tcp/31330"


class ToldNode(ReadyNode):
    """A node that takes {"number", "do", "with"} on its standard input, and answers {"number", "result" or "error"}."""

    def __init__(self, command: Sequence[str], home: Path) -> None:
        super().__init__(command, environment(home), _ROOT)
        self._numbers = itertools.count(1)
        self._passed: list[dict[str, Any]] = []

    def event(self, name: str, timeout: float = START_TIMEOUT) -> dict[str, Any]:
        """As `wait_event`."""
        return self.wait_event(name, timeout)

    def ask(self, do: str, *, patience: float = START_TIMEOUT, **arguments: Any) -> Any:
        """Has a command done; returns its result. Raises NodeRefused with the error's text if it failed."""
        return self.answer(self.tell(do, **arguments), patience=patience)

    def tell(self, do: str, **arguments: Any) -> int:
        """Starts a command; several run side by side. `answer` takes the number that this returns."""
        number = next(self._numbers)
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"number": number, "do": do, "with": arguments}) + "\n")
        self.process.stdin.flush()
        return number

    def answer(self, number: int, *, patience: float = START_TIMEOUT) -> Any:
        found = self._next(lambda line: line.get("number") == number, patience)
        if "error" in found:
            raise NodeRefused(found["error"])
        return found["result"]

    def wait_event(self, name: str, patience: float = START_TIMEOUT, **fields: Any) -> dict[str, Any]:
        """The next event of that name with these fields. What comes in between is kept for later."""
        wanted = {"event": name, **fields}
        return self._next(lambda line: wanted.items() <= line.items(), patience)

    def wait_log(self, text: str, patience: float = START_TIMEOUT) -> None:
        """Until it has said so on standard error."""
        waiting = Patience(patience, self.pid, lambda: len(self.errors))
        while text not in self.errors:
            if waiting.is_over:
                raise AssertionError(f"never said {text!r}; its standard error:\n{self.errors}")
            sleep(0.05)

    def _next(self, wanted: Any, patience: float) -> dict[str, Any]:
        for index, line in enumerate(self._passed):
            if wanted(line):
                return self._passed.pop(index)
        while True:
            line = json.loads(self.line(patience))
            if wanted(line):
                return line
            self._passed.append(line)


class LightNode(ToldNode):
    """A node of the swarm that computes nothing and does what it is told: see light_node.py for the commands.

    `program` is the module that is run, with its arguments before the options.
    """

    def __init__(
        self,
        host: Host,
        home: Path,
        options: dict[str, Any],
        program: Sequence[str] = ("tests.nat.light_node",),
    ) -> None:
        super().__init__(host.command([sys.executable, "-m", *program, json.dumps(options)]), home)


class NodeRefused(Exception):
    """A command that a node could not carry out, with its reason."""


class LabNodes:
    """Starts programs on machines of a lab and ends all of them. Every machine has a home folder of its own."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._running: list[Running] = []

    def env(self, host: Host) -> dict[str, str]:
        """What a person has there: nothing is switched off, since nobody else is in the lab."""
        switched = {"PETALNODE_MDNS", "PETALNODE_REMEMBER"}
        return {name: value for name, value in environment(self.home(host)).items() if name not in switched}

    def home(self, host: Host) -> Path:
        folder = self._home / host.name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def light(self, host: Host, **options: Any) -> LightNode:
        """Returns at once; its `ready` waits. Options: those of light_node.py."""
        return self.kept(LightNode(host, self.home(host), options))

    def command(self, host: Host, *arguments: str) -> Node:
        """A `petalnode` command that runs until it is told to stop, with --json; returns at once."""
        return self.kept(Node(*arguments, "--json", env=self.env(host), prefix=host.command(())))

    def program(self, host: Host, arguments: Sequence[str]) -> Running:
        """Any other program."""
        return self.kept(Running(host.command(arguments), self.env(host)))

    def run(self, host: Host, *arguments: str, given: str = "", timeout: float = 60) -> Outcome:
        """One `petalnode` command to its end."""
        return petalnode(*arguments, env=self.env(host), given=given, timeout=timeout, prefix=host.command(()))

    def kept(self, process: Any) -> Any:
        """`process`, which is ended with the others."""
        self._running.append(process)
        return process

    def end(self) -> None:
        for process in self._running:
            if process.process.poll() is None:
                process.close_stdin()
                process.process.terminate()
        for process in self._running:
            try:
                process.process.wait(STOP_TIMEOUT)
            except Exception:
                pass
            process.kill()


@contextmanager
def lab_nodes(home: Path) -> Iterator[LabNodes]:
    started = LabNodes(home)
    try:
        yield started
    finally:
        started.end()
