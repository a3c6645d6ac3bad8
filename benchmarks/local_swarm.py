"""Real server processes on this machine for the benchmarks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

STOP_TIMEOUT = 15.0
_ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
"""An installation has its modules as byte code: here the first server of a benchmark leaves it for the next ones."""


class ServerProcess:
    """One `petalnode serve` on loopback with `threads` compute threads; ends when `stop` closes its standard input.

    `prefix` is put before the command line, to run it elsewhere; `host` is the address there. `program` is what Python
    runs.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        scratch: Path,
        *,
        host: str = "127.0.0.1",
        prefix: Sequence[str] = (),
        program: Sequence[str] = ("-m", "petalnode"),
        threads: int = 1,
    ) -> None:
        self.log = scratch / "server.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    *(*prefix, sys.executable, *program, "serve", *arguments, "--json", "--until-eof"),
                    *("--listen", f"/ip4/{host}/tcp/0", "--identity", str(scratch / "key")),
                    *("--no-mdns", "--no-remember"),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=_ENVIRONMENT | {"OMP_NUM_THREADS": str(threads)},
            )
        self.started = time.perf_counter()
        self.ready_seconds = self.ready_processor = 0.0
        self.ready: dict[str, object] = {}
        self.metrics_url: object = None

    def wait_ready(self) -> dict[str, object]:
        """The ready event. Raises RuntimeError with the server's log if it ends instead."""
        assert self.process.stdout is not None
        while self.ready.get("event") != "ready":
            line = self.process.stdout.readline()
            if not line:
                raise RuntimeError(f"a server ended: {self.log.read_text()}")
            self.ready = json.loads(line)
            self.metrics_url = self.ready.get("url", self.metrics_url)
        self.ready_seconds = time.perf_counter() - self.started
        self.ready_processor = self.processor_seconds()
        return self.ready

    def metric(self, name: str) -> float:
        """The value of a metric without labels, of a server with `--metrics-port`; 0 if it is not there."""
        with urllib.request.urlopen(str(self.metrics_url)) as page:
            lines = page.read().decode().splitlines()
        return next((float(line.split()[1]) for line in lines if line.split(" ")[0] == name), 0.0)

    def memory(self) -> dict[str, int]:
        """Bytes of resident memory: `rss`, and of that `file`, the pages mapped from files."""
        fields = {}
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in ("VmRSS", "RssFile"):
                fields[name] = int(value.split()[0]) * 1024
        return {"rss": fields["VmRSS"], "file": fields["RssFile"]}

    def processor_seconds(self) -> float:
        """That the process has used."""
        times = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextmanager
def local_swarm(model: str, spans: Sequence[tuple[int, int]], *options: str) -> Iterator[list[ServerProcess]]:
    """Servers of `model`, one for each span, in a swarm of their own; stopped on the way out."""
    servers: list[ServerProcess] = []
    with tempfile.TemporaryDirectory(prefix="petalnode-bench-") as scratch:
        try:
            peer: list[str] = ["--new-swarm"]
            for index, (start, end) in enumerate(spans):
                folder = Path(scratch) / str(index)
                folder.mkdir()
                server = ServerProcess([model, "--blocks", f"{start}:{end}", *peer, *options], folder)
                servers.append(server)
                addrs = server.wait_ready()["addrs"]
                assert isinstance(addrs, list)
                peer = ["--peer", addrs[0]]
            yield servers
        finally:
            for server in servers:
                server.stop()
