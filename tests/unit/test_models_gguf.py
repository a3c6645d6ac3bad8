"""A GGUF file is served as it is: the values and tokenizer that transformers reads out of it, or a clear refusal."""

from __future__ import annotations

import logging as standard_logging
import math
import os
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import logging

from petalnode.node.blocks import skeleton as skeleton_module
from petalnode.node.blocks.architecture import open_skeleton
from petalnode.node.blocks.skeleton import fill
from petalnode.node.errors import MachineError, ModelError
from petalnode.node.models import EMBEDDINGS, HEAD, Checkpoint, ModelFolder, compute_manifest, resolve
from petalnode.node.models.digests import part_digests
from petalnode.node.models.gguf.header import read_gguf_header
from petalnode.node.models.gguf.stored import stored_rows
from tests.swarm import warm_python
from tests.tiny_gguf import BLOCKS, CHAT_TEMPLATE, VOCABULARY, write_tiny_gguf
from tests.unit.gguf_parts import split

logging.disable_progress_bar()

TEXTS = (
    "The cat and the other thing in the hat.",
    "  spaces\tand\n\nlines ",
    "caf\u00e9 \u4f60\u597d \U0001f680 1234567890",
    "<s>not a start</s> <unk>",
    "",
)


pytestmark = pytest.mark.usefixtures("cache")


def as_transformers_reads(file: Path) -> PreTrainedModel:
    """What `from_pretrained(gguf_file=)` does, which wants a package that is not needed otherwise."""
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(file.parent, gguf_file=file.name))
    model.load_state_dict(load_gguf_checkpoint(file, return_tensors=True, model_to_load=model)["tensors"])
    return model.eval()


def as_served(folder: ModelFolder) -> PreTrainedModel:
    """The whole model, opened as a server without kernels and a client have it."""
    skeleton = open_skeleton(folder.path)
    with Checkpoint(folder.path, folder.num_blocks) as weights:
        fill(skeleton, weights, lambda block: True, torch.device("cpu"))
    return skeleton.model


KINDS = (
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL",
    "IQ4_XS", "MXFP4",
)  # fmt: skip


@pytest.mark.parametrize("kernels", [True, False], ids=["opened by the kernels", "by numpy"])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_what_transformers_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, kernels: bool
) -> None:
    if not kernels:
        monkeypatch.setattr(skeleton_module, "library", lambda: None)
    file = write_tiny_gguf(tmp_path / "tiny.gguf", kind)
    before = file.stat()
    folder = resolve(file)
    assert (folder.name, folder.num_blocks) == ("tiny", BLOCKS)
    theirs, ours = as_transformers_reads(file), as_served(folder)
    assert str(ours.dtype) == {"F16": "torch.float16", "BF16": "torch.bfloat16"}.get(kind, "torch.float32")
    expected, found = theirs.state_dict(), ours.state_dict()
    assert expected.keys() == found.keys()
    for key in expected:
        assert torch.equal(expected[key], found[key].float()), key
    tokens = torch.arange(9)[None] * 7
    assert torch.equal(ours.float()(tokens).logits, theirs(tokens).logits)
    assert sum(made.stat().st_size for made in folder.path.iterdir()) < 64 << 10  # no weights
    assert (file.stat().st_mtime_ns, file.stat().st_size) == (before.st_mtime_ns, before.st_size)


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
    assert '"eos_token_id": 2' in (folder.path / "generation_config.json").read_text()


@pytest.mark.parametrize(
    ("quantisation", "fine_norms", "dtype"),
    [
        ("F32", False, torch.float32),
        ("F16", False, torch.float16),
        ("BF16", False, torch.bfloat16),
        ("BF16", True, torch.float32),
    ],
)
def test_half_precision_is_kept_where_exact(
    tmp_path: Path, quantisation: str, fine_norms: bool, dtype: torch.dtype
) -> None:
    file = write_tiny_gguf(tmp_path / "tiny.gguf", quantisation, fine_norms=fine_norms)
    assert as_served(resolve(file)).dtype == dtype


def test_changed_header_has_its_file_read_again(tmp_path: Path) -> None:
    file = write_tiny_gguf(tmp_path / "tiny.gguf")
    first = resolve(file)
    before = (first.path / "tokenizer.json").stat().st_mtime_ns
    assert resolve(file).path == first.path
    assert (first.path / "tokenizer.json").stat().st_mtime_ns == before
    write_tiny_gguf(file, "Q8_0")
    assert resolve(file).path != first.path


def test_version_is_that_of_bytes_wherever_file_is(tmp_path: Path) -> None:
    file = write_tiny_gguf(tmp_path / "tiny.gguf")
    first = compute_manifest(resolve(file))
    moved = file.rename(tmp_path / "other.gguf")
    assert resolve(moved).name == "other"
    assert compute_manifest(resolve(moved)).version == first.version
    data = bytearray(moved.read_bytes())
    place = next(held for held in read_gguf_header(moved).tensors if held.name == "blk.1.attn_q.weight")
    data[place.start + 7] ^= 1
    moved.write_bytes(data)
    second = compute_manifest(resolve(moved))
    assert [one == other for one, other in zip(first.blocks, second.blocks, strict=True)] == [True, False, True]
    assert (second.embeddings, second.head) == (first.embeddings, first.head)


