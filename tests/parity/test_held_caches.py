"""Keys and values in bfloat16 or in blocks of eight bits: what is computed with them, by torch and by the kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from petalnode.node.blocks.kernels import choice
from petalnode.node.blocks.kernels.library import ISAS, Library
from petalnode.node.blocks.span import BlockSpan, load_span
from petalnode.node.errors import MachineError
from petalnode.protocols.ids import Span
from tests.parity.kernel_spans import SPAN, Script, conversation, needs_kernels, off, pair, saved, values
from tests.tiny_models import save_tiny

FORMS = ("bfloat16", "int8")


def all_of(script: Script) -> torch.Tensor:
    return torch.cat([part.flatten() for part in script])


def loaded(folder: Path, form: str) -> tuple[torch.Tensor, BlockSpan, BlockSpan]:
    """What float32 keys and values give, and blocks with others by torch and by the kernels."""
    exact = all_of(conversation(load_span(folder, SPAN, dtype="float32", device="cpu")))
    return exact, *pair(folder, SPAN, f"none/cache={form}")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["llama", "qwen2_sliding", "gemma3", "gpt2", "deepseek_v2"])
def test_steps_are_those_of_torch_on_every_processor(name: str, form: str, tmp_path: Path, kernels: Library) -> None:
    """A last bit may decide how a value is rounded, but few of them are: not a third of what all roundings make."""
    exact, by_torch, native = loaded(saved(name, tmp_path / "model"), form)
    assert native.step is not None
    expected = all_of(conversation(by_torch))
    rounding = off(expected, exact)
    assert 1e-3 < rounding < 0.05
    for isa in ISAS:
        if kernels.select(isa):
            assert off(all_of(conversation(native)), expected) < 0.3 * rounding, isa


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["bloom", "gpt_oss", "mixtral"])
def test_other_families_by_torch(name: str, form: str, tmp_path: Path) -> None:
    folder = saved(name, tmp_path / "model")
    exact = all_of(conversation(load_span(folder, SPAN, dtype="float32", device="cpu")))
    blocks = load_span(folder, SPAN, dtype="float32", device="cpu", quantisation=f"none/cache={form}")
    assert 1e-4 < off(all_of(conversation(blocks)), exact) < 0.1


@needs_kernels
@pytest.mark.parametrize("form", FORMS)
def test_the_kernels_hold_what_torch_holds(form: str, tmp_path: Path) -> None:
    held = []
    for blocks in pair(save_tiny("llama", tmp_path / "model"), SPAN, f"none/cache={form}"):
        cache = blocks.make_cache(8, 4, part=Span(1, 2))
        blocks.forward(values(8, 2, seed=1), cache)
        blocks.decode([(values(8, 1, seed=2), cache)])
        held.append(cache.memory)
    one, other = (memory.view(torch.uint8).view(2, 8, 2, 4, -1)[:, :, :, :3] for memory in held)
    assert float((one != other).float().mean()) < 0.01  # a last bit decided it


@needs_kernels
@pytest.mark.parametrize("form", FORMS)
def test_neither_neighbours_nor_threads_change_a_row(form: str, tmp_path: Path) -> None:
    _, native = pair(save_tiny("llama", tmp_path / "model"), SPAN, f"none/cache={form}")
    assert native.step is not None
    caches = [native.make_cache(1, 60) for _ in range(5)]
    for index, cache in enumerate(caches):
        native.forward(values(1, 3 + 13 * index, seed=index), cache)  # of panels, whole and not
    steps = [(values(1, 1, seed=100 + index), cache) for index, cache in enumerate(caches)]
    together = native.decode(steps)
    native.step.threads = 3
    for (hidden, cache), before in zip(steps, together, strict=True):
        cache.rollback(cache.length - 1)
        assert torch.equal(native.decode([(hidden, cache)])[0], before)


@pytest.mark.parametrize("form", FORMS)
def test_a_prompt_in_pieces_is_the_prompt(form: str, tmp_path: Path) -> None:
    """A recovery replays a session in other pieces than those in which it came."""
    folder = save_tiny("llama", tmp_path / "model")
    blocks = load_span(folder, SPAN, dtype="float32", device="cpu", quantisation=f"none/cache={form}")
    hidden = values(2, 12)
    whole = blocks.forward(hidden, blocks.make_cache(2, 12))
    cache = blocks.make_cache(2, 12)
    pieces = [blocks.forward(piece, cache) for piece in hidden.split(5, dim=1)]
    rounding = off(whole, (exact := load_span(folder, SPAN, dtype="float32", device="cpu")).forward(
        hidden, exact.make_cache(2, 12)
    ))  # fmt: skip
    assert off(torch.cat(pieces, dim=1), whole) < 0.3 * rounding


def test_fewer_bits_hold_more_tokens(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "model")
    sizes = {}
    for form in ("", "/cache=bfloat16", "/cache=int8"):
        blocks = load_span(folder, SPAN, dtype="float32", device="cpu", quantisation=f"none{form}")
        assert blocks.quantisation == f"none{form}"
        assert blocks.make_cache(3, 7).nbytes == 3 * 7 * blocks.cache_bytes_per_token
        sizes[blocks.cache_dtype] = blocks.cache_bytes_per_token
    keys = 2 * 2 * len(SPAN)  # of 16 values
    assert sizes == {"float32": keys * 64, "bfloat16": keys * 32, "int8": keys * 18}


def test_keys_of_fewer_bits_are_for_float32_only(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "model")
    with pytest.raises(MachineError, match="--cache-dtype int8 computes in float32, not in bfloat16: add --dtype"):
        load_span(folder, SPAN, dtype="bfloat16", device="cpu", quantisation="none/cache=int8")


@needs_kernels
def test_step_that_reads_them_otherwise_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = choice.SpanStep.run
    monkeypatch.setattr(choice.SpanStep, "run", lambda *given: right(*given) * 1.03)
    _, native = pair(save_tiny("llama", tmp_path / "model"), SPAN, "none/cache=int8")
    assert native.step is None
    assert "the compiled kernels differ" in caplog.text
