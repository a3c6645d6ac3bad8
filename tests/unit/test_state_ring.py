"""States of the past: how far a session goes back, and that what failed leaves no trace."""

from __future__ import annotations

import pytest
import torch

from petalnode.node.blocks.caches.states import (
    SNAPSHOT,
    STATES,
    WINDOW,
    JoinedStates,
    StateInputs,
    StateRing,
    StatesLost,
    StateView,
)

NAME = (0, "recurrent", 0)


class Addends(StateInputs):
    """What entered a sum: [rows, tokens, 1]."""

    def behind(self, state: torch.Tensor, tokens: int) -> torch.Tensor:
        return state.add_(self.given[0][:, :tokens].sum(1))


class Sum:
    """Blocks whose state is the sum of what entered, of rows of one value a token. `known`: by something that keeps
    what enters it. `again`: tokens that were computed once more."""

    def __init__(self, rows: int = 1, known: bool = False) -> None:
        self.ring = StateRing()
        self.entered = torch.zeros(rows, 0, 1)
        self.known, self.again = known, 0

    @property
    def length(self) -> int:
        return self.entered.shape[1]

    def step(self, *values: float, parts: int = 1, fails: bool = False) -> torch.Tensor:
        """The state behind a step; `entered` follows. What is computed once more has to be what entered before."""
        new = torch.tensor(values, dtype=torch.float32).view(1, -1, 1).repeat(self.entered.shape[0], 1, 1)
        self.ring.mark(self.length, new.shape[1])
        for part in new.chunk(parts, dim=1):
            again = self.ring.begin(self.length)
            count = 0 if again is None else again.shape[1]
            self.again += count
            assert again is None or torch.equal(again, self.entered[:, self.length - count :])
            given = part if again is None else torch.cat([again, part], dim=1)
            before = self.ring.get(NAME)
            total = given.sum(1) if before is None else before.add_(given.sum(1))
            self.ring.put(NAME, total, Addends([given]) if self.known else None)
            if fails:
                self.ring.abandon()
                break
            self.entered = torch.cat([self.entered, part], dim=1)
            self.ring.commit(self.length, given)
        return total

    def back(self, position: int) -> None:
        self.ring.rollback(position)
        self.entered = self.entered[:, :position]

    def check(self) -> None:
        assert torch.allclose(self.step(0.5), self.entered.sum(1))


def test_a_step_that_fails_leaves_no_trace() -> None:
    session = Sum()
    session.step(1, 2, 3)
    session.step(10, 20, fails=True)
    session.check()


