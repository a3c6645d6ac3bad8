"""Chains that share no server: how a request runs through several of them, which are right, and where one of them went
wrong. Pure functions.

**How many there are.** As many as servers hold the block that the fewest hold: intervals that cover every point k times
can always be split into k covers. `partition` does it from the first block on: whichever chain reaches least far takes,
of the servers that go on from there, the one that reaches farthest. (The other chains have at most one server each at
that block, so one of k is left.)

**Which are right.** All chains were sent the same, so honest ones answer the same but for rounding. How much that may
be is measured for validators (`node.verification.tolerances`): two chains are two honest servers of that kind. Those of
the exact kind answer the same bytes, and nothing else is looked at where they do; else distances say where they begin
to differ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Literal

import torch

from ....protocols.ids import Span
from ...errors import NoChainError
from ...models.quantisation import QUANTISATIONS, describe_numerics, is_exact, within_tolerance
from ...swarm.routing import ONE_TOKEN, Demand, Hop, RouteCandidate, chain_seconds, cheapest_chain, describe_blocks
from ...verification.judging import Distance, distance, judge_distance
from ...verification.tolerances import CODEC_SLACK, Kind, Tolerance, calibrations, find_tolerance
from ..chunks import from_chunks
from .history import InputHistory

NO_TOLERANCE: Final = Tolerance(0.0, 0.0, 0.0, 0.0)

_CLEAN: Final = 0.1
"""A junction at which chains differ by less than this share of their difference at the end is before the fault: no
block that computes right makes ten times as much of what comes into it wrong."""

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
    candidates: Sequence[RouteCandidate], wanted: Span, count: int, demand: Demand = ONE_TOKEN
) -> list[tuple[Hop, ...]] | None:
    """`count` chains that share no server, None if there are fewer.

    Each is the cheapest of what those before it left, if that leaves enough for those after it.
    """
    usable = [
        candidate
        for candidate in candidates
        if candidate.max_session_length is None or candidate.max_session_length >= demand.max_length
    ]
    if held_least([candidate.span for candidate in usable], wanted) < count:
        return None
    chains: list[tuple[Hop, ...]] = []
    left = usable
    while len(chains) < count:
        chain = cheapest_chain(left, wanted, demand)
        taken = {hop.peer_id for hop in chain}
        left = [candidate for candidate in left if candidate.peer_id not in taken]
        if held_least([candidate.span for candidate in left], wanted) < count - len(chains) - 1:
            return [cheapest_chain(group, wanted, demand) for group in partition(usable, wanted, count)]
        chains.append(chain)
    return chains


@dataclass(frozen=True)
class Weights:
    """What servers compute in. Only the same can be compared: to the bit, or those that round too within tolerance."""

    dtype: str
    quantisation: str

    @property
    def rounded(self) -> Weights:
        """The same, of which no bits are promised."""
        return replace(self, quantisation=within_tolerance(self.quantisation))

    def includes(self, other: Weights) -> bool:
        """Whether chains that are compared in these may have a server that computes in `other`."""
        return self in (other, other.rounded)

    def __str__(self) -> str:
        if self.quantisation in QUANTISATIONS:
            return self.dtype if self.quantisation == "none" else f"{self.quantisation} ({self.dtype})"
        return describe_numerics(self.dtype, self.quantisation)


def plan_chains(
    candidates: Sequence[RouteCandidate],
    weights: Mapping[str, Weights],
    wanted: Span,
    count: int,
    model_name: str,
    demand: Demand = ONE_TOKEN,
) -> tuple[Weights, list[tuple[Hop, ...]]]:
    """The cheapest `count` chains that share no server and compute in the same; `weights` by peer id. Servers of the
    exact kind are mixed with those that round only where neither make enough alone: their bits are not compared then.

    Raises:
        NoChainError: saying how many there are.
    """
    kinds = sorted({weights[candidate.peer_id] for candidate in candidates}, key=str)
    found: list[tuple[float, Weights, list[tuple[Hop, ...]]]] = []
    most, best, thin = 0, "", list(range(wanted.start, wanted.end))
    for kind in kinds:
        same = [candidate for candidate in candidates if weights[candidate.peer_id] == kind]
        chains = disjoint_chains(same, wanted, count, demand)
        if chains is not None:
            seconds = sum(chain_seconds(chain, same, demand) for chain in chains)
            found.append((seconds, kind, chains))
            continue
        spans = [candidate.span for candidate in same]
        if held_least(spans, wanted) >= most:
            most, best = held_least(spans, wanted), f" that compute in {kind}"
            thin = [block for block in range(wanted.start, wanted.end) if sum(block in span for span in spans) < count]
    if found:
        _, kind, chains = min(found, key=lambda choice: choice[0])
        return kind, chains
    mixed = {peer_id: kind.rounded for peer_id, kind in weights.items()}
    if mixed != weights:
        return plan_chains(candidates, mixed, wanted, count, model_name, demand)
    raise NoChainError(
        f"{count} chains of {model_name} that share no server are wanted, and the servers{best} make {most}: "
        f"{describe_blocks(thin)} are held by too few. Start more with `petalnode serve`, or compare fewer chains",
        tuple(thin),
    )


# --- which are right


@dataclass(frozen=True)
class Agreement:
    """`agreed` are the chains that are believed, most of all, beginning with the nearest to all others; empty if there
    is no majority. `error` and `tolerance` are those of the chains farthest apart."""

    agreed: tuple[int, ...]
    dissenting: tuple[int, ...]
    error: float
    tolerance: float


def tolerance_between(
    weights: Weights, devices: Sequence[str], blocks: int, codec: str, activations: str, hops: int
) -> Tolerance | None:
    """How far chains of these `devices` ("" for an unknown one) may be apart after `blocks` blocks; None if nobody has
    measured it.

    Activations may travel in a coarser dtype than the servers compute in, or under a codec. Then they are rounded
    between servers, at other places in each of the chains of up to `hops` servers. Where nothing is, chains of the
    exact kind (docs/exact.md) are not apart at all.
    """
    if is_exact(weights.quantisation) and (hops == 1 or (codec, activations) == ("none", weights.dtype)):
        return NO_TOLERANCE
    known = {kind for device in devices if device for kind in device.split("+")}
    if "" in devices:  # it may be any
        for row in calibrations():
            if (row.dtype, row.quantisation) == (weights.dtype, within_tolerance(weights.quantisation)):
                known |= {row.server_device, row.own_device}
    kinds = [
        Kind(weights.dtype, weights.quantisation, "forward", blocks, codec, one, other)
        for one in known
        for other in known
    ]
    found = [find_tolerance(kind) for kind in kinds]
    present = [tolerance for tolerance in found if tolerance is not None]
    if not present or len(present) < len(found):
        return None
    widest = max(present, key=lambda tolerance: tolerance.faulty_mean)
    rounds = activations if weights.dtype == "float32" and activations != "float32" else codec
    return widest.plus(math.sqrt(hops) * CODEC_SLACK[rounds])


def decide(outputs: Sequence[torch.Tensor], tolerance: Tolerance) -> Agreement:
    """Compares what two or more chains answered, float [rows, tokens, hidden] each."""
    count = len(outputs)
    near = [[one] for one in range(count)]
    error, limit = 0.0, tolerance.faulty_mean
    for one in range(count):
        for other in range(one):
            found = between(outputs[one], outputs[other])
            judged = judge_distance(found, tolerance)
            if judged.result != "faulty":
                near[one].append(other)
                near[other].append(one)
            elif judged.error > error:
                error, limit = judged.error, judged.tolerance
    centre = max(range(count), key=lambda index: (len(near[index]), -index))
    if 2 * len(near[centre]) <= count:
        return Agreement((), tuple(range(count)), error, limit)
    others = sorted(set(near[centre]) - {centre})
    dissenting = tuple(index for index in range(count) if index not in near[centre])
    return Agreement((centre, *others), dissenting, error, limit)


def between(one: torch.Tensor, other: torch.Tensor) -> Distance:
    """How far two answers are from each other, whichever of them is the right one."""
    if one.shape != other.shape:
        return Distance(math.inf, math.inf, 0)
    there, back = distance(one, other), distance(other, one)
    farther = max(there, back, key=lambda found: found.mean)
    return farther if farther.known else Distance(math.inf, math.inf, farther.tokens)


def differing_blocks(chains: Sequence[Mapping[int, torch.Tensor]], wanted: Span, tolerance: Tolerance) -> Span:
    """The blocks in which chains that end in different answers begin to differ.

    Args:
        chains: for each, what left the block before the key, float [rows, tokens, hidden]; at the end of `wanted` too.
    """
    common = sorted(set.intersection(*(set(chain) for chain in chains)) - {wanted.start})
    apart = {
        block: max(between(one[block], other[block]).mean for one in chains for other in chains if one is not other)
        for block in common
    }
    start = wanted.start
    for block in common:
        if apart[block] > min(tolerance.ok_mean, _CLEAN * apart[wanted.end]):
            break
        start = block
    # What is clearly wrong at a junction went wrong before it.
    end = next((block for block in common if block > start and apart[block] > tolerance.faulty_mean), wanted.end)
    return Span(start, end)


@dataclass(frozen=True)
class SpanAnswer:
    """One server's part of the step that is judged: what `history` has, and the hidden states that it claims for it."""

    hop: Hop
    history: InputHistory
    claimed: torch.Tensor


