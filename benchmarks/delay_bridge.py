"""Hosts with a delay between them, on one Linux machine: a network namespace each, a TAP device in each, and a
process that hands every frame on after the delay. Needs root and `ip`; the kernel's own delay (netem) is often missing.

    with delay_network(hosts=3, one_way=0.05) as network:
        subprocess.run(network.command(0, ["ping", "-c3", network.address(1)]))

The bridge process makes the namespaces and removes them when its standard input ends, so also when we are killed.
A frame takes the delay and 0.1 ms. With a `rate`, each host's line carries so much each way: frames leave it one behind
the other, and enter the other one's so; who would wait for longer than a second is dropped, as by a router. Lines of
100 Mbit/s and more, and those without a limit, hand on up to 64 KiB of a TCP connection at once, as a network card does
that cuts segments by itself (Linux sends no more than a millisecond's worth so). With a `loss`, that share of frames
never arrives: on slower lines, whose frames are those of the wire. `delay_line` is a single line between two namespaces
that there are already.

    sudo python benchmarks/delay_bridge.py --measure [--rates 10 100 1000] [--rtt 4]

sends over one connection between two hosts, then over three hosts' lines at once, and prints what arrived.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import heapq
import itertools
import json
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

_TUNSETIFF = 0x400454CA
_TUNSETOFFLOAD = 0x400454D0
_TAP_NO_INFO = 0x0002 | 0x1000  # bare Ethernet frames
_TAP_OFFLOADED = _TAP_NO_INFO | 0x4000  # each behind a virtio_net_hdr, which says where to cut it
_SEGMENTS_OF_TCP = 1 | 2  # checksums, TCP over IPv4
_VIRTIO = struct.Struct("=BBHHHH")
_OFFLOADED = 100.0
_BURST = 64  # frames taken from one host before the others have their turn
_LONGEST_WAIT = 1.0  # seconds in the queue of a line


class DelayNetwork:
    """The running network; made by `delay_network`. Hosts are numbered from 0."""

    def __init__(self, bridge: subprocess.Popen[str], name: str) -> None:
        self._bridge = bridge
        self._name = name

    @property
    def process_id(self) -> int:
        """Of the bridge."""
        return self._bridge.pid

    def address(self, host: int) -> str:
        return _address(host)

    def command(self, host: int, arguments: Sequence[str]) -> list[str]:
        """The command line that runs `arguments` on that host."""
        return ["ip", "netns", "exec", f"{self._name}-{host}", *arguments]

    def bytes_sent(self) -> dict[tuple[int, int], int]:
        """Bytes of frames so far per (from, to), headers included; they are counted when they start out."""
        return {(source, target): count for source, target, count in self._ask("count")}

    def set_delay(self, one_way: float) -> None:
        """From now on every host is these seconds from every other."""
        self._ask(f"delay {one_way}")

    def _ask(self, line: str) -> list[tuple[int, int, int]]:
        assert self._bridge.stdin is not None and self._bridge.stdout is not None
        self._bridge.stdin.write(f"{line}\n")
        self._bridge.stdin.flush()
        counts: list[tuple[int, int, int]] = json.loads(self._bridge.stdout.readline())
        return counts


@contextlib.contextmanager
def delay_network(hosts: int, one_way: float, rate: float = 0.0, loss: float = 0.0) -> Iterator[DelayNetwork]:
    """`hosts` hosts, each `one_way` seconds from every other, with lines of `rate` Mbit/s each way (0: no limit). What
    runs there must have ended at the block's end.

    Raises:
        RuntimeError: this machine cannot do that; the text says why.
    """
    name = f"pnwan{os.getpid()}"
    with _process(name, str(hosts), str(one_way), "--rate", str(rate), "--loss", str(loss)) as bridge:
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


def _add_tap(passing: str, namespace: str, device: str, *, offloaded: bool = False) -> int:
    """Makes a device in a namespace; the file descriptor of its other side. `passing` is its name on the way."""
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    kind = _TAP_OFFLOADED if offloaded else _TAP_NO_INFO
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", passing.encode(), kind))
    if offloaded:
        fcntl.ioctl(tap, _TUNSETOFFLOAD, _SEGMENTS_OF_TCP)
    _ip("link", "set", passing, "netns", namespace, "name", device)
    return tap


def _add_host(name: str, host: int, *, offloaded: bool) -> int:
    """Makes one namespace; the file descriptor of its device. A frame's last byte of the MAC address is the host."""
    namespace, device = f"{name}-{host}", f"{name}t{host}"
    _ip("netns", "add", namespace)
    tap = _add_tap(device, namespace, device, offloaded=offloaded)
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
    """When frames that leave a host arrive: on the way out and on the way in, each waits for those before it.

    `rate` in bytes per second; 0 is without limit. `loss`: the share that is dropped on the way out."""

    def __init__(self, hosts: int, one_way: float, rate: float, loss: float) -> None:
        self.one_way = one_way
        self._rate, self._loss = rate, loss
        self._random = random.Random(1)
        self._out = [0.0] * hosts  # when the line from each host is free again
        self._in = [0.0] * hosts

    def leave(self, source: int, nbytes: int, now: float) -> float | None:
        """When a frame that comes to the line of `source` now has begun to come out at its end; None: it is dropped."""
        begun = self._queued(self._out, source, nbytes, now)
        return None if begun is None or self._random.random() < self._loss else begun + self.one_way

    def enter(self, target: int, nbytes: int, now: float) -> float | None:
        """When a frame that reaches the line of `target` now is there as a whole; None if it is dropped. It enters that
        line while it leaves the source's."""
        begun = self._queued(self._in, target, nbytes, now)
        return None if begun is None else begun + (nbytes / self._rate if self._rate else 0.0)

    def _queued(self, free: list[float], host: int, nbytes: int, now: float) -> float | None:
        """When a frame's turn on a line comes, which it then takes."""
        if not self._rate:
            return now
        begun = max(now, free[host])
        if begun - now > _LONGEST_WAIT:
            return None
        free[host] = begun + nbytes / self._rate
        return begun


