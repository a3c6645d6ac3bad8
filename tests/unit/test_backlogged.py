"""Who asks for more than it gets waits behind others: whole servings by the decisions of a server, in virtual time."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import product

import pytest

from petalnode.node.server.accounts import Accounts
from petalnode.node.server.turns import (
    BatchCost,
    Waiting,
    next_turn,
    pause,
)

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
        """What was served in so many seconds from now on."""
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
def test_one_session_keeps_half_of_its_rate_beside_five_addresses(kinds: tuple[str, ...], core: float) -> None:
    """At half a processor, it does where that is not taken for others: its rate alone there is the measure."""
    device = Device([honest(), *attackers(kinds)], core)
    device.run(10.0)  # until it is known who is backlogged
    before = device.busy.copy()
    tokens = device.run(20.0)["honest"]
    assert tokens >= 0.5 * Device([honest()], core).run(20.0)["honest"]
    theirs = {address: seconds for address, seconds in (device.busy - before).items() if address != "10.0.0.1"}
    assert len(theirs) == 5 and min(theirs.values()) >= 0.5 * max(theirs.values()), "each has its share of the rest"
    assert sum(theirs.values()) >= 0.15 * 20.0 * core
