from __future__ import annotations

import pytest
import torch

from petalnode.node.blocks.cache import BlockCacheSpec, SessionView, SpanCache
from petalnode.node.blocks.caches.form import CacheForm
from petalnode.node.blocks.caches.states import StatesLost, StateSpec
from petalnode.node.models.quantisation import CacheDtype

SPECS = (BlockCacheSpec(heads=2, key_dim=4, value_dim=3, window=None), BlockCacheSpec(1, 4, 4, 5))


def make(batch: int = 2, max_length: int = 8, left_padding: list[int] | None = None) -> SpanCache:
    return SpanCache(SPECS, batch, max_length, CacheForm("auto", torch.float32), torch.device("cpu"), left_padding)


def write(cache: SpanCache, tokens: int, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """One step of `tokens` tokens with random contents; what each block got back."""
    generator = torch.Generator().manual_seed(seed)
    held = []
    for block, spec in enumerate(SPECS):
        keys = torch.randn(cache.batch, spec.heads, tokens, spec.key_dim, generator=generator)
        values = torch.randn(cache.batch, spec.heads, tokens, spec.value_dim, generator=generator)
        held.append(cache.write(block, keys, values))
    cache.advance(tokens)
    return held


def contents(cache: SpanCache) -> list[torch.Tensor]:
    """A copy of all that it holds, read by writing nothing behind it."""
    held = []
    for block, spec in enumerate(SPECS):
        nothing = torch.empty(cache.batch, spec.heads, 0, spec.key_dim)
        held += [part.clone() for part in cache.write(block, nothing, nothing[..., : spec.value_dim])]
    return held


def test_size_is_known_at_once() -> None:
    assert make(batch=2, max_length=8).nbytes == 2 * 8 * (2 * (4 + 3) + (4 + 4)) * 4


def test_write_returns_the_whole_history() -> None:
    cache = make()
    first = [[part.clone() for part in pair] for pair in write(cache, 3)]
    second = write(cache, 2, seed=1)
    for (keys, values), (old_keys, old_values) in zip(second, first, strict=True):
        assert keys.shape[2] == values.shape[2] == 5
        assert torch.equal(keys[:, :, :3], old_keys)
        assert torch.equal(values[:, :, :3], old_values)


def test_step_that_was_not_counted_leaves_no_trace() -> None:
    cache = make()
    write(cache, 3)
    before = contents(cache)
    cache.write(0, torch.ones(2, 2, 4, 4), torch.ones(2, 2, 4, 3))
    assert cache.length == 3
    assert all(torch.equal(a, b) for a, b in zip(before, contents(cache), strict=True))


def test_rollback_keeps_what_stands_before() -> None:
    cache = make()
    write(cache, 3)
    before = contents(cache)
    write(cache, 4, seed=1)
    cache.rollback(3)
    assert all(torch.equal(a, b) for a, b in zip(before, contents(cache), strict=True))
    with pytest.raises(ValueError, match="3 are held"):
        cache.rollback(4)
    with pytest.raises(ValueError, match="roll back"):
        cache.rollback(-1)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 0], [1, 1, 1], [2, 1, 0]])
def test_reorder_moves_rows_and_their_padding(order: list[int]) -> None:
    cache = make(batch=3, left_padding=[0, 1, 2])
    write(cache, 4)
    before = contents(cache)
    cache.reorder(order)
    assert cache.left_padding == [[0, 1, 2][row] for row in order]
    assert all(torch.equal(old[order], new) for old, new in zip(before, contents(cache), strict=True))


@pytest.mark.parametrize("order", [[0], [0, 2], [-1, 0]])
def test_reorder_refuses_rows_that_are_not_there(order: list[int]) -> None:
    with pytest.raises(ValueError, match="reorder"):
        make(batch=2).reorder(order)


def test_too_many_tokens_are_refused() -> None:
    cache = make(max_length=4)
    write(cache, 3)
    with pytest.raises(ValueError, match="do not fit"):
        write(cache, 2)


def test_freed_memory_is_gone() -> None:
    cache = make()
    write(cache, 3)
    cache.free()
    assert (cache.nbytes, cache.length) == (0, 0)
    with pytest.raises(ValueError, match="do not fit"):
        write(cache, 1)


@pytest.mark.parametrize(
    ("batch", "max_length", "padding"), [(0, 4, None), (1, 0, None), (2, 4, [0]), (1, 4, [4]), (1, 4, [-1])]
)
def test_senseless_sizes_are_refused(batch: int, max_length: int, padding: list[int] | None) -> None:
    with pytest.raises(ValueError, match=r"cache holds|left padding"):
        make(batch, max_length, padding)


FEWER: tuple[CacheDtype, ...] = ("bfloat16", "int8")


def held_in(form: CacheDtype, values: torch.Tensor) -> torch.Tensor:
    """What is left of float32 values [..., dim]."""
    kept = CacheForm(form, torch.float32)
    memory = torch.empty(*values.shape[:-1], kept.width(values.shape[-1]), dtype=kept.dtype)
    kept.put(values, memory)
    return kept.opened(memory, values.shape[-1])


