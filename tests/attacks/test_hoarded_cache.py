"""One client may use all of a server's cache and sessions as long as nobody else wants any."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from petalnode.crypto.identity import Identity
from petalnode.node.blocks.span import BlockSpan
from petalnode.node.client.api.causal_lm import AutoDistributedModelForCausalLM
from petalnode.node.models.folder import ModelFolder
from petalnode.node.server import budget as budget_module
from petalnode.node.server.budget import BUDGETS, BudgetFull, BudgetPolicy, Holding, MemoryBudget, to_reclaim
from petalnode.node.server.requests.request import REQUESTS, OpenCount
from petalnode.node.testing.memory_servers import memory_swarm
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.inference import INFERENCE, Refusal
from tests.attacks.one_server import OneServer, one_server
from tests.swarm.raw import RawSession, values
from tests.tiny_models import VOCABULARY, load_whole

pytestmark = pytest.mark.virtual_time

HOG, HONEST, OTHER = Identity.generate(), Identity.generate(), Identity.generate()
ROWS = {"batch": 10, "max_length": 100}
"""1,000 of the 10,000 cache tokens of the server."""


async def opened(server: OneServer, client: Identity, count: int = 1, **terms: Any) -> list[RawSession]:
    sessions = [server.session(client) for _ in range(count)]
    for session in sessions:
        assert (await session.open(**ROWS | terms)).HasField("granted")
    return sessions


async def refused(server: OneServer, client: Identity, **terms: Any) -> bool:
    return (await server.session(client).open(**ROWS | terms)).error.code == wire.ERROR_CACHE_FULL


async def serves(session: RawSession) -> bool:
    """Whether the session goes on; one that was taken says why."""
    frame, _ = await session.step(1, 0, values(1, rows=10))
    assert frame.HasField("reply") or frame.error.code == wire.ERROR_CACHE_FULL
    return frame.HasField("reply")


async def test_one_alone_may_use_everything(blocks: BlockSpan, mock_clock: MockClock) -> None:
    async with one_server(blocks) as server:
        sessions = await opened(server, HOG, 10)
        mock_clock.jump(2 * BUDGETS.long_idle)
        assert await refused(server, HOG)
        assert [await serves(session) for session in sessions] == [True] * 10


async def test_what_is_idle_goes_to_who_waits(blocks: BlockSpan, mock_clock: MockClock) -> None:
    async with one_server(blocks) as server:
        hoarded = await opened(server, HOG, 10)
        mock_clock.jump(BUDGETS.idle / 2)
        assert all([await serves(session) for session in hoarded[1:]])
        mock_clock.jump(BUDGETS.idle / 2 + 1)
        (honest,) = await opened(server, HONEST)
        frame, _ = await hoarded[0].receive()
        assert frame.error.code == wire.ERROR_CACHE_FULL
        assert await serves(honest)
        frame, _ = await hoarded[1].step(2, 1, values(1, rows=10))
        assert frame.HasField("reply")


async def test_who_keeps_all_busy_keeps_half_at_most(blocks: BlockSpan, mock_clock: MockClock) -> None:
    async with one_server(blocks) as server:
        hoarded = await opened(server, HOG, 10)
        assert await refused(server, HONEST)
        steps = int(BUDGETS.long_idle / BUDGETS.idle) + 2
        for step in range(steps):
            mock_clock.jump(BUDGETS.idle - 1)
            for session in hoarded:
                frame, _ = await session.step(step + 1, step, values(1, rows=10))
                assert frame.HasField("reply")
        await opened(server, HONEST, 5)
        assert await refused(server, HONEST)
        taken = 0
        for session in hoarded:
            frame, _ = await session.step(steps + 1, steps, values(1, rows=10))
            taken += frame.error.code == wire.ERROR_CACHE_FULL
        assert taken == 5


async def test_who_is_within_its_share_loses_nothing(blocks: BlockSpan, mock_clock: MockClock) -> None:
    async with one_server(blocks) as server:
        (modest,) = await opened(server, HONEST)
        await opened(server, HOG, 9)
        mock_clock.jump(BUDGETS.long_idle - 1)
        await opened(server, OTHER, 3)
        assert await serves(modest)


async def test_a_request_under_way_is_not_interrupted() -> None:
    budget, taken = MemoryBudget(10), []
    lease = await budget.acquire(10, 0, holder="hog")
    lease.on_taken = lambda: taken.append("hog")
    with lease.in_use(), pytest.raises(BudgetFull):
        await budget.acquire(5, 3 * BUDGETS.long_idle, holder="honest")
    assert not taken
    await budget.acquire(5, 0, holder="honest")
    assert taken == ["hog"] and lease.taken
    lease.release()
    assert budget.free == 5


async def test_who_waits_looks_again_at_what_becomes_idle() -> None:
    budget = MemoryBudget(10)
    for holder in ("one", "two"):
        lease = await budget.acquire(5, 0, holder=holder)
        lease.on_taken = list
    begun = trio.current_time()
    await budget.acquire(3, BUDGETS.long_idle, holder="three")
    assert BUDGETS.idle <= trio.current_time() - begun <= BUDGETS.idle + 10


async def test_one_clients_long_line_does_not_precede_others() -> None:
    budget, granted = MemoryBudget(10), []

    async def ask(holder: str, amount: int) -> None:
        granted.append((holder, await budget.acquire(amount, 1000, holder=holder)))

    first = await budget.acquire(10, 0)
    async with trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(ask, "hog", 3)
            await wait_all_tasks_blocked()
        nursery.start_soon(ask, "honest", 3)
        await wait_all_tasks_blocked()
        first.release()
        await wait_all_tasks_blocked()
        assert sorted(holder for holder, _ in granted) == ["hog", "hog", "honest"]
        nursery.cancel_scope.cancel()


async def test_one_addresss_keys_hold_the_cache_briefly_only() -> None:
    """Each key stays within an equal share of all keys, and none is ever idle."""
    budget, taken = MemoryBudget(100), 0

    def count() -> None:
        nonlocal taken
        taken += 1

    for number in range(20):
        lease = await budget.acquire(5, 0, holder=f"key {number}", address="hog")
        lease.on_taken = count
    begun = trio.current_time()
    with pytest.raises(BudgetFull):
        await budget.acquire(5, BUDGETS.long_idle - 1, holder="key 20", address="hog")
    assert trio.current_time() - begun >= BUDGETS.long_idle - 2 and not taken
    with pytest.raises(BudgetFull):
        await budget.acquire(51, 0, holder="greedy", address="elsewhere")
    await budget.acquire(5, 0, holder="honest", address="elsewhere")
    assert taken == 1


async def test_small_need_does_not_wait_behind_many_keys() -> None:
    budget, granted = MemoryBudget(100), []

    async def ask(holder: str, address: str) -> None:
        granted.append((holder, await budget.acquire(5, 1000, holder=holder, address=address)))

    leases = [await budget.acquire(5, 0, holder=f"key {number}", address="hog") for number in range(20)]
    async with trio.open_nursery() as nursery:
        for number in range(20, 30):
            nursery.start_soon(ask, f"key {number}", "hog")
            await wait_all_tasks_blocked()
        nursery.start_soon(ask, "honest", "elsewhere")
        await wait_all_tasks_blocked()
        leases[0].release()
        await wait_all_tasks_blocked()
        assert [holder for holder, _ in granted] == ["honest"]
        nursery.cancel_scope.cancel()


async def test_small_need_waits_seconds_where_addresses_hold_all() -> None:
    """Each of five addresses opens its sessions anew, all at once, before what it held is half a minute old."""
    budget = MemoryBudget(100)
    for number in range(20):
        lease = await budget.acquire(5, 0, holder=f"key {number}", address=f"address {number % 5}")
        lease.on_taken = list
    begun = trio.current_time()
    await budget.acquire(5, 20, holder="honest", address="elsewhere")
    assert trio.current_time() - begun <= 7


def test_paid_cache_goes_only_when_idle_for_long() -> None:
    held = [
        Holding("payer", 6, BUDGETS.idle + 1, BUDGETS.long_idle, paid=True),
        Holding("hog", 4, 0.0, BUDGETS.long_idle),
    ]
    assert to_reclaim(held, 1, "honest", 10) == []
    held[0] = Holding("payer", 6, BUDGETS.long_idle, BUDGETS.long_idle, paid=True)
    assert to_reclaim(held, 1, "honest", 10) == [0]


HOLDINGS = st.lists(
    st.builds(
        Holding,
        st.sampled_from("abcd"),
        st.integers(1, 30),
        st.one_of(st.none(), st.floats(0, 2 * BUDGETS.long_idle)),
        st.floats(0, 2 * BUDGETS.long_idle),
        st.booleans(),
    ),
    max_size=12,
)


@given(HOLDINGS, st.integers(1, 100))
def test_whatever_is_taken_is_enough_and_not_claimants(held: list[Holding], wanted: int) -> None:
    places = to_reclaim(held, wanted, "a", 100)
    taken = [held[place] for place in places]
    assert len(set(places)) == len(places)
    assert not taken or sum(holding.amount for holding in taken) >= wanted
    for holding in taken:
        assert holding.holder != "a" and holding.idle is not None
        of_holder = sum(other.amount for other in held if other.holder == holding.holder)
        assert holding.idle >= BUDGETS.long_idle or (
            not holding.paid
            and (holding.idle >= BUDGETS.idle or holding.age >= BUDGETS.long_idle)
            and of_holder > 100 // len({*(other.holder for other in held), "a"})
        )


def test_one_clients_sessions_leave_as_many_for_others() -> None:
    count = OpenCount("sessions", 4 * REQUESTS.least_open)

    def open_all(client: str) -> int:
        opened = 0
        with suppress(Refusal):
            while True:
                count.check(client)
                count.add(client)
                opened += 1
        with pytest.raises(Refusal) as refused:
            count.check(client)
        assert refused.value.code == wire.ERROR_BUSY
        return opened

    assert open_all("hog") == 2 * REQUESTS.least_open
    assert open_all("honest") == REQUESTS.least_open


def test_client_that_lost_its_cache_goes_on_elsewhere(folder: ModelFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget_module, "BUDGETS", BudgetPolicy(idle=0.0))

    async def open_raw(network: Any, ready: dict[str, Any]) -> None:
        session = await RawSession.connect(network.node(), ready)
        assert (await session.open(max_length=150)).HasField("granted")

    path: Path = folder.path
    ids = torch.randint(3, VOCABULARY, (1, 8), generator=torch.Generator().manual_seed(0))
    with memory_swarm() as swarm:
        first = swarm.start(path, "0:6", cache_tokens=300)
        assert first.ready
        with (
            swarm.open_model(AutoDistributedModelForCausalLM, path) as model,
            model.inference_session(max_length=200) as session,
        ):
            options = {"pad_token_id": 0, "do_sample": False, "session": session}
            begun = model.generate(ids, max_new_tokens=4, **options)
            second = swarm.start(path, "0:6", cache_tokens=300)
            assert second.ready
            swarm.call(open_raw, swarm.network, first.ready)
            out = model.generate(begun, max_new_tokens=4, **options)
            links = swarm.change(lambda network: network.links_of(second.peer_id))
            assert any(list(link.live(INFERENCE.id)) for link in links)
        whole = load_whole(path)
        assert out.tolist() == whole.generate(ids, max_new_tokens=8, pad_token_id=0, do_sample=False).tolist()
