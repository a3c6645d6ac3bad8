"""Who asks for more than it gets waits behind others: whole servings by the decisions of a server, in virtual time."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import product

import pytest

from petalnode.node.server.accounts import Accounts
from petalnode.node.server.turns import PREFILL_CHUNK, TURNS, BatchCost, Shares, Turn, Waiting, next_turn, pause

COST = BatchCost(0.004, 0.001)
TOKEN = 0.001
"""Seconds of a token of a prompt, in a chunk that takes as long as a decode step besides."""
BLOCK = 0.02
"""Of a block of a batch."""
CALL = 0.005
KINDS = ("sessions", "prompts", "passes", "calls")


@dataclass(eq=False)
class Asker:
    """Somebody who always asks for the next thing of its `kind`, `think` seconds after the one before."""

    peer: str
    address: str
    kind: str
    think: float = 0.0
    coming: float = 0.0
    done: int = 0


class Device:
    """A server's device that serves `askers`; `core` is the part of a processor that it has while it computes. `served`
    counts decode steps, tokens of prompts, blocks and calls of each peer."""

    def __init__(self, askers: list[Asker], core: float = 1.0) -> None:
        self.now = 0.0
        self.served = Counter[str]()
        self.busy = Counter[str]()
        self._askers, self._core = askers, core
        self._accounts = Accounts()
        self._part = 0.0, 0.0

    def run(self, seconds: float) -> Counter[str]:
        """What was served in the next seconds."""
        before, until = self.served.copy(), self.now + seconds
        while self.now < until:
            there = [asker for asker in self._askers if asker.coming <= self.now]
            self._note(there)
            wait = self._turn(there)
            self._note([asker for asker in there if asker.coming <= self.now])
            if wait:
                later = [asker.coming for asker in self._askers if asker.coming > self.now]
                self.now = min([self.now + max(wait, 1e-4), *later])
        return self.served - before

    def _note(self, there: list[Asker]) -> None:
        self._accounts.note_waiting({(asker.address, asker.peer) for asker in there}, self.now)

    def _turn(self, there: list[Asker]) -> float:
        """As the compute thread has it: one call, and then steps, or else a part of a pass."""
        kinds = {kind: [asker for asker in there if asker.kind == kind] for kind in KINDS}
        called = self._other(kinds["calls"], CALL)
        if steps := kinds["sessions"] + kinds["prompts"]:
            return 0.0 if self._steps(steps) or called else max(self._accounts.rest(self.now), 1e-4)
        waited = pause(self._part[0], self.now - self._part[1]) if self._generating() else 0.0
        if kinds["passes"] and not waited and self._other(kinds["passes"], BLOCK):
            self._part = BLOCK / self._core, self.now
            return 0.0
        return 0.0 if called else waited or self._accounts.rest(self.now) or 1.0

    def _generating(self) -> bool:
        return bool(self._accounts.shares([], self.now).generating)

    def _works(self, seconds: float) -> float:
        self.now += seconds / self._core
        return seconds / self._core

    def _other(self, askers: list[Asker], seconds: float) -> bool:
        clients = [(asker.address, asker.peer) for asker in askers]
        place = self._accounts.next_of(clients, self.now) if askers else None
        if place is None:
            return False
        took = self._works(seconds)
        self._accounts.note_other(clients[place], took, self.now, self._core)
        self._served(askers[place], 1, seconds)
        return True

    def _steps(self, askers: list[Asker]) -> bool:
        waiting = [
            Waiting(1, 1 if asker.kind == "sessions" else 1 << 20, peer=asker.peer, address=asker.address)
            for asker in askers
        ]
        turn = next_turn(waiting, 0, self._accounts.shares(waiting, self.now))
        if turn.decode:
            rows = Counter(waiting[index].peer for index in turn.decode)
            took = self._works(COST.seconds(rows.total()))
            self._accounts.note_decode(rows, took, self.now, self._core)
            for index in turn.decode:
                self._served(askers[index], 1, took * self._core / rows.total())
            left = [asker for asker in askers if asker.coming <= self.now]
            self._accounts.note_left({(a.address, a.peer) for a in askers if a not in left}, self.now)
        if turn.prefill is not None:
            seconds = COST.seconds(1) + TOKEN * turn.chunk
            took = self._works(seconds)
            self._accounts.note_prefill(waiting[turn.prefill].peer, took, self.now, self._core)
            self._served(askers[turn.prefill], turn.chunk, seconds)
        return bool(turn.decode) or turn.prefill is not None

    def _served(self, asker: Asker, amount: int, seconds: float) -> None:
        self.served[asker.peer] += amount
        self.busy[asker.address] += seconds
        asker.coming = self.now + asker.think


def honest(think: float = 0.03) -> Asker:
    """One session, whose tokens go through other servers and a network in between."""
    return Asker("honest", "10.0.0.1", "sessions", think)


def attackers(kinds: tuple[str, ...]) -> list[Asker]:
    """Twenty keys at five addresses; each does one of `kinds`, by turns."""
    return [Asker(f"key {n}", f"127.0.0.{2 + n % 5}", kinds[n // 5 % len(kinds)]) for n in range(20)]


def alone(think: float = 0.03) -> int:
    return Device([honest(think)]).run(20.0)["honest"]


MIXTURES = [
    ("sessions",),
    ("prompts",),
    ("passes",),
    ("calls",),
    *product(("sessions", "prompts"), ("passes", "calls")),
    KINDS,
]


@pytest.mark.parametrize("kinds", MIXTURES, ids="+".join)
@pytest.mark.parametrize("core", [1.0, 0.5], ids=["own processor", "half of a processor"])
def test_one_session_keeps_half_beside_five_addresses(kinds: tuple[str, ...], core: float) -> None:
    """At half a processor, it does where that is not taken for others: its rate alone there is the measure."""
    device = Device([honest(), *attackers(kinds)], core)
    device.run(10.0)  # until it is known who is backlogged
    before = device.busy.copy()
    tokens = device.run(20.0)["honest"]
    assert tokens >= 0.5 * Device([honest()], core).run(20.0)["honest"]
    theirs = {address: seconds for address, seconds in (device.busy - before).items() if address != "10.0.0.1"}
    assert len(theirs) == 5 and min(theirs.values()) >= 0.5 * max(theirs.values()), "each has its share of the rest"
    assert sum(theirs.values()) >= 0.12 * 20.0 * core


def test_newcomer_is_not_behind_and_its_prompt_waits() -> None:
    """Nor does the session that was there before stop for it."""
    newcomer = Asker("new", "10.0.0.2", "prompts", coming=10.0)
    device = Device([honest(), newcomer, *attackers(KINDS)])
    device.run(10.0)
    served = device.run(1.5)
    assert served["new"] >= 5 * TURNS.chunk_beside and served["honest"] >= 5
    before = device.served.copy()
    device.run(20.0)  # by now it asks for as much as the others
    after = device.served - before
    prompts = [asker.peer for asker in attackers(KINDS) if asker.kind == "prompts"]
    assert after["new"] >= 0.9 * max(after[peer] for peer in prompts)


def test_two_who_always_ask_are_served_as_alone() -> None:
    """By batches and chunks as long as ever, and without rests."""
    both = [Asker(name, name, kind) for name in ("one", "other") for kind in ("prompts",)]
    device = Device(both)
    device.run(10.0)
    begun, busy = device.now, sum(device.busy.values())
    served = device.run(10.0)
    assert sum(device.busy.values()) - busy == pytest.approx(device.now - begun)
    assert served["one"] == pytest.approx(served["other"], rel=0.05)
    assert served.total() >= 0.9 * PREFILL_CHUNK / (COST.seconds(1) + TOKEN * PREFILL_CHUNK) * 10.0


def shares(**fields: object) -> Shares:
    addresses = {"light": "home", "heavy": "away", "other": "away"}
    return Shares(COST, addresses=addresses, behind={"away"}, generating={"light": 1}, **fields)  # type: ignore[arg-type]


LIGHT = Waiting(1, 1, peer="light", address="home")
HEAVY = [Waiting(1, 1, peer=peer, address="away") for peer in ("heavy", "other") for _ in range(8)]


def test_batch_is_hardly_longer_for_those_behind() -> None:
    """The one row takes 5 ms, two 6, and three more than 1.25 times as long."""
    turn = next_turn([*HEAVY, LIGHT], 0, shares(used={"light": 9.0}, used_of={"home": 9.0}))
    assert len(HEAVY) in turn.decode and len(turn.decode) == 2


def test_waiters_batch_is_short_for_who_may_come() -> None:
    assert len(next_turn(HEAVY, 0, shares()).decode) == 6  # 10 ms, twice what the row of the other takes
    assert next_turn([Waiting(16, 1, peer="heavy", address="away")], 0, shares()).decode == (0,)
    assert len(next_turn(HEAVY, 0, Shares(COST, addresses={"heavy": "away", "other": "away"})).decode) == 16


def test_nothing_of_those_who_rest_is_computed() -> None:
    prompts = [Waiting(1, 900, peer="heavy", address="away"), Waiting(1, 900, peer="light", address="home")]
    assert next_turn([*HEAVY, *prompts[:1]], 0, shares(resting=True)) == Turn((), None)
    assert next_turn([*HEAVY, *prompts], 0, shares(resting=True)).prefill == len(HEAVY) + 1
    assert next_turn([*HEAVY, LIGHT], 0, shares(resting=True)).decode == (len(HEAVY),)


def test_waiters_chunks_are_short_and_come_last() -> None:
    prompts = [Waiting(2, 900, peer="heavy", address="away"), Waiting(1, 900, peer="light", address="home")]
    used = {"light": 9.0, "heavy": 1.0}
    assert next_turn(prompts, 0, shares(used=used, used_of={"home": 9.0, "away": 1.0})).prefill == 1
    assert next_turn(prompts[:1], 0, shares()) == Turn((), 0, TURNS.chunk_behind // 2)


def accounts_of(*backlogged: str, generating: str = "light") -> Accounts:
    accounts = Accounts()
    accounts.note_waiting((), 0.0)
    accounts.note_decode({generating: 1}, 0.005, 0.0)
    for address in backlogged:
        accounts.note_given_up((address, address))
    return accounts


def test_who_leaves_its_work_is_behind_for_while() -> None:
    accounts = accounts_of("heavy")
    assert accounts.behind(0.0) == {"heavy"}
    accounts.note_waiting((), 0.4)
    assert accounts.behind(0.4) == {"heavy"}
    accounts.note_waiting((), 0.6)
    assert not accounts.behind(0.6)


def test_nobody_is_behind_where_all_or_none_are() -> None:
    assert not accounts_of("heavy", "light").behind(0.0)
    assert not accounts_of("heavy").behind(2.0), "the other has had no step for a while"
    accounts = accounts_of("heavy")
    accounts.note_waiting([("home", "prompt")], 0.1)
    accounts.note_given_up(("heavy", "heavy"))
    assert accounts.behind(2.0) == {"heavy"}, "the other waits"
    assert not accounts.rest(2.0)


@pytest.mark.parametrize(("core", "times"), [(1.0, 1.0), (0.9, 1.0), (0.5, 5.0)])
def test_rests_are_as_long_as_contended_work(core: float, times: float) -> None:
    accounts = accounts_of("heavy")
    accounts.note_other(("heavy", "heavy"), 0.1, 0.1, core)
    assert accounts.rest(0.1) == pytest.approx(0.1 * times)
    assert accounts.next_of([("heavy", "heavy")], 0.15) is None
    assert accounts.next_of([("heavy", "heavy"), ("light", "light")], 0.15) == 1
    assert accounts.next_of([("heavy", "heavy")], 0.1 + 0.1 * times) == 0
    accounts.note_prefill("light", 0.1, 0.7, core)
    assert not accounts.rest(0.7), "of others it is no matter"


def test_waiters_batch_rests_only_on_contended_processors() -> None:
    for core, rest in ((1.0, 0.0), (0.5, 0.05)):
        accounts = accounts_of("heavy")
        for _ in range(20):
            accounts.note_decode({"light": 1, "heavy": 1}, 0.01, 0.0, core)
        assert not accounts.rest(0.0), "who is not behind was in these"
        accounts.note_decode({"heavy": 1}, 0.01, 0.0, core)
        assert accounts.rest(0.0) == pytest.approx(rest)


def test_steps_passes_and_calls_count_by_processor_time() -> None:
    accounts = Accounts()
    clients = [("home", "one"), ("away", "other")]
    steps = [Waiting(1, 1, peer="other", address="away")]
    accounts.note_waiting(clients, 0.0)
    accounts.shares(steps, 0.0)
    accounts.note_other(clients[0], 1.0, 1.0, 0.5)
    accounts.note_prefill("other", 0.2, 2.0)
    assert accounts.next_of(clients, 2.0) == 1
    accounts.note_prefill("other", 0.4, 2.0)
    assert accounts.next_of(clients, 2.0) == 0
    assert accounts.shares(steps, 2.0).used_of["away"] == pytest.approx(0.6)
