"""Real `petalnode` processes, apart from the person's own files, that never outlive their test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from queue import Empty, Queue
from typing import IO, Any, TypeVar

from tests.patience import LONGEST_PAUSE, Patience
from tests.swarm import warm_python

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
WS, TLS = f"{LOOPBACK}/ws", f"{LOOPBACK}/tls/ws"
# Seconds without any progress of the process that is waited for.
START_TIMEOUT = 120.0
STOP_TIMEOUT = 40.0
_MEETING_POINT = Path(__file__).with_name("announcer.py")
_NUMBERS = count()
"""Of nodes: no two under one home have the same key."""


def environment(home: Path, **extra: str) -> dict[str, str]:
    """A person's environment with everything that petalnode keeps under `home`, and one compute thread."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PETALNODE_", "HF_", "XDG_"))}
    return kept | {
        "HOME": str(home),
        "XDG_DATA_HOME": str(home / "data"),
        "XDG_CACHE_HOME": str(home / "cache"),
        "PETALNODE_CACHE": str(home / "cache" / "petalnode"),
        "HF_HUB_OFFLINE": "1",
        # Swarms of one machine, or of one test and the next, shall not find each other.
        "PETALNODE_MDNS": "0",
        "PETALNODE_REMEMBER": "0",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "200",
        "PYTHONUNBUFFERED": "1",
        **extra,
    }


R = TypeVar("R", bound="Running")


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def objects(self) -> list[dict[str, Any]]:
        """Standard output of --json, a line each."""
        return [json.loads(line) for line in self.out.splitlines()]

    def __str__(self) -> str:
        return f"exit code {self.code}\n--- stdout\n{self.out}\n--- stderr\n{self.err}"


def petalnode(
    *arguments: str,
    env: Mapping[str, str],
    cwd: Path | None = None,
    given: str = "",
    timeout: float = 120,
    prefix: Sequence[str] = (),
) -> Outcome:
    """Runs one command to its end, with `given` on its standard input. `prefix` comes before the command line.

    `timeout` is for how long it may make no progress.
    """
    return run_to_end([*prefix, sys.executable, "-m", "petalnode", *arguments], env, cwd, given, timeout)


