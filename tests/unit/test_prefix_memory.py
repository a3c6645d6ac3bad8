"""What a client remembers of sessions that have ended, so that later ones may begin alike."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from petalnode.node.client.request import WireTensor
from petalnode.node.client.session.answers import SessionSpec
from petalnode.node.client.session.history import Input
from petalnode.node.client.session.prefixes import (
    REMEMBERED,
    Beginning,
    PrefixMemory,
    beginning_of,
    common_prefix,
)
from petalnode.node.swarm.routing import Hop
from petalnode.protocols.ids import Layout, Span
from petalnode.protocols.prefix import token_digests
from petalnode.protocols.wire_pb2 import Tensor

HIDDEN = 4


def chunk(first: int, tokens: int, rows: int = 1, codec: str = "none") -> WireTensor:
    payload = b"".join(bytes([(first + n) % 251] * 4 * HIDDEN) for _ in range(rows) for n in range(tokens))
    return WireTensor(Tensor(shape=[rows, tokens, HIDDEN], dtype="float32", codec=codec, nbytes=len(payload)), payload)


@dataclass(eq=False)
class Session:
    """As it is when it ends: a prompt of 20 tokens, then one token a step, at two servers."""

    tokens: int
    batch: int = 1
    blocks: tuple[int, ...] = (0, 2)
    route: tuple[Hop, ...] = ()

    @property
    def spec(self) -> SessionSpec:
        return SessionSpec(b"v" * 32, Span(0, 4), self.batch, 4096)

    def beginning(self) -> Beginning:
        steps = [Input(0, (), chunk(0, 20, self.batch))]
        steps += [Input(n, (), chunk(n, 1, self.batch)) for n in range(20, self.tokens)]
        return beginning_of(dict.fromkeys(self.blocks, steps), self.tokens, self.route)


async def remembered(*sessions: Session) -> PrefixMemory:
    memory = PrefixMemory()
    for session in sessions:
        memory.opened(session)
        await memory.ended(session)
    return memory


def found(memory: PrefixMemory, tokens: int, first: int = 0) -> Beginning:
    prompt = [chunk(first, 10), chunk(first + 10, 15), chunk(first + 25, tokens - 25)]
    result = memory.search(Session(0).spec, prompt)()
    assert result is not None
    return result


async def test_ended_session_is_few_objects_whatever_steps() -> None:
    """Those of one token are 256 bytes of hidden states and ten times as much around them, for 32 sessions."""
    memory = await remembered(Session(600))
    result = found(memory, 700)
    assert result.shared == 576  # whole blocks of 32 tokens of the 600
    for block in (2,):
        steps = result.inputs[block]
        assert len(steps) <= 2
        whole = b"".join(bytes(step.chunk.payload) for step in steps)
        assert whole == chunk(0, 600).payload
        assert [step.end for step in steps] == [512, 600] and not any(step.reorder for step in steps)
    assert memory.nbytes == 2 * 600 * 4 * HIDDEN


async def test_impossible_beginnings_are_not_remembered() -> None:
    memory = await remembered(Session(600, batch=2), Session(31))
    assert memory.nbytes == 0 and found(memory, 700).shared == 0
    memory = await remembered(Session(600, batch=2), Session(600, blocks=(2,)))
    assert found(memory, 700).shared == 0, "what entered the first block is not known"
    two = Session(0, batch=2)
    assert memory.search(two.spec, [chunk(0, 100, 2)])() is None and memory.search(Session(0).spec, [])() is None


async def test_oldest_go_and_ends_survive_cancelling() -> None:
    memory = await remembered(*(Session(40) for _ in range(REMEMBERED + 5)))
    assert memory.nbytes == REMEMBERED * 2 * 40 * 4 * HIDDEN
    small = PrefixMemory(room=4 * 40 * 4 * HIDDEN)
    for _ in range(3):
        await small.ended(Session(40))
    assert small.nbytes == 4 * 40 * 4 * HIDDEN
    large = Session(100)  # more than a half of the room
    small.opened(large)
    assert found(small, 200).shared == 96
    await small.ended(large)
    assert small.nbytes == 4 * 40 * 4 * HIDDEN and found(small, 200).shared == 32
    cancelled = PrefixMemory()
    with trio.CancelScope() as scope:
        scope.cancel()
        await cancelled.ended(Session(40))
    assert cancelled.nbytes


async def test_of_texts_that_begin_otherwise_nothing_is_taken() -> None:
    memory = await remembered(Session(600))
    assert not found(memory, 100, first=7).inputs[2] and found(memory, 100, first=7).shared == 0
    assert [step.end for step in found(memory, 100, first=7).inputs[0]] == [10, 25, 100]
    wide = WireTensor(Tensor(shape=[1, 8, 2 * HIDDEN], dtype="float32", codec="none"), bytes(8 * 8 * HIDDEN))
    other = memory.search(Session(0).spec, [wide])()
    assert other is not None and not other.inputs[2] and other.shared == 0


async def test_of_equal_ones_the_last_counts() -> None:
    first, second = ((Hop(name, Span(0, 4)),) for name in ("first", "second"))
    memory = await remembered(Session(600, route=first), Session(600, route=second), Session(40))
    assert found(memory, 700).route == second


async def test_tokens_that_stand_elsewhere_in_picture_are_others() -> None:
    placed = tuple(range(40)) * 3
    theirs = replace(chunk(0, 40), layout=Layout(placed))
    digests: list[list[bytes]] = []
    for place, shared in ((0, 0), (33, 32)):
        moved = list(placed)
        moved[40 + place] += 1  # along the second axis
        mine = replace(chunk(0, 40), layout=Layout(tuple(moved)))
        memory = PrefixMemory()
        session = Session(40)
        known = beginning_of({0: [Input(0, (), theirs)]}, 40)
        session.beginning = lambda known=known: known  # type: ignore[method-assign]
        memory.opened(session)
        found = memory.search(session.spec, [mine])()
        assert found is not None and found.shared == shared
        digests = [token_digests(one.payload, 1, 40, layout=one.layout) for one in (theirs, mine)]
        assert [at for at in range(40) if digests[0][at] != digests[1][at]] == [place]
    assert token_digests(theirs.payload, 1, 40) != digests[0]


def test_beginning_ends_where_tokens_cannot_be_told_apart() -> None:
    def told(*steps: Input) -> int:
        return beginning_of({0: [Input(0, (), chunk(0, 20)), *steps]}, 100).tokens

    assert told(Input(20, (), chunk(20, 5))) == 25
    for step in (
        Input(20, (), chunk(20, 5, codec="int8-block64")),
        Input(20, (0,), chunk(20, 5)),
        Input(19, (), chunk(19, 5)),
    ):
        assert told(step) == 20


@given(st.lists(st.integers(0, 2), max_size=6), st.lists(st.integers(0, 2), max_size=6))
def test_what_two_texts_begin_with(left: list[int], right: list[int]) -> None:
    count = common_prefix(left, right)
    assert left[:count] == right[:count] and (left[count : count + 1] != right[count : count + 1] or left == right)


@pytest.mark.parametrize("tokens", [33, 100])
def test_an_open_session_counts_as_well(tokens: int) -> None:
    memory, session = PrefixMemory(), Session(tokens)
    memory.opened(session)
    assert found(memory, 500).shared == tokens // 32 * 32 and memory.nbytes == 0


def test_a_salt_is_of_use_at_one_server() -> None:
    spec = SessionSpec(b"v" * 32, Span(0, 4), 1, 64)
    assert spec.salt_at("one") == b""
    salted = replace(spec, prefix_salt=b"salt")
    assert salted.salt_at("one") == salted.salt_at("one") != salted.salt_at("other")


def test_a_text_is_long_by_its_longest_row() -> None:
    spec = SessionSpec(b"v" * 32, Span(0, 4), 2, 64)
    assert not spec.takes_long_factors(10**6)
    for padding, longest in (((), 10), ((5, 3), 13)):
        text = replace(spec, original_length=10, left_padding=padding)
        assert (text.takes_long_factors(longest), text.takes_long_factors(longest + 1)) == (False, True)
