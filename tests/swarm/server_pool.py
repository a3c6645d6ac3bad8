"""Many short-lived `petalnode serve` processes of one model, for tests that end servers by the dozen.

As a program it is one that lies: `python -m tests.swarm.server_pool CONTROL ARGUMENTS` is `petalnode ARGUMENTS` with
the faults that the file CONTROL orders.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.patience import Patience
from tests.swarm import warm_python
from tests.swarm.processes import LOOPBACK, START_TIMEOUT, STOP_TIMEOUT, environment

_ROOT = Path(__file__).parents[2]


class PooledServer:
    """One `petalnode serve` of a pool."""

    def __init__(
        self, process: warm_python.Process, output: Path, arguments: list[str], fault: Path | None = None
    ) -> None:
        self.fault = fault
        self.process = process
        self.pid = process.pid
        self.alive = True
        self.frozen = False
        self.arguments = arguments
        self._output = output
        self._ready: dict[str, Any] | None = None

    @property
    def ready(self) -> dict[str, Any]:
        """Its ready event; waits for it the first time."""
        patience = Patience(START_TIMEOUT, self.pid, lambda: self._output.stat().st_size)
        pause = threading.Event()
        while self._ready is None:
            self._ready = next((event for event in self.events if event["event"] == "ready"), None)
            if self._ready is None:
                assert self.process.poll() is None, f"{self.arguments} has ended: {self.errors[-3000:]}"
                assert not patience.is_over, f"{self.arguments} is not ready: {self.errors[-3000:]}"
                pause.wait(0.05)
        return self._ready

    @property
    def events(self) -> list[dict[str, Any]]:
        """All that it has said so far."""
        lines = self._output.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n") and line.startswith("{")]

    @property
    def is_ready(self) -> bool:
        return self._ready is not None or '"ready"' in self._output.read_text()

    @property
    def peer_id(self) -> str:
        return str(self.ready["peer_id"])

    @property
    def span(self) -> tuple[int, int]:
        start, end = self.ready["blocks"]
        return start, end

    @property
    def errors(self) -> str:
        return self._output.with_suffix(".err").read_text()

    def kill(self) -> None:
        self.alive = False
        self.process.send_signal(signal.SIGKILL)

    def freeze(self) -> None:
        self.frozen = True
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.frozen = False
        self.process.send_signal(signal.SIGCONT)

    def terminate(self) -> None:
        """Tells it to leave; it says goodbye and ends by itself."""
        self.alive = False
        self.process.send_signal(signal.SIGTERM)


class ServerPool:
    """Starts servers of one model that join at one peer, if they are not given another."""

    def __init__(self, home: Path, folder: Path, peer: str, **variables: str) -> None:
        self.servers: list[PooledServer] = []
        self.peer = peer
        self._home = home
        self._folder = folder
        home.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._env = environment(home, **variables)

    def start(
        self,
        blocks: str | None,
        *options: str,
        peer: str | None = None,
        identity: Path | None = None,
        fault: Path | None = None,
        host: tuple[str, str] = ("", LOOPBACK),
    ) -> PooledServer:
        """Returns at once; `ready` waits. Without `blocks` it chooses them. `fault` is the control file of
        `faulty_server` and `false_blocks`; beside it, ending in .clock, is that of `moved_clock`. `host` is a network
        namespace, and where to listen in it.
        """
        with self._lock:
            number = len(self.servers)
            output = self._home / f"server-{number}.out"
            output.touch()
            arguments = ["serve", str(self._folder), "--peer", peer or self.peer, "--json"]
            arguments += ["--blocks", blocks] if blocks is not None else []
            namespace, listen = host
            arguments += ["--listen", listen, "--identity", str(identity or self._home / f"server-{number}.key")]
            arguments += options
            program = ["petalnode"] if fault is None else ["tests.swarm.server_pool", str(fault)]
            entered = ["ip", "netns", "exec", namespace] if namespace else []
            with output.open("w") as out, output.with_suffix(".err").open("w") as err:
                process = warm_python.start(
                    [*entered, sys.executable, "-m", *program, *arguments],
                    self._env,
                    _ROOT,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                )
            server = PooledServer(process, output, arguments, fault)
            self.servers.append(server)
            return server

    @property
    def alive(self) -> list[PooledServer]:
        return [server for server in self.servers if server.alive]

    def of(self, peer_id: str) -> PooledServer:
        return next(server for server in self.alive if server.is_ready and server.peer_id == peer_id)

    def end(self) -> None:
        """Ends all of them. Their memory of this test is not worth an orderly goodbye."""
        for server in self.servers:
            server.process.kill()
        for server in self.servers:
            server.process.wait(STOP_TIMEOUT)


@contextmanager
def server_pool(home: Path, folder: Path, peer: str, **variables: str) -> Iterator[ServerPool]:
    """`variables` of the servers' environment."""
    pool = ServerPool(home, folder, peer, **variables)
    try:
        yield pool
    finally:
        pool.end()


def _main(control: Path, arguments: list[str]) -> None:
    from petalnode.__main__ import main
    from tests.swarm import false_blocks, faulty_server, moved_clock

    moved_clock.install(control.with_suffix(".clock"))
    faulty_server.install(control)
    false_blocks.install(control)
    sys.argv = ["petalnode", *arguments]
    main()


if __name__ == "__main__":
    _main(Path(sys.argv[1]), sys.argv[2:])