@pytest.mark.parametrize(("kind", "of_a_value"), [("Q4_0", 4), ("F16", 2), ("F32", 4)])
def test_what_a_validator_opens_is_counted_as_opened(tmp_path: Path, kind: str, of_a_value: int) -> None:
    folder = resolve(write_tiny_gguf(tmp_path / "tiny.gguf", kind))
    checkpoint = Checkpoint(folder.path, folder.num_blocks)
    matrices = sum(math.prod(held.shape) for held in checkpoint.tensors(1) if len(held.shape) > 1)
    assert checkpoint.opened_nbytes(1) == of_a_value * matrices + 2 * 4 * 64
    assert (checkpoint.nbytes(1) < checkpoint.opened_nbytes(1)) == (kind == "Q4_0")


def test_parts_are_embeddings_blocks_and_head(tmp_path: Path) -> None:
    folder = resolve(write_tiny_gguf(tmp_path / "tiny.gguf"))
    parts = Checkpoint(folder.path, folder.num_blocks).parts
    assert parts[EMBEDDINGS] == ("token_embd.weight",)
    assert parts[HEAD] == ("output.weight", "output_norm.weight")
    assert len(parts[1]) == 9 and all(name.startswith("blk.1.") for name in parts[1])


def test_a_file_has_one_version_on_every_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_tiny_gguf(tmp_path / "tiny.gguf")
    first = compute_manifest(resolve(file)).version
    monkeypatch.setenv("PETALNODE_CACHE", str(tmp_path / "elsewhere"))
    assert compute_manifest(resolve(file)).version == first


def test_processes_that_start_at_once_convert_tokenizer_once(tmp_path: Path, cache: Path) -> None:
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
    (left / "tokenizer.json").write_bytes(b"half of it")
    (left / "surprise.txt").write_text("x")
    assert resolve(file).path == whole
    assert not left.exists()
    assert not (whole / "surprise.txt").exists()


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    file = write_tiny_gguf(tmp_path / "tiny.gguf")
    folder = resolve(file)
    file.unlink()
    with pytest.raises(ModelError, match=r"Cannot read .*tiny\.gguf: No such file"):
        Checkpoint(folder.path)
    (folder.path / "gguf.json").write_text("[]")
    with pytest.raises(ModelError, match=r"gguf\.json is damaged"):
        Checkpoint(folder.path)


def test_scaled_rotary_frequencies_are_kept(tmp_path: Path) -> None:
    frequencies = 10000.0 ** (-np.arange(8) / 8)
    waves = 2 * math.pi / frequencies
    smooth = np.clip((8192 / waves - 1) / 3, 0, 1)
    factors = (1 / ((1 - smooth) / 32 + smooth)).astype(np.float32)
    assert factors.min() == 1
    assert factors.max() == 32
    folder = resolve(write_tiny_gguf(tmp_path / "tiny.gguf", extra={"rope_freqs.weight": factors}))
    model = as_served(folder)
    assert np.allclose(model.model.rotary_emb.inv_freq.numpy(), frequencies / factors, rtol=1e-5)


def test_frequencies_scaled_in_an_unknown_way_are_refused(tmp_path: Path) -> None:
    extra = {"rope_freqs.weight": np.linspace(1, 8, 8, dtype=np.float32)}
    with pytest.raises(ModelError, match="rotary frequencies are scaled in a way that is not known"):
        resolve(write_tiny_gguf(tmp_path / "tiny.gguf", extra=extra))


def test_weights_unlike_their_architecture_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"down_proj\.weight' as \[64, 96\], where transformers reads \[64, 128\]"):
        resolve(write_tiny_gguf(tmp_path / "tiny.gguf", said_feed_forward=128))


@pytest.mark.parametrize(
    ("without", "missing"), [("blk.1.attn_norm.weight", "1.input_layernorm"), ("output_norm.weight", "norm")]
)
def test_file_that_leaves_tensor_out_is_not_imported(tmp_path: Path, without: str, missing: str) -> None:
    """Its block would compute with whatever weights a new model begins with."""
    with pytest.raises(ModelError, match=rf"lacks weights of its architecture: model\.(layers\.)?{missing}\.weight\."):
        resolve(write_tiny_gguf(tmp_path / "tiny.gguf", without=without))


def test_a_refused_file_leaves_nothing(tmp_path: Path, cache: Path) -> None:
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


def test_full_disk_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    file = write_tiny_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1 << 20}))
    with pytest.raises(MachineError, match=r"needs 64 MiB .* has 1 MiB free") as caught:
        resolve(file)
    assert caught.value.exit_code == 4


