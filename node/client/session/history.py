"""What a client keeps of a session so that any of its servers may die: the inputs of one junction of the chain.

The client's half of the dual attention caches of Petals (NeurIPS 2023, section 3.2, algorithm 1): replaying these
inputs into another server rebuilds the cache that was lost. Pure data; nothing here waits or computes. Memory is
tokens held x hidden size x bytes per value, for each server of the chain: what is rolled back is forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from ....protocols.ids import Layout
from ....protocols.wire_pb2 import Tensor
from ...swarm.routing import Hop
from ..request import WireTensor

REPLAY_TOKENS: Final = 512
"""Rows times positions of one step of a replay."""
_MERGED_CODECS: Final = frozenset({"none", "float16", "bfloat16"})


@dataclass(frozen=True)
class Input:
    """One step as it was sent: roll back to `position`, let each row continue row `reorder[row]`, then take `chunk`.

    `long_factors`: as `wire.Step` has it. `answered`: SHA-256 of the answer, as the receipt for all of the step has it;
    empty where that says nothing of the server.
    """

    position: int
    reorder: tuple[int, ...]
    chunk: WireTensor
    long_factors: bool = False
    answered: bytes = b""

    @property
    def end(self) -> int:
        return self.position + self.chunk.tokens


@dataclass(frozen=True)
class Signer:
    """A server whose answers have the same bits everywhere (docs/exact.md), and what it computes in."""

    hop: Hop
    dtype: str
    quantisation: str


class InputHistory:
    """The inputs that make a server's present cache, in order.

    Attributes:
        start: tokens of a row that stood in the cache before the first input that is known here.
        signer: the server, if what it signed for these inputs has to be what any other of its kind computes.
    """

    def __init__(self, inputs: Sequence[Input] = (), start: int = 0, signer: Signer | None = None) -> None:
        self.start = start
        self.signer = signer
        self._inputs = list(inputs)

    @property
    def end(self) -> int:
        """Tokens of a row after the last step."""
        return self._inputs[-1].end if self._inputs else 0

    @property
    def nbytes(self) -> int:
        """Bytes of hidden states that are kept."""
        return sum(len(step.chunk.payload) for step in self._inputs)

    def append(self, step: Input) -> None:
        """Adds a step, and forgets what its rollback made void.

        A reorder of a step that is forgotten still moved the tokens before it. It is folded into this one, which is
        exact because choosing rows and cutting them off commute.
        """
        self.start = min(self.start, step.position)
        reorder = step.reorder
        while self._inputs and self._inputs[-1].position >= step.position:
            reorder = _composed(self._inputs.pop().reorder, reorder)
        if self._inputs and self._inputs[-1].end > step.position:
            self._inputs[-1] = part_of(self._inputs[-1], 0, step.position)
        self._inputs.append(replace(step, reorder=reorder))

    @property
    def inputs(self) -> Sequence[Input]:
        return self._inputs

    def needed(self, position: int) -> list[Input]:
        """The steps that rebuild a cache of `position` tokens. A last one that cannot be cut there goes beyond, and the
        next step rolls back. That is not possible everywhere: blocks that keep states go back a few tokens only."""
        if position == 0:
            return []
        # A reorder behind `position` has moved the rows before it too, which no rollback undoes.
        last = [index for index, step in enumerate(self._inputs) if step.position < position or step.reorder]
        steps = self._inputs[: last[-1] + 1] if last else []
        if steps and steps[-1].position < position:
            steps[-1] = part_of(steps[-1], 0, position)
        return steps

    def replay(self, position: int, max_tokens: int, start: int = 0) -> list[Input]:
        """`needed` from the token number `start` on, merged for quickness."""
        steps = self.needed(position)
        if start:
            steps = [part_of(step, start, step.end) for step in steps if step.end > start]
        return merged(steps, max_tokens)


def merged(inputs: Sequence[Input], max_tokens: int) -> list[Input]:
    """The same with neighbouring steps as one, of up to `REPLAY_TOKENS` and `max_tokens` positions."""
    groups: list[list[Input]] = []
    for step in inputs:
        if groups and _may_follow(groups[-1], step, max_tokens):
            groups[-1].append(step)
        else:
            groups.append([step])
    return [_merge(group) for group in groups]


def part_of(step: Input, start: int, end: int) -> Input:
    """The part of a step between two positions; the whole of it if its codec cannot be taken apart."""
    tensor = step.chunk.tensor
    start, end = max(start, step.position), min(end, step.end)
    if tensor.codec not in _MERGED_CODECS or (start, end) == (step.position, step.end):
        return step
    rows, tokens, hidden = tensor.shape
    row_bytes = len(step.chunk.payload) // rows
    token_bytes = row_bytes // tokens
    first, last = token_bytes * (start - step.position), token_bytes * (end - step.position)
    parts = (step.chunk.payload[row + first : row + last] for row in range(0, rows * row_bytes, row_bytes))
    payload = b"".join(parts)
    described = Tensor(shape=[rows, end - start, hidden], dtype=tensor.dtype, codec=tensor.codec, nbytes=len(payload))
    layout = step.chunk.layout.part(rows, tokens, start - step.position, end - step.position)
    return replace(step, position=start, chunk=WireTensor(described, payload, layout), answered=b"")


def outside_groups(inputs: Sequence[Input], position: int) -> int:
    """The last place up to `position` at which no group of tokens that see each other is cut."""
    for step in inputs:
        if step.position < position < step.end:
            cuts = step.chunk.layout.cuts(step.chunk.tensor.shape[0], step.chunk.tokens)
            return step.position + max(cut for cut in cuts if cut <= position - step.position)
    return position


def _composed(first: tuple[int, ...], then: tuple[int, ...]) -> tuple[int, ...]:
    """The reorder that does what `first` and then `then` do."""
    if not first or not then:
        return first or then
    return tuple(first[row] for row in then)


def _may_follow(group: list[Input], step: Input, max_tokens: int) -> bool:
    rows = step.chunk.tensor.shape[0]
    tokens = step.end - group[0].position
    return (
        not step.reorder
        and step.long_factors == group[0].long_factors
        and step.chunk.layout.is_like(group[0].chunk.layout)
        and step.position == group[-1].end
        and step.chunk.tensor.codec in _MERGED_CODECS
        and tokens <= max_tokens
        and tokens * rows <= REPLAY_TOKENS
    )


def _merge(group: list[Input]) -> Input:
    if len(group) == 1:
        return group[0]
    first = group[0].chunk.tensor
    rows = first.shape[0]
    parts = []
    # Row by row: a chunk holds all tokens of its first row, then of its second.
    for row in range(rows):
        for step in group:
            size = len(step.chunk.payload) // rows
            parts.append(step.chunk.payload[row * size : (row + 1) * size])
    payload = b"".join(parts)
    tokens = sum(step.chunk.tokens for step in group)
    tensor = Tensor(shape=[rows, tokens, first.shape[2]], dtype=first.dtype, codec=first.codec, nbytes=len(payload))
    layout = Layout.joined([(step.chunk.layout, step.chunk.tokens) for step in group], rows)
    return replace(group[0], chunk=WireTensor(tensor, payload, layout), answered=b"")
