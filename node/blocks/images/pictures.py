"""Pictures as a person gives them, and what a model's own processor makes of them: tokens, and values for the encoder.

A picture is some stranger's file to whoever serves the HTTP API. Its size in bytes and, by its header, in pixels is
checked before it is opened. Only well-known kinds are opened.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from ...errors import BadInput, MachineError, ModelError, reason_of
from ...models.folder import read_config

if TYPE_CHECKING:
    from .encoder import ImagePrompt


@dataclass(frozen=True)
class PictureLimits:
    """Of one picture, and of all of one conversation. A picture of 16 million pixels takes 48 MB opened, and more as
    numbers for an encoder. Each scan of a progressive JPEG goes over all pixels again: ten are usual."""

    nbytes: int = 8 << 20
    pixels: int = 1 << 24
    side: int = 1 << 14
    count: int = 8
    pixels_together: int = 1 << 25
    scans: int = 64
    formats: tuple[str, ...] = ("PNG", "JPEG", "WEBP", "GIF")


PICTURES: Final = PictureLimits()
_DATA_URL: Final = re.compile(r"data:image/[a-z0-9.+-]{1,40};base64,", re.IGNORECASE)


@dataclass(frozen=True)
class Picture:
    """The bytes of a file that may be a picture: `size` looks."""

    data: bytes

    @classmethod
    def of(cls, data: bytes) -> Picture:
        """One that was looked at.

        Raises:
            BadInput, MachineError: as `size`.
        """
        picture = cls(data)
        picture.size()
        return picture

    def size(self) -> tuple[int, int]:
        """Width and height, by the header, whose reading may take a while.

        Raises:
            BadInput: it is too large, or no picture of a kind that is known.
            MachineError: there is no Pillow here.
        """
        if len(self.data) > PICTURES.nbytes:
            raise BadInput(f"a picture of {len(self.data):,} bytes: {PICTURES.nbytes:,} are the most")
        opened = _opened(self.data)
        width, height = opened.size
        if width * height > PICTURES.pixels or max(width, height) > PICTURES.side or not width * height:
            most = f"{PICTURES.pixels:,} in all and {PICTURES.side:,} a side"
            raise BadInput(f"a picture of {width} x {height} pixels: {most} are the most")
        if opened.format in ("JPEG", "MPO") and self.data.count(b"\xff\xda") > PICTURES.scans:
            raise BadInput(f"a JPEG of more than {PICTURES.scans} scans")
        return width, height

    @classmethod
    def of_base64(cls, text: str) -> Picture:
        """One that was not looked at: this is quick.

        Raises:
            BadInput: it is too large, or not written in base64.
        """
        if len(text) > PICTURES.nbytes * 4 // 3 + 4:
            raise BadInput(f"a picture of more than {PICTURES.nbytes:,} bytes")
        try:
            return cls(base64.b64decode(text, validate=True))
        except (binascii.Error, ValueError):
            raise BadInput("a picture that is not written in base64") from None

    @classmethod
    def of_url(cls, url: str) -> Picture:
        """Of a data URL. Others are not fetched: who asks would have this machine ask others.

        Raises:
            BadInput: as `of_base64`; or it is another URL.
        """
        found = _DATA_URL.match(url[:100])
        if found is None:
            raise BadInput("pictures come as data URLs (data:image/png;base64,...): no address is fetched")
        return cls.of_base64(url[found.end() :])

    def pixels(self) -> Any:
        """Pillow's image, opened, in RGB.

        Raises:
            BadInput: it is cut short or damaged.
        """
        try:
            return _opened(self.data).convert("RGB")
        except Exception as error:  # decoders break in their own ways
            raise BadInput(f"a picture that cannot be opened: {reason_of(error)}") from None


def _opened(data: bytes) -> Any:
    """Pillow's image of the file, of which the header is read."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise MachineError("pictures need Pillow: pip install pillow") from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of its own limit, which is larger
            return Image.open(io.BytesIO(data), formats=PICTURES.formats)
    except UnidentifiedImageError:  # whose words have an address in memory
        raise BadInput(f"no picture that can be opened ({', '.join(PICTURES.formats)})") from None
    except Exception as error:  # as above; its own limit of pixels, too
        raise BadInput(f"a picture that cannot be opened: {reason_of(error)}") from None


@dataclass(frozen=True)
class PictureTokens:
    """A conversation with pictures, as tokens. `values`: for `ImageEncoder.encode`. `token`: that of pictures."""

    ids: list[int]
    values: dict[str, Any]
    token: int

    def named(self, prompt: ImagePrompt) -> list[int]:
        """The tokens, those of pictures and of groups with numbers below zero: equal ones are of equal pictures, by
        what the encoder has made of them, and of equal groups."""
        named = list(self.ids)
        for start, end in pairwise(prompt.whole.on_wire().cuts(1, prompt.tokens)):
            seen = hashlib.sha256()
            for place in range(start, end) if end > start + 1 else ():
                seen.update(prompt.bytes_of(place))
            for place in range(start, end):
                if self.ids[place] == self.token or end > start + 1:
                    own = seen.copy()
                    own.update(prompt.bytes_of(place))
                    named[place] = -1 - int.from_bytes(own.digest()[:6], "big")
        return named


