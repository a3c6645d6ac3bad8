from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from dataclasses import replace
from ipaddress import ip_network
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st
from multiaddr import Multiaddr

from petalnode.crypto.identity import Identity
from petalnode.node.network import mdns
from petalnode.node.network.mdns import announceable, is_apart, read_txt, service_name, txt_record
from petalnode.node.swarm import discovery as discovery_module
from petalnode.node.swarm.config import SwarmConfig
from petalnode.node.swarm.discovery import Discovery, is_local, pause_before
from petalnode.protocols.framing import PeerError
from tests.node_inspection import held

A, B = (Identity.from_seed(bytes([n]) * 32).peer_id for n in (1, 2))
NEAR, FAR = "/ip4/192.168.1.10/tcp/31330", "/ip4/11.77.0.10/tcp/31330"


def test_a_record_tells_all_addresses() -> None:
    record = txt_record([f"{NEAR}/p2p/{A}", f"{FAR}/p2p/{A}"])
    assert record[1:9] == b"dnsaddr=" and record[0] == len(f"dnsaddr={NEAR}/p2p/{A}")
    assert read_txt(record) == {A: [NEAR, FAR]}


def test_what_is_of_no_use_is_left_out() -> None:
    useless = ["/ip4/127.0.0.1/tcp/1/p2p/" + A, "/ip4/192.168.1.10/udp/1/quic-v1/p2p/" + A, NEAR, "nonsense"]
    assert read_txt(txt_record([*useless, f"{NEAR}/p2p/{B}"])) == {B: [NEAR]}
    assert read_txt(txt_record([f"{NEAR}/p2p/{B}"]).replace(b"dnsaddr", b"another")) == {}
    assert read_txt(b"\x04true\x08name=any\x09dnsaddr=\xff" + txt_record([f"{NEAR}/p2p/{A}"])) == {A: [NEAR]}


def test_a_record_is_bounded() -> None:
    many = [f"/ip4/192.168.1.10/tcp/{port}/p2p/{A}" for port in range(1, 100)]
    assert len(read_txt(txt_record(many))[A]) == 8


@given(st.binary(max_size=600))
def test_no_record_is_too_strange(record: bytes) -> None:
    for addrs in read_txt(record).values():
        assert addrs


def test_private_swarm_has_name_of_its_own() -> None:
    names = {service_name(psk) for psk in (None, "ab" * 32, "cd" * 32)}
    assert len(names) == 3 and service_name(None) == "_petalnode._udp.local."
    for name in names:
        # RFC 6763: at most 15 characters after the underscore.
        assert len(name.split(".")[0]) <= 16 and name.endswith("._udp.local.")


def test_only_addresses_of_own_networks_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    networks = ["10.0.0.0/24", "192.168.1.0/24", "127.0.0.0/8"]
    monkeypatch.setattr(mdns, "own_networks", lambda: list(map(ip_network, networks)))
    relayed = f"{NEAR}/p2p/{B}/p2p-circuit/p2p/{A}"
    addrs = [f"/ip4/127.0.0.1/tcp/1/p2p/{A}", f"/dns4/example.org/tcp/1/p2p/{A}", relayed, FAR]
    assert announceable([*addrs, NEAR]) == [NEAR] and len(announceable([NEAR] * 9)) == 8


def test_neighbour_is_told_until_it_has_no_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """By zeroconf itself, on loopback."""
    names, some, told = list[str](), threading.Event(), (f"{NEAR}/p2p/{A}", f"{FAR}/p2p/{A}")
    service = f"_{secrets.token_hex(7)}._udp.local."

    def put(name: str) -> None:
        names.append(name)
        some.set()

    heard_names: Any = SimpleNamespace(put=put)
    try:
        listener, neighbour = (mdns._Radio(["127.0.0.1"], service, apart, heard_names) for apart in (False, True))
    except OSError as error:
        pytest.skip(f"nobody multicasts here: {error}")
    with closing(listener), closing(neighbour):
        for addr in told:
            some.clear()
            neighbour.announce([addr])
            assert some.wait(60)
            assert listener.read(names[-1]) == txt_record([addr], True)
        heard = list(names)
        neighbour.announce([])
        monkeypatch.setattr(mdns, "MDNS", replace(mdns.MDNS, read=0.1))
        for name in heard:  # the first when it had another address
            while listener.read(name):
                time.sleep(0.05)
        assert names == heard


class Radio:
    """What is heard of the names in `records`, and what is said."""

    made: ClassVar[list[Radio]] = []
    records: ClassVar[dict[str, bytes]] = {}

    def __init__(self, interfaces: list[str], service: str, apart: bool, names: mdns._Names) -> None:
        self.interfaces, self.service, self.apart, self.names = interfaces, service, apart, names
        self.announced: list[list[str]] = []
        self.closed = False
        self.made.append(self)

    def announce(self, addrs: list[str]) -> None:
        self.announced.append(addrs)

    def read(self, name: str) -> bytes:
        return self.records[name]

    def close(self) -> None:
        self.closed = True