def tail(parts: Sequence[tuple[int, torch.Tensor]], start: int) -> torch.Tensor:
    """The tokens from `start` on of parts [rows, tokens, hidden] that stand at these positions."""
    kept = [part[:, max(0, start - position) :] for position, part in parts if position + part.shape[1] > start]
    return torch.cat(kept, dim=1)


@dataclass
class Settlement:
    """`kept` are the chains that go on, the one that is believed first; none: nobody knows."""

    settled: Settled
    kept: list[int] = field(default_factory=list)
    liars: dict[str, str] = field(default_factory=dict)
    suspects: set[str] = field(default_factory=set)


def _junctions(
    answered: Sequence[Sequence[SpanAnswer]], counts: torch.Tensor
) -> tuple[Span, list[dict[int, torch.Tensor]]]:
    """All blocks; and for each chain what left which block."""
    whole = Span(answered[0][0].hop.span.start, answered[0][-1].hop.span.end)
    return whole, [{one.hop.span.end: one.claimed[counts].unsqueeze(0) for one in chain} for chain in answered]


def questioned(answered: Sequence[Sequence[SpanAnswer]], counts: torch.Tensor, tolerance: Tolerance) -> Span:
    """The blocks in which the chains part. Computes, as `settle`."""
    whole, junctions = _junctions(answered, counts)
    return differing_blocks(junctions, whole, tolerance)


