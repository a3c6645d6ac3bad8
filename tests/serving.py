"""A server's turns in virtual time: batches by the decisions of `turns.py` and `gathering.py`, and clients that ask for
the next token some time after the one before."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from petalnode.node.server.accounts import Accounts
from petalnode.node.server.gathering import Gathering
from petalnode.node.server.turns import BatchCost, Shares, Turn, Waiting, next_turn

MEMORY_BOUND = BatchCost(0.0235, 0.0029, {1: 0.026, 2: 0.028, 4: 0.032, 8: 0.043, 16: 0.072})
"""Four blocks of Llama, hidden size 2048, float32, by the compiled kernels; seconds."""


@dataclass(eq=False)
class Session:
    """A session of `rows` rows of `peer`. `think`: seconds until its next step, by how many it has had. `coming`: when
    its next step is here."""

    peer: str
    rows: int
    think: Callable[[int], float]
    coming: float = 0.0
    latencies: list[float] = field(default_factory=list)


class Serving:
    """A server of cost `cost`, and peers with sessions of some rows that ask for the next token a second after the
    one before, or as many as `think` says, or when a function of how many they have had says. Each has an
    address of its own, if `addresses` has none.

    Attributes:
        sizes: the rows of each batch.
        idle: seconds for which steps waited and the device did nothing.
    """

    def __init__(
        self,
        cost: BatchCost,
        peers: Mapping[str, list[int]],
        think: Mapping[str, float | Callable[[int], float]] | None = None,
        *,
        gathers: bool = True,
        addresses: Mapping[str, str] | None = None,
    ) -> None:
        self.now = self.idle = 0.0
        self.tokens = dict.fromkeys(peers, 0)
        self.longest = dict.fromkeys(peers, 0.0)
        self.sizes: list[int] = []
        self.sessions = []
        for peer, sessions in peers.items():
            told = (think or {}).get(peer, 1.0)
            thinks = told if callable(told) else (lambda count, seconds=told: seconds)  # type: ignore[misc]
            self.sessions += [Session(peer, rows, thinks) for rows in sessions]
        self._cost, self._gathers, self._addresses = cost, gathers, addresses or {}
        self._accounts, self._gathering = Accounts(), Gathering()
        self._coming = list(self.sessions)
        self._waiting: list[Session] = []

    def run(self, seconds: float) -> Serving:
        while self.now < seconds:
            self._coming.sort(key=lambda session: session.coming)
            while self._coming and self._coming[0].coming <= self.now:
                session = self._coming.pop(0)
                self._gathering.came(session, session.coming)
                self._waiting.append(session)
            if self._waiting:
                self._turn()
            else:
                self.now = self._coming[0].coming
        return self

    def latencies(self, peer: str) -> list[float]:
        return sorted(seconds for session in self.sessions if session.peer == peer for seconds in session.latencies)

    def _turn(self) -> None:
        if left := self._gathering.left(len(self._waiting), self.now):
            return self._wait(left)
        steps = [
            Waiting(session.rows, 1, peer=session.peer, address=self._addresses.get(session.peer, ""))
            for session in self._waiting
        ]
        shares = self._accounts.shares(steps, self.now)
        turn = next_turn(steps, 0, shares)
        assert turn.decode, "a device must not be idle while somebody waits"
        wait = self._gathering.time(steps, self._waiting, turn, shares, self.now) if self._gathers else 0.0
        if wait > 0:
            return self._wait(wait)
        served = [self._waiting[index] for index in turn.decode]
        self._waiting = [session for session in self._waiting if session not in served]
        self.sizes.append(sum(session.rows for session in served))
        seconds = self._cost.seconds(self.sizes[-1])
        self.now += seconds
        rows_of: dict[str, int] = {}
        for session in served:
            peer, rows = session.peer, session.rows
            rows_of[peer] = rows_of.get(peer, 0) + rows
            self.tokens[peer] += rows
            session.latencies.append(self.now - session.coming)
            self.longest[peer] = max(self.longest[peer], session.latencies[-1])
            session.coming = self.now + session.think(len(session.latencies))
            self._coming.append(session)
            self._gathering.answered(session, peer, rows, self.now)
        self._accounts.note_decode(rows_of, seconds, self.now)
        self._gathering.note_decode(rows_of, seconds, self.now)

    def _wait(self, seconds: float) -> None:
        until = min([self.now + seconds, *(session.coming for session in self._coming)])
        self.idle += until - self.now
        self.now = until


class Times:
    """A serving's `Gathering`, asked by itself: "here" has steps all the time, "other" comes back as told."""

    def __init__(self) -> None:
        self.gathering, self.now = Gathering(), 0.0

    def batch(self, *names: str, seconds: float = 0.03) -> None:
        self.now += seconds
        self.gathering.note_decode(dict.fromkeys(names, 1), seconds, self.now)
        for name in names:
            self.gathering.answered(name, name, 1, self.now)

    def back(self, name: str, seconds: float) -> None:
        self.now += seconds
        self.gathering.came(name, self.now)

    def wait(self) -> float:
        waiting = [Waiting(1, 1, peer="here")]
        return self.gathering.time(waiting, ["here"], Turn((0,), None), Shares(MEMORY_BOUND), self.now)

    def rounds(self, count: int, seconds: float = 0.002) -> Times:
        for _ in range(count):
            self.batch("here", "other")
            self.back("here", 0.0)
            self.back("other", seconds)
        return self
