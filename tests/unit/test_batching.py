from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from petalnode.node.blocks.span import PREFILL_CHUNK
from petalnode.node.server.turns import TURNS, Turn, Waiting, next_turn

waiting = st.lists(
    st.one_of(
        st.builds(Waiting, st.integers(1, 300), st.just(1)),
        st.builds(lambda rows, tokens, done: Waiting(rows, tokens, min(done, tokens - 1)),
                  st.integers(1, 300), st.integers(2, 2048), st.integers(0, 2047)),
    ),
    max_size=20,
)  # fmt: skip


@given(waiting.filter(bool))
def test_every_turn_does_something_within_its_bounds(steps: list[Waiting]) -> None:
    turn = next_turn(steps)
    assert turn.decode or turn.prefill is not None
    assert all(steps[index].is_decode for index in turn.decode)
    assert len(turn.decode) == 1 or sum(steps[index].rows for index in turn.decode) <= TURNS.max_decode_rows
    if turn.prefill is not None:
        step = steps[turn.prefill]
        assert not step.is_decode and 1 <= turn.chunk <= step.tokens - step.done
        assert turn.chunk == 1 or turn.chunk * step.rows <= PREFILL_CHUNK


@given(waiting.filter(bool))
def test_first_of_each_kind_is_never_passed_over(steps: list[Waiting]) -> None:
    turn = next_turn(steps)
    first_decode = next((index for index, step in enumerate(steps) if step.is_decode), None)
    first_prefill = next((index for index, step in enumerate(steps) if not step.is_decode), None)
    assert turn.decode[:1] == (() if first_decode is None else (first_decode,))
    assert turn.prefill == first_prefill


def test_decode_steps_go_together_with_one_chunk() -> None:
    steps = [Waiting(2, 1000, 512), Waiting(1, 1), Waiting(5, 1), Waiting(1, 40)]
    assert next_turn(steps) == Turn((1, 2), 0, 128)


def test_the_rest_of_a_prefill_is_one_chunk() -> None:
    assert next_turn([Waiting(1, 300, 256)]) == Turn((), 0, 44)


def test_nothing_waits() -> None:
    assert next_turn([]) == Turn((), None)
