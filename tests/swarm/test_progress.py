"""With one server for each block that is well, no step waits for long: every cause of waiting is bounded.

All in virtual time (`virtual_servers.py`), as usual and five times slower than usual.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import trio

from petalnode.node.client.core import SwarmClient
from petalnode.node.client.deadlines import DEADLINES
from petalnode.node.client.session import compared_session
from petalnode.node.client.session.chain import HistoryLost
from petalnode.node.client.session.compared_session import ComparedSession
from petalnode.node.client.session.comparing import Weights
from petalnode.node.client.session.stream import SessionSpec
from petalnode.node.errors import NoChainError, SwarmError
from petalnode.protocols.ids import Span
from petalnode.protocols.inference import INFERENCE
from tests.inspection import tasks_of
from tests.patience import eventually
from tests.swarm.virtual_servers import (
    BLOCKS,
    HIDDEN,
    MAX_LENGTH,
    VERSION,
    Talk,
    VirtualServer,
    VirtualSwarm,
    talk,
    virtual_swarm,
    wire_tensor,
)

LONGEST = 10.0
"""Seconds that a step may wait."""
SLOW = pytest.mark.parametrize("slow", [1.0, 5.0], ids=["as usual", "five times slower"])
QUICK, USUAL = 0.001, 0.02
"""Seconds for a token that servers announce: routes prefer the quick ones."""


def start_three(swarm: VirtualSwarm) -> None:
    for blocks in ("0:2", "2:4", "4:6"):
        swarm.start(blocks, announced=QUICK)


@asynccontextmanager
async def chain_of_three(**options: Any) -> AsyncIterator[tuple[VirtualSwarm, SwarmClient, Talk]]:
    """Three servers, and a client with a session over them."""
    async with virtual_swarm() as swarm:
        start_three(swarm)
        async with swarm.client() as client, talk(client, **options) as talking:
            yield swarm, client, talking


def silent_and_well(swarm: VirtualSwarm, silence: Callable[[VirtualServer], object], blocks: str = "2:4") -> None:
    """Six servers that seem the better ones and are silent, and one that is well."""
    for _ in range(6):
        silence(swarm.start(blocks, announced=QUICK))
    swarm.start(blocks, announced=10 * USUAL)


def no_grant(server: VirtualServer) -> None:
    server.grants = False


def no_replay(server: VirtualServer) -> None:
    server.answers = False


@pytest.mark.virtual_time
@SLOW
@pytest.mark.parametrize("silence", [VirtualServer.fall_silent, no_grant, no_replay])
async def test_six_silent_candidates_and_one_that_is_well(
    silence: Callable[[VirtualServer], object], slow: float
) -> None:
    async with chain_of_three() as (swarm, client, talking):
        silent_and_well(swarm, silence)
        await measured(client, swarm)
        swarm.slow_down(client, slow)
        swarm.of(talking.session, 1).fall_silent()
        await talking.step()
        assert talking.slowest <= LONGEST
        assert talking.session.recoveries == 1
        for _ in range(3):
            assert await talking.step() <= 2.0
        await all_caches_free(swarm, talking)


@pytest.mark.virtual_time
@SLOW
async def test_candidates_that_can_neither_be_pinged_nor_dialed(slow: float) -> None:
    async with virtual_swarm() as swarm:

        def cut_off(server: VirtualServer) -> None:
            swarm.mute.add(server.peer_id)
            swarm.unreachable.add(server.peer_id)

        start_three(swarm)
        async with swarm.client() as client, talk(client) as talking:
            silent_and_well(swarm, cut_off)
            swarm.slow_down(client, slow)
            swarm.of(talking.session, 1).fall_silent()
            await talking.step()
            assert talking.slowest <= LONGEST


@pytest.mark.virtual_time
@SLOW
async def test_candidates_that_were_well_when_they_were_measured(slow: float) -> None:
    """Their round trips are known and old, and their machines are gone from the network without a word."""
    async with chain_of_three() as (swarm, client, talking):
        silent_and_well(swarm, lambda server: None)
        await measured(client, swarm)
        gone = [*swarm.servers[3:9], swarm.of(talking.session, 1)]
        swarm.mute.update(server.peer_id for server in gone)
        swarm.unreachable.update(server.peer_id for server in gone)
        await trio.sleep(100)
        swarm.slow_down(client, slow)
        gone[-1].fall_silent()
        await talking.step()
        assert talking.slowest <= LONGEST


@pytest.mark.virtual_time
@pytest.mark.parametrize("place", [0, 1, 2])
async def test_frozen_server_costs_as_little_wherever_it_stands(place: int) -> None:
    async with chain_of_three() as (swarm, client, talking):
        for blocks in ("0:2", "2:4", "4:6"):
            swarm.start(blocks, announced=USUAL).seconds = QUICK
        await measured(client, swarm)
        swarm.of(talking.session, place).fall_silent()
        assert await talking.step() <= 0.8
        assert talking.session.recoveries == 1


@pytest.mark.virtual_time
@SLOW
@pytest.mark.parametrize("push", [True, False])
@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (0, 1, 2)])
async def test_servers_fall_silent_while_a_step_is_pushed(frozen: tuple[int, ...], push: bool, slow: float) -> None:
    async with chain_of_three(push=push) as (swarm, client, talking):
        for blocks in ("0:2", "2:4", "4:6"):
            swarm.start(blocks, announced=USUAL)
        swarm.slow_down(client, slow)
        for server in [swarm.of(talking.session, position) for position in frozen]:
            server.fall_silent()
        await talking.step()
        assert talking.slowest <= LONGEST
        assert talking.session.recoveries == len(frozen)


@pytest.mark.virtual_time
@SLOW
async def test_server_stops_reading_in_middle_of_long_prompt(slow: float) -> None:
    async with chain_of_three() as (swarm, client, talking):
        swarm.start("2:4", announced=USUAL)
        swarm.slow_down(client, slow)
        swarm.of(talking.session, 1).reads = False
        await talking.step(1500)
        assert talking.slowest <= LONGEST + 3 * 512 * 3 * slow * USUAL / 10


@pytest.mark.virtual_time
@SLOW
async def test_replacements_fall_silent_in_middle_of_long_prompt(slow: float) -> None:
    async with chain_of_three() as (swarm, client, talking):
        for left in (3, 4):
            swarm.start("2:4", announced=QUICK).answers_left = left
        swarm.start("2:4", announced=USUAL)
        swarm.slow_down(client, slow)
        swarm.of(talking.session, 1).answers_left = 1
        await talking.step(2000)
        assert talking.session.recoveries >= 2  # a replacement may be overtaken before it is one
        waits = talking.session.waits.by_cause
        assert max(waits[cause].longest for cause in ("late", "replace", "switch") if cause in waits) <= LONGEST


@pytest.mark.virtual_time
@SLOW
async def test_new_session_meets_silent_servers_but_for_one(slow: float) -> None:
    async with virtual_swarm() as swarm:
        silent_and_well(swarm, VirtualServer.fall_silent, "0:6")
        async with swarm.client() as client:
            await measured(client, swarm)
            swarm.slow_down(client, slow)
            begun = trio.current_time()
            async with talk(client) as talking:
                assert trio.current_time() - begun <= LONGEST
                assert talking.session.recoveries == 0


@pytest.mark.virtual_time
@SLOW
async def test_directories_answer_late_and_a_server_comes(slow: float) -> None:
    async with chain_of_three() as (swarm, client, talking):
        coming = swarm.start("2:4", told=False)
        swarm.slow_down(client, slow)
        swarm.look_seconds = 60.0
        swarm.of(talking.session, 1).fall_silent()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(talking.step)
            await trio.sleep(3)
            coming.announce()
            come = trio.current_time()
        assert trio.current_time() - come <= LONGEST
        assert talking.session.recoveries == 1


@pytest.mark.virtual_time
@SLOW
async def test_a_server_comes_while_all_others_are_silent(slow: float) -> None:
    """The look for others does not wait for those that were asked."""
    async with chain_of_three() as (swarm, client, talking):
        for _ in range(3):
            swarm.start("2:4", announced=QUICK).fall_silent()
        coming = swarm.start("2:4", told=False)
        await measured(client, swarm)
        swarm.slow_down(client, slow)
        swarm.of(talking.session, 1).fall_silent()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(talking.step)
            await trio.sleep(12)
            looks = swarm.looks
            coming.announce()
            come = trio.current_time()
        assert looks >= 4
        assert trio.current_time() - come <= LONGEST


@pytest.mark.virtual_time
async def test_server_that_answers_no_ping_is_last_resort() -> None:
    """As one on a busy machine, or this machine being busy."""
    async with chain_of_three() as (swarm, _, talking):
        swarm.mute.add(swarm.start("2:4").peer_id)
        swarm.of(talking.session, 1).fall_silent()
        assert await talking.step() <= LONGEST


@pytest.mark.virtual_time
async def test_a_search_among_silent_servers_ends() -> None:
    async with chain_of_three() as (swarm, client, talking):
        for _ in range(3):
            swarm.start("2:4").fall_silent()
        await measured(client, swarm)
        lost = swarm.of(talking.session, 1)
        lost.fall_silent()
        swarm.network.remove(lost.node)
        begun = trio.current_time()
        with pytest.raises(NoChainError):
            await talking.step()
        assert 30 <= trio.current_time() - begun <= 45


@pytest.mark.virtual_time
@SLOW
async def test_a_standby_that_was_ready_falls_silent(slow: float) -> None:
    async with chain_of_three() as (swarm, client, talking):
        standby = swarm.start("2:4", announced=QUICK)
        swarm.slow_down(client, slow)
        leaving = swarm.of(talking.session, 1)
        leaving.draining = True
        await talking.step()
        link = talking.session.links[1]
        await eventually(lambda: link.standby_ready, "a standby is ready")
        swarm.start("2:4", announced=USUAL)
        standby.fall_silent()
        await talking.step()
        leaving.fall_silent()
        await talking.step()
        assert talking.slowest <= LONGEST


@pytest.mark.virtual_time
async def test_no_step_asks_what_another_found_silent() -> None:
    async with virtual_swarm() as swarm:
        start_three(swarm)
        async with swarm.client() as client, talk(client) as first, talk(client) as second:
            silent_and_well(swarm, VirtualServer.fall_silent)
            await measured(client, swarm)
            lost = swarm.of(first.session, 1)
            lost.fall_silent()
            await first.step()
            asked = [server.opened for server in swarm.servers]
            await second.step()
            assert second.session.recoveries == 1
            assert [server.opened for server in swarm.servers[3:9]] == asked[3:9]
            assert second.slowest < first.slowest
            async with talk(client) as third:
                assert lost.peer_id not in [hop.peer_id for hop in third.session.route]


@pytest.mark.virtual_time
async def test_once_stopped_server_is_not_given_longer() -> None:
    async with chain_of_three() as (swarm, _, talking):
        server = swarm.of(talking.session, 1)
        usual = server.seconds
        server.seconds = 30.0
        await talking.step()
        server.seconds = usual
        for blocks in ("0:2", "2:4", "4:6"):
            swarm.start(blocks, announced=USUAL)
        await talking.step()
        swarm.of(talking.session, 1).fall_silent()
        assert await talking.step() <= LONGEST


@pytest.mark.virtual_time
async def test_waits_are_counted_by_cause() -> None:
    async with chain_of_three() as (swarm, client, talking):
        silent_and_well(swarm, VirtualServer.fall_silent)
        await measured(client, swarm)
        swarm.of(talking.session, 1).fall_silent()
        await talking.step()
        waits = talking.session.waits.fields()
        assert {"step", "send", "answer", "late", "switch", "route", "open", "replay", "turn"} <= set(waits)
        step = waits["step"]
        assert step["count"] == 6 and step["max_ms"] == pytest.approx(1000 * talking.slowest, abs=1)
        assert sum(step["buckets"].values()) == 6
        # What a step waits for one after another is what it waits for.
        parts = ("send", "answer", "push", "late", "switch", "reconnect", "race", "replace")
        assert sum(waits[part]["total_ms"] for part in parts if part in waits) == pytest.approx(step["total_ms"])


@pytest.mark.virtual_time
@SLOW
async def test_nothing_is_left_of_those_that_were_asked(slow: float) -> None:
    """No task of the client, no stream and no session at a server that is well."""
    async with virtual_swarm() as swarm:
        start_three(swarm)
        async with swarm.client() as client:
            for factor in (slow, 1.0, 1.0):
                async with talk(client) as talking:
                    silent_and_well(swarm, VirtualServer.fall_silent)
                    await measured(client, swarm)
                    swarm.slow_down(client, factor)
                    swarm.of(talking.session, 1).fall_silent()
                    await talking.step()
            await eventually(lambda: not tasks_of(client), "the client's tasks have ended")
            links = [swarm.network.link(client.peer_id, server.peer_id) for server in swarm.servers]
            assert not [stream for link in links for stream in link.live(INFERENCE.id) if not stream.is_closed]
            await eventually(lambda: not any(s.sessions for s in swarm.servers if s.answers), "caches are free")


@pytest.mark.virtual_time
async def test_earlier_processs_texts_cannot_go_to_another_server() -> None:
    """Of a session that was taken up, not all inputs are known."""
    async with chain_of_three() as (swarm, _, talking):
        swarm.start("2:4", announced=USUAL)
        talking.session.links[1].history.start = 3
        swarm.of(talking.session, 1).node.end()
        with pytest.raises(HistoryLost, match="what it held before this process started is not known here"):
            await talking.step()


# --- chains that are compared

CHUNK = wire_tensor(np.ones((1, HIDDEN), np.float32))
WHOLE = SessionSpec(VERSION, Span(0, BLOCKS), batch=1, max_length=MAX_LENGTH)


@pytest.mark.virtual_time
async def test_chains_cut_off_while_rows_moved_are_useless() -> None:
    async with virtual_swarm() as swarm:
        one, other = swarm.start("0:6"), swarm.start("0:6")
        async with swarm.client(compare_chains=2) as client, client.session(WHOLE) as session:
            assert isinstance(session, ComparedSession)
            before = await session.step([CHUNK])
            other.seconds = 1000.0
            with trio.move_on_after(1) as scope:
                await session.step([CHUNK])
            assert scope.cancelled_caught and session.position == 1  # one of them has taken it
            other.seconds = one.seconds
            after = await session.step([CHUNK])
            assert session.position == 2 and len(before) == len(after) == 1 and client.disagreements == []
            await session.step([CHUNK], (0,))
            other.seconds = 1000.0
            with trio.move_on_after(1) as scope:
                await session.step([CHUNK], (0,))
            assert scope.cancelled_caught
            other.seconds = one.seconds
            with pytest.raises(SwarmError, match="cut off while its rows changed places"):
                await session.step([CHUNK])


@pytest.mark.virtual_time
async def test_who_waits_for_a_second_chain_looks_regularly() -> None:
    async with virtual_swarm() as swarm:
        swarm.start("0:6")
        second = swarm.start("0:6", told=False)

        async def come() -> None:
            await trio.sleep(30)
            second.announce()

        async with swarm.client(compare_chains=2) as client, trio.open_nursery() as nursery:
            with pytest.raises(NoChainError, match=r"2 chains .* make 1"):
                async with client.session(WHOLE):
                    pass
            assert trio.current_time() < 1 and swarm.looks >= 1
            nursery.start_soon(come)
            begun, looks = trio.current_time(), swarm.looks
            async with client.session(WHOLE, wait=True) as session:
                assert 30 <= trio.current_time() - begun < 32
                assert 10 < swarm.looks - looks <= 30 / DEADLINES.retry_interval + 3
                assert isinstance(session, ComparedSession) and len(session.routes) == 2


@pytest.mark.virtual_time
async def test_incomparable_servers_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each alone could be, but not one with the other."""
    known = compared_session.tolerance_between

    def between(weights: Weights, devices: Sequence[str], *rest: Any) -> Any:
        return known(weights, devices, *rest) if len(devices) == 1 else None

    async with virtual_swarm() as swarm:
        monkeypatch.setattr(compared_session, "tolerance_between", between)
        for _ in range(2):
            swarm.start("0:6")
        async with swarm.client(compare_chains=2) as client:
            with pytest.raises(SwarmError, match=r"nobody has measured .* compute in float32 on different devices"):
                async with client.session(WHOLE):
                    pass


async def measured(client: SwarmClient, swarm: VirtualSwarm) -> None:
    """Returns when the client knows the round trips to all servers that it has heard of."""
    await client.candidates()

    def known() -> bool:
        return all(client.round_trip(server.peer_id) is not None for server in client.servers())

    await eventually(known, "all round trips are known")


async def all_caches_free(swarm: VirtualSwarm, talking: Talk) -> None:
    """Of all sessions that were opened, only those of the chain stay; silent servers notice nothing."""
    chain = {hop.peer_id for hop in talking.session.route}
    others = [server for server in swarm.servers if server.answers and server.peer_id not in chain]
    await eventually(lambda: not any(server.sessions for server in others), "caches are free")