def run_to_end(
    command: Sequence[str], env: Mapping[str, str], cwd: Path | None = None, given: str = "", timeout: float = 120
) -> Outcome:
    """As `petalnode`, of any program."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = warm_python.start(command, env, cwd, stdout=out, stderr=err)
        try:
            assert process.stdin is not None
            with suppress(BrokenPipeError), process.stdin as stdin:
                stdin.write(given)
            code = wait_ended(process, timeout)
        finally:
            process.kill()
        out.seek(0)
        err.seek(0)
        return Outcome(code, out.read().decode(), err.read().decode())


def wait_ended(process: warm_python.Process, timeout: float) -> int:
    """The exit code, once a process has ended.

    Raises:
        subprocess.TimeoutExpired: it has made no progress for `timeout` seconds.
    """
    patience = Patience(timeout, process.pid)
    while True:
        try:
            return process.wait(1.0)
        except subprocess.TimeoutExpired:
            if patience.is_over:
                raise


class Running:
    """A process whose standard output is read line by line, and whose standard error is kept for messages."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], cwd: Path | None = None) -> None:
        self.process = warm_python.start(command, env, cwd)
        self._command = " ".join(command)
        self._lines: Queue[str | None] = Queue()
        self._errors: list[str] = []
        self._read = 0
        self._readers = [
            threading.Thread(target=self._read_lines, args=(self.process.stdout,), daemon=True),
            threading.Thread(target=self._read_errors, args=(self.process.stderr,), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def errors(self) -> str:
        return "".join(self._errors)

    def line(self, timeout: float = START_TIMEOUT) -> str:
        """The next line of standard output; `timeout` is for how long the process may make no progress."""
        patience = Patience(timeout, self.pid, lambda: self._read + len(self._errors))
        while True:
            try:
                line = self._lines.get(timeout=min(timeout, 1.0))
                break
            except Empty:
                if patience.is_over:
                    raise AssertionError(self._told(f"said and did nothing for {timeout:.0f} s")) from None
        if line is None:
            code = wait_ended(self.process, STOP_TIMEOUT)
            raise AssertionError(self._told(f"ended with exit code {code}"))
        return line

    def event(self, name: str, timeout: float = START_TIMEOUT) -> dict[str, Any]:
        """The next JSON line with this `event`; others are passed over."""
        while True:
            found: dict[str, Any] = json.loads(self.line(timeout))
            if found.get("event") == name:
                return found

    def events_so_far(self) -> list[dict[str, Any]]:
        """The JSON lines that are there and were not read yet."""
        found = []
        while not self._lines.empty():
            line = self._lines.get_nowait()
            if line is not None:
                found.append(json.loads(line))
        return found

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def close_stdin(self) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            pass

    def wait(self, timeout: float = STOP_TIMEOUT) -> int:
        """The exit code, once the process has ended."""
        try:
            code = wait_ended(self.process, timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(self._told(f"did not end and did nothing for {timeout:.0f} s")) from None
        for reader in self._readers:
            reader.join(STOP_TIMEOUT)
        return code

    def stop(self) -> int:
        """Ends a process that was started with --until-eof as its owner would."""
        self.close_stdin()
        return self.wait()

    def kill(self) -> None:
        """Ends it whatever it does, and leaves nothing open."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.close_stdin()
        for reader in self._readers:
            reader.join(STOP_TIMEOUT)

    def _told(self, what: str) -> str:
        return f"{self._command} {what}; its standard error:\n{self.errors[-3000:]}"

    def _read_lines(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                self._read += 1
                self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    def _read_errors(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                self._errors.append(line)


class ReadyNode(Running):
    """A node that says when it is ready, and by which event."""

    _ready: dict[str, Any] | None = None

    @property
    def ready(self) -> dict[str, Any]:
        """The ready event; waits for it the first time."""
        if self._ready is None:
            self._ready = self.event("ready")
        return self._ready

    @property
    def peer_id(self) -> str:
        return str(self.ready["peer_id"])

    @property
    def address(self) -> str:
        return str(self.ready["addrs"][0])


class Node(ReadyNode):
    """A `petalnode` command that runs until it is told to stop; `ready` is its ready event."""

    def __init__(
        self, *arguments: str, env: Mapping[str, str], cwd: Path | None = None, prefix: Sequence[str] = ()
    ) -> None:
        super().__init__([*prefix, sys.executable, "-m", "petalnode", *arguments], env, cwd)


class Nodes:
    """Starts nodes, each with an identity of its own, and ends all of them."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.env = environment(home)
        self.running: list[Running] = []

    def meeting_point(self) -> Running:
        """A light node to join by, which ends with this process whatever happens to it."""
        return self._kept(Running([sys.executable, str(_MEETING_POINT), "{}"], self.env))

    def announcer(self, **options: Any) -> Running:
        """A node that announces made-up blocks; see announcer.py."""
        return self._kept(Running([sys.executable, str(_MEETING_POINT), json.dumps(options)], self.env))

    def bootstrap(self, *options: str) -> Node:
        return self._started("bootstrap", "--new-swarm", *options)

    def server(self, folder: Path | str, blocks: str | None = None, *options: str, peer: str | None = None) -> Node:
        """Returns at once: several servers start side by side, and their `ready` waits."""
        join = ["--new-swarm"] if peer is None else ["--peer", peer]
        span = [] if blocks is None else ["--blocks", blocks]
        return self._started("serve", str(folder), *span, *join, "--until-eof", *options)

    def api(self, folder: Path | str, peer: str) -> Node:
        return self._kept(Node("api", str(folder), "--peer", peer, "--http-port", "0", "--json", env=self.env))

    def script(self, code: str, *arguments: str) -> Running:
        """A Python program in a process of its own."""
        return self._kept(Running([sys.executable, "-c", code, *arguments], self.env))

    def _started(self, command: str, *options: str) -> Node:
        own = {"--listen": LOOPBACK, "--identity": str(self.home / f"node-{next(_NUMBERS)}.key")}
        added = [part for name, value in own.items() if name not in options for part in (name, value)]
        return self._kept(Node(command, "--json", *added, *options, env=self.env))

    def _kept(self, process: R) -> R:
        self.running.append(process)
        return process

    def end(self) -> None:
        for process in self.running:
            if process.process.poll() is None:
                process.close_stdin()
                process.process.send_signal(signal.SIGCONT)  # a frozen one would not hear the next
                process.process.terminate()
        for process in self.running:
            try:
                process.process.wait(STOP_TIMEOUT)
            except subprocess.TimeoutExpired:
                pass
            process.kill()


@contextmanager
def nodes(home: Path) -> Iterator[Nodes]:
    home.mkdir(parents=True, exist_ok=True)
    started = Nodes(home)
    try:
        yield started
    finally:
        started.end()


def until(condition: Callable[[], bool], what: str, timeout: float = LONGEST_PAUSE) -> None:
    """Asks again and again until `condition` holds.

    Gives up once neither this process nor any that it started has worked in earnest for `timeout` seconds.
    """
    pause, seconds = threading.Event(), 0.01
    patience = Patience(timeout, os.getpid(), working=0.5)
    while not condition():
        if patience.is_over:
            raise AssertionError(f"not within {timeout:.0f} s in which not much was done: {what}")
        pause.wait(seconds)
        seconds = min(0.1, seconds * 1.2)