def _wire_bytes(frame: bytes, offloaded: bool) -> int:
    """Bytes of the frames into which a line cuts what came at once: each has headers of its own."""
    if not offloaded:
        return len(frame)
    _, kind, headers, segment, _, _ = _VIRTIO.unpack_from(frame)
    nbytes = len(frame) - _VIRTIO.size
    return nbytes + (-(-(nbytes - headers) // segment) - 1) * headers if kind and segment else nbytes


class _Waiting:
    """Frames under way to the lines of their targets, or on them."""

    def __init__(self, taps: Sequence[int], lines: _Lines, offloaded: bool) -> None:
        self._taps, self._lines, self._offloaded = taps, lines, offloaded
        self._frames: list[tuple[float, int, int, bytes, bool]] = []
        self._number = itertools.count()  # of equal times, first in is first out

    def put(self, due: float, target: int, frame: bytes, *, enters: bool) -> None:
        """At `due` the frame `enters` the target's line, or is there."""
        heapq.heappush(self._frames, (due, next(self._number), target, frame, enters))

    def pause(self, now: float) -> float | None:
        """Seconds until one is due; None: there is none."""
        return max(self._frames[0][0] - now, 0.0) if self._frames else None

    def hand_over(self, now: float) -> None:
        """Everything that is due."""
        while self._frames and self._frames[0][0] <= now:
            due, _, target, frame, enters = heapq.heappop(self._frames)
            if enters:
                there = self._lines.enter(target, _wire_bytes(frame, self._offloaded), due)
                if there is None:
                    continue
                if there > now:
                    self.put(there, target, frame, enters=False)
                    continue
            with contextlib.suppress(OSError):  # lost, as on any line: its buffer is full, or the host is gone
                os.write(self._taps[target], frame)


def _forward(taps: Sequence[int], lines: _Lines, *, to_all: bool = False, offloaded: bool = False) -> None:
    """Hands frames on until standard input ends; a line there, which may set the delay, is answered with the counts.

    A frame goes to the host that its MAC address names, or to all others.
    """
    begin = _VIRTIO.size if offloaded else 0
    hosts = range(len(taps))
    counts = [[0] * len(taps) for _ in hosts]
    waiting = _Waiting(taps, lines, offloaded)
    hosts_of = {fd: host for host, fd in enumerate(taps)}
    while True:
        pause = waiting.pause(time.monotonic())
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
                    frame = os.read(fd, 1 << 17)
                    # An odd first byte: to all.
                    targets = hosts if to_all or frame[begin] & 1 else (frame[begin + 5],)
                    nbytes = _wire_bytes(frame, offloaded)
                    for target in targets:
                        if target != source and target < len(taps):
                            counts[source][target] += nbytes
                            due = lines.leave(source, nbytes, now)
                            if due is not None:
                                waiting.put(due, target, frame, enters=True)
        waiting.hand_over(time.monotonic())


# --- what the lines carry

_SECONDS = 3.0
_RECEIVE = """
import socket, time
server = socket.create_server(("0.0.0.0", 5001))
print("ready", flush=True)
line, _ = server.accept()
begun, nbytes, room = time.monotonic(), 0, bytearray(1 << 20)
while count := line.recv_into(room):
    nbytes += count
print(8e-6 * nbytes / (time.monotonic() - begun))
"""
_SEND = """
import socket, sys, time
line, until = socket.create_connection((sys.argv[1], 5001)), time.monotonic() + float(sys.argv[2])
while time.monotonic() < until:
    line.sendall(bytes(1 << 16))
"""


def measure(rate: float, rtt: float, connections: int) -> tuple[float, float]:
    """Mbit/s that TCP connections carry, all at once, each on a line of its own and on average; and how busy the bridge
    keeps a core meanwhile. Lines of `rate` Mbit/s (0: no limit) and hosts `rtt` ms apart."""

    def python(host: int, script: str, *arguments: str) -> subprocess.Popen[str]:
        command = network.command(host, [sys.executable, "-c", script, *arguments])
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def processor() -> float:
        fields = Path(f"/proc/{network.process_id}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")

    hosts = max(2, connections)
    with delay_network(hosts, rtt / 2000, rate) as network:
        receivers = [python(host, _RECEIVE) for host in range(connections)]
        for receiver in receivers:
            assert receiver.stdout is not None and receiver.stdout.readline() == "ready\n"
        used, begun = processor(), time.monotonic()
        senders = [
            python((host + 1) % hosts, _SEND, network.address(host), str(_SECONDS)) for host in range(connections)
        ]
        found = [float(receiver.communicate()[0]) for receiver in receivers]
        busy = (processor() - used) / (time.monotonic() - begun)
        for sender in senders:
            sender.communicate()
    return sum(found) / len(found), busy


def _measured(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="what the lines carry")
    parser.add_argument("--rates", nargs="+", type=float, default=[10, 100, 1000, 0], help="Mbit/s; 0: no limit")
    parser.add_argument("--rtt", type=float, default=4, help="milliseconds between any two hosts")
    options = parser.parse_args(arguments)
    for rate, connections in itertools.product(options.rates, (1, 3)):
        mbit, busy = measure(rate, options.rtt, connections)
        print(f"{rate:g} Mbit/s, {connections} lines at once: {mbit:.0f} Mbit/s each, the bridge {busy:.0%} of a core")


def main() -> None:
    if "--measure" in sys.argv[1:] or "--help" in sys.argv[1:]:
        _measured(sys.argv[1:])
        return
    parser = argparse.ArgumentParser(description="The process of `delay_network`.")
    parser.add_argument("name")
    parser.add_argument("hosts", type=int)
    parser.add_argument("one_way", type=float)
    parser.add_argument("--rate", type=float, default=0.0, help="Mbit/s of each host's line, each way; 0: no limit")
    parser.add_argument("--loss", type=float, default=0.0, help="share of the frames that is lost, each way")
    parser.add_argument("ends", nargs="*", help="of a line: namespace and device, twice")
    options = parser.parse_args()
    line = list(zip(options.ends[::2], options.ends[1::2], strict=True))
    with contextlib.suppress(OSError):
        # The delay is the same for all only if the bridge need not wait for a core.
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    taps: list[int] = []
    offloaded = not line and not 0 < options.rate < _OFFLOADED
    try:
        for index, (namespace, device) in enumerate(line):
            taps.append(_add_tap(f"{options.name}e{index}", namespace, device))
        for host in range(options.hosts):
            taps.append(_add_host(options.name, host, offloaded=offloaded))
        _introduce(options.name, options.hosts)
        print("ready", flush=True)
        lines = _Lines(len(taps), options.one_way, options.rate * 1e6 / 8, options.loss)
        _forward(taps, lines, to_all=bool(line), offloaded=offloaded)
    except OSError as error:
        sys.exit(str(error))
    finally:
        for host in range(options.hosts):
            if Path(f"/run/netns/{options.name}-{host}").exists():
                _ip("netns", "del", f"{options.name}-{host}")


if __name__ == "__main__":
    main()
