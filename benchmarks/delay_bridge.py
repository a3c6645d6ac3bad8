"""Hosts with a delay between them, on one Linux machine: a network namespace each, a TAP device in each, and a
process that hands every frame on after the delay. Needs root and `ip`; the kernel's own delay (netem) is often missing.

    with delay_network(hosts=3, one_way=0.05) as network:
        subprocess.run(network.command(0, ["ping", "-c3", network.address(1)]))

The bridge process makes the namespaces and removes them when its standard input ends, so also when we are killed.
A frame takes the delay and 0.1 ms; about 40 MB/s pass on one core. With a `rate`, each host's line carries so much
each way: frames leave it one behind the other, and enter the other one's so; who would wait for longer than a second is
dropped, as by a router. `delay_line` is a single line between two namespaces that there are already.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import heapq
import itertools
import json
import os
import select
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

_TUNSETIFF = 0x400454CA
_TAP_NO_INFO = 0x0002 | 0x1000  # bare Ethernet frames
_BURST = 64  # frames taken from one host before the others have their turn
_LONGEST_WAIT = 1.0  # seconds in the queue of a line


class DelayNetwork:
    """The running network; made by `delay_network`. Hosts are numbered from 0."""

    def __init__(self, bridge: subprocess.Popen[str], name: str) -> None:
        self._bridge = bridge
        self._name = name

    def address(self, host: int) -> str:
        return _address(host)

    def command(self, host: int, arguments: Sequence[str]) -> list[str]:
        """The command line that runs `arguments` on that host."""
        return ["ip", "netns", "exec", f"{self._name}-{host}", *arguments]

    def bytes_sent(self) -> dict[tuple[int, int], int]:
        """Bytes of frames so far per (from, to), headers included; they are counted when they start out."""
        return {(source, target): count for source, target, count in self._ask("count")}

    def set_delay(self, one_way: float) -> None:
        """From now on every host is so many seconds from every other."""
        self._ask(f"delay {one_way}")

    def _ask(self, line: str) -> list[tuple[int, int, int]]:
        assert self._bridge.stdin is not None and self._bridge.stdout is not None
        self._bridge.stdin.write(f"{line}\n")
        self._bridge.stdin.flush()
        counts: list[tuple[int, int, int]] = json.loads(self._bridge.stdout.readline())
        return counts


@contextlib.contextmanager
def delay_network(hosts: int, one_way: float, rate: float = 0.0) -> Iterator[DelayNetwork]:
    """`hosts` hosts, each `one_way` seconds from every other, with lines of `rate` Mbit/s each way (0: no limit). What
    runs there must have ended at the block's end.

    Raises:
        RuntimeError: this machine cannot do that; the text says why.
    """
    name = f"pnwan{os.getpid()}"
    with _process(name, str(hosts), str(one_way), "--rate", str(rate)) as bridge:
        yield DelayNetwork(bridge, name)


@contextlib.contextmanager
def delay_line(one_way: float, *ends: tuple[str, str]) -> Iterator[None]:
    """Two Ethernet devices with a line of `one_way` seconds between them; both are gone at the block's end.

    `ends` are a namespace and the name of the device to make in it, twice. The devices are down at first.

    Raises:
        RuntimeError: this machine cannot do that; the text says why.
    """
    name = f"pnl{os.getpid()}x{next(_lines)}"
    with _process(name, "0", str(one_way), *(part for end in ends for part in end)):
        yield


_lines = itertools.count()


@contextlib.contextmanager
def _process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    bridge = subprocess.Popen(
        [sys.executable, __file__, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is ours to handle: what runs on the hosts ends first
    )
    assert bridge.stdin is not None and bridge.stdout is not None and bridge.stderr is not None
    try:
        if bridge.stdout.readline() != "ready\n":
            reason = bridge.stderr.read().strip() or "the bridge ended"
            raise RuntimeError(f"no network with delays (this needs root, `ip` and /dev/net/tun): {reason}")
        yield bridge
    finally:
        bridge.stdin.close()
        bridge.wait()
        bridge.stdout.close()
        bridge.stderr.close()


def _address(host: int) -> str:
    return f"10.88.0.{host + 1}"


def _mac(host: int) -> str:
    return f"02:00:00:00:00:{host:02x}"


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def _add_tap(passing: str, namespace: str, device: str) -> int:
    """Makes a device in a namespace; the file descriptor of its other side. `passing` is its name on the way."""
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", passing.encode(), _TAP_NO_INFO))
    _ip("link", "set", passing, "netns", namespace, "name", device)
    return tap


def _add_host(name: str, host: int) -> int:
    """Makes one namespace; the file descriptor of its device. A frame's last byte of the MAC address is the host."""
    namespace, device = f"{name}-{host}", f"{name}t{host}"
    _ip("netns", "add", namespace)
    tap = _add_tap(device, namespace, device)
    inside = ("-n", namespace)
    _ip(*inside, "link", "set", device, "address", _mac(host), "txqueuelen", "10000")
    _ip(*inside, "address", "add", f"{_address(host)}/24", "dev", device)
    _ip(*inside, "link", "set", "lo", "up")
    _ip(*inside, "link", "set", device, "up")
    return tap


