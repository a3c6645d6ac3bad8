"""Pictures at the API: nothing is fetched, nothing is opened that is too large, and nobody gets what is another's."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from petalnode.node.api.engine.generation import ApiLimits
from petalnode.node.api.http.admission import Admission, ApiKeys, hash_of_key
from petalnode.node.blocks.images.pictures import PICTURES
from petalnode.node.testing.memory_servers import memory_swarm
from tests.memory_api import MemoryApi, memory_api
from tests.tiny_models import save_tiny
from tests.tiny_pictures import SIDE, png, save_processor, save_seeing

NEW = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("seeing") / "qwen2_vl"
    save_seeing("qwen2_vl", made)
    save_processor(made)
    return made


@pytest.fixture(scope="module")
def api(folder: Path) -> Iterator[MemoryApi]:
    with memory_swarm() as swarm:
        for blocks in ("0:2", "2:4"):
            _ = swarm.start(folder, blocks).ready
        # As with `--max-body 32`.
        with memory_api(swarm, folder, limits=ApiLimits(context=64, body_bytes=32 << 20)) as running:
            yield running


def url_of(picture: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(picture).decode()}"


def ask(api: MemoryApi, path: str, key: str = "", **fields: Any) -> httpx.Response:
    return httpx.post(f"{api.url}{path}", json=fields, timeout=600, headers={"x-api-key": key} if key else {})


def openai(api: MemoryApi, *parts: dict[str, Any], **fields: Any) -> httpx.Response:
    messages = [{"role": "user", "content": list(parts)}]
    return ask(api, "/v1/chat/completions", messages=messages, max_tokens=NEW, temperature=0, **fields)


def bomb() -> bytes:
    """A PNG of two gigapixels by its header, in a hundred bytes."""
    header = struct.pack(">IIBBBBB", 65_000, 33_000, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")]
    written = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(written)


def scans() -> bytes:
    """A progressive JPEG whose last scan is there a thousand times: each takes as long as the picture is large."""
    file = io.BytesIO()
    Image.new("RGB", (64, 64), 0x3060C0).save(file, "JPEG", progressive=True)
    whole = file.getvalue()
    last = whole[whole.rindex(b"\xff\xda") : -2]
    return whole[:-2] + last * 1000 + whole[-2:]


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://127.0.0.1:9/picture.png", "no address is fetched"),
        ("file:///etc/passwd", "no address is fetched"),
        ("data:text/html;base64,AAAA", "no address is fetched"),
        ("data:image/png;base64,!!!!", "not written in base64"),
        (url_of(b"GIF89a"), "no picture that can be opened"),
        (url_of(b"<svg xmlns='http://www.w3.org/2000/svg'/>"), "no picture that can be opened"),
        (url_of(png()[:60]), "cannot be opened"),
        (url_of(bomb()), "pixels"),
        (url_of(scans()), "scans"),
        ("data:image/png;base64," + "A" * (PICTURES.nbytes * 4 // 3 + 8), "bytes"),
    ],
)
def test_what_is_no_picture_is_refused_in_words(api: MemoryApi, url: str, says: str) -> None:
    answer = openai(api, {"type": "image_url", "image_url": {"url": url}})
    assert answer.status_code == 400 and says in answer.json()["error"]["message"], answer.text[:500]
    assert " at 0x" not in answer.text, "an address in this machine's memory"


def test_nobody_gets_what_another_has_shown(folder: Path) -> None:
    """The caches that a picture leaves are for the same picture under the same key."""
    keys = ApiKeys({hash_of_key(f"pn-{name}"): name for name in ("alice", "bob")})

    def cached(api: MemoryApi, key: str, picture: bytes) -> int:
        part = {"type": "image_url", "image_url": {"url": url_of(picture)}}
        answer = openai(api, part, {"type": "text", "text": "What is on it? " * 8}, key=key)
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    with memory_swarm() as swarm:
        for blocks in ("0:2", "2:4"):
            _ = swarm.start(folder, blocks).ready
        with memory_api(swarm, folder, admission=Admission(keys)) as api:
            assert cached(api, "pn-alice", png()) == 0
            assert cached(api, "pn-alice", png()) > 64
            assert cached(api, "pn-bob", png()) == 0
            assert cached(api, "pn-alice", png(colour=0xF01020)) < 32


def test_pictures_are_bounded_together_before_the_encoder_runs(api: MemoryApi) -> None:
    """Files of a few KB can claim many pixels, and ask for many tokens."""
    large = {"type": "image_url", "image_url": {"url": url_of(png(4000, 4000))}}
    answer = openai(api, *[large] * 3)
    assert answer.status_code == 400 and "pixels together" in answer.json()["error"]["message"], answer.text
    wide = {"type": "image_url", "image_url": {"url": url_of(png(6 * SIDE, SIDE))}}
    answer = openai(api, *[wide] * PICTURES.count)
    assert answer.status_code == 400 and "tokens, those of pictures included" in answer.json()["error"]["message"]
    assert openai(api, wide).status_code == 200


def test_text_that_names_a_placeholder_is_no_picture(api: MemoryApi) -> None:
    picture = {"type": "image_url", "image_url": {"url": url_of(png())}}
    answer = openai(api, picture, {"type": "text", "text": "<|image_pad|>"})
    assert answer.status_code == 400, answer.text
    messages = [{"role": "user", "content": "<|image_pad|>"}]
    assert ask(api, "/v1/chat/completions", messages=messages, max_tokens=1).status_code == 200


def test_pictures_are_counted(api: MemoryApi) -> None:
    part = {"type": "image_url", "image_url": {"url": url_of(png())}}
    answer = openai(api, *[part] * (PICTURES.count + 1))
    assert answer.status_code == 400 and "pictures at most" in answer.json()["error"]["message"]


def test_a_model_of_text_says_so(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "llama")
    save_processor(folder)
    with memory_swarm() as swarm, memory_api(swarm, folder) as api:
        answer = openai(api, {"type": "image_url", "image_url": {"url": url_of(png())}})
        assert answer.status_code == 400 and "takes no pictures" in answer.json()["error"]["message"], answer.text
