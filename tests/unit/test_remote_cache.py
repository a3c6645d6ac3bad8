from __future__ import annotations

import pytest
import torch

from petalnode.node.blocks.remote_cache import RemoteCache, RemoteCall
from petalnode.node.errors import BadInput


def test_reorders_before_a_step_add_up() -> None:
    cache = RemoteCache()
    rows = ["a", "b", "c"]
    for order in ([1, 2, 0], [2, 2, 1]):
        cache.reorder_cache(torch.tensor(order))
        rows = [rows[row] for row in order]
    taken = cache.take_reorder()
    assert taken is not None
    assert [["a", "b", "c"][row] for row in taken] == rows
    assert cache.take_reorder() is None


def test_an_order_that_moves_nothing_is_none() -> None:
    cache = RemoteCache()
    cache.reorder_cache(torch.tensor([0, 1]))
    assert cache.take_reorder() is None


def test_crop_and_rollback_shorten_it() -> None:
    cache = RemoteCache()
    cache.advance(10)
    cache.crop(-3)
    assert cache.get_seq_length() == 7
    cache.crop(0)
    assert cache.get_seq_length() == 7
    cache.crop(5)
    assert cache.get_seq_length() == 5
    cache.rollback(2)
    assert cache.get_seq_length() == 2
    with pytest.raises(ValueError, match="2 are held"):
        cache.rollback(3)


@pytest.mark.parametrize(
    ("mask", "padding"), [(None, None), ([[1, 1]], None), ([[0, 1], [1, 1]], (1, 0)), ([[0, 0, 1]], (2,))]
)
def test_left_padding_of_a_mask(mask: list[list[int]] | None, padding: tuple[int, ...] | None) -> None:
    call = RemoteCall(None, 0, None if mask is None else torch.tensor(mask))
    assert call.left_padding == padding


@pytest.mark.parametrize("mask", [[[1, 0]], [[0, 1, 0, 1]]])
def test_other_masks_are_refused(mask: list[list[int]]) -> None:
    with pytest.raises(BadInput, match="left"):
        _ = RemoteCall(None, 0, torch.tensor(mask)).left_padding
