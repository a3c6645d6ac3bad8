"""What a session may begin with: the inputs of earlier sessions of this client, of which servers may keep the results.

The inputs of every junction are kept, as for recovery (`history`): from them follow the names by which each server
knows what it keeps. With them any server can be replaced later. So nothing is remembered of servers but who has had
what.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Protocol
from weakref import WeakSet

import numpy as np
import trio

from ....protocols.ids import AXES
from ....protocols.prefix import BLOCK_TOKENS, MAX_BLOCKS, PREFIX_CODECS, PrefixNames, PrefixTerms, token_digests
from ...swarm.routing import Hop
from ..request import WireTensor
from .answers import SessionSpec
from .history import Input, merged, outside_groups, part_of

REMEMBERED_BYTES: Final = 64 << 20
"""Of hidden states of sessions that have ended; those of 1,024 tokens are 2.4 MB for each server of SmolLM2-135M."""
REMEMBERED: Final = 32


@dataclass(frozen=True)
class Beginning:
    """What a session may begin with.

    Attributes:
        inputs: the steps that entered a block, from the first token on, by that block; of some blocks more than others.
        tokens: of a row, at most.
        route: of the session that they are from, whose servers have had the first `shared` tokens.
    """

    inputs: Mapping[int, Sequence[Input]]
    tokens: int
    route: tuple[Hop, ...] = ()
    shared: int = 0

    def names(self, spec: SessionSpec, hop: Hop) -> list[bytes]:
        """By which the server of `hop` knows what it may keep; none where nothing is known that entered its blocks.
        Hashes all of it: not for the trio thread."""
        inputs = self.part(hop.span.start, self.tokens)
        if not inputs:
            return []
        root = PrefixTerms(
            model_version=spec.model_version,
            span=hop.span,
            batch=spec.batch,
            left_padding=spec.left_padding,
            codec=spec.codec,
            dtype=spec.dtype,
            adapter=spec.adapter_hash,
            salt=spec.salt_at(hop.peer_id),
        ).root()
        named = PrefixNames(root)
        for step in inputs:
            chunk, long = step.chunk, step.long_factors
            named.append(token_digests(chunk.payload, spec.batch, chunk.tokens, long_factors=long, layout=chunk.layout))
        return named.names[:MAX_BLOCKS]

    @property
    def nbytes(self) -> int:
        """Of hidden states."""
        return sum(len(step.chunk.payload) for steps in self.inputs.values() for step in steps)

    def joined(self) -> Beginning:
        """The same in few objects: one of a token takes several times what its hidden states do. Copies them: not for
        the trio thread."""
        inputs = {block: merged(self.part(block, self.tokens), self.tokens) for block in self.inputs}
        return replace(self, inputs=inputs)

    def part(self, block: int, tokens: int) -> list[Input]:
        """The steps that entered `block`, up to `tokens` tokens; none if they are not known."""
        inputs = self.inputs.get(block, ())
        return [part_of(step, 0, tokens) for step in inputs if step.position < tokens]


def beginning_of(inputs: Mapping[int, Sequence[Input]], tokens: int, route: tuple[Hop, ...] = ()) -> Beginning:
    """As far as tokens can be told apart in `inputs`, and rows have stayed in their places."""
    for steps in inputs.values():
        end = 0
        for step in steps:
            if step.position != end or step.reorder or step.chunk.tensor.codec not in PREFIX_CODECS:
                break
            end = step.end
        tokens = min(tokens, end)
    return Beginning(inputs, tokens, route, tokens)


class SharedSession(Protocol):
    """A session that knows what entered its servers."""

    @property
    def spec(self) -> SessionSpec: ...

    def beginning(self) -> Beginning: ...

    def junctions(self) -> list[WireTensor]: ...


@dataclass(frozen=True)
class _Ended:
    spec: SessionSpec
    beginning: Beginning


class PrefixMemory:
    """The sessions of one client whose beginnings others may share, open ones and some that have ended."""

    def __init__(self, room: int = REMEMBERED_BYTES) -> None:
        self._room = room
        self._open: WeakSet[SharedSession] = WeakSet()
        self._ended: deque[_Ended] = deque(maxlen=REMEMBERED)

    @property
    def nbytes(self) -> int:
        """Of hidden states that are kept for no open session."""
        return sum(ended.beginning.nbytes for ended in self._ended)

    def opened(self, session: SharedSession) -> None:
        self._open.add(session)

    async def ended(self, session: SharedSession) -> None:
        """Remembers the inputs of a session that is about to be closed, also when cancelled; the oldest are forgotten
        for them."""
        self._open.discard(session)
        spec, beginning = session.spec, session.beginning()
        if spec.batch != 1 or beginning.tokens < BLOCK_TOKENS or beginning.nbytes > self._room // 2:
            return
        with trio.CancelScope(shield=True):
            joined = await trio.to_thread.run_sync(beginning.joined)
        self._ended.append(_Ended(spec, joined))
        while self.nbytes > self._room:
            self._ended.popleft()

    def search(self, spec: SessionSpec, prompt: Sequence[WireTensor]) -> Callable[[], Beginning | None]:
        """A function that finds the earlier session that begins with the most whole blocks of `prompt`; one token is
        always left to be computed. It compares bytes, and may run in a thread."""
        known = [(ended.spec, ended.beginning) for ended in self._ended]
        known += [(session.spec, session.beginning()) for session in self._open]
        alike = [beginning for other, beginning in known if _alike(other, spec)]
        return partial(_longest, spec, prompt, alike)


def _longest(spec: SessionSpec, prompt: Sequence[WireTensor], known: Sequence[Beginning]) -> Beginning | None:
    if spec.batch != 1 or not prompt:
        return None
    steps: list[Input] = []
    long_factors = spec.takes_long_factors(sum(chunk.tokens for chunk in prompt))
    for chunk in prompt:
        steps.append(Input(steps[-1].end if steps else 0, (), chunk, long_factors))
    best, most = Beginning({}, 0), 0
    for beginning in known:
        shared = min(_shared(spec, beginning, steps), steps[-1].end - 1)
        if shared >= most:  # of equal ones the last, which is an open one if there is any
            best, most = beginning, shared
    # What enters the first blocks is known without any earlier session: one server of all blocks needs no more.
    inputs = {block: best.part(block, most) for block in best.inputs} | {spec.span.start: steps}
    return Beginning(inputs, steps[-1].end - 1, best.route, most // BLOCK_TOKENS * BLOCK_TOKENS)


def _alike(one: SessionSpec, other: SessionSpec) -> bool:
    """Whether equal inputs have equal names in both."""
    return _terms(one) == _terms(other)


def _terms(spec: SessionSpec) -> tuple[object, ...]:
    kind = spec.model_version, spec.span, spec.batch, spec.left_padding
    return *kind, spec.codec, spec.dtype, spec.adapter_hash, spec.prefix_salt, spec.trusted


def _shared(spec: SessionSpec, beginning: Beginning, mine: Sequence[Input]) -> int:
    """Tokens, of one row, that `mine` have in common with a beginning at the first block of `spec`."""
    theirs = beginning.inputs.get(spec.span.start, ())
    if not theirs or mine[0].chunk.tensor.shape[2] != theirs[0].chunk.tensor.shape[2]:
        return 0
    width = mine[0].chunk.tensor.shape[2]
    mine, theirs = ([step for step in steps if step.end <= _end_of(steps, width)] for steps in (mine, theirs))
    size = len(theirs[0].chunk.payload) // theirs[0].chunk.tokens
    if bytes(mine[0].chunk.payload[:size]) != bytes(theirs[0].chunk.payload[:size]):
        return 0  # which is so of most texts that have nothing to do with each other
    left, right = (np.frombuffer(b"".join(step.chunk.payload for step in steps), np.uint8) for steps in (mine, theirs))
    alike = (step.position for step in theirs if step.long_factors != mine[0].long_factors)
    tokens = min(len(left) // size, len(right) // size, next(alike, beginning.tokens), beginning.tokens)
    equal = (left[: tokens * size] == right[: tokens * size]).reshape(tokens, size).all(axis=1)
    one, other = (np.concatenate([_laid_out(step) for step in steps], axis=1) for steps in (mine, theirs))
    equal &= (one[:, :tokens] == other[:, :tokens]).all(axis=0)
    return outside_groups(theirs, tokens if equal.all() else int(equal.argmin()))


def _end_of(steps: Sequence[Input], width: int) -> int:
    """Where the first of them begins whose hidden states are not so wide."""
    return next((step.position for step in steps if step.chunk.tensor.shape[2] != width), steps[-1].end)


def _laid_out(step: Input) -> np.ndarray[Any, Any]:
    """What is said of the tokens of a step of one row, [axes + 1, tokens]; -1 where positions are counted."""
    tokens, layout = step.chunk.tokens, step.chunk.layout
    positions = np.array(layout.positions or [-1] * AXES * tokens, np.int64).reshape(AXES, tokens)
    return np.concatenate([positions, np.array(layout.groups or [0] * tokens, np.int64).reshape(1, tokens)])


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens two texts begin with alike."""
    if left == right[: len(left)]:  # which is what happens at every token
        return len(left)
    count = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        count += 1
    return count
