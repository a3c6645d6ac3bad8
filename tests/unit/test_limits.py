"""What one peer, and all of them, may take of a node."""

from __future__ import annotations

import pickle
from contextlib import suppress
from dataclasses import replace

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from petalnode.node.network import shares
from petalnode.node.network.shares import AddressShares, ShareCount, TokenBucket, Turns, may_have_more, origin_of_ip
from petalnode.node.network.transport import limits
from petalnode.node.network.transport.limits import NodeLimits, PeerUse
from petalnode.node.network.transport.memory import budgets_of
from petalnode.protocols.framing import StreamTimeout


class Stuck:
    """A connection."""

    dropped = 0

    def held(self, granted: bool | None = None) -> int:
        return 1

    def drop_fullest(self, granted: bool | None = None) -> None:
        self.dropped += 1


@given(st.integers(1, 500), st.integers(0, 20), st.lists(st.integers(0, 9), max_size=600))
def test_there_is_never_more_than_there_may_be(most: int, least: int, asked: list[int]) -> None:
    held = [0] * 10
    for who in asked:
        if may_have_more(held[who], sum(held), most, least):
            held[who] += 1
    assert sum(held) <= most


@given(st.integers(2, 1000))
def test_one_alone_gets_half_and_leaves_the_rest(most: int) -> None:
    own = other = 0
    while may_have_more(own, own, most, 0):
        own += 1
    assert own == (most + 1) // 2
    while may_have_more(other, own + other, most, 0):
        other += 1
    assert other >= (most - own) // 2


def test_least_is_granted_while_there_is_any() -> None:
    assert may_have_more(3, 99, 100, 4)
    assert not may_have_more(4, 99, 100, 4)
    assert not may_have_more(0, 100, 100, 4)


def test_what_is_given_back_may_be_had_again() -> None:
    count = ShareCount(64, 4)
    assert sum(count.add("one") for _ in range(64)) == 32
    assert count.add("other")
    for _ in range(32):
        count.remove("one")
    assert count.total == len(count) == 1  # nobody is remembered who has given everything back
    assert count.add("one")
    keys = ShareCount(64, 4)
    assert sum(keys.add(f"key {number}", "their address") for number in range(64)) == 32


def test_addresses_of_one_origin_of_ip_count_together() -> None:
    assert origin_of_ip("2001:db8::1") == origin_of_ip("2001:db8::ffff:1%eth0") != origin_of_ip("2001:db8:0:1::1")
    assert origin_of_ip("203.0.113.7") == origin_of_ip("::ffff:203.0.113.7") != origin_of_ip("203.0.113.8")
    assert origin_of_ip("nowhere") == "nowhere"


@pytest.mark.virtual_time
async def test_frames_flow_in_by_the_clock() -> None:
    use = PeerUse().frames

    def taken() -> int:
        count = 0
        while use.take():
            count += 1
        return count

    assert taken() == limits.LIMITS.frames_at_once
    assert taken() == 0
    await trio.sleep(0.5)
    assert taken() == pytest.approx(limits.LIMITS.frames_per_second / 2, abs=2)
    await trio.sleep(3600)
    assert taken() == pytest.approx(limits.LIMITS.frames_at_once, abs=2)


@pytest.mark.virtual_time
async def test_a_new_connection_brings_no_new_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "REMEMBERED", 4)
    node = NodeLimits()
    while node.of("flooder").frames.take():
        pass
    for number in range(20):
        node.of(f"peer {number}")
    assert not node.of("flooder").frames.take()
    await trio.sleep(10)
    for number in range(20, 40):
        node.of(f"peer {number}")
    assert node.of("flooder").frames.may_be_forgotten


class Busy:
    """What may not be forgotten yet; counts how often that is asked."""

    asked = 0

    def __init__(self, _: str) -> None:
        pass

    @property
    def may_be_forgotten(self) -> bool:
        Busy.asked += 1
        return False


