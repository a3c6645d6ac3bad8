"""Networks as people have them, made of network namespaces on this machine: an internet, NATs, homes, delays.

    with open_lab() as lab:
        relay = lab.host("relay")
        home, office = lab.nat("home"), lab.nat("office", Kind.SYMMETRIC, delay=0.05)
        client, server = home.host("client"), office.host("server")
        subprocess.run(client.command(["ping", "-c1", relay.address]))

Every lab has names of its own, so labs run side by side with equal addresses. All homes use 192.168.1.0/24, as most
homes do: what a host says of its own address leads its peers astray. With `ipv6` every machine has a public IPv6
address as well, and the NATs are plain stateful firewalls for it. Needs root, `ip` and `iptables`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from benchmarks.delay_bridge import delay_line

# They count as public addresses; nothing ever leaves the namespaces.
_INTERNET, _INTERNET6 = "11.77.0", "2a00:77"
_HOME = "192.168.1"
_ROUTER, _FIRST_HOST, _FIRST_NAT = 1, 10, 101
_BRIDGE = "02:00:00:00:00:01"
_FORGET = Path(__file__).with_name("forget_mappings.py")
_HANGING = 300.0  # seconds, of commands that take hundredths of one
_labs = itertools.count()


class Kind(Enum):
    """What a NAT does with ports, and with who knocks uninvited at its outer address."""

    DROPS = "keeps ports, answers nothing"
    REJECTS = "keeps ports, answers that the port cannot be reached (ICMP)"
    RESETS = "keeps ports, answers with a reset, so that two who punch at the same time undo each other"
    SYMMETRIC = "a random port for every connection, answers nothing"


_UNINVITED = {
    Kind.REJECTS: "-A INPUT -i wan -j REJECT",
    Kind.RESETS: "-A INPUT -i wan -p tcp -j REJECT --reject-with tcp-reset",
}


# Ours is one Ethernet; on the internet no multicast DNS comes through.
_NO_NEIGHBOURS = "*filter\n-A INPUT -p udp --dport 5353 -j DROP\nCOMMIT\n"


class LabError(Exception):
    """A network that this machine does not make, with what the tool said."""


@functools.cache
def why_not() -> str:
    """Why this machine cannot have such networks, found out by making one; empty if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "iptables-restore", "ip6tables-restore"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed (packages iproute2 and iptables)"
    try:
        with open_lab() as lab:
            lab.nat("probe")
    except LabError as error:
        return f"no network namespaces with NAT here: {error}"
    return ""


@functools.cache
def why_no_delay() -> str:
    """Why this machine cannot have delays on its lines, found out by making one; empty if it can."""
    if why_not():
        return why_not()
    try:
        with open_lab() as lab:
            lab.host("probe", delay=0.001)
    except LabError as error:
        return str(error)
    return ""


def _run(*command: str, given: str = "") -> None:
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=_HANGING)
    if done.returncode:
        raise LabError(f"{' '.join(command)}: {done.stderr.strip()}")


class Machine:
    """A network namespace: this machine with network interfaces and a firewall of its own."""

    def __init__(self, lab: Lab, name: str) -> None:
        self.name = name
        self.namespace = f"{lab.prefix}-{name}"
        _run("ip", "netns", "add", self.namespace)
        lab.machines.append(self)
        self.ip("link set lo up")
        if lab.ipv6:
            # Looking for others with the same address takes a second in which nothing can be sent.
            self.set(ipv6__conf__all__accept_dad=0, ipv6__conf__default__accept_dad=0)
        else:
            self.set(ipv6__conf__all__disable_ipv6=1, ipv6__conf__default__disable_ipv6=1)

    def command(self, arguments: Sequence[str]) -> list[str]:
        """The command line that runs `arguments` there, in the process that it starts itself."""
        return ["ip", "netns", "exec", self.namespace, *arguments]

    def ip(self, *lines: str) -> None:
        """Carries out these command lines of `ip` there."""
        _run("ip", "-n", self.namespace, "-batch", "-", given="".join(f"{line}\n" for line in lines))

    def set(self, **values: int) -> None:
        """Sets kernel parameters of the network, with __ for a slash: ipv4__ip_forward=1."""
        lines = [f"echo {value} > /proc/sys/net/{name.replace('__', '/')}" for name, value in values.items()]
        _run(*self.command(["sh", "-ec", "; ".join(lines)]))


