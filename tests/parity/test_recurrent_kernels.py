"""Convolutions and delta rules by the compiled kernels, against the functions of transformers whose place they take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.qwen3_5 import modeling_qwen3_5

from petalnode.node.blocks.caches.states import STATES, StateRing
from petalnode.node.blocks.kernels import recurrent
from petalnode.node.blocks.kernels.library import ISAS, Library
from petalnode.protocols.ids import Span
from tests.parity.kernel_spans import conversation, needs_kernels, off, pair, values
from tests.tiny_models import HYBRIDS, WHOLE, save_tiny

DELTA = (modeling_qwen3_5, "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
KIMI = (modeling_kimi_linear, "chunk_kimi_delta_attention", "recurrent_kimi_delta_attention")


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ours(kernels: Library, name: str, threads: int = 1) -> Any:
    """The kernels' function, which has none to call in its place."""
    return recurrent._REPLACED[name](kernels.functions, threads, None)


def projected(
    rows: int, tokens: int, heads: tuple[int, int], dims: tuple[int, int], by_channel: bool = False
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """What a delta rule is called with, heads of keys and of values, and a state."""
    (key_heads, value_heads), (dim, value_dim) = heads, dims
    decays = (rows, tokens, value_heads, dim) if by_channel else (rows, tokens, value_heads)
    given = {
        "query": drawn(rows, tokens, key_heads, dim, seed=1),
        "key": drawn(rows, tokens, key_heads, dim, seed=2) / dim**0.5,
        "value": drawn(rows, tokens, value_heads, value_dim, seed=3),
        "g": -drawn(*decays, seed=4).abs(),
        "beta": drawn(rows, tokens, value_heads, seed=5).sigmoid(),
    }
    return given, drawn(rows, value_heads, dim, value_dim, seed=6)


@pytest.mark.parametrize("shape", [(1, 16, 1, 4), (3, 130, 1, 3), (2, 24, 5, 7), (1, 70, 100, 4)], ids=str)
@torch.inference_mode()
def test_convolutions_are_those_of_transformers(shape: tuple[int, int, int, int], kernels: Library) -> None:
    rows, channels, tokens, taps = shape
    hidden, weight, bias = drawn(rows, tokens, channels).transpose(1, 2), drawn(channels, taps), drawn(channels)
    for isa in filter(kernels.select, ISAS):
        for more in ((), (bias,), (None, "silu"), (bias, "silu")):
            expected = modeling_qwen3_5.causal_conv1d_fn(hidden, weight, *more)
            assert off(ours(kernels, "causal_conv1d_fn")(hidden, weight, *more), expected) < 1e-6, isa
            for held in (taps - 1, taps, taps + 3):
                state, same = drawn(rows, channels, held), drawn(rows, channels, held)
                expected = modeling_qwen3_5.causal_conv1d_update(hidden, state, weight, *more)
                given = ours(kernels, "causal_conv1d_update")(hidden, same, weight, *more)
                assert off(given, expected) < 1e-6 and torch.equal(same, state), (isa, held)


@pytest.mark.parametrize("functions", [DELTA, KIMI], ids=["delta", "kimi"])
@pytest.mark.parametrize("tokens", [1, 5, 70])
@torch.inference_mode()
def test_delta_rules_are_those_of_transformers(functions: tuple[Any, str, str], tokens: int, kernels: Library) -> None:
    module, *names = functions
    for heads, dims in (((2, 2), (16, 32)), ((4, 4), (24, 40)), ((2, 2), (128, 128)), ((1, 3), (16, 16))):
        if module is modeling_kimi_linear and heads[0] != heads[1]:
            continue
        given, state = projected(2, tokens, heads, dims, module is modeling_kimi_linear)
        for before in (None, state):
            for name in names:
                options = {"output_final_state": True, "use_qk_l2norm_in_kernel": before is not None}
                expected = getattr(module, name)(**given, initial_state=before, **options)
                for isa in filter(kernels.select, ISAS):
                    start = None if before is None else before.clone()
                    found = ours(kernels, name)(**given, initial_state=start, **options)
                    for one, other in zip(found, expected, strict=True):
                        assert off(one, other) < 1e-5, (isa, name, heads, dims)


@torch.inference_mode()
def test_rows_pieces_and_threads_change_no_bit(kernels: Library) -> None:
    given, state = projected(3, 6, (2, 4), (128, 128))
    update, rule = "causal_conv1d_update", "torch_chunk_gated_delta_rule"
    hidden, weight, held = drawn(3, 9000, 6), drawn(9000, 4), drawn(3, 9000, 4)
    for isa in filter(kernels.select, ISAS):
        output, end = ours(kernels, rule, 3)(**given, initial_state=state.clone(), output_final_state=True)
        convolved = ours(kernels, update, 3)(hidden, kept := held.clone(), weight, None, "silu")
        for row in range(3):
            alone, last = state[row : row + 1].clone(), held[row : row + 1].clone()
            for piece in (slice(0, 1), slice(1, 4), slice(4, 6)):
                part = {name: tensor[row : row + 1, piece] for name, tensor in given.items()}
                found, alone = ours(kernels, rule)(**part, initial_state=alone, output_final_state=True)
                assert torch.equal(found[0], output[row, piece]), isa
                piece_of = hidden[row : row + 1, :, piece]
                said = ours(kernels, update)(piece_of, last, weight, None, "silu")
                assert torch.equal(said[0], convolved[row, :, piece]), isa
            assert torch.equal(alone[0], end[row]) and torch.equal(last[0], kept[row]), isa


def test_what_kernels_do_not_know_transformers_computes(kernels: Library) -> None:
    given, state = projected(1, 3, (2, 2), (16, 16))
    module, name, _ = DELTA
    original = getattr(module, name)
    rule = recurrent._REPLACED[name](kernels.functions, 1, original)
    options = {"initial_state": state, "output_final_state": True}
    wide, long = projected(1, 3, (1, 1), (272, 16))
    assert torch.equal(rule(**wide, initial_state=long)[0], original(**wide, initial_state=long)[0])
    half = {key: tensor.bfloat16() for key, tensor in given.items()}
    assert rule(**half, **options)[0].dtype == torch.bfloat16
    leaf = given["value"].requires_grad_()
    output, _ = rule(**given, **options)
    (gradient,) = torch.autograd.grad(output.sum(), leaf)
    assert gradient.abs().sum() > 0
    convolve = recurrent._REPLACED["causal_conv1d_fn"](kernels.functions, 1, modeling_qwen3_5.causal_conv1d_fn)
    hidden, weight = drawn(1, 8, 30), drawn(8, 17)
    for more in ((), (None, "gelu")):
        assert torch.equal(convolve(hidden, weight, *more), modeling_qwen3_5.causal_conv1d_fn(hidden, weight, *more))


def test_a_function_of_another_kind_stays(kernels: Library) -> None:
    """One that computes something else, or wants to be called otherwise."""

    def reversed_taps(hidden: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return modeling_qwen3_5.causal_conv1d_fn(hidden, weight.flip(1), *args, **kwargs)

    def renamed(hidden: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
        return hidden

    function = recurrent._REPLACED["causal_conv1d_fn"]
    assert function(kernels.functions, 1, modeling_qwen3_5.causal_conv1d_fn).agrees()
    assert not function(kernels.functions, 1, reversed_taps).agrees()
    assert not function(kernels.functions, 1, renamed).agrees()


@needs_kernels
@pytest.mark.parametrize("name", [*HYBRIDS, *WHOLE])
def test_hybrids_compute_as_by_torch(name: str, tmp_path: Path) -> None:
    by_torch, native = pair(save_tiny(name, tmp_path / "model"), Span(0, 4))
    for blocks, replaced in ((by_torch, False), (native, name not in ("minimax", "recurrent_gemma"))):
        modules = (inner for block in blocks.stack.blocks for inner in block.modules())
        assert any("forward" in vars(module) for module in modules) == replaced
    for expected, given in zip(conversation(by_torch), conversation(native), strict=True):
        assert off(given, expected) < 1e-4


@needs_kernels
@pytest.mark.parametrize("name", ["qwen3_5", "jamba"])
def test_drafts_that_are_always_partly_wrong(name: str, tmp_path: Path) -> None:
    """However many of them, what is computed once more with the next one stays little."""
    for blocks in pair(save_tiny(name, tmp_path / "model")):
        hidden = values(1, 150)
        whole, cut = blocks.make_cache(1, 150), blocks.make_cache(1, 150)
        expected = blocks.forward(hidden, whole)
        blocks.forward(hidden[:, :10], cut)
        for start in range(10, 140, 5):
            drafted = blocks.forward(hidden[:, start : start + 8], cut)
            assert off(drafted, expected[:, start : start + 8]) < 1e-4
            cut.rollback(start + 5)
            again = cut.states and cut.states.begin(cut.length)
            assert again is None or again.shape[1] < 50


@needs_kernels
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next", "kimi_linear", "olmo_hybrid", "lfm2"])
def test_steps_of_several_tokens_and_their_rollback(name: str, tmp_path: Path) -> None:
    """As drafts are checked: where a prompt is cut changes last bits only, and nothing is computed once more."""
    native = pair(save_tiny(name, tmp_path / "model"))[1]
    hidden = values(2, 90)
    whole, cut = native.make_cache(2, 90, [0, 3]), native.make_cache(2, 90, [0, 3])
    expected = native.forward(hidden, whole)
    native.forward(hidden[:, :70], cut)
    for start, end in ((70, 74), (72, 75), (73, 80), (79, 84), (81, 90)):
        cut.rollback(start)
        assert cut.states is not None and cut.states.begin(start) is None
        assert off(native.forward(hidden[:, start:end], cut), expected[:, start:end]) < 1e-5
        kept = [one.nbytes for kept in cut.states._kept for _, given in kept.inputs for one in given.values()]
        counted = sum(StateRing.bytes_per_row(spec.states) for spec in native.specs)
        held = sum(state.nbytes for spec in native.specs for state in spec.states)
        assert kept and sum(kept) <= 2 * (counted - STATES * held)