@pytest.mark.parametrize("most", [0, 100, 700, 1500, 5000])
def test_full_disk_while_writing_leaves_nothing(tmp_path: Path, cache: Path, most: int) -> None:
    """By the largest file that the process may write: whichever of its files or libraries meets the end first."""
    file = write_tiny_gguf(tmp_path / "tiny.gguf")
    script = (
        "import resource, signal, sys\n"
        "from petalnode.node.errors import MachineError\n"
        "from petalnode.node.models import resolve\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "most = int(sys.argv[2])\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))\n"
        "try:\n"
        "    resolve(sys.argv[1])\n"
        "except MachineError as error:\n"
        "    print(error)\n"
    )
    started = warm_python.start([sys.executable, "-c", script, str(file), str(most)], warm_python.environment())
    assert started.stdout is not None
    said = started.stdout.read()
    assert started.wait() == 0
    assert "File too large" in said or "room" in said or "full" in said, said
    assert [entry.name for entry in (cache / "models").glob("*") if entry.is_dir()] == []
    whole = resolve(file)
    assert (whole.path / "tokenizer.json").stat().st_size > most


def test_the_header_gives_every_tensor_its_place(tmp_path: Path) -> None:
    file = write_tiny_gguf(tmp_path / "tiny.gguf", "F32")
    header = read_gguf_header(file)
    assert header.metadata["general.architecture"] == "llama"
    assert header.metadata["tokenizer.ggml.tokens"] == VOCABULARY
    tensors = {tensor.name: tensor for tensor in header.tensors}
    norm = tensors["blk.1.ffn_norm.weight"]
    assert np.all(np.frombuffer(file.read_bytes()[norm.start : norm.start + norm.nbytes], "<f4") == 1.25)
    assert tensors["blk.0.ffn_down.weight"].shape == (64, 96)


def test_model_in_parts_is_that_of_whole_file(tmp_path: Path) -> None:
    whole = write_tiny_gguf(tmp_path / "tiny.gguf")
    parts = split(whole, tmp_path)
    for part in parts[:2]:
        folder = resolve(part)
        assert compute_manifest(folder).version == compute_manifest(resolve(whole)).version
    expected, found = as_transformers_reads(whole).state_dict(), as_served(folder).state_dict()
    assert all(torch.equal(value, found[key]) for key, value in expected.items())


def test_parts_that_are_missing_or_misnamed_are_named(tmp_path: Path) -> None:
    whole = write_tiny_gguf(tmp_path / "tiny.gguf")
    parts = split(whole, tmp_path)
    parts[1].rename(tmp_path / "elsewhere.gguf")
    with pytest.raises(ModelError, match=r"one of 3 parts, of which .*model-00002-of-00003\.gguf is missing"):
        resolve(parts[0])
    with pytest.raises(ModelError, match=r"found by their names \(NAME-00001-of-00003\.gguf\)"):
        resolve(tmp_path / "elsewhere.gguf")
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(ModelError, match=r"model-00002-of-00003\.gguf is not part 2 of 3"):
        resolve(parts[0])


def test_what_earlier_version_imported_is_removed_and_said(
    tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = write_tiny_gguf(tmp_path / "tiny.gguf")
    old, packed = cache / "models" / f"gguf-{'0' * 32}-1", cache / "quantised" / "packed2-float32-cpu-12.safetensors"
    other = cache / "quantised" / "nf4-float32-cpu-12.safetensors"
    for path in (old / "model.safetensors", packed, other):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(1000))
    with caplog.at_level(standard_logging.WARNING):
        resolve(file)
        resolve(file)
    assert [record.message.startswith("removed the float32 copies") for record in caplog.records].count(True) == 1
    assert not old.exists() and not packed.exists() and other.exists() and file.exists()


def test_file_shortened_while_read_is_said(tmp_path: Path) -> None:
    file = write_tiny_gguf(tmp_path / "tiny.gguf")
    folder = resolve(file)
    held = max(read_gguf_header(file).tensors, key=lambda tensor: tensor.start)
    os.truncate(file, file.stat().st_size - 100)
    with pytest.raises(ModelError, match="became shorter while it was read"):
        stored_rows(file, held, 0, held.shape[0])
    with pytest.raises(ModelError, match="is truncated: its tensors end"):
        part_digests(Checkpoint(folder.path), (HEAD,))


def test_unbuildable_header_is_said(tmp_path: Path) -> None:
    extra = {"blk.0.attn_q.weight": np.zeros((64, 64), np.float32)}
    file = write_tiny_gguf(tmp_path / "tiny.gguf", heads=7, without="blk.0.attn_q.weight", extra=extra)
    with pytest.raises(ModelError, match=r"tiny\.gguf(: transformers cannot build the 'llama' model| holds 'model)"):
        resolve(file)


@pytest.mark.parametrize("blocks", [BLOCKS * 9 + 4, 1 << 31])
def test_more_blocks_than_tensors_are_refused(tmp_path: Path, blocks: int) -> None:
    file = write_tiny_gguf(tmp_path / "tiny.gguf")
    key = b"llama.block_count" + struct.pack("<I", 4)
    data = file.read_bytes()
    assert data.count(key + struct.pack("<I", BLOCKS)) == 1
    file.write_bytes(data.replace(key + struct.pack("<I", BLOCKS), key + struct.pack("<I", blocks)))
    with pytest.raises(ModelError, match=rf"{blocks:,} blocks of {BLOCKS * 9 + 3} tensors"):
        resolve(file)
