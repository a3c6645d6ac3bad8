"""Targets that are pictures: files of every kind that is opened, and requests of each dialect that show one."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from collections.abc import Callable
from functools import cache
from typing import Any, Final

from PIL import Image

from petalnode.node.api import ollama
from petalnode.node.api.anthropic import parse_messages
from petalnode.node.api.errors import ApiError, error_object
from petalnode.node.api.fields import Fields, parse_object
from petalnode.node.api.openai.requests import parse_chat
from petalnode.node.blocks.images.pictures import PICTURES, Picture
from petalnode.node.errors import BadInput
from tests.fuzz.files import as_json
from tests.fuzz.harness import Target, parser
from tests.fuzz.mutation import Mutator

_KINDS: Final = (*PICTURES.formats, "BMP", "TIFF", "PPM")
"""Those that are opened, and some that are not."""
_SIDES: Final = (0, 1, 2, 255, 4096, 4097, 16_383, 16_384, 65_535, 0x7FFF_FFFF, 0xFFFF_FFFF)
_PARSERS: Final[dict[str, Callable[[Fields], Any]]] = {
    "/v1/chat/completions": parse_chat,
    "/v1/messages": parse_messages,
    "/api/chat": ollama.parse_chat,
    "/api/generate": ollama.parse_generate,
}


@cache
def _written(kind: str) -> bytes:
    picture = Image.new("RGB", (24, 16), 0x3060C0)
    picture.paste(0x10E0F0, (4, 4, 12, 12))
    file = io.BytesIO()
    several = {"save_all": True, "append_images": [picture.rotate(90)]} if kind in ("GIF", "WEBP") else {}
    picture.save(file, kind, **several)
    return file.getvalue()


def _claiming(mutator: Mutator, kind: str) -> bytes:
    """A picture whose header claims other sizes."""
    data, (width, height) = bytearray(_written(kind)), (mutator.random.choice(_SIDES) for _ in range(2))
    match kind:
        case "PNG":
            struct.pack_into(">II", data, 16, width, height)
            struct.pack_into(">I", data, 29, zlib.crc32(data[12:29]))
        case "GIF":
            struct.pack_into("<HH", data, 6, width & 0xFFFF, height & 0xFFFF)
        case "JPEG":
            struct.pack_into(">HH", data, data.index(b"\xff\xc0") + 5, height & 0xFFFF, width & 0xFFFF)
        case "WEBP":
            for place, side in ((24, width), (27, height)):
                data[place : place + 3] = (side & 0xFFFFFF).to_bytes(3, "little")
    return bytes(data)


def _file(mutator: Mutator) -> bytes:
    kind = mutator.random.choice(_KINDS)
    data = _claiming(mutator, kind) if mutator.chance(0.3) else _written(kind)
    return mutator.bytes(data) if mutator.chance(0.8) else data


def _read_file(data: bytes) -> None:
    """What is taken is within the limits, and opens as what its header said or not at all."""
    picture = Picture.of(data)
    width, height = picture.size()
    assert 0 < width * height <= PICTURES.pixels and max(width, height) <= PICTURES.side
    opened = picture.pixels()
    assert opened.mode == "RGB" and opened.width * opened.height <= PICTURES.pixels


def _url(mutator: Mutator, encoded: str) -> str:
    head = mutator.random.choice(
        ("data:image/png;base64,", "data:IMAGE/x;base64,", "data:,", "http://127.0.0.1:1/", "")
    )
    return head + encoded


def _body(mutator: Mutator) -> tuple[str, bytes]:
    encoded = base64.b64encode(_file(mutator)).decode()
    if mutator.chance(0.3):
        encoded = mutator.bytes(encoded.encode()).decode("latin-1")
    text = {"type": "text", "text": "a"}
    source = mutator.random.choice(
        (
            {"type": "base64", "media_type": "image/png", "data": encoded},
            {"type": "url", "url": _url(mutator, encoded)},
        )
    )
    parts = {
        "/v1/chat/completions": {
            "content": [{"type": "image_url", "image_url": {"url": _url(mutator, encoded)}}, text]
        },
        "/v1/messages": {"content": [{"type": "image", "source": source}, text]},
        "/api/chat": {"content": "a", "images": [encoded] * mutator.random.choice((1, 2, PICTURES.count + 1))},
    }
    path = mutator.random.choice(list(_PARSERS))
    if path == "/api/generate":
        return path, as_json(mutator, {"prompt": "a", "images": [encoded], "raw": mutator.chance(0.2)})
    return path, as_json(mutator, {"max_tokens": 1, "messages": [{"role": "user", **parts[path]}]})


def _read_body(given: tuple[str, bytes]) -> None:
    path, body = given
    try:
        _PARSERS[path](parse_object(body))
    except ApiError as error:
        if error.status != 400:
            raise AssertionError(f"{error.status}: {error}") from error
        error_object(error, path)


TARGETS: Final[tuple[Target, ...]] = (
    parser("picture", 4, _file, _read_file, BadInput),
    parser("request with pictures", 3, _body, _read_body, BadInput),
)