def _introduce(name: str, hosts: int) -> None:
    """Tells every host the others' MAC addresses: on a real line, asking for them does not cross the ocean."""
    for host, other in itertools.permutations(range(hosts), 2):
        neighbour = ("neighbour", "add", _address(other), "lladdr", _mac(other), "nud", "permanent")
        _ip("-n", f"{name}-{host}", *neighbour, "dev", f"{name}t{host}")


class _Lines:
    """When frames that leave a host now arrive. `rate` in bytes per second; 0 is without limit."""

    def __init__(self, hosts: int, one_way: float, rate: float) -> None:
        self.one_way = one_way
        self._rate = rate
        self._out = [0.0] * hosts  # when the line from each host is free again
        self._in = [0.0] * hosts

    def arrival(self, source: int, target: int, nbytes: int, now: float) -> float | None:
        """None if it is dropped. A frame enters the target's line while it leaves the source's."""
        if not self._rate:
            return now + self.one_way
        start = max(now, self._out[source], self._in[target] - self.one_way)
        if start - now > _LONGEST_WAIT:
            return None
        self._out[source] = start + nbytes / self._rate
        self._in[target] = self._out[source] + self.one_way
        return self._in[target]


def _forward(taps: Sequence[int], lines: _Lines, *, to_all: bool = False) -> None:
    """Hands frames on until standard input ends; a line there, which may set the delay, is answered with the counts.

    A frame goes to the host that its MAC address names, or to all others.
    """
    hosts = range(len(taps))
    counts = [[0] * len(taps) for _ in hosts]
    number = itertools.count()  # of equal times, first in is first out
    waiting: list[tuple[float, int, int, bytes]] = []
    hosts_of = {fd: host for host, fd in enumerate(taps)}
    while True:
        pause = max(waiting[0][0] - time.monotonic(), 0.0) if waiting else None
        # Not epoll, which waits in whole milliseconds.
        for fd in select.select([*taps, sys.stdin.fileno()], (), (), pause)[0]:
            if fd not in hosts_of:
                line = os.read(fd, 4096).decode().split()
                if not line:
                    return
                if line[0] == "delay":
                    lines.one_way = float(line[1])
                print(json.dumps([(a, b, counts[a][b]) for a in hosts for b in hosts if a != b]), flush=True)
                continue
            source, now = hosts_of[fd], time.monotonic()
            with contextlib.suppress(BlockingIOError):
                for _ in range(_BURST):
                    frame = os.read(fd, 65536)
                    targets = hosts if to_all or frame[0] & 1 else (frame[5],)  # an odd first byte: to all
                    for target in targets:
                        if target != source and target < len(taps):
                            counts[source][target] += len(frame)
                            due = lines.arrival(source, target, len(frame), now)
                            if due is not None:
                                heapq.heappush(waiting, (due, next(number), target, frame))
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, _, target, frame = heapq.heappop(waiting)
            with contextlib.suppress(OSError):  # lost, as on any line: its buffer is full, or the host is gone
                os.write(taps[target], frame)


def main() -> None:
    parser = argparse.ArgumentParser(description="The process of `delay_network`.")
    parser.add_argument("name")
    parser.add_argument("hosts", type=int)
    parser.add_argument("one_way", type=float)
    parser.add_argument("--rate", type=float, default=0.0, help="Mbit/s of each host's line, each way; 0: no limit")
    parser.add_argument("ends", nargs="*", help="of a line: namespace and device, twice")
    options = parser.parse_args()
    line = list(zip(options.ends[::2], options.ends[1::2], strict=True))
    with contextlib.suppress(OSError):
        # The delay is the same for all only if the bridge need not wait for a core.
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    taps: list[int] = []
    try:
        for index, (namespace, device) in enumerate(line):
            taps.append(_add_tap(f"{options.name}e{index}", namespace, device))
        for host in range(options.hosts):
            taps.append(_add_host(options.name, host))
        _introduce(options.name, options.hosts)
        print("ready", flush=True)
        _forward(taps, _Lines(len(taps), options.one_way, options.rate * 1e6 / 8), to_all=bool(line))
    except OSError as error:
        sys.exit(str(error))
    finally:
        for host in range(options.hosts):
            if Path(f"/run/netns/{options.name}-{host}").exists():
                _ip("netns", "del", f"{options.name}-{host}")


if __name__ == "__main__":
    main()
