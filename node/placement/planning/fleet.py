"""The machines of a plan and the round trips between them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ....protocols.announcement import Announcement
from ....protocols.ids import Span
from ...swarm import cost
from ...swarm.cost import Floats
from .cycle import Problem, shortest_ways


@dataclass(frozen=True)
class Machine:
    """`blocks` is how many it could hold, `block_seconds` what one takes of a decode step; `span` what it holds now."""

    name: str
    blocks: int
    block_seconds: float
    span: Span | None = None


@dataclass(frozen=True)
class Fleet:
    """Machines with `rtts` float [N, N] in seconds between them, NaN where nobody knows.

    `client_rtts` float [N] are from the client; None where the client may sit beside whichever machine comes first.
    `client_seconds` is its own part of a token, embeddings and head.
    """

    machines: tuple[Machine, ...]
    rtts: Floats = field(repr=False)
    client_rtts: Floats | None = field(default=None, repr=False)
    client_seconds: float = 0.0

    def problem(self, num_blocks: int) -> Problem:
        """The machines, and after them the client, if there is one, as the home.

        Pairs without a measurement go through the client, as in a route; without a client they take MAX_SECONDS. The
        way to a machine has its handling of a step in it.
        """
        size = len(self.machines)
        ways = cost.one_way(self.rtts)
        halves = None if self.client_rtts is None else cost.bounded(self.client_rtts) / 2
        if halves is not None:
            ways = np.minimum(ways, halves[:, None] + halves)
            ways = np.block([[ways, halves[:, None]], [halves[None, :], np.zeros((1, 1))]])
        ways[~np.isfinite(ways)] = cost.MAX_SECONDS
        ways[:, :size] += cost.HANDLING_SECONDS
        np.fill_diagonal(ways, 0.0)
        home = [] if halves is None else [0]
        return Problem(
            capacity=np.array([machine.blocks for machine in self.machines] + home, np.intp),
            block_seconds=np.array([*(self.block_seconds()), *home], float),
            way=ways,
            num_blocks=num_blocks,
            home=size if home else None,
        )

    def detours(self, problem: Problem) -> Floats:
        """The ways of this fleet's `problem` by way of others; where all of them are no shorter, ways are a metric.

        Without a client, one beside a machine could pass on what others send to each other, without the handling.
        """
        if self.client_rtts is not None:
            return shortest_ways(problem.way)
        handled = cost.HANDLING_SECONDS * ~np.eye(len(problem), dtype=bool)
        sent = problem.way - handled
        shortest = shortest_ways(sent)
        return np.where(shortest < sent, shortest + handled, problem.way)

    def block_seconds(self) -> Floats:
        """Of each machine, not below what a server is believed."""
        return np.maximum(cost.bounded([machine.block_seconds for machine in self.machines]), cost.MIN_BLOCK_SECONDS)


def fleet_of_servers(servers: Sequence[Announcement], client_rtts: Mapping[str, float]) -> Fleet:
    """Servers of one model as machines that could hold as many blocks as they do now, any of them.

    `client_rtts` are seconds from this client by peer id, of all `servers`; between two servers counts what the one
    that sends announced.
    """
    spans = [len(server.span) for server in servers]
    seconds = cost.block_seconds(
        cost.span_seconds([server.step_seconds for server in servers], [0.0] * len(servers), [0.0] * len(servers)),
        spans,
    )
    machines = [
        Machine(server.public_name or "…" + server.peer_id[-8:], len(server.span), float(block_seconds), server.span)
        for server, block_seconds in zip(servers, seconds, strict=True)
    ]
    rtts = np.array([[one.rtts.get(other.peer_id, math.nan) for other in servers] for one in servers], float)
    np.fill_diagonal(rtts, 0.0)
    return Fleet(tuple(machines), rtts, np.array([client_rtts[server.peer_id] for server in servers]))
