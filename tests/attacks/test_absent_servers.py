"""Announcements of servers that never answer delay the sessions of a client that has others by little, and once."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar

import pytest
import trio

from petalnode.node.client import deadlines, round_trips
from petalnode.node.client.api.causal_lm import AutoDistributedModelForCausalLM
from petalnode.node.client.deadlines import DEADLINES
from petalnode.node.client.session.answers import SessionSpec
from petalnode.node.errors import NoChainError
from petalnode.node.models.folder import ModelFolder
from petalnode.node.testing.memory_network import MemoryNetwork, MemoryNode
from petalnode.node.testing.memory_servers import MemorySwarm, memory_swarm
from petalnode.protocols.announcement import Announcement, ServerState
from petalnode.protocols.ids import Span
from tests.inspection import call, client_of
from tests.tiny_models import NUM_BLOCKS

ABSENT = 5
MANY = 300
FOR_EVER = 1e6
TIMEOUT = 300.0


class Patient(MemoryNode):
    """A node whose questions to a peer that says nothing are not answered by anybody else."""

    async def measure_rtt(self, peer_id: str, *, timeout: float) -> float:
        if self.network.link(self.peer_id, peer_id).frozen:
            with trio.move_on_after(timeout):
                await trio.sleep_forever()
        return await super().measure_rtt(peer_id, timeout=timeout)


def announce_absent(network: MemoryNetwork, client: str, version: bytes, count: int) -> None:
    """Servers that are said to be quick, at addresses where nobody says that they are not there."""
    for _ in range(count):
        node = network.node()
        network.link(client, node.peer_id).freeze(FOR_EVER)
        claimed = Announcement(
            node.peer_id, version, "tiny", NUM_BLOCKS, Span(0, NUM_BLOCKS), ServerState.ONLINE, max_session_length=4096
        )
        node.announce(claimed)


def routes_find_who_is_there(swarm: MemorySwarm, folder: ModelFolder, timeout: float, absent: int = ABSENT) -> str:
    """A server, which is found before and after others are announced that are not there."""
    server = swarm.start(folder.path, f"0:{NUM_BLOCKS}")
    version = bytes.fromhex(str(server.ready["model_version"]))
    with swarm.open_model(AutoDistributedModelForCausalLM, folder.path) as model:
        client = client_of(model)
        spec = SessionSpec(version, Span(0, NUM_BLOCKS), 1, 64)

        async def route() -> list[str]:
            with trio.fail_after(timeout):
                return [hop.peer_id for hop in await client.route(spec)]

        assert call(model, route) == [server.peer_id]
        swarm.change(lambda network: announce_absent(network, client.swarm.peer_id, version, absent))
        for _ in range(3):
            assert call(model, route) == [server.peer_id]
    return server.peer_id


def test_absent_servers_are_not_awaited_where_others_suffice(
    folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only as long as the way to a server that is no farther than those that are known may take."""
    endless = replace(DEADLINES, rtt=FOR_EVER, measure=FOR_EVER)  # whoever waits for an answer never ends
    monkeypatch.setattr(round_trips, "DEADLINES", endless)
    with memory_swarm(Patient) as swarm:
        routes_find_who_is_there(swarm, folder, TIMEOUT)


class Refused(MemoryNode):
    """A node that notes whom it asks."""

    asked: ClassVar[list[str]] = []

    async def measure_rtt(self, peer_id: str, *, timeout: float) -> float:
        self.asked.append(peer_id)
        return await super().measure_rtt(peer_id, timeout=timeout)


def test_absent_servers_are_not_asked_again_each_session(folder: ModelFolder) -> None:
    Refused.asked.clear()
    with memory_swarm(Refused) as swarm:
        there = routes_find_who_is_there(swarm, folder, math.inf)
    absent = [peer for peer in Refused.asked if peer != there]
    assert 0 < len(absent) == len(set(absent)) <= ABSENT


def test_few_of_thousands_of_absent_servers_are_asked(folder: ModelFolder) -> None:
    """All of them were dialed at a session's start, and again every 15 s, for as long as their announcements last."""
    Refused.asked.clear()
    with memory_swarm(Refused) as swarm:
        there = routes_find_who_is_there(swarm, folder, math.inf, MANY)
    absent = [peer for peer in Refused.asked if peer != there]
    assert 0 < len(absent) <= 3 * round_trips.NEW[1] < MANY / 2


def test_few_are_asked_though_a_server_is_excluded(folder: ModelFolder) -> None:
    """Each step that was late had all announced servers dialed, which made the next steps late."""
    Refused.asked.clear()
    with memory_swarm(Refused) as swarm:
        there = swarm.start(folder.path, f"0:{NUM_BLOCKS}")
        version = bytes.fromhex(str(there.ready["model_version"]))
        with swarm.open_model(AutoDistributedModelForCausalLM, folder.path) as model:
            client = client_of(model)
            swarm.change(lambda network: announce_absent(network, client.swarm.peer_id, version, MANY))
            spec = SessionSpec(version, Span(0, NUM_BLOCKS), 1, 64)

            async def instead() -> None:
                with pytest.raises(NoChainError):
                    await client.route(spec, excluded={there.peer_id})

            call(model, instead)
    absent = set(Refused.asked) - {there.peer_id}
    assert 0 < len(absent) <= round_trips.MEASURES < MANY / 2


def test_ever_new_servers_do_not_delay_every_session(folder: ModelFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these routes waited for the servers that had been announced since the one before. Now one waits, and
    another one that did would never end."""
    with memory_swarm(Patient) as swarm:
        server = swarm.start(folder.path, f"0:{NUM_BLOCKS}")
        version = bytes.fromhex(str(server.ready["model_version"]))
        with swarm.open_model(AutoDistributedModelForCausalLM, folder.path) as model:
            client = client_of(model)
            spec = SessionSpec(version, Span(0, NUM_BLOCKS), 1, 64)

            async def route() -> None:
                with trio.fail_after(TIMEOUT):
                    assert [hop.peer_id for hop in await client.route(spec)] == [server.peer_id]

            call(model, route)
            endless = replace(DEADLINES, measure=FOR_EVER, rtt=FOR_EVER, rtt_retry=FOR_EVER)
            monkeypatch.setattr(round_trips, "DEADLINES", endless)
            for _ in range(4):
                swarm.change(lambda network: announce_absent(network, client.swarm.peer_id, version, 2))
                call(model, route)
                monkeypatch.setattr(deadlines, "DEADLINES", replace(endless, rtt_at_least=FOR_EVER))
