"""A span that is cut over devices computes what its parts do, one after the other, and what one device would.

Two parts on one processor stand for two devices: one with the compiled kernels, the other without, as an accelerator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from petalnode.node.blocks.cache import SpanCache
from petalnode.node.blocks.passes import Batch, SpanPasses, run_through
from petalnode.node.blocks.span import BlockSpan, load_span
from petalnode.node.blocks.split import SplitCache, SplitSpan
from petalnode.node.server.prefixes import PrefixStore, PrefixUse
from petalnode.node.server.steps import ComputeSession
from petalnode.protocols.ids import Span
from petalnode.protocols.prefix import PrefixNames, token_digests
from petalnode.protocols.training import LORA_PARTS, LoraName
from tests.greedy import prompt
from tests.parity.kernel_spans import KNOWN, conversation, lora, needs_kernels, off, saved, values
from tests.parity.local_swarm import loaded
from tests.parity.whole import whole_of
from tests.tiny_models import CROSSING, CUTS, HIDDEN, HYBRIDS, NUM_BLOCKS

Tiny = Callable[[str], Path]
PLENTY = 1 << 40


def split(folder: Path, *ends: int, kernels: Sequence[Any] = (), **options: Any) -> SplitSpan:
    """Blocks from the first of `ends` to the last, cut at those between."""
    ways = kernels or ["torch"] * (len(ends) - 1)
    return SplitSpan(
        [load_span(folder, Span(*cut), kernels=way, **options) for cut, way in zip(pairwise(ends), ways, strict=True)]
    )


# Of those that keep keys and values alone, one of each kind of cache and mask.
@pytest.mark.parametrize("architecture", ["llama", "bloom", "gpt_oss", "deepseek_v32", "llama4", *HYBRIDS, *CROSSING])
def test_sessions_equal_those_of_its_parts(architecture: str, tiny: Tiny) -> None:
    folder = tiny(architecture)
    cuts = CUTS.get(architecture, (Span(0, 2), Span(2, 3), Span(3, 6)))
    parts = [loaded(folder, cut) for cut in cuts]
    both, whole = SplitSpan(parts), whole_of(folder)
    ids = [prompt(1, 24), prompt(3, 24, seed=1)]
    entered = [whole.step(given, whole.cache())[0] for given in ids]
    paddings = None, [0, 5, 2]
    caches = [both.make_cache(len(given), 40, padding) for given, padding in zip(ids, paddings, strict=True)]
    own = [[part.make_cache(len(given), 40, pad) for part in parts] for given, pad in zip(ids, paddings, strict=True)]

    def through(hidden: torch.Tensor, session: list[SpanCache]) -> torch.Tensor:
        for part, cache in zip(parts, session, strict=True):
            hidden = part.forward(hidden, cache)
        return hidden

    def steps(at: int) -> None:
        given = [hidden[:, at : at + 1] for hidden in entered]
        expected = given
        for number, part in enumerate(parts):
            expected = part.decode([(hidden, session[number]) for hidden, session in zip(expected, own, strict=True)])
        for found, right in zip(both.decode(list(zip(given, caches, strict=True))), expected, strict=True):
            assert torch.equal(found, right)

    def prompts(first: int, end: int) -> None:
        for hidden, cache, session in zip(entered, caches, own, strict=True):
            given = hidden[:, first:end]
            assert torch.equal(both.forward(given, cache), through(given, session))

    prompts(0, 9)
    prompts(9, 13)
    for at in range(13, 18):
        steps(at)
    for cache in (*caches, *own[0], *own[1]):
        cache.rollback(15)
    for cache in (caches[1], *own[1]):
        cache.reorder([2, 0, 0])
    steps(15)
    prompts(16, 20)
    assert [cache.length for cache in caches] == [20, 20]


@needs_kernels
@pytest.mark.parametrize("name", KNOWN)
def test_parts_may_compute_in_unlike_ways(name: str, tmp_path: Path) -> None:
    folder = saved(name, tmp_path / "model")
    one = load_span(folder, Span(1, 4), dtype="float32", device="cpu")
    expected = conversation(one)
    for kernels in (("native", "torch"), ("torch", "native")):
        unlike = split(folder, 1, 2, 4, kernels=kernels, dtype="float32", device="cpu")
        assert {part.kernels for part in unlike.parts} == {"native", "torch"} and unlike.kernels == "native"
        for found, right in zip(conversation(unlike), expected, strict=True):
            assert off(found, right) < 1e-5
    assert unlike.linears == one.linears and unlike.weight_bytes >= one.weight_bytes
    # What is counted as a token of a part that keeps states alone comes on top.
    assert unlike.cache_bytes_per_token == one.cache_bytes_per_token or one.keeps_states


@pytest.mark.parametrize("part", [Span(0, 2), Span(1, 4), Span(3, 6), Span(2, 3), Span(4, 5)])
def test_sessions_through_some_of_the_blocks(part: Span, tiny: Tiny) -> None:
    both, one = split(tiny("gemma3"), 0, 2, 4, 6), loaded(tiny("gemma3"), Span(0, 6))
    for found, right in zip(conversation(both, part=part), conversation(one, part=part), strict=True):
        assert off(found, right) < 1e-5
    with pytest.raises(ValueError, match=r"blocks 0:7 are wanted, 0:6 are here"):
        both.make_cache(1, 8, part=Span(0, 7))


def test_batch_of_sessions_through_unlike_blocks(tiny: Tiny) -> None:
    both, one = split(tiny("llama"), 0, 2, 4, 6), loaded(tiny("llama"), Span(0, 6))
    parts = (None, Span(0, 2), Span(3, 5), Span(2, 6))

    def said(blocks: BlockSpan) -> list[torch.Tensor]:
        caches = [blocks.make_cache(2, 8, part=part) for part in parts]
        for seed, cache in enumerate(caches):
            blocks.forward(values(2, 5, seed=seed), cache)
        return blocks.decode([(values(2, 1, seed=9), cache) for cache in caches])

    for found, right in zip(said(both), said(one), strict=True):
        assert off(found, right) < 1e-5


@needs_kernels
@pytest.mark.parametrize("layers", [("self_attn.q_proj", "mlp.down_proj"), ("mlp.up_proj",)])
def test_adapters_of_all_parts_or_of_one(layers: tuple[str, ...], tiny: Tiny) -> None:
    both = split(tiny("llama"), 0, 3, 6, kernels=("native", "torch"), dtype="float32", device="cpu")
    one = loaded(tiny("llama"), Span(0, 6))
    generator = torch.Generator().manual_seed(3)
    tensors = {f"{block}.prompt": torch.randn(4, HIDDEN, generator=generator) for block in range(NUM_BLOCKS)}
    name = LoraName(4, layers[0], LORA_PARTS[0])  # of the second part
    into, out = one.linears[4][layers[0]]
    tensors |= {str(name): torch.randn(2, into, generator=generator)}
    tensors |= {str(LoraName(4, layers[0], LORA_PARTS[1])): torch.randn(out, 2, generator=generator)}
    only = {key: tensor for key, tensor in tensors.items() if "prompt" not in key}

    def said(blocks: BlockSpan) -> list[torch.Tensor]:
        adapters = [lora(blocks, layers, 1), blocks.make_adapter(only), None, blocks.make_adapter(tensors)]
        caches = [blocks.make_cache(1, 12) for _ in adapters]
        found = [blocks.forward(values(1, 6, seed=at), caches[at], using) for at, using in enumerate(adapters)]
        return found + blocks.decode([(values(1, 1, seed=9), cache) for cache in caches], adapters)

    for found, right in zip(said(both), said(one), strict=True):
        assert off(found, right) < 1e-5


@pytest.mark.parametrize("architecture", ["llama", "qwen3_5"])
def test_later_sessions_begin_with_kept_tokens(architecture: str, tiny: Tiny) -> None:
    both = split(tiny(architecture), 0, 3, 6)
    hidden, cache = values(2, 258), both.make_cache(2, 300)
    digests = token_digests(hidden.numpy().tobytes(), 2, 258)
    store, use = PrefixStore(), PrefixUse("client", PrefixNames(b"root"), True)
    store.limit(10_000)
    both.stack.begin_step(cache, 257, False)
    assert cache.whole_groups(257) == (256 if both.keeps_states else 257)
    both.forward(hidden[:, :256], cache)
    use.names.append(digests[:256])
    store.offer(use, cache)
    expected = both.forward(hidden[:, 256:257], cache)
    # The states of two rows count beside their tokens.
    assert store.tokens > 512 if both.keeps_states else store.tokens == 512

    later = PrefixUse("client", PrefixNames(b"root"), True)
    other = both.make_cache(2, 300)
    store.begin(later, use.names.names, other)
    assert other.length == 256 and torch.equal(both.forward(hidden[:, 256:257], other), expected)
    shorter = both.make_cache(2, 300)
    store.begin(PrefixUse("client", PrefixNames(b"root"), True), use.names.names[:5], shorter)
    assert shorter.length == (0 if both.keeps_states else 160)


def test_a_step_failing_half_way_leaves_nothing(tiny: Tiny) -> None:
    both = split(tiny("llama"), 0, 3, 6)
    hidden, cache = values(1, 8), both.make_cache(1, 8)
    unfit = {
        str(LoraName(4, "self_attn.q_proj", part)): torch.ones(shape)
        for part, shape in zip(LORA_PARTS, ((2, HIDDEN + 1), (HIDDEN, 2)), strict=True)
    }
    both.forward(hidden[:, :5], cache)
    for run in (both.forward, lambda given, cache, adapter: both.decode([(given[:, :1], cache)], [adapter])):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            run(hidden[:, 5:], cache, both.make_adapter(unfit))
        assert isinstance(cache, SplitCache) and [own.length for own in cache.parts] == [5, 5] == 2 * [cache.length]
    other = both.make_cache(1, 5)  # full by now
    both.forward(hidden[:, :5], other)
    with pytest.raises(ValueError, match="5 of 5 are held"):
        both.decode([(hidden[:, 5:6], cache), (hidden[:, 5:6], other)])
    fresh = both.make_cache(1, 8)
    both.forward(hidden[:, :5], fresh)
    assert torch.equal(both.forward(hidden[:, 5:], cache), both.forward(hidden[:, 5:], fresh))
    session = ComputeSession(cache, "none")
    session.close()
    assert not cache.nbytes and not any(own.nbytes for own in cache.parts)


def test_a_session_reserves_for_the_fullest_device(tiny: Tiny) -> None:
    """A part of sliding windows keeps fewer tokens than one that keeps all."""
    both = split(tiny("gemma3"), 0, 5, 6)
    tokens = [part.cache_tokens(2, 5000) for part in both.parts]
    assert both.cache_tokens(2, 5000) == max(tokens) > min(tokens)


@needs_kernels
def test_exact_parts_have_the_bits_of_one(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "model")
    both = split(folder, 1, 2, 4, kernels=("native", "native"), quantisation="none/exact-1", dtype="float32")
    one = load_span(folder, Span(1, 4), quantisation="none/exact-1", dtype="float32", kernels="native", device="cpu")
    for found, right in zip(conversation(both), conversation(one), strict=True):
        assert torch.equal(found, right)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen3_5"])
@pytest.mark.parametrize("memory", [PLENTY, 0])
@pytest.mark.parametrize("part", [Span(0, 6), Span(1, 5), Span(4, 6)])
def test_gradients_pass_through_all_parts(architecture: str, memory: int, part: Span, tiny: Tiny) -> None:
    both, one = split(tiny(architecture), 0, 2, 4, 6), loaded(tiny(architecture), Span(0, 6))
    rows, length = 2, 9
    hidden, gradient = values(rows, length), values(rows, length, seed=1)
    path, (into, out) = next(iter(one.linears[part.end - 1].items()))
    generator = torch.Generator().manual_seed(2)
    lora_of_last = {
        LoraName(part.end - 1, path, LORA_PARTS[0]): torch.randn(3, into, generator=generator),
        LoraName(part.end - 1, path, LORA_PARTS[1]): torch.randn(out, 3, generator=generator),
    }
    mask = torch.arange(length) >= torch.tensor([[0], [4]])
    prompts = values(len(part), 1, 3, seed=3)
    batch = Batch(part, hidden, mask, prompts=prompts, lora=lora_of_last)

    def passed(blocks: BlockSpan) -> tuple[Any, ...]:
        passes = SpanPasses(blocks, memory)
        forward, back = run_through(passes.forward(batch)), run_through(passes.backward(batch, gradient))
        saved_first = run_through(passes.recompute(batch))
        assert bool(saved_first.graphs) == bool(memory)
        again = run_through(passes.resume(saved_first, gradient))
        return forward, back.hidden, back.prompts, *back.lora.values(), again.hidden, again.prompts

    for found, right in zip(passed(both), passed(one), strict=True):
        assert off(found, right) < 1e-5
