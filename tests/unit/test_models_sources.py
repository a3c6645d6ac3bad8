"""What a person may call a model, and what they are told if there is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from petalnode.node.errors import MachineError, ModelError
from petalnode.node.models import cache_dir, hidden_size, num_blocks, resolve
from petalnode.node.models.folder import has_experts, read_config
from petalnode.node.models.sources.resolve import split_version
from petalnode.protocols.ids import Span
from tests.tiny_models import HIDDEN, NUM_BLOCKS, save_tiny


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("models") / "llama")


def test_a_folder_is_the_model_in_it(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = resolve(llama)
    assert (folder.name, folder.path, folder.revision) == ("llama", llama, None)
    assert (folder.num_blocks, folder.hidden_size) == (NUM_BLOCKS, HIDDEN)
    assert folder.config["model_type"] == "llama"
    monkeypatch.chdir(llama.parent)
    assert resolve("llama") == resolve("./llama/") == folder
    monkeypatch.chdir(llama)
    assert resolve(".") == folder


def test_folder_without_a_model_says_its_content(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ModelError, match=r"is no model folder: it has no config\.json\. It holds notes\.txt"):
        resolve(tmp_path)
    for number in range(7):
        (tmp_path / f"{number}").touch()
    with pytest.raises(ModelError, match=r"It holds 0, 1, 2, 3, 4, 5, 6, notes\.txt\. "):
        resolve(tmp_path)
    (tmp_path / "more").touch()
    with pytest.raises(ModelError, match=r", 6, more and 1 more\. "):
        resolve(tmp_path)
    with pytest.raises(ModelError, match="more is not a folder"):
        read_config(tmp_path / "more")
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ModelError, match=r"Cannot read .*config\.json: Is a directory"):
        read_config(tmp_path)


def test_a_configuration_is_read_up_to_4_mib(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"{}".ljust(4 << 20))
    assert read_config(tmp_path) == {}
    (tmp_path / "config.json").write_bytes(b"{}".ljust((4 << 20) + 1))
    with pytest.raises(ModelError, match="4,194,305 bytes of JSON are too many"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("config", "experts"),
    [
        *(({"num_local_experts": 8}, True), ({"hidden_size": 8}, False), ({"num_experts": 0, "hidden_size": 8}, False)),
        *(({"text_config": {"n_routed_experts": 4}}, True), ({"text_config": {"n_layer": 4}}, False)),
    ],
)
def test_a_mixture_of_experts_says_so(tmp_path: Path, config: dict[str, object], experts: bool) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert has_experts(tmp_path) == experts


def test_only_the_needed_part_must_be_whole(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((llama / "config.json").read_bytes())
    assert resolve(tmp_path, need="config").num_blocks == NUM_BLOCKS
    with pytest.raises(ModelError, match="has no weights"):
        resolve(tmp_path, need="client")


def test_a_span_beyond_the_model_is_refused(llama: Path) -> None:
    assert resolve(llama, need=Span(0, NUM_BLOCKS)).num_blocks == NUM_BLOCKS
    with pytest.raises(ModelError, match="has 6 blocks: 0:999 passes its end") as caught:
        resolve(llama, need=Span(0, 999))
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("smolm2", "Did you mean 'smollm2'"),
        ("Smollm2", "Did you mean 'smollm2'"),
        ("gpt2", r"no model 'gpt2' here.*hub id \(org/name"),
        ("", "No model was given"),
        ("./nowhere", "no folder or file .*nowhere"),
        ("/no/such/model.gguf", "no folder or file /no/such/model.gguf"),
        ("models/mine.gguf", "no folder or file .*models/mine.gguf"),
        ("a/b/c", "no folder or file"),
        ("org/name@", "no model 'org/name@' here"),
        ("org/../etc@x y", "no model|no folder"),
    ],
)
def test_a_typo_lists_what_is_possible(name: str, complaint: str) -> None:
    with pytest.raises(ModelError, match=f"(?s){complaint}.*aliases: smollm2"):
        resolve(name)


SHORT, COMMIT, LONG = "0123456789aB", "0123456789" * 4, "01234567" * 8


@pytest.mark.parametrize(
    ("model", "named"),
    [
        *((f"smollm2@{digits}", "smollm2") for digits in (SHORT, COMMIT, LONG)),
        *((f"org/name@{digits}", "org/name") for digits in (SHORT, LONG)),
        *((f"org/name@main@{digits}", "org/name@main") for digits in (SHORT, COMMIT)),
        (f"here/folder@{COMMIT}", "here/folder"),
        *((name, None) for name in ("smollm2", "org/name", "org/name@main", f"there@{SHORT}")),
        *((f"org/name@{revision}", None) for revision in (SHORT[:-1], COMMIT, LONG + "0")),
    ],
)
def test_a_version_stands_behind_a_model(
    model: str, named: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here" / "folder").mkdir(parents=True)
    (tmp_path / f"there@{SHORT}").mkdir()
    assert split_version(model) == ((model, None) if named is None else (named, model.rpartition("@")[2].lower()))


@pytest.mark.parametrize("model", [f"smollm2@{SHORT[:-1]}", f"smollm2@{LONG}0", "here/folder@0"])
def test_a_version_has_12_to_64_digits(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here" / "folder").mkdir(parents=True)
    with pytest.raises(ModelError, match="a model version has 12 to 64 hexadecimal digits"):
        resolve(model)


def test_revisions_belong_to_the_hub(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"x")
    for model in (llama, "smollm2", tmp_path / "model.gguf"):
        with pytest.raises(ModelError, match=f"Only models on the hub have revisions: '{model}' is none, leave 'main'"):
            resolve(model, revision="main")
    for model, revision in (("org/name@v1", None), ("org/name@v1", "v1"), ("org/name", "v1")):
        with pytest.raises(ModelError, match="org/name") as offline:
            resolve(model, revision=revision, offline=True)
        assert "contradict" not in str(offline.value)
    with pytest.raises(ModelError, match=f"no folder or file .*none@{SHORT}"):
        resolve(tmp_path / f"none@{SHORT}")  # no word of a person
    with pytest.raises(ModelError, match="contradict each other"):
        resolve("org/name@v1", revision="v2")


def test_another_file_is_no_model(tmp_path: Path) -> None:
    file = tmp_path / "weights.bin"
    file.write_bytes(b"x")
    with pytest.raises(ModelError, match=r"is a file but no \.gguf file"):
        resolve(file)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "is no JSON"),
        ("[1]", "no JSON object"),
        ("[" * 100_000, "nests deeper"),
        (json.dumps({"model_type": "x"}), "does not say how many blocks"),
        (json.dumps({"num_hidden_layers": 0, "hidden_size": 8}), "0 blocks are out of range"),
        (json.dumps({"num_hidden_layers": 10**6, "hidden_size": 8}), "blocks are out of range"),
        (json.dumps({"num_hidden_layers": True, "hidden_size": 8}), "does not say how many blocks"),
        (json.dumps({"num_hidden_layers": 2}), "does not say how wide"),
        (json.dumps({"num_hidden_layers": 2, "hidden_size": 0}), "does not say how wide"),
        (json.dumps({"num_hidden_layers": 4097, "hidden_size": 8}), "4097 blocks are out of range"),
        (json.dumps({"num_layers": 2, "d_model": 8, "is_encoder_decoder": True}), "encoder-decoder"),
    ],
)
def test_an_odd_configuration_is_said(tmp_path: Path, content: str, complaint: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=rf"config\.json.*{complaint}"):
        resolve(tmp_path)


@pytest.mark.parametrize(
    ("config", "blocks", "hidden"),
    [
        ({"num_hidden_layers": 30, "hidden_size": 576}, 30, 576),
        ({"n_layer": 12, "n_embd": 768, "n_head": 12}, 12, 768),
        ({"num_layers": 1, "d_model": 1}, 1, 1),
        ({"num_layers": 4096, "d_model": 8}, 4096, 8),
        ({"n_layers": 32, "d_model": 4096}, 32, 4096),
        ({"n_layer": 70, "n_embed": 14336}, 70, 14336),
        ({"text_config": {"num_hidden_layers": 26, "hidden_size": 1152}, "vision_config": {}}, 26, 1152),
        ({"text_config": {"hidden_size": 9}, "num_hidden_layers": 2, "hidden_size": 8}, 2, 8),
    ],
)
def test_every_architecture_has_its_words(config: dict[str, object], blocks: int, hidden: int) -> None:
    assert (num_blocks(config), hidden_size(config)) == (blocks, hidden)


@pytest.mark.parametrize(
    ("name", "mib", "read"),
    [
        *(("tokenizer.json", 256, True), ("tokenizer.json", 257, False), ("vocab.txt", 257, False)),
        *(("generation_config.json", 5, False), ("chat_template.jinja", 4, True), ("chat_template.jinja", 5, False)),
        *(("additional_chat_templates/tool.jinja", 5, False), ("qwen.tiktoken", 257, False), ("more.bin", 999, True)),
    ],
)
def test_files_that_transformers_reads_whole_have_bounds(tmp_path: Path, name: str, mib: int, read: bool) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 2, "hidden_size": 8}))
    (tmp_path / name).parent.mkdir(exist_ok=True)
    with (tmp_path / name).open("wb") as stream:
        stream.truncate(mib << 20)  # a hole
    if read:
        resolve(tmp_path, need="config")
        return
    with pytest.raises(ModelError, match=rf"{Path(name).name} has {mib} MiB, where files of its kind have at most"):
        resolve(tmp_path, need="config")


def test_cache_can_be_anywhere_that_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PETALNODE_CACHE", str(tmp_path / "a" / "b"))
    assert cache_dir() == tmp_path / "a" / "b"
    assert cache_dir().is_dir()
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("PETALNODE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(MachineError, match="Cannot make the cache folder"):
        cache_dir()
