"""A GGUF file becomes an ordinary folder with the same weights and the same tokenizer, or a clear refusal."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import logging

from petalnode.node.errors import MachineError, ModelError
from petalnode.node.models import Checkpoint, compute_manifest, resolve
from petalnode.node.models.sources import gguf_import
from petalnode.node.models.sources.gguf_header import read_gguf_header
from tests.swarm import warm_python
from tests.tiny_gguf import BLOCKS, CHAT_TEMPLATE, VOCABULARY, write_tiny_gguf

logging.disable_progress_bar()

TEXTS = (
    "The cat and the other thing in the hat.",
    "  spaces\tand\n\nlines ",
    "caf\u00e9 \u4f60\u597d \U0001f680 1234567890",
    "<s>not a start</s> <unk>",
    "",
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PETALNODE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def as_transformers_reads(file: Path) -> PreTrainedModel:
    """What `from_pretrained(gguf_file=)` does, which wants a package that is not needed otherwise."""
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(file.parent, gguf_file=file.name))
    model.load_state_dict(load_gguf_checkpoint(file, return_tensors=True, model_to_load=model)["tensors"])
    return model.eval()


def test_quantised_weights_are_what_transformers_reads(tmp_path: Path) -> None:
    file = write_tiny_gguf(tmp_path / "tiny.gguf", "Q4_1")
    folder = resolve(file)
    assert (folder.name, folder.num_blocks, folder.hidden_size) == ("tiny", BLOCKS, 64)
    theirs = as_transformers_reads(file)
    ours = AutoModelForCausalLM.from_pretrained(folder.path)
    assert ours.dtype == torch.float32
    expected, found = theirs.state_dict(), ours.state_dict()
    assert expected.keys() == found.keys()
    for key in expected:
        assert torch.equal(expected[key], found[key]), key
    tokens = torch.arange(9)[None] * 7
    assert torch.equal(ours(tokens).logits, theirs(tokens).logits)


def test_the_configuration_is_what_transformers_reads(tmp_path: Path) -> None:
    file = write_tiny_gguf(tmp_path / "tiny.gguf")
    theirs = AutoConfig.from_pretrained(tmp_path, gguf_file=file.name).to_dict()
    ours = AutoConfig.from_pretrained(resolve(file).path).to_dict()
    incidental = {"architectures", "dtype", "_name_or_path", "transformers_version", "_model_name_or_path"}
    assert {key: value for key, value in theirs.items() if key not in incidental} == {
        key: value for key, value in ours.items() if key not in incidental
    }


def test_the_tokenizer_survives(tmp_path: Path) -> None:
    file = write_tiny_gguf(tmp_path / "tiny.gguf")
    folder = resolve(file)
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    ours = AutoTokenizer.from_pretrained(folder.path)
    for text in TEXTS:
        assert ours(text).input_ids == theirs(text).input_ids
        assert ours.decode(ours(text).input_ids) == theirs.decode(theirs(text).input_ids)
    assert ours.chat_template == theirs.chat_template == CHAT_TEMPLATE
    assert (ours.bos_token_id, ours.eos_token_id, len(ours)) == (1, 2, len(theirs))
    assert AutoModelForCausalLM.from_pretrained(folder.path).generation_config.eos_token_id == 2


@pytest.mark.parametrize(
    ("quantisation", "fine_norms", "dtype"),
    [
        ("F32", False, torch.float32),
        ("F16", False, torch.float16),
        ("BF16", False, torch.bfloat16),
        ("BF16", True, torch.float32),
    ],
)
def test_half_precision_is_kept_where_it_holds_every_value(
    tmp_path: Path, quantisation: str, fine_norms: bool, dtype: torch.dtype
) -> None:
    file = write_tiny_gguf(tmp_path / "tiny.gguf", quantisation, fine_norms=fine_norms)
    folder = resolve(file)
    weights = load_file(folder.path / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {dtype}
    theirs = as_transformers_reads(file).state_dict()
    for key, weight in weights.items():
        assert torch.equal(weight.float(), theirs[key]), key


def test_a_file_is_imported_once_whatever_it_is_called(tmp_path: Path) -> None:
    file = write_tiny_gguf(tmp_path / "tiny.gguf")
    first = resolve(file)
    before = (first.path / "model.safetensors").stat().st_mtime_ns
    again = resolve(file.rename(tmp_path / "other.gguf"))
    assert again.path == first.path
    assert again.name == "other"
    assert (first.path / "model.safetensors").stat().st_mtime_ns == before


def test_an_import_is_the_same_on_every_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_tiny_gguf(tmp_path / "tiny.gguf")
    first = compute_manifest(resolve(file)).version
    monkeypatch.setenv("PETALNODE_CACHE", str(tmp_path / "elsewhere"))
    assert compute_manifest(resolve(file)).version == first


def test_processes_that_start_at_once_import_once(tmp_path: Path, cache: Path) -> None:
    file = write_tiny_gguf(tmp_path / "tiny.gguf")
    script = (
        "import sys; from petalnode.node.models import resolve\n"
        "said = []\n"
        "folder = resolve(sys.argv[1], progress=lambda what, done, total: said.append(what))\n"
        "print(folder.path, any(what.startswith('Converting') for what in said))"
    )
    command = [sys.executable, "-c", script, str(file)]
    started = [warm_python.start(command, warm_python.environment()) for _ in range(3)]
    said = [process.stdout.read().split() for process in started if process.stdout is not None]
    assert len({path for path, _ in said}) == 1
    assert sorted(converted for _, converted in said) == ["False", "False", "True"]
    assert not list((cache / "models").glob("*.partial"))


def test_what_a_killed_import_left_is_no_model(tmp_path: Path, cache: Path) -> None:
    file = write_tiny_gguf(tmp_path / "tiny.gguf")
    whole = resolve(file).path
    left = whole.rename(whole.with_name(f"{whole.name}.partial"))
    (left / "model.safetensors").write_bytes(b"half of it")
    (left / "surprise.txt").write_text("x")
    assert resolve(file).path == whole
    assert not left.exists()
    assert not (whole / "surprise.txt").exists()


def test_a_damaged_import_says_how_to_repeat_it(tmp_path: Path) -> None:
    file = write_tiny_gguf(tmp_path / "tiny.gguf")
    (resolve(file).path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="petalnode's own import: remove it to import again"):
        resolve(file)


def test_scaled_rotary_frequencies_are_kept(tmp_path: Path) -> None:
    frequencies = 10000.0 ** (-np.arange(8) / 8)
    waves = 2 * math.pi / frequencies
    smooth = np.clip((8192 / waves - 1) / 3, 0, 1)
    factors = (1 / ((1 - smooth) / 32 + smooth)).astype(np.float32)
    assert factors.min() == 1
    assert factors.max() == 32
    folder = resolve(write_tiny_gguf(tmp_path / "tiny.gguf", extra={"rope_freqs.weight": factors}))
    model = AutoModelForCausalLM.from_pretrained(folder.path)
    assert np.allclose(model.model.rotary_emb.inv_freq.numpy(), frequencies / factors, rtol=1e-5)


def test_frequencies_scaled_in_an_unknown_way_are_refused(tmp_path: Path) -> None:
    extra = {"rope_freqs.weight": np.linspace(1, 8, 8, dtype=np.float32)}
    with pytest.raises(ModelError, match="rotary frequencies are scaled in a way that is not known"):
        resolve(write_tiny_gguf(tmp_path / "tiny.gguf", extra=extra))


def test_weights_that_do_not_fit_their_architecture_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"down_proj\.weight' as \[64, 96\], where transformers reads \[64, 128\]"):
        resolve(write_tiny_gguf(tmp_path / "tiny.gguf", said_feed_forward=128))


@pytest.mark.parametrize(
    ("without", "missing"), [("blk.1.attn_norm.weight", "1.input_layernorm"), ("output_norm.weight", "norm")]
)
def test_a_file_that_leaves_a_tensor_out_is_not_imported(tmp_path: Path, without: str, missing: str) -> None:
    """Its block would compute with whatever weights a new model begins with."""
    with pytest.raises(ModelError, match=rf"lacks weights of its architecture: model\.(layers\.)?{missing}\.weight\."):
        resolve(write_tiny_gguf(tmp_path / "tiny.gguf", without=without))


def test_a_failed_import_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    extra = {"blk.0.surprise.weight": np.zeros(4, np.float32)}
    with pytest.raises(ModelError, match=r"blk\.0\.surprise\.weight"):
        resolve(write_tiny_gguf(tmp_path / "tiny.gguf", extra=extra))
    assert [entry.name for entry in (cache / "models").iterdir() if entry.is_dir()] == []


@pytest.mark.parametrize("keep", [3, 40, 2000, -1000])
def test_a_truncated_file_is_named(tmp_path: Path, keep: int) -> None:
    whole = write_tiny_gguf(tmp_path / "whole.gguf").read_bytes()
    file = tmp_path / "part.gguf"
    file.write_bytes(whole[:keep])
    with pytest.raises(ModelError, match=r"part\.gguf (is truncated|is not a GGUF)"):
        resolve(file)


def test_a_full_disk_is_said_before_the_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    file = write_tiny_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1 << 20}))
    with pytest.raises(MachineError, match=r"needs 6\d MiB .* has 1 MiB free") as caught:
        resolve(file)
    assert caught.value.exit_code == 4


def test_the_header_gives_every_tensor_its_place(tmp_path: Path) -> None:
    file = write_tiny_gguf(tmp_path / "tiny.gguf", "F32")
    header = read_gguf_header(file)
    assert header.metadata["general.architecture"] == "llama"
    assert header.metadata["tokenizer.ggml.tokens"] == VOCABULARY
    tensors = {tensor.name: tensor for tensor in header.tensors}
    norm = tensors["blk.1.ffn_norm.weight"]
    assert np.all(np.frombuffer(file.read_bytes()[norm.start : norm.start + norm.nbytes], "<f4") == 1.25)
    assert tensors["blk.0.ffn_down.weight"].shape == (64, 96)


def test_large_models_are_written_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_tiny_gguf(tmp_path / "tiny.gguf")
    whole = compute_manifest(resolve(file)).version
    monkeypatch.setenv("PETALNODE_CACHE", str(tmp_path / "elsewhere"))
    monkeypatch.setattr("petalnode.node.models.checkpoint._SHARD_BYTES", 150_000)
    folder = resolve(file)
    checkpoint = Checkpoint(folder.path)
    assert len(set(checkpoint.file_of.values())) > 2
    assert compute_manifest(folder).version == whole


def test_what_is_dequantised_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    said: list[str] = []
    assert gguf_import.word_on_kinds("a.gguf", ["F32", "Q4_K", "IQ4_XS", "Q3_K"]) is None
    monkeypatch.setattr(gguf_import._log, "warning", lambda form, *arguments: said.append(form % arguments))
    resolve(write_tiny_gguf(tmp_path / "quiet.gguf", "Q8_0"))
    assert said == []
    monkeypatch.setattr(gguf_import, "_DEQUANTISED", frozenset(("Q2_K", "Q4_0")))  # gguf does not write Q2_K
    resolve(write_tiny_gguf(tmp_path / "wide.gguf", "Q4_0"))
    assert said == [gguf_import.word_on_kinds("wide.gguf", ["F32", "Q4_0"])]
    assert "wide.gguf: weights in Q4_0 are dequantised" in said[0]
