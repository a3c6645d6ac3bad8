"""Reading adapter folders: what is taken, and what is refused with a sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from petalnode.node.errors import BadInput
from petalnode.node.models import adapter as module
from petalnode.node.models.adapter import Adapter, read_adapter
from petalnode.protocols.adapter import (
    AnnouncedAdapter,
    TensorDigest,
    block_of,
    hash_of_adapter,
    hash_of_block,
    hashes_of_blocks,
)
from petalnode.protocols.ids import Span

PREFIX = "base_model.model.model.layers"
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "bias": "none", "target_modules": ["q_proj"]}
LINEARS = {number: {"self_attn.q_proj": (8, 6)} for number in range(4)}
WHOLE = Span(0, 4)
Weights = dict[str, torch.Tensor]


def weights(*blocks: int) -> Weights:
    generator = torch.Generator().manual_seed(0)
    return {
        f"{PREFIX}.{block}.self_attn.q_proj.lora_{part}.weight": torch.randn(shape, generator=generator)
        for block in blocks or (1,)
        for part, shape in (("A", (2, 8)), ("B", (6, 2)))
    }


def folder(root: Path, config: Any = CONFIG, tensors: Weights | None = None) -> Path:
    target = root / "poet"
    target.mkdir(exist_ok=True)
    (target / "adapter_config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    save_file(weights() if tensors is None else tensors, target / "adapter_model.safetensors")
    return target


def test_the_scaling_is_in_b(tmp_path: Path) -> None:
    given_weights = weights(1, 3)
    adapter = read_adapter(folder(tmp_path, tensors=given_weights))
    assert adapter.name == "poet" and [number for number, _ in adapter.blocks] == [1, 3]
    assert set(adapter.part(Span(2, 4))) == {"3.self_attn.q_proj.lora_A", "3.self_attn.q_proj.lora_B"}
    plain = given_weights[f"{PREFIX}.1.self_attn.q_proj.lora_B.weight"]
    assert torch.equal(adapter.tensors["1.self_attn.q_proj.lora_B"], 2 * plain)
    adapter.check_fits(WHOLE, LINEARS, 16, 4)


@pytest.mark.parametrize(
    ("options", "scaling"),
    [
        ({"lora_alpha": 3}, 1.5),
        ({"use_rslora": True}, 4 / 2**0.5),
        ({"alpha_pattern": {"q_proj": 8, "k_proj": 16}}, 4.0),
        ({"alpha_pattern": {"layers.2.self_attn.q_proj": 8}}, 2.0),
        ({"alpha_pattern": {"model.layers.1.self_attn.q_proj": 8}, "rank_pattern": {"q_proj": 2}}, 4.0),
    ],
)
def test_peft_s_ways_to_scale(options: dict[str, Any], scaling: float, tmp_path: Path) -> None:
    adapter = read_adapter(folder(tmp_path, CONFIG | options))
    expected = weights()[f"{PREFIX}.1.self_attn.q_proj.lora_B.weight"] * scaling
    torch.testing.assert_close(adapter.tensors["1.self_attn.q_proj.lora_B"], expected)


def test_half_precision_is_kept_where_it_is_exact(tmp_path: Path) -> None:
    half = {name: tensor.bfloat16() for name, tensor in weights().items()}
    assert read_adapter(folder(tmp_path, tensors=half)).tensors["1.self_attn.q_proj.lora_B"].dtype == torch.bfloat16
    odd = read_adapter(folder(tmp_path, CONFIG | {"lora_alpha": 3}, half)).tensors["1.self_attn.q_proj.lora_B"]
    assert odd.dtype == torch.float32 and torch.equal(odd, list(half.values())[1].float() * 1.5)


def changed(key: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Weights:
    name = f"{PREFIX}.1.self_attn.q_proj.lora_{key}.weight"
    return {**weights(), name: change(weights()[name]).contiguous()}


def without(key: str) -> Weights:
    return {name: tensor for name, tensor in weights().items() if f"lora_{key}." not in name}


def nan(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.index_fill(1, torch.tensor([0]), float("nan"))


@pytest.mark.parametrize(
    ("config", "tensors", "says"),
    [
        ("{", None, "no JSON"),
        ("[]", None, "no JSON object"),
        (CONFIG | {"peft_type": "IA3"}, None, "type IA3"),
        (CONFIG | {"bias": "all"}, None, "bias='all'"),
        (CONFIG | {"use_dora": True}, None, "DoRA"),
        (CONFIG | {"init_lora_weights": "pissa_niter_4"}, None, "pissa_niter_4"),
        (CONFIG | {"target_parameters": ["mlp.experts"]}, None, "no linear layers"),
        (CONFIG | {"lora_alpha": "much"}, None, "must be numbers"),
        (CONFIG | {"alpha_pattern": {"(": 3}}, None, "must be numbers"),
        (CONFIG | {"lora_alpha": 0}, None, "makes no sense"),
        (CONFIG, {}, "no LoRA weights"),
        (CONFIG, without("B"), "no other half"),
        (CONFIG, without("A"), "no other half"),
        (CONFIG, changed("A", nan), "NaN"),
        (CONFIG, changed("B", lambda b: b.double()), "F64"),
        (CONFIG, {**weights(), "base_model.model.lm_head.lora_A.weight": torch.ones(2, 8)}, "lm_head"),
        (CONFIG, {**weights(), f"{PREFIX}.1.self_attn.q_proj.lora_magnitude_vector": torch.ones(6)}, "magnitude"),
        (CONFIG | {"modules_to_save": ["q_proj"]}, {f"{PREFIX}.1.q_proj.weight": torch.ones(2, 2)}, "nothing else"),
        ({"peft_type": "PROMPT_TUNING"}, None, "no prompt_embeddings"),
        (
            {"peft_type": "PROMPT_TUNING"},
            {"prompt_embeddings": torch.ones(2, 4), "more": torch.ones(1)},
            "more beside its prompt",
        ),
    ],
)
def test_what_cannot_be_used_is_said(config: Any, tensors: Weights | None, says: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=says):
        read_adapter(folder(tmp_path, config, tensors))


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        (changed("A", lambda a: a[:, :7]), r"\[rank, 8\]"),
        (changed("B", lambda b: b[:5]), r"\[6, rank\]"),
        (weights(4), "block 4, and the model has 4"),
        (
            {name.replace("q_proj", "mlp"): tensor for name, tensor in weights().items()},
            "no linear layer 'self_attn.mlp'",
        ),
    ],
)
def test_what_is_for_another_model_is_said(tensors: Weights, says: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=says):
        read_adapter(folder(tmp_path, tensors=tensors)).check_fits(WHOLE, LINEARS, 16, 4)


def test_pickles_are_refused(tmp_path: Path) -> None:
    target = folder(tmp_path)
    (target / "adapter_model.safetensors").unlink()
    with pytest.raises(BadInput, match=r"no adapter_model\.safetensors"):
        read_adapter(target)
    (target / "adapter_model.bin").write_bytes(b"\x80\x04")
    for path in (target, target / "adapter_model.bin"):
        with pytest.raises(BadInput, match=r"adapter_model\.bin is a pickle"):
            read_adapter(path)


def test_what_is_no_adapter_is_said(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="there is no folder"):
        read_adapter(tmp_path / "nowhere")
    with pytest.raises(BadInput, match=r"no adapter_config\.json"):
        read_adapter(tmp_path)
    target = folder(tmp_path)
    whole = (target / "adapter_model.safetensors").read_bytes()
    (target / "adapter_model.safetensors").write_bytes(whole[:-3])
    with pytest.raises(BadInput, match="truncated"):
        read_adapter(target)


def test_too_large_is_said_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ADAPTER_BYTES", 100)
    with pytest.raises(BadInput, match="too large for an adapter"):
        read_adapter(folder(tmp_path))


def test_a_version_is_compared(tmp_path: Path) -> None:
    target = folder(tmp_path)
    read_adapter(target).check_model(bytes(32), "tiny")  # nothing is noted
    note = {"format": 1, "method": "lora", "model": "tiny", "model_version": "ab" * 32, "task": "language"}
    (target / "petalnode.json").write_text(json.dumps(note | {"labels": [], "tags": [], "results": {}}))
    adapter = read_adapter(target)
    adapter.check_model(b"\xab" * 32, "tiny")
    with pytest.raises(BadInput, match="version abababababab of tiny, and this is version 000000000000"):
        adapter.check_model(bytes(32), "tiny")


def test_deep_prompts(tmp_path: Path) -> None:
    note = {"format": 1, "method": "deep-prompt", "model": "tiny", "model_version": "ab" * 32, "task": "language"}
    (tmp_path / "petalnode.json").write_text(json.dumps(note | {"labels": [], "tags": [], "results": {}}))
    tensors = {"prompt_embeddings": torch.ones(3, 16), "deep_prompts": torch.randn(4, 3, 16)}
    save_file(tensors, tmp_path / "deep_prompts.safetensors")
    adapter = read_adapter(tmp_path)
    assert set(adapter.tensors) == {f"{block}.prompts" for block in range(4)} and adapter.soft_prompt is not None
    adapter.check_fits(WHOLE, LINEARS, 16, 4)
    with pytest.raises(BadInput, match="deep prompts are for all blocks"):
        adapter.check_fits(Span(0, 5), LINEARS, 16, 5)
    save_file(tensors | {"deep_prompts": torch.ones(4, 2, 16)}, tmp_path / "deep_prompts.safetensors")
    with pytest.raises(BadInput, match=r"no deep_prompts of \[blocks, 3"):
        read_adapter(tmp_path)


def test_the_hash_says_which_tensors_they_are() -> None:
    tensors = {f"{block}.q.lora_{part}": torch.ones(2, 2) for block in (0, 1) for part in "AB"}
    one = Adapter.of("one", tensors)
    assert Adapter.of("other", dict(reversed(tensors.items()))).hash == one.hash
    assert Adapter.of("one", {**tensors, "1.q.lora_A": torch.zeros(2, 2)}).hash != one.hash
    assert Adapter.of("one", {**tensors, "1.q.lora_A": torch.ones(2, 2).half()}).hash != one.hash
    assert Adapter.of("one", {**tensors, "2.q.lora_A": torch.ones(2, 2)}).hash != one.hash
    soft = Adapter.of("one", {}, soft_prompt=torch.ones(1, 2))
    assert not soft.hash and soft.identity not in (one.identity, Adapter.of("one", {}).identity)


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from("ABC"), st.binary(min_size=1, max_size=2)), unique=True))
def test_a_part_is_checked_alone(entries: list[tuple[int, str, bytes]]) -> None:
    """The hashes of blocks are the same, whether they are made of all tensors or of those of a span."""
    tensors = [TensorDigest(f"{block}.{path}.lora_A", (1, 1), "float32", value) for block, path, value in entries]
    hashes = hashes_of_blocks(tensors)
    part = hashes_of_blocks([tensor for tensor in tensors if int(tensor.name[0]) < 3])
    assert part == tuple((block, value) for block, value in hashes if block < 3)
    assert hash_of_adapter(hashes) == hash_of_adapter(list(reversed(hashes)))
    assert all(value == hash_of_block(tensor for tensor in tensors if tensor.name[0] == str(b)) for b, value in hashes)


@pytest.mark.parametrize("name", ["3.other", "3.", "3", "x.prompts", ".prompts", "-3.prompts", f"{10**9}.prompts"])
def test_names_of_no_block(name: str) -> None:
    assert block_of("3.prompts") == 3 and block_of(name) is None


@given(st.text(max_size=80))
def test_names_in_announcements(text: str) -> None:
    parsed = AnnouncedAdapter.parse(text)
    assert parsed is None or str(parsed) == text
    known = AnnouncedAdapter("poet-2.b", bytes(range(32)))
    assert AnnouncedAdapter.parse(str(known)) == known
