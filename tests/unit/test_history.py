"""Replaying a history into an empty cache makes the cache that was lost, whatever was done to it before."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from petalnode.node.client.request import WireTensor
from petalnode.node.client.session.history import REPLAY_TOKENS, Input, InputHistory
from petalnode.protocols.ids import AXES, Layout
from petalnode.protocols.wire_pb2 import Tensor

HIDDEN = 3
MAX_LENGTH = 24
PLACED = 1000
"""Added to tokens that came with positions."""
WIDTHS = {("float32", "none"): 4, ("float32", "float16"): 2, ("float32", "bfloat16"): 2}


def chunk(tokens: Sequence[Sequence[int]], codec: str = "none", *, placed: bool = False) -> WireTensor:
    """Hidden states of [rows, tokens, HIDDEN] in which every byte tells the token, and `placed` positions, too."""
    width = WIDTHS[("float32", codec)]
    cells = np.array(tokens, dtype=np.uint8)
    payload = np.repeat(cells, HIDDEN * width, axis=1).tobytes()
    shape = [*cells.shape, HIDDEN]
    positions = tuple(token + axis for axis in range(AXES) for row in tokens for token in row) if placed else ()
    return WireTensor(
        Tensor(shape=shape, dtype="float32", codec=codec, nbytes=len(payload)), payload, Layout(positions)
    )


def tokens_of(sent: WireTensor) -> list[list[int]]:
    rows, tokens, hidden = sent.tensor.shape
    assert sent.tensor.nbytes == len(sent.payload)
    cells = np.frombuffer(sent.payload, dtype=np.uint8).reshape(rows, tokens, hidden, -1)
    assert (cells == cells[:, :, :1, :1]).all(), "the bytes of one token came apart"
    numbers = cells[:, :, 0, 0].astype(int)
    if sent.layout.positions:
        expected = [numbers + axis for axis in range(AXES)]
        assert np.array_equal(np.array(sent.layout.positions).reshape(AXES, rows, tokens), expected), (
            "positions came apart"
        )
        numbers += PLACED
    return numbers.tolist()  # type: ignore[no-any-return]


@dataclass
class Cache:
    """What a server does with steps: for each row, the tokens that it holds."""

    rows: list[list[int]] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.rows[0])

    def take(self, step: Input) -> None:
        assert step.position <= self.length, "a server refuses a step that leaves a hole"
        self.rows = [row[: step.position] for row in self.rows]
        if step.reorder:
            self.rows = [list(self.rows[source]) for source in step.reorder]
        self.rows = [row + new for row, new in zip(self.rows, tokens_of(step.chunk), strict=True)]


@dataclass(frozen=True)
class Made:
    """A session so far: what the server holds, and what the client kept."""

    cache: Cache
    history: InputHistory
    batch: int
    codec: str


@st.composite
def sessions(draw: st.DrawFn, codecs: Sequence[str] = ("none",)) -> Made:
    batch = draw(st.integers(1, 3))
    codec = draw(st.sampled_from(codecs))
    cache, history, token = Cache([[] for _ in range(batch)]), InputHistory(), 0
    for _ in range(draw(st.integers(0, 12))):
        position = cache.length
        if draw(st.integers(0, 3)) == 0:
            position = draw(st.integers(0, position))
        new = draw(st.integers(1, 5))
        if position + new > MAX_LENGTH:
            continue
        moves = st.lists(st.integers(0, batch - 1), min_size=batch, max_size=batch)
        reorder = tuple(draw(moves)) if draw(st.integers(0, 2)) == 0 else ()
        numbers = [[(token + row * new + index) % 251 for index in range(new)] for row in range(batch)]
        token += batch * new
        step = Input(position, reorder, chunk(numbers, codec, placed=draw(st.booleans())))
        cache.take(step)
        history.append(step)
    return Made(cache, history, batch, codec)


def replayed(made: Made, position: int, max_tokens: int = 512) -> Cache:
    """The cache of a new server, once the step after the failure has rolled it back to `position`."""
    fresh = Cache([[] for _ in range(made.batch)])
    for step in made.history.replay(position, max_tokens):
        assert step.chunk.tokens <= max(max_tokens, 5)
        fresh.take(step)
    assert fresh.length >= position
    return Cache([row[:position] for row in fresh.rows])


@settings(max_examples=100, deadline=None)
@given(sessions(), st.sampled_from([1, 2, 7, 512]))
def test_replay_rebuilds_the_whole_cache(made: Made, max_tokens: int) -> None:
    assert replayed(made, made.cache.length, max_tokens).rows == made.cache.rows


@settings(max_examples=100, deadline=None)
@given(sessions(), st.integers(0, MAX_LENGTH), st.sampled_from([1, 3, 512]))
def test_replay_rebuilds_a_cache_about_to_roll_back(made: Made, position: int, max_tokens: int) -> None:
    position = min(position, made.cache.length)
    kept = [row[:position] for row in made.cache.rows]
    assert replayed(made, position, max_tokens).rows == kept


@settings(max_examples=60, deadline=None)
@given(sessions(), sessions(), st.integers(0, MAX_LENGTH))
def test_what_was_replayed_can_be_replayed_again(made: Made, more: Made, position: int) -> None:
    """The replacement's own history is what was replayed into it; it may die as well, and after more steps."""
    position = min(position, made.cache.length)
    second = InputHistory()
    for step in made.history.replay(position, 4):
        second.append(step)
    again = Made(made.cache, second, made.batch, made.codec)
    assert replayed(again, position).rows == [row[:position] for row in made.cache.rows]
    if more.batch != made.batch:
        return
    cache = Cache([row[:position] for row in made.cache.rows])
    for step in more.history.replay(more.cache.length, 3):
        later = Input(step.position + position, step.reorder, step.chunk)
        cache.take(later)
        second.append(later)
    rebuilt = replayed(Made(cache, second, made.batch, made.codec), cache.length)
    assert rebuilt.rows == cache.rows