@pytest.mark.virtual_time
async def test_neighbours_are_heard_until_the_interfaces_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def at_once(call: Any, *arguments: Any, **_: Any) -> Any:
        await trio.lowlevel.checkpoint()
        return call(*arguments)

    interfaces, addrs, found = list[str](), [f"{NEAR}/p2p/{A}", f"{FAR}/p2p/{A}"], []
    Radio.made, Radio.records = [], {"b": txt_record([f"{NEAR}/p2p/{B}"]), "far": txt_record([f"{FAR}/p2p/{B}"])}
    monkeypatch.setattr(mdns, "_Radio", Radio)
    monkeypatch.setattr(
        mdns, "concrete", lambda _: [Multiaddr(f"/ip4/{host}/tcp/1") for host in ("127.0.0.1", *interfaces)]
    )
    monkeypatch.setattr(mdns, "own_networks", lambda: [ip_network("192.168.1.0/24")])
    monkeypatch.setattr(trio.to_thread, "run_sync", at_once)
    async with trio.open_nursery() as nursery:
        asked = trio.Event()
        host: Any = SimpleNamespace(addrs=lambda: addrs)
        nursery.start_soon(mdns.run_mdns, "service", host, lambda *told: found.append(told), asked, True)
        await asked.wait()  # in vain: it is in no network
        assert not Radio.made
        interfaces.append("10.0.0.1")
        await trio.sleep(100)
        (first,) = Radio.made
        for name in ("far", "unreadable", "b", "b"):
            first.names.put(name)
        await trio.sleep(100)
        assert found == [(B, [NEAR], False)]
        first.names.put("b")
        addrs[0] = f"/ip4/192.168.1.11/tcp/1/p2p/{A}"
        await trio.sleep(100)
        assert len(found) == 2 and first.announced == [[f"{NEAR}/p2p/{A}"], addrs[:1]]
        for changed in (["10.0.0.1", "10.0.0.2"], [], ["10.0.0.2"]):
            interfaces[:] = changed
            await trio.sleep(100)
        assert [(radio.interfaces, radio.closed) for radio in Radio.made] == [
            (["10.0.0.1"], True), (["10.0.0.1", "10.0.0.2"], True), (["10.0.0.2"], False)
        ]  # fmt: skip
        assert (first.service, first.apart) == ("service", True)
        nursery.cancel_scope.cancel()
    assert Radio.made[-1].closed


def test_a_node_on_loopback_is_for_this_machine() -> None:
    assert is_local(["/ip4/127.0.0.1/tcp/0", "/ip6/::1/tcp/0"])
    assert not is_local(["/ip4/0.0.0.0/tcp/0"])
    assert not is_local(["/ip4/127.0.0.1/tcp/0", "/ip4/192.168.1.2/tcp/0"])
    assert not is_local([])


def test_pauses_grow_to_a_minute_and_no_further() -> None:
    pauses = [pause_before(attempt) for attempt in range(1, 2000)]
    assert pauses == sorted(pauses) and pauses[0] == 0.5 and pauses[-1] == 60
    assert sum(pauses[:4]) < 5


def test_record_tells_whether_node_was_told_its_swarm() -> None:
    addr = f"/ip4/192.168.1.2/tcp/1/p2p/{A}"
    assert is_apart(txt_record([addr], True)) and not is_apart(txt_record([addr])) and not is_apart(b"")
    assert read_txt(txt_record([addr], True)) == read_txt(txt_record([addr]))


def looking(listens: bool, named: Sequence[str] = ()) -> SwarmConfig:
    """Of a node that looks for its neighbours."""
    peers = tuple(f"/ip4/10.0.0.3/tcp/3/p2p/{peer_id}" for peer_id in named)
    return SwarmConfig(Identity.generate(), peers=peers, listen=("/ip4/0.0.0.0/tcp/1",) if listens else (), mdns=True)


class Neighbourhood:
    """A node, its network and its directory. `met` are those it has called on, in order; the `silent` do not answer."""

    peer_id = "self"

    def __init__(self, members: Sequence[str] = (), silent: Sequence[str] = ()) -> None:
        self.members, self.silent = set(members), silent
        self.met: list[str] = []
        self.company: list[str] = []

    def addrs(self) -> list[str]:
        return []

    def connected(self) -> list[str]:
        return self.company

    def on_lost(self, callback: object) -> None:
        """Nobody is lost here."""

    def is_connected(self, peer_id: str) -> bool:
        return peer_id in self.company

    async def refresh(self, nursery: trio.Nursery, **asked: object) -> None:
        """Those named have answered."""

    async def provide_forever(self) -> None:
        await trio.sleep_forever()

    parts = ()

    def addrs_of(self, peer_id: str) -> list[str]:
        return ["/ip4/10.0.0.1/tcp/1"] if peer_id in self.members else []

    async def meet(self, peer_id: str, addrs: object, *, timeout: float) -> None:
        self.met.append(peer_id)
        if peer_id in self.silent:
            await trio.sleep(timeout)
            raise PeerError(f"{peer_id} is silent", peer_id)
        self.company.append(peer_id)
        self.members.add(peer_id)