class PictureReader:
    """The processor of transformers for the model in `folder`.

    Raises:
        ModelError: it has none, or one that cannot be made here.
    """

    def __init__(self, folder: Path, tokenizer: Any) -> None:
        from transformers.models.auto.configuration_auto import AutoConfig

        self._processor = _processor(folder, tokenizer)
        # That of a processor may be another one, which stands once for a whole picture.
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        token = getattr(config, "image_token_id", getattr(config, "image_token_index", None))
        self._token = int(_placeholder(self._processor, tokenizer) if token is None else token)

    def read(self, messages: Sequence[dict[str, Any]]) -> PictureTokens:
        """The prompt for the next answer to messages whose contents are lists of parts, of "text" or "image".

        Raises:
            BadInput: the model's template or processor does not take them.
        """
        shown = [part["image"] for message in messages for part in _parts(message.get("content")) if "image" in part]
        if len(shown) > PICTURES.count:
            raise BadInput(f"a conversation has {PICTURES.count} pictures at most")
        if sum(prod(picture.size()) for picture in shown) > PICTURES.pixels_together:
            raise BadInput(f"pictures of more than {PICTURES.pixels_together:,} pixels together in one conversation")
        opened = [
            {**message, "content": [_part(part) for part in _parts(message.get("content"))]} for message in messages
        ]
        try:
            made = self._processor.apply_chat_template(
                opened, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
            )
        except Exception as error:  # processors and templates break in their own ways
            raise BadInput(f"the model's processor does not take these messages: {reason_of(error)}") from error
        values = {name: value for name, value in made.items() if name not in ("input_ids", "attention_mask")}
        ids = made["input_ids"][0].tolist()
        if self._token not in ids:
            raise BadInput("the model's chat template leaves pictures out")
        return PictureTokens(ids, values, self._token)


def _parts(content: Any) -> list[dict[str, Any]]:
    return content if isinstance(content, list) else [{"type": "text", "text": content or ""}]


def _part(part: dict[str, Any]) -> dict[str, Any]:
    picture = part.get("image")
    return {"type": "image", "image": picture.pixels()} if isinstance(picture, Picture) else part


def _placeholder(processor: Any, tokenizer: Any) -> Any:
    """The token of pictures, as a processor has it."""
    name = str(getattr(processor, "image_token", "<image>"))
    return getattr(processor, "image_token_id", None) or tokenizer.convert_tokens_to_ids(name)


def _processor(folder: Path, tokenizer: Any) -> Any:
    from transformers.models.auto.processing_auto import AutoProcessor

    try:
        found = AutoProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        if "torchvision" not in str(error).lower():
            raise ModelError(f"{folder} has no processor of pictures: {_reason(error)}") from error
        found = _for_pictures_alone(folder, tokenizer)
    if not hasattr(found, "image_processor"):
        raise ModelError(f"{folder} has a tokenizer and no processor of pictures: the model takes text only")
    if not found.chat_template:
        found.chat_template = tokenizer.chat_template
    return found


def _for_pictures_alone(folder: Path, tokenizer: Any) -> Any:
    """The processor without what takes videos, which needs torchvision, and sounds.

    Raises:
        ModelError: what takes pictures needs something that is not here, too.
    """
    from transformers.models.auto.image_processing_auto import AutoImageProcessor
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES as NAMES
    from transformers.models.auto.processing_auto import processor_class_from_name

    try:
        made: Any = processor_class_from_name(NAMES[str(read_config(folder)["model_type"])])
        pictures = AutoImageProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        parts = {"image_processor": pictures, "tokenizer": tokenizer}
        alone: Any = type(made.__name__, (made,), {"check_argument_for_proper_class": lambda *_: None})
        stated, _ = made.get_processor_dict(folder, local_files_only=True)
        found = alone.from_args_and_dict([parts.get(name) for name in made.get_attributes()], stated)
        if getattr(found, "video_processor", parts) is None:  # SmolVLM wants two numbers of it without videos, too
            found.video_processor = SimpleNamespace(num_frames=None, fps=None, model_input_names=[])
        return found
    except Exception as error:  # processors break in their own ways
        raise ModelError(f"{folder} has no processor of pictures that works here: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    missing = next((name for name in ("torchvision", "num2words") if name in str(error).lower()), None)
    return reason_of(error) if missing is None else f"transformers needs {missing} for it (pip install {missing})"