@pytest.mark.parametrize("dim", [1, 16, 33, 64, 80])
@pytest.mark.parametrize("form", FEWER)
def test_keys_of_fewer_bits_are_rounded(form: CacheDtype, dim: int) -> None:
    values = torch.randn(50, dim, generator=torch.Generator().manual_seed(dim)) * torch.logspace(-20, 20, 50)[:, None]
    found = held_in(form, values)
    assert found.dtype == torch.float32
    if form == "bfloat16":
        assert torch.equal(found, values.bfloat16().float())
        return
    for start in range(0, dim, 32):
        most = values[:, start : start + 32].abs().amax(1, keepdim=True)
        wrong = (found - values)[:, start : start + 32].abs()
        assert bool((wrong <= most / 127 * (0.5 + 1 / 256)).all())  # of a scale that is rounded up
    again = held_in(form, found)
    assert float((again - found).norm() / found.norm()) < 1e-2


def test_eight_bits_of_values_beyond_numbers() -> None:
    values = torch.ones(4, 64)
    values[0, 3], values[1, 40], values[2, :32] = torch.nan, torch.inf, 1e-31
    found = held_in("int8", values)
    assert bool(found[0, :32].isnan().all() & found[1, 32:].isnan().all())  # the block, and no other
    assert torch.equal(found[2, :32], torch.zeros(32))
    assert float((found[[0, 1, 2, 3], [40, 3, 40, 0]] - 1).abs().max()) < 0.01


@pytest.mark.parametrize("form", FEWER)
def test_cache_of_fewer_bits_rolls_back_and_reorders(form: CacheDtype) -> None:
    cache = SpanCache(SPECS, 3, 8, CacheForm(form, torch.float32), torch.device("cpu"))
    random = torch.Generator().manual_seed(0)
    keys, given = torch.randn(3, 2, 4, 4, generator=random), torch.randn(3, 2, 4, 3, generator=random)
    cache.write(0, keys, given)
    cache.advance(4)
    cache.rollback(3)
    cache.reorder([2, 0, 0])
    nothing = torch.empty(3, 2, 0, 4)
    found = cache.opened(0, *cache.write(0, nothing, nothing[..., :3]))
    for held, written in zip(found, (keys, given), strict=True):
        assert torch.equal(held, held_in(form, written)[[2, 0, 0], :, :3])
    assert cache.nbytes == 3 * 8 * {"bfloat16": (2 * 7 + 8) * 2, "int8": 2 * (6 + 6) + 12}[form]


def _remembering() -> SpanCache:
    """Of a block with a window and a state, of which steps of 600, 50 and 500 tokens are held."""
    spec = BlockCacheSpec(1, 4, 4, 8, (StateSpec("conv", 0, (2,), torch.float32),), forgets=True)
    cache = SpanCache([spec], 1, 2000, CacheForm("auto", torch.float32), torch.device("cpu"))
    for tokens in (600, 50, 500):
        cache.begin_step(tokens)
        with cache.replaying():
            cache.write(0, torch.zeros(1, 1, tokens, 4), torch.zeros(1, 1, tokens, 4))
            assert cache.states is not None
            cache.states.put((0, "conv", 0), torch.zeros(1, 2))
        cache.advance(tokens, torch.zeros(1, tokens, 3))
    return cache


def test_rollback_needs_what_the_tokens_computed_again_see() -> None:
    """To token 645 leads what entered behind the state at 600, whose first token looks at 593."""
    cache = _remembering()
    cache.rollback(645)
    with cache.replaying() as again:
        assert again is not None and again.shape[1] == 45
    cache = _remembering()
    cache.begin_step(1)  # keys and values before token 630 are given back
    with pytest.raises(StatesLost):
        cache.rollback(645)


def _compressed(max_length: int) -> tuple[SpanCache, SessionView]:
    """Of a block whose entries have 5 values and stand for 4 tokens, and others of 9 values."""
    cache = SpanCache(
        [BlockCacheSpec(1, 4, 4, 8, forgets=True, entries=(2, 3))],
        2,
        max_length,
        CacheForm("auto", torch.float32),
        torch.device("cpu"),
    )
    return cache, SessionView(cache)


def test_entries_for_several_tokens_grow_and_go_back() -> None:
    cache, view = _compressed(11)
    first, second = torch.randn(2, 1, 5), torch.randn(2, 1, 5)
    assert torch.equal(view.update_entries(0, 0, first, 4), first)
    cache.advance(6)
    assert view.update_entries(0, 1, torch.randn(2, 0, 9), 4).shape == (2, 1, 9)
    assert torch.equal(view.update_entries(0, 0, second, 4), torch.cat([first, second], 1))
    cache.advance(3)
    cache.rollback(7)
    assert torch.equal(view.update_entries(0, 0, torch.empty(2, 0, 5), 4), first)
    cache.reorder([1, 1])
    assert torch.equal(view.update_entries(0, 0, second, 4), torch.cat([first[[1, 1]], second], 1))
    cache.advance(4)
    with pytest.raises(ValueError, match="do not fit"):
        view.update_entries(0, 0, second, 4)


def test_entries_of_a_long_session_are_counted_whole() -> None:
    short, long = (_compressed(tokens)[0].nbytes for tokens in (20_000, 40_000))
    assert long - short == 2 * 20_000 * 5 * 4
