"""The budget under trio's own clock: what would take minutes takes none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import trio
import trio.testing

from petalnode.node.server.budget import BudgetFull, Lease, MemoryBudget

pytestmark = pytest.mark.virtual_time


async def test_what_is_free_is_taken_at_once() -> None:
    budget, begun = MemoryBudget(100), trio.current_time()
    lease = await budget.acquire(60, 0)
    await budget.acquire(40, 0)
    assert budget.free == 0
    lease.release()
    assert budget.free == 60 and trio.current_time() == begun


async def test_what_can_never_fit_is_refused_at_once() -> None:
    begun = trio.current_time()
    with pytest.raises(BudgetFull, match="has 100 in all"):
        await MemoryBudget(100).acquire(101, 60)
    assert trio.current_time() == begun


async def test_who_waits_too_long_is_refused_traceless() -> None:
    budget = MemoryBudget(100)
    await budget.acquire(70, 0)
    begun = trio.current_time()
    with pytest.raises(BudgetFull, match="30 of 100 are free"):
        await budget.acquire(31, 12)
    assert trio.current_time() - begun == pytest.approx(12)
    assert budget.free == 30 and budget.waiting == 0
    await budget.acquire(30, 0)


async def test_first_come_first_served_also_for_large_ones() -> None:
    budget = MemoryBudget(100)
    first = await budget.acquire(90, 0)
    granted: dict[str, Lease] = {}

    async def ask(name: str, tokens: int) -> None:
        granted[name] = await budget.acquire(tokens, 1000)

    async with trio.open_nursery() as nursery:
        for name, tokens in (("large", 95), ("small", 6), ("other", 3)):
            nursery.start_soon(ask, name, tokens)
            await trio.testing.wait_all_tasks_blocked()
        assert [*granted] == [] and budget.waiting == 3  # 10 are free, but the large one was first
        first.release()
        await trio.testing.wait_all_tasks_blocked()
        assert [*granted] == ["large"] and budget.free == 5  # the other one would fit, but the small one was before
        granted["large"].release()
    assert sorted(granted) == ["large", "other", "small"]
    assert budget.free == 100 - 6 - 3


async def test_who_gives_up_makes_way_for_the_next() -> None:
    async def small_after(small: Callable[[], object], nursery: trio.Nursery) -> None:
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(small)  # type: ignore[arg-type]

    budget = MemoryBudget(100)
    await budget.acquire(50, 0)
    granted = trio.Event()

    async def small() -> None:
        await budget.acquire(50, 1000)
        granted.set()

    async with trio.open_nursery() as nursery:
        with trio.move_on_after(5):
            nursery.start_soon(small_after, small, nursery)
            await budget.acquire(80, 1000)
        with trio.fail_after(1):
            await granted.wait()
    assert budget.free == 0 and budget.waiting == 0


async def test_grant_in_instant_of_cancellation_is_given_back() -> None:
    budget = MemoryBudget(10)
    first = await budget.acquire(10, 0)
    second: list[Lease] = []

    async def wait() -> None:
        second.append(await budget.acquire(10, 1000))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        first.release()  # granted, but the task has not run yet
        nursery.cancel_scope.cancel()
    assert budget.free in (0, 10)
    if budget.free == 0:  # the grant was taken before the cancellation was seen
        second[0].release()
    assert budget.free == 10 and budget.waiting == 0


async def test_lent_cache_goes_to_the_needy_oldest_first() -> None:
    budget = MemoryBudget(100)
    taken: list[str] = []
    for name, tokens in (("first", 30), ("second", 20), ("third", 10)):
        (await budget.acquire(tokens, 0)).lend(lambda name=name: taken.append(name))  # type: ignore[misc]
    leases = [await budget.acquire(40, 0)]
    assert taken == [] and budget.free == 0  # what nobody holds is given first
    leases.append(await budget.acquire(35, 0))
    assert taken == ["first", "second"] and budget.free == 15
    for lease in leases:
        lease.release()
    assert budget.free == 90


async def test_lent_cache_is_kept_where_taking_would_fail() -> None:
    budget = MemoryBudget(100)
    await budget.acquire(60, 0)
    loan = await budget.acquire(40, 0)
    loan.lend(lambda: None)
    with pytest.raises(BudgetFull):
        await budget.acquire(41, 3)
    assert not loan.taken and loan.recall()


async def test_what_was_called_back_is_not_taken() -> None:
    budget = MemoryBudget(100)
    loan = await budget.acquire(100, 0)
    loan.lend(lambda: None)
    assert loan.recall() and loan.recall()
    with pytest.raises(BudgetFull):
        await budget.acquire(1, 0)
    loan.lend(lambda: None)
    await budget.acquire(1, 0)
    assert loan.taken and not loan.recall()
    assert budget.free == 99


async def test_who_waits_already_gets_lent_cache_at_once() -> None:
    budget = MemoryBudget(100)
    lease = await budget.acquire(100, 0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(budget.acquire, 30, 1000)
        await trio.testing.wait_all_tasks_blocked()
        lease.lend(lambda: None)
        assert lease.taken
    assert budget.free == 70


async def test_any_order_of_taking_and_leaving_adds_up() -> None:
    budget = MemoryBudget(64)
    peak = 0

    async def client(index: int) -> None:
        nonlocal peak
        tokens = 1 + index * 7 % 64
        await trio.sleep(index * 5 % 17)
        with trio.move_on_after(3 + index % 50):
            try:
                lease = await budget.acquire(tokens, 2 + index % 30)
            except BudgetFull:
                return
            peak = max(peak, 64 - budget.free)
            try:
                await trio.sleep(1 + index % 9)
            finally:
                lease.release()

    async with trio.open_nursery() as nursery:
        for index in range(200):
            nursery.start_soon(client, index)
    assert budget.free == 64 and budget.waiting == 0 and 0 < peak <= 64


async def test_what_is_over_is_given_back_once() -> None:
    budget = MemoryBudget(100)
    released, taken = await budget.acquire(60, 0), await budget.acquire(40, 0)
    taken.lend(lambda: None)
    await budget.acquire(40, 0)
    for lease in (released, released, taken):
        lease.release()
    assert budget.free == 60 and taken.taken and not released.taken
    released.lend(lambda: None)  # there is nothing to be lent any more
    with pytest.raises(BudgetFull, match="60 of 100 are free"):
        await budget.acquire(61, 0)


async def test_bytes_are_told_in_mebibytes() -> None:
    budget = MemoryBudget(5 << 20, "MiB for batches", 1 << 20)
    with pytest.raises(BudgetFull, match="6 MiB for batches are wanted, this server has 5 in all"):
        await budget.acquire(6 << 20, 0)


class _CountedName(str):
    """The name of a peer; counts how often it was looked up."""

    count = 0

    def __hash__(self) -> int:
        _CountedName.count += 1
        return super().__hash__()


async def work_of_a_queue(length: int) -> int:
    """How often names are looked up while peers wait for two looks at what is idle, and give up."""
    budget = MemoryBudget(100_000)
    for number in range(20):
        await budget.acquire(5_000, 0, holder=f"h{number}", address=f"a{number % 3}")
    _CountedName.count = 0

    async def ask(number: int) -> None:
        with pytest.raises(BudgetFull):
            await budget.acquire(1_000, 12, holder=_CountedName(number), address=f"a{number % 3}")

    async with trio.open_nursery() as nursery:
        for number in range(length):
            nursery.start_soon(ask, number)
    return _CountedName.count


async def test_a_long_queue_costs_each_of_it_little() -> None:
    """Each that comes or leaves has all looked at once. Strangers fill the queue with keys that cost nothing."""
    few, many = 40, 160
    work = await work_of_a_queue(few), await work_of_a_queue(many)
    assert work[0] < 10 * few**2
    assert work[1] < 8 * (many / few) * work[0]  # not by the cube of the length