@pytest.mark.parametrize("known", [False, True])
def test_session_goes_back_into_its_last_steps(known: bool) -> None:
    session = Sum(known=known)
    session.step(*range(200))
    for tokens in (5, 1, 3, 1, 1, 1, 4, 1):
        session.step(*range(tokens))
    for position in (214, 211, 208, 203, 200):
        session.back(position)
        session.check()
        session.back(position)
    with pytest.raises(StatesLost, match="from the first token on"):
        session.back(150)
    session.check()  # nothing has changed


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 7, 40])
def test_the_last_tokens_can_always_be_gone_back(tokens: int, known: bool) -> None:
    session = Sum(known=known)
    session.step(*range(100))
    for _ in range(3 * WINDOW // tokens + STATES):
        session.step(*range(tokens))
        assert len(session.ring._kept) <= STATES
    end = session.length
    for position in range(end, end - WINDOW - 1, -1):
        session.back(position)
    session.check()


@pytest.mark.parametrize("parts", [1, 3])
def test_short_steps_are_undone_without_the_blocks(parts: int) -> None:
    """One after another, or several that were under way at once."""
    session = Sum(2, known=True)
    session.step(*range(100))
    session.step(1)
    for accepted in range(1, 13):
        for _ in range(3):
            session.step(5, 6, 7, 8, parts=parts)
        session.back(session.length - 12 + accepted)
        session.check()
        session.back(session.length - 1)
    assert not session.again
    session.step(*range(StateRing.rewound + 1))  # more than is kept
    session.back(session.length - 1)
    session.check()
    assert session.again == StateRing.rewound
    session.step(1, 2, 3)
    session.back(session.length - 1)
    session.ring.reorder([1, 0])
    session.check()
    assert session.again == StateRing.rewound + 2


def test_step_of_many_parts_is_one_state() -> None:
    session = Sum()
    session.step(1, 2, 3)
    session.step(*range(STATES * 2 * WINDOW), parts=STATES * 2)
    session.back(3)
    session.check()


def test_all_tokens_can_be_undone_at_any_time() -> None:
    session = Sum()
    for _ in range(20):
        session.step(*range(WINDOW + 1))
    session.back(0)
    session.check()


def test_rows_take_their_states_along() -> None:
    session = Sum(3)
    session.step(1, 2)
    session.ring.put(NAME, torch.tensor([[1.0], [2.0], [3.0]]))
    session.ring.commit(2, session.entered)
    session.step(1, 1)
    session.back(3)
    session.ring.reorder([2, 2, 0])
    assert session.step(1)[:, 0].tolist() == [5.0, 5.0, 3.0]


@pytest.mark.parametrize("known", [False, True])
def test_what_is_kept_does_not_grow(known: bool) -> None:
    session = Sum(known=known)
    sizes = set()
    for _ in range(8 * WINDOW):
        session.step(1)
        sizes.add(session.ring.nbytes)
    assert max(sizes) <= (STATES + 3 * WINDOW + known * StateRing.rewound) * 4


@pytest.mark.parametrize("size", [None, 4])
def test_a_convolution_sees_what_came_before(size: int | None) -> None:
    values = torch.arange(30.0).view(1, 1, 30)
    ring = StateRing()
    view, at = StateView(ring), 0
    first = values[..., :4] if size is None else values[..., :2]
    assert view.get_conv_state(0) is None
    for part in (first, values[..., first.shape[-1] : 9], values[..., 9:10]):
        seen = view.update_conv_state(part, 0, conv_kernel_size=size)
        at += part.shape[-1]
        assert torch.equal(seen[..., -min(at, 4) :], values[..., max(at - 4, 0) : at])
        assert seen.shape[-1] == (4 if at == first.shape[-1] else 4 + part.shape[-1])
        ring.commit(at, part.transpose(1, 2))
    state = view.get_conv_state(0)
    assert state is not None
    state.zero_()  # models may change it in place; what was kept stays
    ring.abandon()
    kept = view.get_conv_state(0)
    assert kept is not None
    assert torch.equal(kept, values[..., 6:10])


def test_another_session_begins_with_states_of_long_step() -> None:
    first, other = Sum(), Sum()
    first.step(*range(3 * SNAPSHOT + 10), parts=4)
    assert not first.ring.snapshots  # no part ends there
    first.back(0)
    for _ in range(3):
        first.step(*[1.0] * SNAPSHOT)
        assert list(first.ring.snapshots) == [first.length]
    first.back(0)
    first.step(*[1.0] * 4 * SNAPSHOT, parts=4)
    kept = {position: dict(states) for position, states in first.ring.snapshots.items()}
    assert list(kept) == [3 * SNAPSHOT, 4 * SNAPSHOT]
    first.check()
    for position in kept:
        other = Sum()
        other.ring.restore(kept)
        other.entered = torch.ones(1, 4 * SNAPSHOT, 1)
        other.back(position)
        assert float(other.step(0.5)) == position + 0.5
    with pytest.raises(StatesLost):
        other.ring.rollback(SNAPSHOT)
    assert float(kept[3 * SNAPSHOT][NAME]) == 3 * SNAPSHOT  # nobody has changed them


def test_states_of_several_sessions_go_through_one_step() -> None:
    sessions = [Sum(rows) for rows in (1, 3, 2)]
    for number, session in enumerate(sessions):
        session.step(*[1.0 + number] * 4)
    joined = JoinedStates([session.ring for session in sessions], [1, 3, 2])
    state = joined.get(NAME)
    assert state is not None and state.flatten().tolist() == [4, 8, 8, 8, 12, 12]
    state += 1  # as models do, in place
    joined.put((0, "conv", 0), torch.zeros(6, 2))
    assert not any(session.ring.computed() for session in sessions)
    joined.part()
    for session in sessions:
        session.ring.commit(5, torch.ones(session.entered.shape[0], 1, 1))
    assert [session.ring.last(NAME)[0].item() for session in sessions] == [5, 9, 13]  # type: ignore[index]
    sessions[0].ring.rollback(4)
    assert sessions[0].ring.last(NAME).item() == 4  # type: ignore[union-attr]


def test_session_without_states_is_not_joined_with_others() -> None:
    first = Sum()
    first.step(1.0)
    with pytest.raises(ValueError, match="computed alone"):
        JoinedStates([first.ring, Sum().ring], [1, 1]).get(NAME)
    assert JoinedStates([Sum().ring, Sum().ring], [1, 1]).get(NAME) is None