def test_new_names_cost_the_same_however_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each name of a flood of them had all others looked through, once there were many."""
    monkeypatch.setattr(shares, "REMEMBERED", 16)
    uses = shares.Remembered(Busy)
    for number in range(2000):
        uses.of(f"peer {number}")
    assert len(uses) == 2000 and Busy.asked <= 2 * 2000


class Full:
    """A connection with unread bytes in streams of one size."""

    def __init__(self, node: NodeLimits, peer_id: str, size: int, origin: str = "", granted: bool = True) -> None:
        self.node, self.use, self.size, self.granted = node, node.of(peer_id), size, granted
        self.address = node.of_address(origin or peer_id)
        self.buffered = self.dropped = 0
        node.connected(self.use, self.address, self)

    def fill(self, streams: int) -> None:
        for _ in range(streams):
            self.buffered += self.size
            self.node.hold(self.use, self.address, self.size, self.granted)

    def held(self, granted: bool | None = None) -> int:
        return self.buffered if granted in (None, self.granted) else 0

    def drop_fullest(self, granted: bool | None = None) -> None:
        if self.held(granted):
            self.dropped += 1
            self.buffered -= self.size
            self.node.hold(self.use, self.address, -self.size, self.granted)


async def test_who_holds_the_most_loses_its_fullest_stream() -> None:
    node = NodeLimits()
    honest = Full(node, "honest", 1 << 20)
    honest.fill(8)
    others = [Full(node, f"hostile {number}", 4 << 20) for number in range(8)]
    for other in others:
        other.fill(30)
        assert other.use.unread <= node.budgets.unread_of_peer
        assert node.unread <= node.budgets.unread
    assert honest.dropped == 0 and honest.use.unread == 8 << 20


@pytest.mark.virtual_time
async def test_who_is_connected_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "REMEMBERED", 4)
    node = NodeLimits()
    full = Full(node, "connected", 1)
    idle = node.of_address("idle")
    opener, talker = node.of("opener"), node.of("talker")
    assert opener.opened.take() and talker.frames.take()
    for number in range(4):
        node.of(f"peer {number}")
        node.of_address(f"peer {number}")
    assert node.of_address("connected") is full.address and node.of_address("idle") is not idle
    assert node.of("opener") is opener and node.of("talker") is talker
    await trio.sleep(3600)
    node.of("one more")
    assert node.of("connected") is full.use and node.of("opener") is not opener
    assert not full.use.may_be_forgotten
    full.use.connections.clear()
    assert full.use.may_be_forgotten


async def test_one_peer_leaves_streams_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LIMITS", replace(limits.LIMITS, streams=100, least_streams=3))
    node = NodeLimits()
    one, other = node.of("one"), node.of("other")
    assert sum(node.open_stream(one) for _ in range(100)) == 50 == one.streams == node.streams
    assert sum(node.open_stream(other) for _ in range(100)) == 25
    node.close_stream(one)
    assert (one.streams, node.streams) == (49, 74)


@pytest.mark.parametrize("granted", [True, False])
async def test_addresss_many_keys_lose_before_a_lone_one(granted: bool) -> None:
    """Each of them holds less than the honest one."""
    node = NodeLimits(budgets_of(0))
    honest = Full(node, "honest", 1 << 20, granted=granted)
    honest.fill(4)
    hostile = [Full(node, f"hostile {number}", 1 << 18, "192.0.2.1", granted) for number in range(300)]
    for other in hostile:
        other.fill(2)
    honest.fill(1)  # takes the room of several
    most = node.budgets.unread if granted else node.budgets.ungranted
    assert most - (1 << 18) <= node.unread <= most
    assert honest.dropped == 0 and sum(other.dropped for other in hostile) > 0


async def test_granted_streams_suffer_nothing_for_others() -> None:
    node = NodeLimits(budgets_of(0))
    served = Full(node, "served", 1 << 20)
    served.fill(20)
    refused = Full(node, "refused", 1 << 18, granted=False)
    refused.fill(200)
    assert served.dropped == 0
    assert refused.buffered <= node.budgets.ungranted
    served.fill(20)
    assert refused.buffered + served.buffered == node.unread


async def test_bytes_no_stream_can_return_delay_nothing() -> None:
    node = NodeLimits()
    use, address, most = node.of("gone"), node.of_address("gone"), node.budgets.unread
    node.hold(use, address, most + 1, True)  # its connection has ended: there is nothing to drop
    assert node.unread == use.unread == address.unread[True] == most + 1
    full = Full(node, "here", 1 << 20)
    full.fill(1)  # and what it holds itself is not the most
    assert full.dropped == 0
    assert not address.may_be_forgotten
    node.hold(use, address, -most - 1, True)
    assert node.unread == 1 << 20
    assert address.may_be_forgotten


async def test_bytes_that_are_given_back_cost_nobody_stream() -> None:
    node, stuck = NodeLimits(replace(budgets_of(0), unread_of_peer=100)), Stuck()
    use, address = node.of("peer"), node.of_address("address")
    use.connections.append(stuck)
    node.hold(use, address, 100, True)
    assert stuck.dropped == 0
    node.hold(use, address, 50, True)
    assert stuck.dropped == 1
    node.hold(use, address, -10, True)
    assert stuck.dropped == 1 and use.unread == node.unread == 140


async def test_connection_with_most_unread_bytes_loses_stream() -> None:
    node = NodeLimits()
    first, second = (Full(node, "peer", size) for size in (10, 20))
    first.fill(3)
    second.fill(2)
    first.use.drop_fullest()
    assert (first.dropped, second.dropped) == (0, 1)
    node.of("nobody").drop_fullest()


@pytest.mark.parametrize(
    ("connections", "silence", "window_kept"), [(0, 8, 60), (64, 8, 15), (128, 16, 7.5), (3840, 480, 0.25)]
)
async def test_many_connections_cost_no_more_than_a_few(connections: int, silence: float, window_kept: float) -> None:
    node = NodeLimits()
    held = [Stuck() for _ in range(connections)]
    for number, connection in enumerate(held):
        node.connected(node.of(f"peer {number}"), node.of_address("here"), connection)
    assert (node.silence, node.window_kept) == (silence, window_kept)
    for number, connection in enumerate(held):
        node.lost(node.of(f"peer {number}"), node.of_address("here"), connection)
        node.lost(
            node.of(f"peer {number}"), node.of_address("here"), connection
        )  # one that is lost twice is not counted twice
    assert node.connections == 0


@pytest.mark.virtual_time
async def test_who_leaves_line_lets_nobody_begin_beside_others() -> None:
    """The turn is taken from when it is given, so that leaving with another thing at that moment frees nothing."""
    turns, begun = Turns(contended=1.0), list[str]()
    running = 0

    async def work(holder: str, wait: float = 0.1, leaving: trio.CancelScope | None = None) -> None:
        nonlocal running
        async with turns.turn(holder):
            begun.append(holder)
            running += 1
            assert running == 1
            await trio.sleep(wait)
            running -= 1
        if leaving is not None:
            leaving.cancel()

    async def leave(scope: trio.CancelScope) -> None:
        with scope:
            await work("attacker")

    for _ in range(20):
        begun.clear()
        async with trio.open_nursery() as nursery:
            scope = trio.CancelScope()
            nursery.start_soon(work, "first", 0.1, scope)
            for task, argument in ((work, "attacker"), (leave, scope), (work, "other")):
                await trio.testing.wait_all_tasks_blocked()
                nursery.start_soon(task, argument)
        assert begun == ["first", "attacker", "other"]


def test_timed_counts_are_given_back_afterwards() -> None:
    share = ShareCount(8, 2, seconds=60)
    assert sum(share.add("one", "address", now=number) for number in range(8)) == 4
    share.remove_all("one", "nobody")
    assert share.total == 4 and share.add("other", "address", now=8.0) is False
    assert share.has_room("other", now=60.0) and share.of("one") == 3
    share.remove_all("one")
    assert share.total == 0 and share.add("other", "address", now=8.0)


@pytest.mark.virtual_time
async def test_holders_take_turns_ending_while_others_wait() -> None:
    turns, ended = Turns(at_once=2, contended=3.0), list[tuple[str, float]]()

    async def hold(holder: str, seconds: float) -> None:
        try:
            async with turns.turn(holder):
                await trio.sleep(seconds)
        except StreamTimeout:
            holder += " was too slow"
        ended.append((holder, round(trio.current_time() - begun, 3)))

    async with trio.open_nursery() as nursery:
        await trio.sleep(100)
        begun = trio.current_time()
        for holder, seconds in (("one", 5.0), ("one", 2.0), ("two", 1.0)):
            nursery.start_soon(hold, holder, seconds)
            await trio.testing.wait_all_tasks_blocked()
    # Nobody is in a hurry for what the same holder waits with; that begins when its first thing is done.
    assert ended == [("two", 1.0), ("one", 5.0), ("one", 7.0)]
    ended.clear()
    async with trio.open_nursery() as nursery:
        begun = trio.current_time()
        for holder, seconds in (("slow", 50.0), ("quick", 1.0), ("slow", 50.0), ("quick", 1.0), ("late", 1.0)):
            nursery.start_soon(hold, holder, seconds)
            await trio.testing.wait_all_tasks_blocked()
    assert sorted(ended, key=lambda end: end[::-1]) == [
        ("quick", 1.0),
        ("late", 2.0),
        ("quick", 3.0),
        ("slow was too slow", 3.0),
        ("slow", 53.0),
    ]


def test_oldest_of_timed_counts_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "REMEMBERED", 3)
    share = ShareCount(100, seconds=60)
    for number in range(4):
        share.count(f"{number}", now=number)
    assert [share.of(f"{number}") for number in range(4)] == [0, 1, 1, 1]


@pytest.mark.virtual_time
async def test_first_after_a_pause_takes_a_full_bucket() -> None:
    bucket = TokenBucket(1.0, 10.0)
    await trio.sleep(1000)
    bucket.take_ahead(15)
    assert bucket.delay(0) == 5
    await trio.sleep(5)
    assert bucket.delay(0) == 0 and bucket.delay(1) == 1


def test_nothing_is_kept_of_addresses_that_went() -> None:
    """However many came: strangers have as many as they like."""
    held = AddressShares[int](100)
    for number in range(5000):
        held.hold(number, f"198.51.{number // 250}.{number % 250}", 1 + number % 3)
        while (surplus := held.surplus()) is not None:
            held.remove(surplus)
    assert held.total <= 100 and len(pickle.dumps(vars(held))) < 20_000
    for number in range(5000):
        with suppress(KeyError):
            held.remove(number)
    assert held.total == len(held) == 0 and len(pickle.dumps(vars(held))) < 5_000