@dataclass(frozen=True)
class Segment:
    """A bridge on a machine, whose addresses begin with `prefix` and end in 1 to 254. That machine, as number 1, is
    the way out for the families in `exits`."""

    at: Machine
    bridge: str
    prefix: str
    prefix6: str | None
    exits: tuple[str, ...] = ()

    def build(self) -> None:
        # Without an address of its own, it takes the lowest of its ports', and the neighbours send to the old one.
        self.at.ip(f"link add {self.bridge} address {_BRIDGE} type bridge", f"link set {self.bridge} up")
        if self.exits:
            self.number(self.at, self.bridge, _ROUTER)

    def number(self, machine: Machine, device: str, number: int) -> None:
        """Takes all addresses from a device and gives it those of `number`, and the way out."""
        lines = [f"address flush dev {device} scope global", f"address add {self.prefix}.{number}/24 dev {device}"]
        if self.prefix6:
            lines.append(f"address add {self.prefix6}::{number}/64 dev {device} nodad")
        if number != _ROUTER:
            way_out = {"ip4": f"{self.prefix}.{_ROUTER}", "ip6": f"{self.prefix6}::{_ROUTER}"}
            lines += [f"route replace default via {way_out[family]}" for family in self.exits]
        machine.ip(*lines)


class Plug:
    """One machine's place on a segment. `socket` is the other end of its cable, at the segment's bridge."""

    def __init__(self, lab: Lab, segment: Segment, machine: Machine, device: str, number: int, delay: float) -> None:
        self._segment, self._machine, self._device = segment, machine, device
        self.socket = f"s{number}"
        ends = (segment.at.namespace, self.socket), (machine.namespace, device)
        if delay:
            try:
                lab.lines.enter_context(delay_line(delay, *ends))
            except RuntimeError as error:
                raise LabError(str(error)) from error
        else:
            (near, socket), (far, name) = ends
            _run(*f"ip link add {name} netns {far} type veth peer name {socket} netns {near}".split())
        segment.at.ip(f"link set {self.socket} master {segment.bridge} up")
        machine.ip(f"link set {device} up")
        self.renumber(number)

    def renumber(self, number: int) -> None:
        self.number = number
        self._segment.number(self._machine, self._device, number)

    @property
    def address(self) -> str:
        return f"{self._segment.prefix}.{self.number}"

    @property
    def address6(self) -> str:
        return f"{self._segment.prefix6}::{self.number}"

    @contextlib.contextmanager
    def pulled(self) -> Iterator[None]:
        """As if the cable were pulled, for the length of the block: nobody is told, nothing comes through."""
        self._segment.at.ip(f"link set {self.socket} down")
        try:
            yield
        finally:
            self._segment.at.ip(f"link set {self.socket} up")


class Host(Machine):
    """A machine for one person's programs, on the internet or in a home. `plug` is its place there."""

    def __init__(self, lab: Lab, name: str, segment: Segment, number: int, delay: float = 0.0) -> None:
        super().__init__(lab, name)
        self.plug = Plug(lab, segment, self, "eth0", number, delay)

    @property
    def address(self) -> str:
        return self.plug.address

    @property
    def address6(self) -> str:
        return self.plug.address6

    def change_address(self) -> None:
        """Takes the next address but 99; connections over the old one get no more through, and hear nothing."""
        self.plug.renumber(self.plug.number + 100)


class Nat(Machine):
    """A router between the internet and a home. `plug` is its place on the internet."""

    def __init__(self, lab: Lab, name: str, kind: Kind, index: int, delay: float) -> None:
        super().__init__(lab, name)
        self._lab = lab
        self._prefix6 = f"{_INTERNET6}:{index + 1}" if lab.ipv6 else None
        self.set(ipv4__ip_forward=1)
        self.plug = Plug(lab, lab.internet, self, "wan", _FIRST_NAT + index, delay)
        self.home = Segment(self, "lan", _HOME, self._prefix6, ("ip4", "ip6") if lab.ipv6 else ("ip4",))
        self.home.build()
        self._numbers = itertools.count(_FIRST_HOST)
        _run(*self.command(["iptables-restore"]), given=_rules(kind))
        # A strict one: what it has forgotten it does not guess from packets in the middle of a connection.
        self.set(netfilter__nf_conntrack_tcp_loose=0)
        if lab.ipv6:
            self.set(ipv6__conf__all__forwarding=1)
            _run(*self.command(["ip6tables-restore"]), given=_rules(kind, translate=False))
            self._route()

    @property
    def address(self) -> str:
        """The outer one, from which all of the home seems to come."""
        return self.plug.address

    def host(self, name: str) -> Host:
        """A machine in the home."""
        return Host(self._lab, name, self.home, next(self._numbers))

    def forget_mappings(self) -> None:
        """Loses all connections that it keeps track of, as by a restart or an impatient timeout."""
        _run(*self.command([sys.executable, str(_FORGET)]))

    def change_address(self) -> None:
        """Gets another outer address, as from a provider overnight; the connections through it are lost."""
        self.plug.renumber(self.plug.number + 100)
        self.forget_mappings()
        if self._prefix6:
            self._route()

    def _route(self) -> None:
        self._lab.internet.at.ip(f"route replace {self._prefix6}::/64 via {self.plug.address6}")


