from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from petalnode.crypto.identity import Identity
from petalnode.node.network.mdns import announceable, read_txt, service_name, txt_record
from petalnode.node.swarm import discovery as discovery_module
from petalnode.node.swarm.discovery import Discovery, is_local, pause_before
from petalnode.node.testing.node_inspection import held

A, B = (Identity.from_seed(bytes([n]) * 32).peer_id for n in (1, 2))
NEAR, FAR = "/ip4/192.168.1.10/tcp/31330", "/ip4/11.77.0.10/tcp/31330"


def test_a_record_tells_all_addresses() -> None:
    record = txt_record([f"{NEAR}/p2p/{A}", f"{FAR}/p2p/{A}"])
    assert record[1:9] == b"dnsaddr=" and record[0] == len(f"dnsaddr={NEAR}/p2p/{A}")
    assert read_txt(record) == {A: [NEAR, FAR]}


def test_what_is_of_no_use_is_left_out() -> None:
    useless = ["/ip4/127.0.0.1/tcp/1/p2p/" + A, "/ip4/192.168.1.10/udp/1/quic-v1/p2p/" + A, NEAR, "nonsense"]
    assert read_txt(txt_record([*useless, f"{NEAR}/p2p/{B}"])) == {B: [NEAR]}
    assert read_txt(b"\x04true\x08name=any\x09dnsaddr=\xff" + txt_record([f"{NEAR}/p2p/{A}"])) == {A: [NEAR]}


def test_a_record_is_bounded() -> None:
    many = [f"/ip4/192.168.1.10/tcp/{port}/p2p/{A}" for port in range(1, 100)]
    assert len(read_txt(txt_record(many))[A]) == 8


@given(st.binary(max_size=600))
def test_no_record_is_too_strange(record: bytes) -> None:
    for addrs in read_txt(record).values():
        assert addrs


def test_a_private_swarm_has_a_name_of_its_own() -> None:
    names = {service_name(psk) for psk in (None, "ab" * 32, "cd" * 32)}
    assert len(names) == 3
    for name in names:
        # RFC 6763: at most 15 characters after the underscore.
        assert len(name.split(".")[0]) <= 16 and name.endswith("._udp.local.")


def test_only_addresses_of_own_networks_are_told() -> None:
    relayed = f"{FAR}/p2p/{B}/p2p-circuit/p2p/{A}"
    assert announceable([f"/ip4/127.0.0.1/tcp/1/p2p/{A}", f"/dns4/example.org/tcp/1/p2p/{A}", relayed]) == []


def test_a_node_on_loopback_is_for_this_machine() -> None:
    assert is_local(["/ip4/127.0.0.1/tcp/0", "/ip6/::1/tcp/0"])
    assert not is_local(["/ip4/0.0.0.0/tcp/0"])
    assert not is_local(["/ip4/127.0.0.1/tcp/0", "/ip4/192.168.1.2/tcp/0"])
    assert not is_local([])


def test_pauses_grow_to_a_minute_and_no_further() -> None:
    pauses = [pause_before(attempt) for attempt in range(1, 2000)]
    assert pauses == sorted(pauses) and pauses[0] == 0.5 and pauses[-1] == 60
    assert sum(pauses[:4]) < 5


def test_neighbours_that_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anybody on the local network can answer under as many names as he likes."""
    calls: list[str] = []

    async def crowd(service: str, addrs: object, found: Callable[[str, list[str]], None], asked: trio.Event) -> None:
        for number in range(10_000):
            found(f"peer {number}", [f"/ip4/10.0.0.1/tcp/{number}"])
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

    monkeypatch.setattr(discovery_module, "run_mdns", crowd)

    async def main() -> None:
        node: Any = Alone()
        async with trio.open_nursery() as nursery:
            found = Discovery(
                node, node, nursery, peers=[], peer_store=None, mdns=True, listen=["/ip4/0.0.0.0/tcp/1"], psk=None
            )
            found.start()
            await trio.testing.wait_all_tasks_blocked()
            assert 0 < held(found) <= 200
            assert 0 < len(calls) <= 64 and "peer 5" not in calls
            nursery.cancel_scope.cancel()

    trio.run(main)
