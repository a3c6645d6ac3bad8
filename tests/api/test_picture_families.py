"""Pictures by the processors of the families that are named in docs/models.md, in all three dialects."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer
from transformers.models.smolvlm import processing_smolvlm

from petalnode.node.blocks.images.pictures import PictureReader
from petalnode.node.errors import ModelError
from petalnode.node.testing.memory_servers import memory_swarm
from tests.memory_api import MemoryApi, memory_api
from tests.tiny_pictures import PROCESSORS, answer_of, png, save_processor, save_seeing

NEW = 6


def works(kind: str) -> bool:
    """Whether transformers has here what it needs for pictures of this family."""
    needs = PROCESSORS[kind].needs
    return not needs or find_spec(needs) is not None


@pytest.fixture(scope="module", params=[kind for kind in PROCESSORS if kind == "smolvlm" or works(kind)])
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    kind = str(request.param)
    with pytest.MonkeyPatch.context() as patched:
        if kind == "smolvlm":  # which counts seconds of videos in words
            patched.setattr(processing_smolvlm, "num2words", str)
        yield kind


@pytest.fixture(scope="module")
def folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("seeing") / kind


@pytest.fixture(scope="module")
def whole(folder: Path, kind: str) -> Any:
    made = save_seeing(kind, folder)
    save_processor(folder, kind)
    return made


@pytest.fixture(scope="module")
def api(folder: Path, whole: Any) -> Iterator[MemoryApi]:
    with memory_swarm() as swarm:
        for blocks in ("0:2", "2:4"):
            _ = swarm.start(folder, blocks).ready
        with memory_api(swarm, folder) as running:
            yield running


def ask(api: MemoryApi, path: str, **fields: Any) -> Any:
    answer = httpx.post(f"{api.url}{path}", json=fields, timeout=600)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_all_three_dialects_show_pictures(api: MemoryApi, folder: Path, whole: Any) -> None:
    """One after another, so that what is kept of the one is no beginning of the other."""
    pictures = png(), png(colour=0xF01020)
    said = [answer_of(whole, folder, picture, tokens=NEW) for picture in pictures]
    assert said[0] != said[1], "the picture makes no difference"
    text: dict[str, Any] = {"type": "text", "text": "What?"}
    for picture, right in zip(pictures, said, strict=True):
        encoded = base64.b64encode(picture).decode()
        image: dict[str, Any] = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}}
        messages = [{"role": "user", "content": [image, text]}]
        answer = ask(api, "/v1/chat/completions", messages=messages, max_tokens=NEW, temperature=0)
        assert answer["choices"][0]["message"]["content"] == right
        image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": encoded}}
        messages = [{"role": "user", "content": [image, text]}]
        answer = ask(api, "/v1/messages", messages=messages, max_tokens=NEW, temperature=0)
        assert "".join(part["text"] for part in answer["content"]) == right
        options = {"num_predict": NEW, "temperature": 0}
        shown = [{"role": "user", "content": "What?", "images": [encoded]}]
        answer = ask(api, "/api/chat", model=folder.name, messages=shown, options=options, stream=False)
        assert answer["message"]["content"] == right
        fields = {"model": folder.name, "prompt": "What?", "images": [encoded], "options": options, "stream": False}
        assert ask(api, "/api/generate", **fields)["response"] == right
    ask(api, "/v1/chat/completions", messages=[{"role": "user", "content": "What?"}], max_tokens=2)  # after pictures


@pytest.mark.parametrize("kind", [kind for kind in PROCESSORS if kind == "smolvlm" or not works(kind)])
def test_missing_packages_are_named(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processing_smolvlm, "num2words", None)
    save_seeing(kind, tmp_path)
    save_processor(tmp_path, kind)
    with pytest.raises(ModelError, match=f"pip install {PROCESSORS[kind].needs}"):
        PictureReader(tmp_path, AutoTokenizer.from_pretrained(tmp_path))
