"""Many short-lived `petalnode serve` processes, started in a fraction of the time that Python takes to import torch.

Each is a process of its own that may be killed or frozen: a copy (fork) of one that has imported everything and done
nothing yet, in which the command line then runs. Only for tests that end servers by the dozen.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import Any

from tests.swarm.processes import LOOPBACK, START_TIMEOUT, environment


class PooledServer:
    """One `petalnode serve` of a pool."""

    def __init__(self, pid: int, output: Path, arguments: list[str]) -> None:
        self.pid = pid
        self.alive = True
        self.frozen = False
        self.arguments = arguments
        self._output = output
        self._ready: dict[str, Any] | None = None

    @property
    def ready(self) -> dict[str, Any]:
        """Its ready event; waits for it the first time."""
        deadline = monotonic() + START_TIMEOUT
        pause = threading.Event()
        while self._ready is None:
            self._ready = next((event for event in self.events if event["event"] == "ready"), None)
            if self._ready is None:
                assert monotonic() < deadline, f"{self.arguments} is not ready: {self.errors[-3000:]}"
                pause.wait(0.02)
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
        os.kill(self.pid, signal.SIGKILL)

    def freeze(self) -> None:
        self.frozen = True
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        self.frozen = False
        os.kill(self.pid, signal.SIGCONT)

    def terminate(self) -> None:
        """Tells it to leave; it says goodbye and ends by itself."""
        self.alive = False
        os.kill(self.pid, signal.SIGTERM)


class ServerPool:
    """Starts servers of one model that join at one peer, if they are not given another."""

    def __init__(self, home: Path, folder: Path, peer: str, **variables: str) -> None:
        self.servers: list[PooledServer] = []
        self.peer = peer
        self._home = home
        self._folder = folder
        home.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._errors = (home / "pool.err").open("w")
        self._parent = subprocess.Popen(
            [sys.executable, "-m", "tests.swarm.server_pool"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            bufsize=1,
            cwd=Path(__file__).parents[2],
            env=environment(home, **variables) | _path_of_this_process(),
        )

    def start(
        self,
        blocks: str | None,
        *options: str,
        peer: str | None = None,
        identity: Path | None = None,
        fault: Path | None = None,
    ) -> PooledServer:
        """Returns at once; `ready` waits. Without `blocks` it chooses them. `fault` is the control file of
        `faulty_server` and `false_blocks`.
        """
        with self._lock:
            number = len(self.servers)
            output = self._home / f"server-{number}.out"
            output.touch()
            arguments = ["serve", str(self._folder), "--peer", peer or self.peer, "--json"]
            arguments += ["--blocks", blocks] if blocks is not None else []
            arguments += ["--listen", LOOPBACK, "--identity", str(identity or self._home / f"server-{number}.key")]
            request = {
                "arguments": [*arguments, *options],
                "output": str(output),
                "fault": str(fault) if fault else None,
            }
            assert self._parent.stdin is not None and self._parent.stdout is not None
            self._parent.stdin.write(json.dumps(request) + "\n")
            answer = self._parent.stdout.readline()
            assert answer, Path(self._errors.name).read_text()
            server = PooledServer(int(answer), output, request["arguments"])  # type: ignore[arg-type]
            self.servers.append(server)
            return server

    @property
    def alive(self) -> list[PooledServer]:
        return [server for server in self.servers if server.alive]

    def of(self, peer_id: str) -> PooledServer:
        return next(server for server in self.alive if server.is_ready and server.peer_id == peer_id)

    def end(self) -> None:
        """Ends all of them. Their memory of this test is not worth an orderly goodbye."""
        assert self._parent.stdin is not None and self._parent.stdout is not None
        self._parent.stdin.close()
        self._parent.wait(30)
        self._parent.stdout.close()
        self._errors.close()


@contextmanager
def server_pool(home: Path, folder: Path, peer: str, **variables: str) -> Iterator[ServerPool]:
    """`variables` of the servers' environment."""
    pool = ServerPool(home, folder, peer, **variables)
    try:
        yield pool
    finally:
        pool.end()


def _path_of_this_process() -> Mapping[str, str]:
    return {"PYTHONPATH": os.environ["PYTHONPATH"]} if "PYTHONPATH" in os.environ else {}


# --- below here: the process that is copied


def _main() -> None:
    import petalnode.node.blocks.span
    import petalnode.node.cli.serve
    import petalnode.node.server.server
    import petalnode.node.server.service  # noqa: F401

    children: list[int] = []
    try:
        # Not reaped until the end: the number of a dead server must not come to mean another process.
        for line in sys.stdin:
            request = json.loads(line)
            pid = os.fork()
            if pid == 0:
                _serve(request)
            children.append(pid)
            print(pid, flush=True)
    finally:
        for pid in children:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _serve(request: dict[str, Any]) -> None:
    from petalnode.__main__ import main

    output = Path(request["output"])
    for path, number in ((Path(os.devnull), 0), (output, 1), (output.with_suffix(".err"), 2)):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600), number)
    if request["fault"] is not None:
        from tests.swarm import false_blocks, faulty_server

        faulty_server.install(Path(request["fault"]))
        false_blocks.install(Path(request["fault"]))
    sys.argv = ["petalnode", *request["arguments"]]
    code: object = 1
    try:
        main()
        code = 0
    except SystemExit as ended:
        code = ended.code
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


if __name__ == "__main__":
    _main()
