"""Dial-backs between hosts of this process, and with libp2p's own AutoNAT."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ipaddress import ip_address

import pytest
import trio
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.host.autonat.autonat import AutoNATService, AutoNATStatus
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import info_from_p2p_addr
from multiaddr import Multiaddr

from petalnode.node.network.addresses import Endpoint
from petalnode.node.network.host import Host
from petalnode.node.network.nat import dial_back
from petalnode.node.network.nat.autonat import DialRequests, observed_by, request_dial_back
from petalnode.node.network.nat.dial_back import Budget, DialBackService
from petalnode.node.network.transport.stream_bytes import StreamBytes
from petalnode.protocols import standard_pb2 as standard
from petalnode.protocols.delimited import DelimitedStream
from petalnode.protocols.nat_traversal import (
    DIAL_BACK,
    DIAL_REQUEST,
    DialStatus,
    bring_nonce,
    receive_dial_request,
)
from tests.swarm.relays import host_here


@asynccontextmanager
async def two_hosts() -> AsyncIterator[tuple[Host, Host]]:
    """One that asks, connected to one that dials back."""
    async with host_here(listens=True) as asking, host_here(listens=True) as answering:
        DialBackService(answering)
        asking.remember(answering.peer_id, answering.addrs())
        await asking.connect(answering.peer_id)
        yield asking, answering


def listening(host: Host) -> Endpoint:
    endpoint = Endpoint.parse(host.addrs()[0])
    assert endpoint is not None
    return endpoint


async def test_a_host_is_dialed_where_it_listens():
    async with two_hosts() as (asking, answering):
        seen = await observed_by(asking, answering.peer_id, timeout=60)
        assert seen is not None and seen.ip == ip_address("127.0.0.1") and seen != listening(asking)
        answer = await request_dial_back(asking, answering.peer_id, (listening(asking),))
        assert answer.status is DialStatus.OK and answer.addr == listening(asking).multiaddr
        # The dial-back is a connection of its own, and gone: it changes nothing.
        assert len(answering.paths(asking.peer_id)) == 1


async def test_nobody_listening_is_failure_although_there_is_connection():
    async with two_hosts() as (asking, answering):
        nowhere = dataclasses.replace(listening(asking), port=1)
        answer = await request_dial_back(asking, answering.peer_id, (nowhere,))
        assert answer.status is DialStatus.DIAL_ERROR


async def test_only_the_asking_ip_address_is_dialed():
    victim = await trio.open_tcp_listeners(0, host="127.0.0.2")
    async with two_hosts() as (asking, answering):
        port = victim[0].socket.getsockname()[1]
        answer = await request_dial_back(asking, answering.peer_id, (Endpoint(ip_address("127.0.0.2"), port),))
        assert answer.status is DialStatus.DIAL_REFUSED and "127.0.0.1, where you are" in answer.text
        with trio.move_on_after(0.2):
            await victim[0].accept()
            raise AssertionError("the victim was dialed")
    await victim[0].aclose()


async def test_number_is_brought_where_host_listens():
    async with two_hosts() as (asking, answering):
        requests = DialRequests(asking)
        answer = await requests.ask(answering.peer_id, (listening(asking),))
        assert answer.status is DialStatus.OK and answer.addr == listening(asking).multiaddr
        assert len(answering.paths(asking.peer_id)) == 1
        nowhere = dataclasses.replace(listening(asking), port=1)
        assert (await requests.ask(answering.peer_id, (nowhere,))).status is DialStatus.DIAL_ERROR
        # It dials one address only, and is asked for the other one.
        answer = await requests.ask(answering.peer_id, (nowhere, listening(asking)))
        assert answer.status is DialStatus.OK and answer.addr == listening(asking).multiaddr


@pytest.mark.parametrize("brings", [False, True], ids=["only says so", "over what is there"])
async def test_who_does_not_dial_proves_nothing(brings: bool):
    async with host_here(listens=True) as asking, host_here(listens=True) as lying:

        async def lie(raw: StreamBytes, peer_id: str) -> None:
            stream = DelimitedStream(raw, peer_id)
            _, nonce = await receive_dial_request(stream, timeout=60)
            if brings:
                back = DelimitedStream(await lying.open_stream(peer_id, DIAL_BACK), peer_id)
                await bring_nonce(back, nonce, timeout=60)
            said = standard.AutoNat2.DialResponse(status=200, dial_status=200)
            await stream.send(standard.AutoNat2(dial_response=said), timeout=60)

        lying.set_stream_handler(DIAL_REQUEST, lie)
        asking.remember(lying.peer_id, lying.addrs())
        await asking.connect(lying.peer_id)
        answer = await DialRequests(asking).ask(lying.peer_id, (listening(asking),))
        assert answer.status is DialStatus.INTERNAL_ERROR and "did not" in answer.text


async def test_dial_elsewhere_costs_who_asks(monkeypatch: pytest.MonkeyPatch):
    """Loopback stands for the internet here: the victim at 127.0.0.2 is dialed when the bytes have come."""
    monkeypatch.setattr(dial_back, "may_be_dialed", lambda asked, seen: asked.ip.is_loopback)
    victim = await trio.open_tcp_listeners(0, host="127.0.0.2")
    there = Multiaddr(f"/ip4/127.0.0.2/tcp/{victim[0].socket.getsockname()[1]}").to_bytes()
    async with two_hosts() as (asking, answering):
        raw = await asking.open_stream(answering.peer_id, DIAL_REQUEST)
        stream = DelimitedStream(raw, answering.peer_id)
        request = standard.AutoNat2.DialRequest(addrs=[there], nonce=1)
        await stream.send(standard.AutoNat2(dial_request=request), timeout=60)
        demand = (await stream.receive(standard.AutoNat2, timeout=60)).dial_data_request
        assert demand.addr_idx == 0 and 30_000 <= demand.num_bytes <= 100_000
        with trio.move_on_after(0.2):
            await victim[0].accept()
            raise AssertionError("the victim was dialed for nothing")
        data = standard.AutoNat2.DialDataResponse(data=bytes(4096))
        for _ in range(0, demand.num_bytes, 4096):
            await stream.send(standard.AutoNat2(dial_data_response=data), timeout=60)
        with trio.fail_after(60):
            await (await victim[0].accept()).aclose()
        response = (await stream.receive(standard.AutoNat2, timeout=60)).dial_response
        assert (response.status, response.dial_status) == (200, standard.AutoNat2.E_DIAL_ERROR)
    await victim[0].aclose()


async def test_dial_backs_are_few():
    async with two_hosts() as (asking, answering):
        statuses = []
        for _ in range(7):
            statuses.append((await request_dial_back(asking, answering.peer_id, (listening(asking),))).status)
        assert statuses == [DialStatus.OK] * 6 + [DialStatus.DIAL_REFUSED]


def test_dial_elsewhere_counts_for_who_asks():
    budget, asker = Budget(), ip_address("203.0.113.1")
    taken = []
    for number in range(7):
        ips = ip_address(f"198.51.100.{number + 1}"), asker
        taken.append(budget.take(*ips, now=0.0))
        if taken[-1]:
            budget.give_back(*ips)
    assert taken == [True] * 6 + [False]


def test_budget_is_per_address_total_and_at_once():
    budget = Budget()
    here, addresses = ip_address("203.0.113.1"), [ip_address(f"198.51.100.{n}") for n in range(1, 61)]
    taken = []
    for _ in range(7):
        taken.append(budget.take(here, now=0.0))
        if taken[-1]:
            budget.give_back(here)
    assert taken == [True] * 6 + [False]
    assert budget.take(here, now=60.0)
    budget.give_back(here)
    granted = 0
    for address in addresses:
        if budget.take(address, now=61.0):
            granted += 1
            budget.give_back(address)
    assert granted == 59
    under_way = Budget()
    assert [under_way.take(here, now=0.0) for _ in range(3)] == [True, True, False]
    assert [under_way.take(address, now=0.0) for address in addresses[:15]] == [True] * 14 + [False]


async def test_libp2ps_own_autonat_understands_us_and_we_it():
    stock = new_host(key_pair=create_new_key_pair(), muxer_preference="YAMUX")
    async with host_here(listens=True) as ours, stock.run(listen_addrs=[Multiaddr("/ip4/127.0.0.1/tcp/0")]):
        DialBackService(ours)
        service = AutoNATService(stock)
        stock_id, stock_addrs = str(stock.get_id()), [str(addr) for addr in stock.get_addrs()]
        await stock.connect(info_from_p2p_addr(Multiaddr(ours.addrs()[0])))
        with trio.fail_after(60):
            status, addr = await service.query_server(ID.from_string(ours.peer_id))
        assert status == int(DialStatus.OK) and addr is not None
        assert str(Multiaddr(addr)) in stock_addrs[0]
        assert service.status in (AutoNATStatus.UNKNOWN, AutoNATStatus.PUBLIC)
        seen = await observed_by(ours, stock_id, timeout=60)
        assert seen is not None and seen.ip == ip_address("127.0.0.1")
        answer = await request_dial_back(ours, stock_id, (listening(ours),))
        assert answer.status is DialStatus.OK and answer.addr == listening(ours).multiaddr