def _rules(kind: Kind, *, translate: bool = True) -> str:
    random = " --random-fully" if kind is Kind.SYMMETRIC else ""
    uninvited = _UNINVITED.get(kind, "") if translate else ""
    nat = f"*nat\n-A POSTROUTING -o wan -j MASQUERADE{random}\nCOMMIT\n" if translate else ""
    # Where the firewall sees bridged packets too, neighbours pass it. Neighbour discovery is no connection that could
    # be known.
    discovery = "" if translate else "-A INPUT -p ipv6-icmp -j ACCEPT"
    return f"""{nat}*filter
:INPUT ACCEPT [0:0]
:FORWARD DROP [0:0]
-A INPUT -i wan -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT
{discovery}
{uninvited}
-A INPUT -i wan -j DROP
-A FORWARD -i lan -o lan -j ACCEPT
-A FORWARD -m conntrack --ctstate INVALID -j DROP
-A FORWARD -i lan -o wan -j ACCEPT
-A FORWARD -i wan -o lan -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT
COMMIT
"""


class Lan:
    """A home without a way out."""

    def __init__(self, lab: Lab, name: str) -> None:
        self._lab = lab
        self.segment = Segment(Machine(lab, name), "lan", _HOME, None)
        self.segment.build()
        self._numbers = itertools.count(_FIRST_HOST)

    def host(self, name: str) -> Host:
        return Host(self._lab, name, self.segment, next(self._numbers))


class Lab:
    """All networks of one test; made by `open_lab`."""

    def __init__(self, prefix: str, ipv6: bool) -> None:
        self.prefix = prefix
        self.ipv6 = ipv6
        self.machines: list[Machine] = []
        self.lines = contextlib.ExitStack()
        self._numbers = itertools.count(_FIRST_HOST)
        self._nats = itertools.count()

    @functools.cached_property
    def internet(self) -> Segment:
        machine = Machine(self, "internet")
        segment = Segment(machine, "net", _INTERNET, *((_INTERNET6, ("ip6",)) if self.ipv6 else (None,)))
        segment.build()
        if self.ipv6:
            machine.set(ipv6__conf__all__forwarding=1)
        return segment

    def host(self, name: str, *, delay: float = 0.0) -> Host:
        """A machine on the internet, `delay` seconds (one way) away from all others."""
        host = Host(self, name, self.internet, next(self._numbers), delay)
        _run(*host.command(["iptables-restore"]), given=_NO_NEIGHBOURS)
        return host

    def nat(self, name: str, kind: Kind = Kind.DROPS, *, delay: float = 0.0) -> Nat:
        """A NAT on the internet, `delay` seconds (one way) away from all others there."""
        return Nat(self, name, kind, next(self._nats), delay)

    @contextlib.contextmanager
    def split(self, hosts: Sequence[Host]) -> Iterator[None]:
        """As if the line between these hosts on the internet and all others there were cut, for the length of the
        block: nobody is told, nothing comes through."""
        part = f"{self.internet.bridge}2"
        sockets = [host.plug.socket for host in hosts]
        self.internet.at.ip(f"link add {part} type bridge", f"link set {part} up")
        self.internet.at.ip(*(f"link set {socket} master {part}" for socket in sockets))
        try:
            yield
        finally:
            self.internet.at.ip(*(f"link set {socket} master {self.internet.bridge}" for socket in sockets))
            self.internet.at.ip(f"link del {part}")

    def lan(self, name: str) -> Lan:
        """A network of its own, without internet."""
        return Lan(self, name)

    def dismantle(self) -> None:
        """Removes everything; what runs there must have ended."""
        self.lines.close()
        for machine in self.machines:
            subprocess.run(["ip", "netns", "del", machine.namespace], capture_output=True, timeout=_HANGING)


@contextlib.contextmanager
def open_lab(*, ipv6: bool = False) -> Iterator[Lab]:
    """An empty lab, whose networks are gone at the end of the block.

    Raises:
        LabError: this machine cannot do that; the text says why.
    """
    _sweep()
    lab = Lab(f"pnlab{os.getpid()}x{next(_labs)}", ipv6)
    try:
        yield lab
    finally:
        lab.dismantle()


def _sweep() -> None:
    """Removes what labs of processes that were killed have left, where nothing runs any more."""
    for namespace in Path("/run/netns").glob("pnlab*x*-*"):
        pid = namespace.name.removeprefix("pnlab").partition("x")[0]
        if not pid.isdigit() or Path(f"/proc/{pid}").exists():
            continue
        inside = subprocess.run(
            ["ip", "netns", "pids", namespace.name], capture_output=True, text=True, timeout=_HANGING
        )
        if inside.returncode == 0 and not inside.stdout.strip():
            subprocess.run(["ip", "netns", "del", namespace.name], capture_output=True, timeout=_HANGING)
