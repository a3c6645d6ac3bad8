"""A client's model over spans answers as the whole model does, for every architecture."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from petalnode.node.blocks.config import read_config
from petalnode.node.blocks.remote_cache import RemoteCache
from petalnode.node.blocks.skeleton import build
from petalnode.node.errors import BadInput
from petalnode.protocols.ids import Span
from tests.greedy import prompt
from tests.parity.local_swarm import open_client
from tests.parity.whole import whole_of
from tests.tiny_models import ARCHITECTURES, CROSSING, CUTS, HYBRIDS, save_tiny

Tiny = Callable[[str], Path]

TWO, THREE = (Span(0, 3), Span(3, 6)), (Span(0, 1), Span(1, 4), Span(4, 6))
LOGITS = 1e-4
NEW = 7
"""Tokens of an answer: windows of 8 behind prompts of 9 are filled once more."""


def generate(model: Any, ids: torch.Tensor, mask: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
    mask = torch.ones_like(ids) if mask is None else mask
    torch.manual_seed(7)
    out: torch.Tensor = model.generate(
        ids, attention_mask=mask, eos_token_id=None, pad_token_id=0, **{"max_new_tokens": NEW, **options}
    )
    return out


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *HYBRIDS, *CROSSING])
def test_logits_equal(architecture: str, tiny: Tiny) -> None:
    folder = tiny(architecture)
    client, _ = open_client(folder, CUTS.get(architecture, THREE))
    whole = whole_of(folder)
    ids = prompt(2, 14)
    entered, left, logits = whole.step(ids, None)
    with torch.no_grad():
        assert torch.equal(client.model(ids).logits, logits)
    assert torch.equal(client.embed(ids), entered)
    assert torch.equal(client.head(left), logits)

    # The same in pieces and with padding.
    mask = (torch.arange(14) >= torch.tensor([3, 0])[:, None]).long()
    entered, left, logits = whole.step(ids, whole.cache(), mask)
    pieces = [client.embed(ids[:, :9], 0, mask[:, :9]), client.embed(ids[:, 9:], 9, mask)]
    assert torch.equal(torch.cat(pieces, 1)[mask == 1], entered[mask == 1])
    assert (client.head(left[:, -1:]) - logits[:, -1:]).abs().max() <= LOGITS


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *HYBRIDS, *CROSSING])
def test_greedy_tokens_equal(architecture: str, tiny: Tiny) -> None:
    folder = tiny(architecture)
    client, swarm = open_client(folder, CUTS.get(architecture, THREE))
    model = whole_of(folder).model
    ids, mask = prompt(3, 9), (torch.arange(9) >= torch.tensor([0, 4, 1])[:, None]).long()
    options: dict[str, Any] = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    for attention_mask in (None, mask):
        swarm.calls.clear()
        expected: Any = generate(model, ids, attention_mask, **options)
        got: Any = generate(client.model, ids, attention_mask, **options)
        assert torch.equal(got.sequences, expected.sequences)
        for mine, theirs in zip(got.logits, expected.logits, strict=True):
            assert (mine - theirs).abs().max() <= LOGITS
        assert swarm.calls == [(0, 9)] + [(9 + step, 1) for step in range(NEW - 1)]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_beam_search_equals(architecture: str, tiny: Tiny) -> None:
    """Of the others over servers: tests/swarm/test_hybrids.py."""
    folder = tiny(architecture)
    client, _ = open_client(folder, CUTS.get(architecture, THREE))
    ids = prompt(2, 7)
    options = {"num_beams": 3, "num_return_sequences": 2, "do_sample": False}
    assert torch.equal(generate(client.model, ids, **options), generate(whole_of(folder).model, ids, **options))


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "bloom", "gpt2"])
def test_sampled_sequences_equal(architecture: str, tiny: Tiny) -> None:
    folder = tiny(architecture)
    client, _ = open_client(folder, TWO)
    ids, mask = prompt(2, 8), (torch.arange(8) >= torch.tensor([2, 0])[:, None]).long()
    options = {"do_sample": True, "top_p": 0.9, "temperature": 0.8, "num_return_sequences": 2}
    got = generate(client.model, ids, mask, **options)
    assert torch.equal(got, generate(whole_of(folder).model, ids, mask, **options))


@pytest.mark.parametrize("architecture", ["llama", "mistral", "opt", "falcon_alibi"])
def test_several_calls_continue_one_session(architecture: str, tiny: Tiny) -> None:
    folder = tiny(architecture)
    client, swarm = open_client(folder, TWO)
    model = whole_of(folder).model
    cache = RemoteCache()
    first = generate(client.model, prompt(1, 8), do_sample=False, past_key_values=cache)
    longer = torch.cat([first, prompt(1, 5, seed=3)], dim=1)
    swarm.calls.clear()
    second = generate(client.model, longer, do_sample=False, past_key_values=cache)
    # The last token of the first answer was never sent: only it and what is new go out.
    assert swarm.calls[0] == (first.shape[1] - 1, 6)
    assert torch.equal(second, generate(model, longer, do_sample=False))

    cache.rollback(10)
    other = torch.cat([first[:, :10], prompt(1, 3, seed=4)], dim=1)
    swarm.calls.clear()
    third = generate(client.model, other, do_sample=False, past_key_values=cache)
    assert swarm.calls[0] == (10, 3)
    assert torch.equal(third, generate(model, other, do_sample=False))


def test_a_client_holds_no_blocks(tiny: Tiny) -> None:
    client, _ = open_client(tiny("llama"), TWO)
    assert {name for name, _ in client.model.named_parameters()} == {
        "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight",
    }  # fmt: skip
    assert client.num_blocks == 6


@pytest.mark.parametrize("held", ["model.embed_tokens.weight", "lm_head.weight"])
def test_tied_head_is_one_tensor(held: str, tmp_path: Path) -> None:
    """Whichever name the checkpoint has for it."""
    file = save_tiny("gemma3", tmp_path) / "model.safetensors"
    tensors = load_file(file)
    tensors[held] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, file, {"format": "pt"})
    model = open_client(tmp_path, TWO)[0].model
    assert model.lm_head.weight is model.model.embed_tokens.weight and torch.equal(model.lm_head.weight, tensors[held])


def test_a_cache_of_other_kind_is_refused(tiny: Tiny) -> None:
    client, _ = open_client(tiny("llama"), TWO)
    with pytest.raises(BadInput, match="RemoteCache"):
        client.model(prompt(1, 3), past_key_values=whole_of(tiny("llama")).cache())


def test_a_mask_with_holes_is_refused(tiny: Tiny) -> None:
    client, _ = open_client(tiny("llama"), TWO)
    with pytest.raises(BadInput, match="left"):
        client.model(prompt(1, 4), attention_mask=torch.tensor([[1, 0, 1, 1]]))


def test_models_loading_at_once_keep_their_dtypes(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path)
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    begin = threading.Barrier(len(dtypes))

    def load(dtype: torch.dtype) -> None:
        begin.wait()
        for _ in range(10):
            model = build(read_config(folder), dtype).model
            assert {weight.dtype for weight in model.parameters()} == {dtype}

    with ThreadPoolExecutor(len(dtypes)) as threads:
        list(threads.map(load, dtypes))
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "granite", "gpt2", "opt"])
def test_layers_are_called_alone_where_that_is_same(architecture: str, tiny: Tiny) -> None:
    client, _ = open_client(tiny(architecture), TWO)
    hidden = torch.randn(1, 3, client.hidden_size, generator=torch.Generator().manual_seed(3))
    logits = client.head(hidden)
    # Gemma 2 caps its logits, Granite scales embeddings and logits, GPT-2 and OPT add positions to embeddings.
    assert client._outer.embeds == (architecture in ("llama", "gemma2"))
    assert client._outer.heads() == (architecture in ("llama", "gpt2", "opt"))
    with torch.no_grad():
        assert torch.equal(logits, client.logits(hidden))
    for position in (0, 11):
        assert torch.equal(client.embed(prompt(1, 4), position), client.embedded(prompt(1, 4), position))


def test_head_is_compared_by_several_threads_at_once(tiny: Tiny) -> None:
    """What one of them calls is not taken for what stands behind the blocks."""
    client, swarm = open_client(tiny("llama"), TWO, fresh=True)
    hidden = torch.randn(8, 1, client.hidden_size)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(client.head, hidden.split(1)))
    with torch.no_grad():
        for row, logits in zip(hidden.split(1), found, strict=True):
            assert torch.equal(logits, client.logits(row))
    assert not swarm.calls
    assert [type(module).__name__ for module in client._outer._behind] == ["LlamaRMSNorm"]
