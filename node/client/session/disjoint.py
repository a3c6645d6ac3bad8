"""Chains that share no server, for a request that is run through several and compared. Pure; no network.

**How many there are.** As many as servers hold the block that the fewest hold: intervals that cover every point k times
can always be split into k covers. `partition` does it from the first block on: whichever chain reaches least far takes,
of the servers that go on from there, the one that reaches farthest. (The other chains have at most one server each at
that block, so one of k is left.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ....protocols.ids import Span
from ...errors import NoChainError
from ...swarm.routing import Hop, RouteCandidate, chain_seconds, cheapest_chain, describe_blocks

Settled = Literal["majority", "weights", "no"]


@dataclass(frozen=True)
class Disagreement:
    """Chains that answered one step differently.

    Attributes:
        position: tokens of a row before the step.
        chains: how many were compared.
        left: how many are after it, those included that took the place of others; 1 compares nothing.
        settled: who decided: most of the chains, or this client's own weights; "no": the request was given up.
        liars: servers that are at fault, and are banned here.
        suspects: servers of which one or more are at fault.
        error, tolerance: how far apart the chains were, and how far honest ones are at most.
    """

    position: int
    chains: int
    left: int
    settled: Settled
    liars: tuple[str, ...]
    suspects: tuple[str, ...]
    error: float
    tolerance: float

    def fields(self) -> dict[str, Any]:
        return {**asdict(self), "liars": list(self.liars), "suspects": list(self.suspects)}

    def __str__(self) -> str:
        text = f"{self.chains} chains disagree at token {self.position}, by {self.error:.2g} "
        text += f"(honest ones by {self.tolerance:.2g} at most)"
        if self.settled == "no":
            return f"{text}; which is right cannot be told"
        text += "; most agree, and are believed" if self.settled == "majority" else "; own weights settled it"
        if self.liars:
            text += f". Wrong, and banned here: {', '.join(self.liars)}"
        if self.suspects:
            text += f". Wrong is one of: {', '.join(self.suspects)}"
        if self.left < 2:
            text += ". No second chain is left: what follows is not compared until there is one"
        return text


def held_least(spans: Sequence[Span], wanted: Span) -> int:
    """How many chains for `wanted` without a common server these spans make."""
    return min(sum(block in span for span in spans) for block in range(wanted.start, wanted.end))


def partition(candidates: Sequence[RouteCandidate], wanted: Span, count: int) -> list[list[RouteCandidate]]:
    """`count` groups that each cover `wanted`, as the module's docstring says; `held_least` must be as many."""
    left = sorted(candidates, key=lambda candidate: (-candidate.span.end, candidate.peer_id))
    groups: list[list[RouteCandidate]] = [[] for _ in range(count)]
    reached = [wanted.start] * count
    while min(reached) < wanted.end:
        chain = reached.index(min(reached))
        taken = next(candidate for candidate in left if candidate.span.start <= reached[chain])
        left.remove(taken)
        groups[chain].append(taken)
        reached[chain] = taken.span.end
    return groups


def disjoint_chains(
    candidates: Sequence[RouteCandidate], wanted: Span, count: int, **demand: Any
) -> list[tuple[Hop, ...]] | None:
    """`count` chains that share no server, None if there are not so many; `demand` as for `cheapest_chain`.

    Each is the cheapest of what those before it left, as long as that leaves enough for those after it.
    """
    longest = demand.get("max_length", 0)
    usable = [
        candidate
        for candidate in candidates
        if candidate.max_session_length is None or candidate.max_session_length >= longest
    ]
    if held_least([candidate.span for candidate in usable], wanted) < count:
        return None
    chains: list[tuple[Hop, ...]] = []
    left = usable
    while len(chains) < count:
        chain = cheapest_chain(left, wanted, **demand)
        taken = {hop.peer_id for hop in chain}
        left = [candidate for candidate in left if candidate.peer_id not in taken]
        if held_least([candidate.span for candidate in left], wanted) < count - len(chains) - 1:
            return [cheapest_chain(group, wanted, **demand) for group in partition(usable, wanted, count)]
        chains.append(chain)
    return chains


@dataclass(frozen=True)
class Weights:
    """What servers compute in. Only the same can be compared."""

    dtype: str
    quantisation: str

    def __str__(self) -> str:
        return self.dtype if self.quantisation == "none" else f"{self.quantisation} ({self.dtype})"


def plan_chains(
    candidates: Sequence[RouteCandidate],
    weights: Mapping[str, Weights],
    wanted: Span,
    count: int,
    model_name: str,
    **demand: Any,
) -> tuple[Weights, list[tuple[Hop, ...]]]:
    """The cheapest `count` chains that share no server and compute in the same; `weights` by peer id.

    Raises:
        NoChainError: saying how many there are.
    """
    kinds = sorted({weights[candidate.peer_id] for candidate in candidates}, key=str)
    found: list[tuple[float, Weights, list[tuple[Hop, ...]]]] = []
    most, best, thin = 0, "", list(range(wanted.start, wanted.end))
    for kind in kinds:
        same = [candidate for candidate in candidates if weights[candidate.peer_id] == kind]
        chains = disjoint_chains(same, wanted, count, **demand)
        if chains is not None:
            timing = {name: value for name, value in demand.items() if name != "max_length"}
            seconds = sum(chain_seconds(chain, same, **timing) for chain in chains)
            found.append((seconds, kind, chains))
            continue
        spans = [candidate.span for candidate in same]
        if held_least(spans, wanted) >= most:
            most, best = held_least(spans, wanted), f" that compute in {kind}"
            thin = [block for block in range(wanted.start, wanted.end) if sum(block in span for span in spans) < count]
    if found:
        _, kind, chains = min(found, key=lambda choice: choice[0])
        return kind, chains
    raise NoChainError(
        f"{count} chains of {model_name} that share no server are wanted, and the servers{best} make {most}: "
        f"{describe_blocks(thin)} are held by too few. Start more with `petalnode serve`, or compare fewer chains",
        tuple(thin),
    )