@settings(max_examples=100, deadline=None)
@given(sessions(codecs=("float16", "bfloat16")))
def test_halved_values_are_merged_row_by_row(made: Made) -> None:
    assert replayed(made, made.cache.length).rows == made.cache.rows
    assert all(step.chunk.tensor.codec == made.codec for step in made.history.replay(MAX_LENGTH, 512))


@settings(max_examples=60, deadline=None)
@given(sessions(codecs=("none", "float16")))
def test_memory_is_that_of_the_tokens_held(made: Made) -> None:
    """What was rolled back is forgotten, also where a step was cut in the middle."""
    per_token = made.batch * HIDDEN * WIDTHS[("float32", made.codec)]
    assert made.history.nbytes == made.cache.length * per_token


def test_decode_steps_become_one() -> None:
    history = InputHistory()
    for position in range(REPLAY_TOKENS + 10):
        history.append(Input(position, (), chunk([[position % 251]])))
    steps = history.replay(REPLAY_TOKENS + 10, 4096)
    assert [(step.position, step.chunk.tokens) for step in steps] == [(0, REPLAY_TOKENS), (REPLAY_TOKENS, 10)]
    assert history.nbytes == (REPLAY_TOKENS + 10) * HIDDEN * 4


@pytest.mark.parametrize("batch", [2, 3])
def test_rows_are_merged_one_after_another(batch: int) -> None:
    rows = [[10 * row + index for index in range(6)] for row in range(batch)]
    history = InputHistory()
    for start, end in ((0, 3), (3, 4), (4, 6)):
        history.append(Input(start, (), chunk([row[start:end] for row in rows])))
    (step,) = history.replay(6, 512)
    assert tokens_of(step.chunk) == rows
    assert step.chunk.payload == chunk(rows).payload
    assert [step.chunk.tokens for step in history.replay(6, 4)] == [4, 2]


def test_rows_count_towards_size_of_replayed_step() -> None:
    history = InputHistory()
    for position in range(REPLAY_TOKENS):
        history.append(Input(position, (), chunk([[1]] * 4)))
    steps = history.replay(REPLAY_TOKENS, 4096)
    assert {step.chunk.tokens for step in steps} == {REPLAY_TOKENS // 4}


def test_blocks_of_codec_that_shares_scales_stay_single() -> None:
    """int8-block64 packs values and scales of a whole tensor: its bytes cannot be put behind each other."""
    numbers = random.Random(0)
    history, sent = InputHistory(), []
    for position in range(5):
        payload = numbers.randbytes(70)
        tensor = Tensor(shape=[1, 1, 64], dtype="float32", codec="int8-block64", nbytes=len(payload))
        sent.append(Input(position, (), WireTensor(tensor, payload)))
        history.append(sent[-1])
    assert history.replay(5, 512) == sent
    assert history.replay(3, 512) == sent[:3]
    assert history.nbytes == 5 * 70


def test_a_reorder_starts_a_step_of_its_own() -> None:
    history = InputHistory()
    history.append(Input(0, (), chunk([[1, 2], [3, 4]])))
    history.append(Input(2, (1, 1), chunk([[5], [6]])))
    history.append(Input(3, (), chunk([[7], [8]])))
    assert [(step.position, step.reorder, tokens_of(step.chunk)) for step in history.replay(4, 512)] == [
        (0, (), [[1, 2], [3, 4]]),
        (2, (1, 1), [[5, 7], [6, 8]]),
    ]


def test_long_step_is_cut_where_the_session_returned() -> None:
    """Servers whose blocks keep states cannot go back into the middle of it."""
    history = InputHistory()
    history.append(Input(0, (), chunk([[*range(20)]])))
    (step,) = history.replay(9, 512)
    assert tokens_of(step.chunk) == [[*range(9)]]


def test_nothing_is_replayed_to_a_session_without_tokens() -> None:
    history = InputHistory()
    assert history.replay(0, 512) == []
    history.append(Input(0, (1, 0), chunk([[1], [2]])))
    assert history.replay(0, 512) == []
    assert InputHistory().nbytes == 0
