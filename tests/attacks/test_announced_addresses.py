"""Addresses that a peer announces, and that are not its own: a service of the victim's machine, its router, the
metadata service of a cloud, or somebody whom all nodes are to dial."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from ipaddress import ip_address, ip_network
from itertools import cycle

import pytest
import trio
from libp2p.peer.id import ID
from libp2p.transport.tcp.tcp import TCP
from multiaddr import Multiaddr

from petalnode.crypto.identity import Identity
from petalnode.node.network.addresses import Endpoint, dialable
from petalnode.node.network.host import Host
from petalnode.node.network.nat.hole_punching import dialed_of, targets
from petalnode.node.network.nat.reachability import LocalEndpoints
from petalnode.node.network.transport import connections, dialing
from petalnode.node.network.transport.address_book import AddressBook
from petalnode.node.network.transport.dialing import DialBudget, DialContext, is_permitted, may_dial
from petalnode.node.network.transport.raw_connection import Path
from petalnode.node.swarm.view import Origin, SwarmView
from tests.attacks.trap import Trap, victim
from tests.swarm.relays import host_here

HOME = DialContext([ip_network("192.168.1.0/24"), ip_network("127.0.0.0/8"), ip_network("fd00:1::/64")])
HERE = DialContext(HOME.networks, on_loopback=True)
ATTACKER, RELAY = Identity.generate().peer_id, Identity.generate().peer_id


# --- which addresses


@pytest.mark.parametrize("ip", ["11.0.0.7", "2a00::7", "192.168.1.7", "fd00:1::7", "198.51.100.7", "::ffff:11.0.0.7"])
def test_public_and_own_networks_addresses_are_dialed(ip: str) -> None:
    assert may_dial(ip_address(ip), HOME)


FOREIGN = [
    *("127.0.0.1", "127.9.9.9", "::1", "0.0.0.0", "0.1.2.3", "::", "224.0.0.251", "ff02::fb", "255.255.255.255"),
    *("240.0.0.1", "169.254.169.254", "fe80::1", "fec0::1"),
    *("10.0.0.1", "172.16.0.1", "192.168.2.1", "100.64.0.1", "fd00:2::1"),
]
HIDDEN = [
    "::ffff:127.0.0.1",
    "::ffff:10.0.0.1",
    "64:ff9b::7f00:1",
    "64:ff9b::a9fe:a9fe",
    "2002:7f00:1::",
    "::127.0.0.1",
]


@pytest.mark.parametrize("ip", [*FOREIGN, *HIDDEN])
def test_addresses_only_others_could_have_are_not_dialed(ip: str) -> None:
    """However it is written: in IPv6, or in the ranges that are translated to IPv4."""
    assert not may_dial(ip_address(ip), HOME)


def test_swarm_on_one_machine_dials_loopback_only() -> None:
    assert [ip for ip in FOREIGN if may_dial(ip_address(ip), HERE)] == ["127.0.0.1", "127.9.9.9", "::1"]


def test_names_and_circuits_are_judged_where_they_lead() -> None:
    assert is_permitted(Multiaddr("/dns4/victim.example/tcp/1"), HOME)
    assert is_permitted(Multiaddr(f"/ip4/127.0.0.1/tcp/1/p2p/{RELAY}/p2p-circuit"), HOME)


def test_who_punches_is_not_sent_elsewhere_either() -> None:
    local = LocalEndpoints((), frozenset(), tuple(HOME.networks))
    said = ["/ip4/127.0.0.1/tcp/22", "/ip4/10.0.0.1/tcp/80", "/ip4/192.168.1.7/tcp/1", "/ip4/11.0.0.7/tcp/2"]
    found = targets(map(Endpoint.parse, said), local, {4: 31330})
    assert list(found) == said
    permitted = [addr for addr in found if (parsed := dialable(addr)) and is_permitted(parsed, HOME)]
    assert [endpoint.multiaddr for endpoint in dialed_of(found, permitted)] == said[2:]


# --- a node, and what it dials


@pytest.fixture
def trap() -> Iterator[Trap]:
    made = Trap()
    yield made
    made.close()


async def refusal(host: Host, peer_id: str = ATTACKER) -> str:
    with pytest.raises(ConnectionError) as caught:
        await host.connect(peer_id)
    return str(caught.value)


async def test_a_service_of_this_machine_is_not_dialed(trap: Trap) -> None:
    async with victim() as host:
        host.learn(ATTACKER, [trap.addr])
        assert "not dialed" in await refusal(host)
        assert not trap.was_dialed


async def test_nor_for_a_name_that_leads_there(trap: Trap, monkeypatch: pytest.MonkeyPatch) -> None:
    async def resolve(addr: Multiaddr) -> list[Multiaddr]:
        return [Multiaddr(trap.addr), Multiaddr("/ip4/169.254.169.254/tcp/80"), Multiaddr("/unix/tmp")]

    monkeypatch.setattr(connections, "resolve_multiaddr_with_retry", resolve)
    async with victim() as host:
        host.learn(ATTACKER, ["/dns4/innocent.example/tcp/443"])
        assert "not dialed" in await refusal(host)
        assert not trap.was_dialed


async def test_nor_as_a_relay(trap: Trap) -> None:
    async with host_here() as host:
        host.learn(ATTACKER, [f"{trap.addr}/p2p/{RELAY}/p2p-circuit"])
        assert "not dialed" in await refusal(host)
        assert not trap.was_dialed


async def test_what_person_gave_is_dialed_wherever_it_leads() -> None:
    dialed = trio.Event()

    async def serve(stream: trio.SocketStream) -> None:
        dialed.set()
        await stream.aclose()

    async with victim() as host, trio.open_nursery() as nursery:
        (listener,) = await nursery.start(partial(trio.serve_tcp, serve, 0, host="127.0.0.1"))
        port = listener.socket.getsockname()[1]
        host.remember(ATTACKER, [f"/ip4/127.0.0.1/tcp/{port}"])
        assert "not dialed" not in await refusal(host)
        assert dialed.is_set()
        nursery.cancel_scope.cancel()


async def test_client_of_a_local_swarm_dials_its_finds() -> None:
    """It was given one address of loopback, and that peer was there."""
    async with host_here(listens=True) as known, host_here(listens=True) as other, host_here() as client:
        client.learn(other.peer_id, other.addrs())
        assert "not dialed" in await refusal(client, other.peer_id)
        client.remember(known.peer_id, known.addrs())
        await client.connect(known.peer_id)
        await client.connect(other.peer_id)
        known.learn(other.peer_id, other.addrs())
        await known.connect(other.peer_id)


class Unconnected:
    def paths(self) -> tuple[Path, ...]:
        return ()


def test_own_connection_opens_a_private_network() -> None:
    """To an address that a person gave, since no other is dialed there; who comes from there opens nothing."""
    book = AddressBook(Unconnected(), on_loopback=False)
    peer, office = ID.from_string(ATTACKER), Multiaddr("/ip4/10.200.0.7/tcp/1")
    elsewhere = [Multiaddr("/ip4/172.30.0.7/tcp/1"), Multiaddr("/ip4/127.0.0.1/tcp/1")]
    book.met(Path(True, None, "/ip4/10.100.0.1/tcp/9", inbound=True))
    assert not book.permitted(peer, [office])
    book.met(Path(True, None, "/ip4/10.100.0.1/tcp/1", inbound=False))
    assert book.permitted(peer, [office, *elsewhere]) == [office]


# --- how often


def test_announcers_and_targets_have_a_rate_of_dials() -> None:
    budget = DialBudget()
    hosts = [f"11.0.{number // 256}.{number % 256}" for number in range(1000)]
    assert sum(budget.take("announcer", host, 0.0) for host in hosts) == 48
    assert sum(budget.take(f"key {number}", "victim", 0.0) for number in range(1000)) == 48
    assert sum(budget.take(f"key {number}", host, 0.0) for number, host in enumerate(hosts)) < 600
    assert budget.take("announcer", "victim", 61.0)


def test_ipv4_victim_written_as_ipv6_is_one_victim() -> None:
    budget = DialBudget()
    forms = cycle(["11.0.0.1", "::ffff:11.0.0.1"])
    assert sum(budget.take(f"key {number}", next(forms), 0.0) for number in range(1000)) == 48
    assert budget.take("honest", "2a00:77::1", 0.0)
    budget.give_back("key 0", "::ffff:11.0.0.1")
    assert budget.take("key 0", "11.0.0.1", 0.0)


def test_keys_of_one_source_leave_dials_for_others() -> None:
    """Before, 13 keys spent all the dials of a minute, and no server that was not known yet was dialed."""
    budget = DialBudget()

    def dialed(key: str, source: str, tries: int = 48) -> int:
        return sum(budget.take(key, f"{key}.example", 0.0, source) for _ in range(tries))

    assert sum(dialed(f"key {number}", "11.0.0.1") for number in range(100)) == 300
    assert sum(dialed(f"unknown {number}", "") for number in range(100)) == 150
    assert dialed("honest", "11.0.0.2") == 48
    for number in range(100):
        dialed(f"another {number}", "11.0.0.1")
    assert dialed("honest too", "11.0.0.3") == 48
    assert sum(dialed(f"key {number}", f"11.1.0.{number}") for number in range(100)) == 600 - 300 - 150 - 2 * 48


@pytest.mark.virtual_time
async def test_false_announcements_leave_dials_for_a_distant_server() -> None:
    """The source is that of the announcement: the address of the server itself, else who passed it on last."""
    book = AddressBook(Unconnected(), on_loopback=False)
    keys = [Identity.from_seed(bytes([number]) * 32).peer_id for number in range(31)]
    origins = {key: Origin(("11.0.0.9", "11.0.0.1"), 0.0) for key in keys[:15]}
    origins |= {key: Origin(("11.0.0.9",), 0.0, met="11.0.0.1") for key in keys[15:30]}
    origins[keys[30]] = Origin(("11.0.0.1",), 0.0, met="11.0.0.2")
    book.sources = SwarmView(origins=origins)

    def dialed(key: str, first: int) -> int:
        peer = ID.from_string(key)
        return sum(book.take_dial(peer, Multiaddr(f"/ip4/11.1.{first}.{host}/tcp/1")) for host in range(48))

    assert sum(dialed(key, number) for number, key in enumerate(keys[:30])) == 300
    assert dialed(keys[30], 30) == 48
    assert dialed(ATTACKER, 31) == 48


def test_who_answers_uses_nothing_up() -> None:
    budget = DialBudget()
    for _ in range(1000):
        assert budget.take("peer", "11.0.0.1", 0.0)
        budget.give_back("peer", "11.0.0.1")


async def test_swarm_of_false_announcements_sends_node_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred keys announce a victim's ports; an honest peer elsewhere is dialed all the same."""
    dialed: list[str] = []

    async def dial(self: TCP, addr: Multiaddr) -> None:
        dialed.append(str(addr))
        raise OSError(errno.ECONNREFUSED, "refused")

    monkeypatch.setattr(TCP, "dial", dial)
    monkeypatch.setattr(dialing, "DIALING", replace(dialing.DIALING, minute=1e6))
    async with victim() as host:
        for key in range(100):
            attacker = Identity.from_seed(bytes([key]) * 32).peer_id
            host.learn(attacker, [f"/ip4/11.0.0.1/tcp/{1 + 10 * key + port}" for port in range(8)])
            await refusal(host, attacker)
        assert len(dialed) <= 48
        honest = Identity.generate().peer_id
        host.learn(honest, ["/ip4/11.0.0.2/tcp/1"])
        await refusal(host, honest)
        assert dialed[-1] == "/ip4/11.0.0.2/tcp/1"
