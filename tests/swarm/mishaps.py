"""What befalls a server's machine: its network is cut, its disk is full, its clock is a day off.

For `benchmarks/chaos.py --soak`, in namespaces of its own: interfaces, mounts and processes end with the process that
has made them, however that ends.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.swarm import moved_clock
from tests.swarm.server_pool import PooledServer, ServerPool

HOSTS = 24
"""Network namespaces, each for one server at a time."""
DISK_BYTES = 8 << 20
CUT = 40.0
"""Seconds."""
_BRIDGE, _NETWORK = "chaos0", "10.78.0"
_INSIDE = "PETALNODE_CHAOS_INSIDE"


def isolated(command: list[str]) -> None:
    """Goes on as `command` in namespaces of its own; returns if this process is in them already.

    Raises:
        SystemExit: they cannot be made.
    """
    if os.environ.get(_INSIDE):
        # Files end with the namespaces, too.
        _run("mount", "-t", "tmpfs", "chaos", "/run")
        tempfile.tempdir = "/run"
        return
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    options = ["--net", "--mount", "--pid", "--fork", "--kill-child=KILL", "--mount-proc"]
    os.environ[_INSIDE] = "1"
    try:
        os.execvp("unshare", ["unshare", *user, *options, *command])
    except OSError as error:
        raise SystemExit(f"no namespaces can be made here: {error}") from error


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


class Mishaps:
    """The hosts of the servers, and what may happen to them."""

    address = f"{_NETWORK}.1"
    """Of this process, on the network of all hosts."""

    def __init__(self, pool_home: Path) -> None:
        self._home = pool_home
        self._hosts: dict[int, PooledServer | None] = dict.fromkeys(range(2, 2 + HOSTS))
        self._ballast = pool_home / "data" / "ballast"
        self.disk_is_full = False
        self.full_since_start: set[PooledServer] = set()
        _run("ip", "link", "set", "lo", "up")
        Path("/run/netns").mkdir()
        (pool_home / "data").mkdir(parents=True)
        _run("mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "disk", str(pool_home / "data"))
        _run("ip", "link", "add", _BRIDGE, "type", "bridge")
        _run("ip", "address", "add", f"{self.address}/24", "dev", _BRIDGE)
        _run("ip", "link", "set", _BRIDGE, "up")
        for number in self._hosts:
            _run("ip", "netns", "add", f"chaos{number}")
            _run("ip", "link", "add", f"c{number}", "type", "veth", "peer", "name", "eth0", "netns", f"chaos{number}")
            _run("ip", "link", "set", f"c{number}", "master", _BRIDGE, "up")
            inside = ("ip", "-n", f"chaos{number}")
            _run(*inside, "address", "add", f"{_NETWORK}.{number}/24", "dev", "eth0")
            _run(*inside, "link", "set", "eth0", "up")
            _run(*inside, "link", "set", "lo", "up")

    def start(self, pool: ServerPool, blocks: str, *options: str) -> PooledServer:
        """Starts a server on a host that nobody uses."""
        number = next(n for n, server in self._hosts.items() if server is None or server.process.poll() is not None)
        self._link(number, "up")
        server = pool.start(
            blocks,
            *options,
            fault=self._home / f"orders-{len(pool.servers)}",
            host=(f"chaos{number}", f"/ip4/{_NETWORK}.{number}/tcp/0"),
        )
        self._hosts[number] = server
        if self.disk_is_full:
            self.full_since_start.add(server)
        return server

    def _number(self, server: PooledServer) -> int:
        return next(number for number, held in self._hosts.items() if held is server)

    def _link(self, number: int, state: str) -> None:
        _run("ip", "link", "set", f"c{number}", state)

    def cut(self, server: PooledServer) -> None:
        """No byte comes or goes, and nobody is told."""
        self._link(self._number(server), "down")

    def mend(self, server: PooledServer) -> None:
        self._link(self._number(server), "up")

    def move_clock(self, server: PooledServer, seconds: float) -> None:
        assert server.fault is not None
        moved_clock.move(server.fault.with_suffix(".clock"), seconds)

    def fill_disk(self, servers: list[PooledServer]) -> None:
        """The disk that all servers keep what they know on has no byte left."""
        self.disk_is_full = True
        self.full_since_start.update(servers)
        with self._ballast.open("wb", buffering=0) as file:
            for size in (1 << 16, 1 << 8, 1):
                with suppress(OSError):
                    while file.write(bytes(size)):
                        pass
        assert not os.statvfs(self._ballast).f_bavail

    def free_disk(self) -> None:
        self.disk_is_full = False
        self._ballast.unlink(missing_ok=True)


@contextmanager
def mishaps(pool_home: Path) -> Iterator[Mishaps]:
    """Needs `isolated` before. The mounts are left before the folders below them are removed."""
    made = Mishaps(pool_home)
    try:
        yield made
    finally:
        subprocess.run(["umount", "-l", str(pool_home / "data")], capture_output=True)
