"""How tokens of a step are laid out: parts, joins, and where no group of tokens that see each other is cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from petalnode.node.blocks.images.layout import TokenLayout
from petalnode.node.client.chunks import to_chunks
from petalnode.node.client.session.history import Input, merged, outside_groups, part_of
from petalnode.node.errors import BadInput
from petalnode.protocols.ids import AXES, MAX_GROUP, PLAIN, Layout, LayoutNeeds, Span
from petalnode.protocols.prefix import token_digests

runs = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6)), min_size=1, max_size=5)


def grouped(*spans: tuple[int, int]) -> tuple[int, ...]:
    """A row: tokens of text, then a group of tokens, and so on."""
    return tuple(left for text, size in spans for left in [*[0] * text, *range(size, 0, -1)])


def rows_of(row: list[tuple[int, int]], rows: int) -> tuple[tuple[int, ...], int]:
    own = grouped(*row, (1, 0))
    return tuple(left for number in range(rows) for left in (own if number % 2 == 0 else [0] * len(own))), len(own)


@given(runs, st.integers(1, 3))
def test_no_group_goes_over_a_cut(row: list[tuple[int, int]], rows: int) -> None:
    groups, tokens = rows_of(row, rows)
    layout = Layout(groups=groups)
    cuts = layout.cuts(rows, tokens)
    assert layout.problem(rows, tokens, 100) is None and cuts[0] == 0 and cuts[-1] == tokens
    assert all(
        layout.part(rows, tokens, *piece).problem(rows, piece[1] - piece[0], 100) is None for piece in pairwise(cuts)
    )
    for place in set(range(tokens)) - set(cuts):
        assert layout.part(rows, tokens, 0, place).problem(rows, place, 100), f"nothing is cut at {place}"


@given(runs, st.integers(1, 3), st.data())
def test_parts_make_the_whole_again(row: list[tuple[int, int]], rows: int, data: st.DataObject) -> None:
    groups, tokens = rows_of(row, rows)
    layout = Layout(tuple(range(AXES * rows * tokens)), groups)
    cut = data.draw(st.integers(1, tokens - 1)) if tokens > 1 else tokens
    pieces = [piece for piece in ((0, cut), (cut, tokens)) if piece[0] < piece[1]]
    parts = [(layout.part(rows, tokens, *piece), piece[1] - piece[0]) for piece in pieces]
    joined = Layout.joined(parts, rows)
    assert joined.positions == layout.positions and (joined.groups or (0,) * rows * tokens) == layout.groups


@pytest.mark.parametrize(
    "groups", [[3, 2], [2, 2, 1], [1, 3, 2], [MAX_GROUP + 1], [0, 0, 0, 0], [3, 1, 0], [0, 0, 2], [2, 0, 1]]
)
def test_numbers_that_are_no_groups_are_told(groups: list[int]) -> None:
    assert "group" in (Layout(groups=tuple(groups)).problem(1, 3, 100) or "")


def chunks_of(groups: tuple[int, ...], size: int, rows: int = 1) -> list[int]:
    layout = TokenLayout(groups=torch.tensor(groups).view(rows, -1))
    return [chunk.tokens for chunk in to_chunks(torch.zeros(rows, len(groups) // rows, 8), "none", size, layout)]


def test_a_prompt_is_cut_before_and_behind_groups() -> None:
    assert chunks_of(grouped((3, 4), (2, 0)), 4) == [3, 4, 2]
    assert chunks_of(grouped((1, 6), (2, 0)), 4) == [1, 6, 2]
    assert chunks_of((*grouped((0, 4), (4, 0)), *grouped((2, 4), (2, 0))), 4, rows=2) == [6, 2]
    with pytest.raises(BadInput, match="see each other"):
        chunks_of((*grouped((0, 1100)), *grouped((1099, 1))) * 2, 512, rows=4)


def test_features_travel_where_there_are_any() -> None:
    features = torch.zeros(1, 6, 2, 8)
    features[0, 2] = 1.0
    sent = to_chunks(torch.ones(1, 6, 8), "none", 2, TokenLayout(features=features))
    assert [list(chunk.tensor.shape) for chunk in sent] == [[1, 2, 8], [1, 2, 24], [1, 2, 8]]
    assert [chunk.layout.features for chunk in sent] == [0, 2, 0]
    steps = [Input(2 * number, (), chunk) for number, chunk in enumerate(sent)]
    assert merged(steps, 512) == steps, "steps of other widths are one"
    assert sent[1].layout.behind(4) == PLAIN


def test_a_history_knows_where_no_group_is_cut() -> None:
    layout = TokenLayout(groups=torch.tensor([grouped((3, 4), (2, 0))]))
    steps = [Input(10, (), chunk) for chunk in to_chunks(torch.zeros(1, 9, 8), "none", 9, layout)]
    assert [outside_groups(steps, position) for position in (10, 13, 14, 16, 17, 18)] == [10, 13, 13, 13, 17, 18]
    assert part_of(steps[0], 13, 17).chunk.layout.groups == (4, 3, 2, 1)


def test_group_tokens_name_follows_from_its_whole() -> None:
    groups = grouped((2, 3), (2, 0))
    first = torch.arange(7.0).view(7, 1)
    changed = first.clone()
    changed[4] += 1
    named = [token_digests(values.numpy().tobytes(), 1, 7, layout=Layout(groups=groups)) for values in (first, changed)]
    assert [at for at in range(7) if named[0][at] != named[1][at]] == [2, 3, 4]
    plain = token_digests(first.numpy().tobytes(), 1, 7)
    assert [at for at in range(7) if named[0][at] != plain[at]] == [2, 3, 4]


def test_servers_are_told_apart_by_what_they_know() -> None:
    needs = LayoutNeeds(groups=True, features=2)
    known = LayoutNeeds(True, True, 2)
    assert needs.unmet(known, Span(0, 2)) is None and needs.unmet(LayoutNeeds(groups=True), Span(2, 4)) is None
    assert "features" in (needs.unmet(known, Span(0, 1)) or "") and "features" in (needs.unmet(known, Span(1, 4)) or "")
    assert "features" in (needs.unmet(LayoutNeeds(True, True), Span(0, 4)) or "")
    assert "groups" in (needs.unmet(LayoutNeeds(True), Span(2, 4)) or "")
    assert known.cover(needs) and known.cover(LayoutNeeds()) and not LayoutNeeds(True).cover(needs)