Mdns = Callable[..., Awaitable[None]]
"""In place of `run_mdns`."""


@pytest.fixture
def hear(monkeypatch: pytest.MonkeyPatch) -> Callable[[Mdns], None]:
    """Says what is heard on the local network from now on."""
    return lambda run_mdns: monkeypatch.setattr(discovery_module, "run_mdns", run_mdns)


async def neighbourhood(
    hear: Callable[[Mdns], None],
    node: Neighbourhood,
    near: Sequence[tuple[str, bool]],
    *,
    named: Sequence[str] = (),
    listens: bool = True,
) -> list[bool]:
    """Has the node search, and hear of those near it; returns how it told them of itself."""
    told: list[bool] = []

    async def run_mdns(service: str, addrs: object, found: Any, asked: trio.Event, apart: bool) -> None:
        told.append(apart)
        for peer_id, theirs in near:
            found(peer_id, ["/ip4/10.0.0.2/tcp/2"], theirs)
        asked.set()

    hear(run_mdns)
    async with trio.open_nursery() as nursery:
        parts: Any = node
        discovery = Discovery(parts, parts, parts, nursery, looking(listens, named))
        await discovery.join()
        await trio.sleep(20)
        nursery.cancel_scope.cancel()
    return told


@pytest.mark.virtual_time
@pytest.mark.parametrize("theirs", [False, True])
async def test_told_swarms_member_calls_its_neighbours_only(hear: Callable[[Mdns], None], theirs: bool) -> None:
    """An unrelated node of the same network would bring its models, and the two swarms would be one."""
    node = Neighbourhood(members=[B, "member"])
    node.company = [B]
    near = [("stranger", theirs), ("member", theirs)]
    assert await neighbourhood(hear, node, near, named=[B]) == [True]
    assert node.met == ["member"]


@pytest.mark.virtual_time
async def test_untold_node_leaves_told_ones_alone(hear: Callable[[Mdns], None]) -> None:
    node = Neighbourhood()
    assert await neighbourhood(hear, node, [("theirs", True), ("one", False), ("other", False)]) == [False]
    assert sorted(node.met) == ["one", "other"]  # and these are one swarm from now on, as ever


@pytest.mark.virtual_time
async def test_begun_swarm_is_not_brought_into_a_named(hear: Callable[[Mdns], None]) -> None:
    """However long it stays alone: it was there before the other one appeared."""
    node = Neighbourhood()
    late = [("theirs", True)]

    async def run_mdns(service: str, addrs: object, found: Any, asked: trio.Event, apart: bool) -> None:
        asked.set()
        await trio.sleep(30)
        found(late[0][0], ["/ip4/10.0.0.2/tcp/2"], True)

    assert await returning(hear, node, run_mdns, listens=True) == []
    assert await returning(hear, Neighbourhood(), run_mdns, listens=False) == ["theirs"]


async def returning(hear: Callable[[Mdns], None], node: Neighbourhood, run_mdns: Mdns, *, listens: bool) -> list[str]:
    """Whom a node that stays alone has called on within five minutes."""
    hear(run_mdns)
    async with trio.open_nursery() as nursery:
        parts: Any = node
        discovery = Discovery(parts, parts, parts, nursery, looking(listens))
        await discovery.join()
        nursery.start_soon(discovery.run)
        await trio.sleep(300)
        nursery.cancel_scope.cancel()
    return node.met


@pytest.mark.virtual_time
@pytest.mark.parametrize("listens", [False, True])
async def test_lone_node_joins_its_nodes_named_swarm(hear: Callable[[Mdns], None], listens: bool) -> None:
    node = Neighbourhood(silent=["gone"])
    await neighbourhood(hear, node, [("theirs", True), ("gone", False)], listens=listens)
    assert node.met == ["gone", "theirs"] and node.company == ["theirs"]


async def test_neighbours_that_are_remembered_are_bounded(hear: Callable[[Mdns], None]) -> None:
    """Anybody on the local network can answer under as many names as he likes."""
    calls: list[str] = []

    async def crowd(
        service: str, addrs: object, found: Callable[[str, list[str], bool], None], asked: trio.Event, apart: bool
    ) -> None:
        for number in range(10_000):
            found(f"peer {number}", [f"/ip4/10.0.0.1/tcp/{number}"], False)
        asked.set()

    class Alone:
        """A node that has met nobody; everybody it calls on is silent."""

        peer_id = "peer 5"

        def addrs(self) -> list[str]:
            return []

        def is_connected(self, peer_id: str) -> bool:
            return False

        async def meet(self, peer_id: str, addrs: object, *, timeout: float) -> None:
            calls.append(peer_id)
            await trio.sleep_forever()

    hear(crowd)
    node: Any = Alone()
    async with trio.open_nursery() as nursery:
        found = Discovery(node, node, node, nursery, looking(listens=True))
        nursery.start_soon(found.join)
        await trio.testing.wait_all_tasks_blocked()
        assert 0 < held(found) <= 200
        assert 0 < len(calls) <= 64 and "peer 5" not in calls
        nursery.cancel_scope.cancel()
