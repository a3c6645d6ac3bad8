"""Which probes a validator makes: pure functions of who serves what, and of random numbers that no server can know.

A probe is what users do: a conversation, or a batch of a fine-tuning, over a whole chain of servers. It tests every
server of the chain, at its blocks in that chain. Random requests of validators to all servers are those of Petals
(NeurIPS 2023, appendix H).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final, Literal

from ...protocols.ids import Span
from ..swarm.routing import Hop

Kind = Literal["chat", "training", "deep-prompt", "lora"]
"""A conversation, or a batch of a training: of weights that stay with the client, such as soft prompts, or of kept
tensors, whose gradients servers return too."""

TRAINING: Final[tuple[Kind, ...]] = ("training", "deep-prompt", "lora")


@dataclass(frozen=True)
class ProbePolicy:
    """What probes look like, so that a server cannot tell them from requests."""

    training_share: float = 0.25  # Of a validator's probes, all kinds of training together
    usual_answer: int = 24
    most_answer: int = 160
    most_rows: int = 4


PROBES: Final = ProbePolicy()


@dataclass(frozen=True)
class ProbedServer:
    """A server and all blocks that it has."""

    peer_id: str
    span: Span


@dataclass(frozen=True)
class Probe:
    """One conversation or batch.

    Attributes:
        route: servers of consecutive blocks; of the whole model if the swarm holds it.
        seed: makes the text, and the tokens that are drawn.
        new_tokens: of the answer at most; in training, tokens of a row.
        temperature: 0 always takes the likeliest token.
        rows: of a batch; a conversation has one.
    """

    kind: Kind
    route: tuple[Hop, ...]
    seed: int
    new_tokens: int
    temperature: float = 0.0
    rows: int = 1

    @property
    def span(self) -> Span:
        return Span(self.route[0].span.start, self.route[-1].span.end)


def chain_through(
    target: ProbedServer, servers: Collection[ProbedServer], num_blocks: int, random: Random
) -> tuple[Hop, ...]:
    """A chain in which `target` runs all of its blocks, between servers that are drawn at random.

    Where nobody has a block, the chain begins behind it or ends before it.
    """
    others = [server for server in sorted(servers, key=_peer_id) if server.peer_id != target.peer_id]
    start = target.span.start
    while start > 0 and any(start - 1 in other.span for other in others):
        start -= 1
    end = target.span.end
    while end < num_blocks and any(end in other.span for other in others):
        end += 1
    before = _filled(others, start, target.span.start, random)
    return (*before, Hop(target.peer_id, target.span), *_filled(others, target.span.end, end, random))


def _peer_id(server: ProbedServer) -> str:
    return server.peer_id


def _filled(servers: Sequence[ProbedServer], start: int, end: int, random: Random) -> list[Hop]:
    hops: list[Hop] = []
    while start < end:
        chosen = random.choice([server for server in servers if start in server.span])
        until = min(end, chosen.span.end)
        hops.append(Hop(chosen.peer_id, Span(start, until)))
        start = until
    return hops


def whole_round(
    servers: Collection[ProbedServer],
    num_blocks: int,
    random: Random,
    *,
    targets: Collection[str] | None = None,
) -> list[Probe]:
    """Probes after which every server has answered for each of its blocks, in conversations and trainings of each kind.

    With `targets` only these servers have to be among them.
    """
    probes: list[Probe] = []
    for kind in ("chat", *TRAINING):
        left = {server.peer_id: server for server in servers if targets is None or server.peer_id in targets}
        while left:
            target = left[random.choice(sorted(left))]
            route = chain_through(target, servers, num_blocks, random)
            probes.append(drawn(kind, route, random))
            for hop in route:
                if hop.peer_id in left and left[hop.peer_id].span == hop.span:
                    del left[hop.peer_id]
    return probes


def next_probe(
    servers: Collection[ProbedServer], seconds_since: Mapping[str, float], num_blocks: int, random: Random
) -> Probe:
    """The next probe. A server is its target with a chance that grows with the seconds since its last verdict. None is
    forgotten, and none is safe for a while. `servers` must not be empty.
    """
    ordered = sorted(servers, key=_peer_id)
    longest = max(seconds_since.values(), default=1.0)
    weights = [1.0 + seconds_since.get(server.peer_id, 2 * longest) for server in ordered]
    (target,) = random.choices(ordered, weights)
    kind: Kind = random.choice(TRAINING) if random.random() < PROBES.training_share else "chat"
    return drawn(kind, chain_through(target, servers, num_blocks, random), random)


def drawn(kind: Kind, route: tuple[Hop, ...], random: Random) -> Probe:
    """A probe of that kind: its text, and a length as users have them (many short, some long)."""
    seed = random.getrandbits(48)
    if kind in TRAINING:
        return Probe(kind, route, seed, random.choice((32, 48, 64, 96)), rows=random.randint(1, PROBES.most_rows))
    length = round(min(random.lognormvariate(math.log(PROBES.usual_answer), 0.7), PROBES.most_answer))
    temperature = random.choice((0.0, 0.0, 0.7, 1.0))
    return Probe(kind, route, seed, max(4, length), temperature)


def waiting_seconds(interval: float, random: Random) -> float:
    """Until the next probe: exponential with mean `interval`, so that the time since the last one says nothing."""
    return random.expovariate(1 / interval)
