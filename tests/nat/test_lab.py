"""That the networks of the lab are what they say, with plain TCP."""

from __future__ import annotations

import sys

import pytest

from tests.nat.lab import Host, Kind, Lab, Nat
from tests.nat.nodes import LabNodes
from tests.swarm.processes import Running
from tests.swarm.warm_python import WarmProcess

# Takes connections, says where they come from, and hands back what is sent.
_LISTEN = """
import socket, sys, threading
def serve(connection, source):
    while data := connection.recv(100):
        connection.sendall(data)
listener = socket.create_server((sys.argv[1], 31330), family=socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET)
print("listening", flush=True)
while True:
    connection, source = listener.accept()
    print(*source[:2], flush=True)
    threading.Thread(target=serve, args=(connection, source), daemon=True).start()
"""
# Connects from a port. Of every line that it is given, the seconds to wait for the echo, it tells that it has sent, and
# then how long the echo took, or what happened.
_CONNECT = """
import socket, sys, time
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
connection = socket.socket(family)
connection.settimeout(float(sys.argv[2]))
connection.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
connection.bind(("", int(sys.argv[3])))
try:
    connection.connect((sys.argv[1], 31330))
    print("connected", flush=True)
    for line in sys.stdin:
        connection.settimeout(float(line))
        start = time.perf_counter()
        connection.sendall(b"x")
        print("sent", flush=True)
        connection.recv(100)
        print(time.perf_counter() - start, flush=True)
except OSError as error:
    print(type(error).__name__, flush=True)
"""


LONG = 60.0
"""Seconds for what will come; what never will is waited for a second."""


def listen(nodes: LabNodes, host: Host, address: str = "0.0.0.0") -> Running:
    program = nodes.program(host, [sys.executable, "-S", "-c", _LISTEN, address])
    assert program.line() == "listening"
    return program


def connect(nodes: LabNodes, host: Host, address: str, patience: float = LONG, port: int = 31331) -> Running:
    return nodes.program(host, [sys.executable, "-S", "-c", _CONNECT, address, str(patience), str(port)])


def send(program: Running, patience: float = LONG) -> None:
    assert program.process.stdin is not None
    program.process.stdin.write(f"{patience}\n")
    program.process.stdin.flush()
    assert program.line() == "sent"


def echoed(program: Running, patience: float = LONG) -> str:
    send(program, patience)
    return program.line()


@pytest.mark.parametrize(
    ("kind", "refusal"),
    [
        (Kind.DROPS, "TimeoutError"),
        (Kind.REJECTS, "ConnectionRefusedError"),
        (Kind.RESETS, "ConnectionRefusedError"),
        (Kind.SYMMETRIC, "TimeoutError"),
    ],
)
def test_home_reaches_internet_but_not_other_way_round(kind: Kind, refusal: str, lab: Lab, nodes: LabNodes) -> None:
    public, nat = lab.host("public"), lab.nat("home", kind)
    private = nat.host("laptop")
    inside, outside = listen(nodes, private), listen(nodes, public)
    patience = 1.0 if refusal == "TimeoutError" else LONG
    inward, outward = connect(nodes, public, nat.address, patience), connect(nodes, private, public.address)
    assert outward.line() == "connected"
    address, port = outside.line().split()
    assert address == nat.address
    assert (port == "31331") is (kind is not Kind.SYMMETRIC)
    assert inward.line() == refusal
    assert inside.process.poll() is None


def test_homes_have_equal_addresses(lab: Lab) -> None:
    one, other = lab.nat("one").host("a"), lab.nat("other").host("b")
    assert one.address == other.address


def test_a_nat_forgets(lab: Lab, nodes: LabNodes) -> None:
    public, nat = lab.host("public"), lab.nat("home")
    listen(nodes, public)
    client = connect(nodes, nat.host("laptop"), public.address)
    assert client.line() == "connected" and float(echoed(client)) < LONG
    nat.forget_mappings()
    assert echoed(client, 1.0) == "TimeoutError"


@pytest.mark.parametrize("whose", ["host", "nat"])
def test_an_address_changes(whose: str, lab: Lab, nodes: LabNodes) -> None:
    public, nat = lab.host("public"), lab.nat("home")
    private = nat.host("laptop")
    outside = listen(nodes, public)
    client = connect(nodes, private, public.address)
    assert client.line() == "connected"
    before = outside.line().split()[0]
    changed: Host | Nat = {"host": private, "nat": nat}[whose]
    old = changed.address
    changed.change_address()
    assert changed.address != old
    assert echoed(client, 1.0) in ("TimeoutError", "OSError")
    assert connect(nodes, private, public.address, port=31332).line() == "connected"
    assert (outside.line().split()[0] == before) is (whose == "host")


def test_a_pulled_plug(lab: Lab, nodes: LabNodes) -> None:
    public, client = lab.host("public"), lab.host("client")
    listen(nodes, public)
    program, other = (connect(nodes, client, public.address, port=port) for port in (31331, 31332))
    assert program.line() == other.line() == "connected"
    with public.plug.pulled():
        send(program)
        assert echoed(other, 0.5) == "TimeoutError"
    assert float(program.line()) < LONG


def test_delays_add_up(lab: Lab, nodes: LabNodes, delays: None) -> None:
    public, nat = lab.host("public", delay=0.02), lab.nat("home", delay=0.05)
    listen(nodes, public)
    client = connect(nodes, nat.host("laptop"), public.address)
    assert client.line() == "connected"
    # A busy machine hands most of them on late, and none too early.
    assert next(took for took in (float(echoed(client)) for _ in range(300)) if took < 0.2) >= 0.14


def test_a_lan_without_internet(lab: Lab, nodes: LabNodes) -> None:
    lan, public = lab.lan("cabin"), lab.host("public")
    one, other = lan.host("one"), lan.host("other")
    listen(nodes, one)
    assert connect(nodes, other, one.address).line() == "connected"
    assert connect(nodes, other, public.address).line() == "OSError"  # no route


def test_ipv6_is_filtered_and_not_translated(lab6: Lab, nodes: LabNodes) -> None:
    public, nat = lab6.host("public"), lab6.nat("home")
    private = nat.host("laptop")
    listen(nodes, private, "::")
    outside = listen(nodes, public, "::")
    inward, outward = connect(nodes, public, private.address6, 1.0), connect(nodes, private, public.address6)
    assert outward.line() == "connected"
    assert outside.line().split() == [private.address6, "31331"]
    assert inward.line() == "TimeoutError"


def test_programs_of_machine_start_warm_in_its_network(lab: Lab, nodes: LabNodes) -> None:
    code = "import socket, sys; print('torch' in sys.modules, sorted(name for _, name in socket.if_nameindex()))"
    program = nodes.program(lab.host("here"), [sys.executable, "-c", code])
    assert isinstance(program.process, WarmProcess)
    assert program.line() == "True ['eth0', 'lo']"