def settle(
    found: Agreement,
    answered: Sequence[Sequence[SpanAnswer]],
    counts: torch.Tensor,
    tolerance: Tolerance,
    found_wrong: Mapping[str, str] | None,
    steady: bool = True,
) -> Settlement:
    """Who is right: by own weights, else by the majority. Computes: off the trio thread.

    Args:
        answered: for each chain, what its servers answered.
        counts: bool [rows, tokens], those that are compared.
        found_wrong: the servers of the `questioned` blocks whose answers own weights prove wrong, and why; None without
            own weights.
        steady: whether honest answers to the same input never part; in a mixture of experts a rounding may choose.
    """
    whole, junctions = _junctions(answered, counts)
    computed, wrong = found_wrong is not None, dict(found_wrong or {})
    guilty = {index for index, chain in enumerate(answered) if any(answer.hop.peer_id in wrong for answer in chain)}
    clean = [index for index in range(len(answered)) if index not in guilty]
    if wrong and clean:
        among = decide([junctions[index][whole.end] for index in clean], tolerance)
        if among.agreed and not among.dissenting:
            return Settlement("weights", clean, wrong)
    if not found.agreed or wrong:
        return Settlement("no", liars=wrong)
    settlement = Settlement("majority", list(found.agreed))
    for index in found.dissenting:
        # Each chain that agrees may have junctions of its own, between which the fault is found.
        narrowed = [differing_blocks([junctions[other], junctions[index]], whole, tolerance) for other in found.agreed]
        blocks = min(narrowed, key=len)
        there = [answer for answer in answered[index] if answer.hop.span.overlaps(blocks)]
        others = [answer for agreed in found.agreed for answer in answered[agreed]]
        # Nobody is banned for what could be computed here and was not found wrong, or for what came into it.
        if len(there) == 1 and steady and not computed and any(_asked_the_same(there[0], other) for other in others):
            settlement.liars[there[0].hop.peer_id] = (
                f"its answer for blocks {blocks} is not what {len(found.agreed)} other chains answered"
            )
        else:
            settlement.suspects.update(answer.hop.peer_id for answer in there)
    return settlement


def _asked_the_same(one: SpanAnswer, other: SpanAnswer) -> bool:
    """Whether two servers were sent the same bits for the same block, in all steps that their answers depend on.

    If not, a server before one of them may have chosen a difference of which blocks that compute right make much.
    """
    if one.hop.span.start != other.hop.span.start or one.history.end != other.history.end:
        return False
    inputs = [
        [(step.position, from_chunks([step.chunk])) for step in answer.history.needed(answer.history.end)]
        for answer in (one, other)
    ]
    return torch.equal(tail(inputs[0], 0), tail(inputs[1], 0))


def span_answers(held: Sequence[tuple[Hop, InputHistory]], before: int, output: torch.Tensor) -> list[SpanAnswer]:
    """What each server of a chain made of the last step, from position `before` on, by its input."""
    left = []
    for _, history in held[1:]:
        inputs = history.needed(history.end)
        left.append(tail([(step.position, from_chunks([step.chunk])) for step in inputs], before))
    return [SpanAnswer(hop, history, claimed) for (hop, history), claimed in zip(held, [*left, output], strict=True)]
