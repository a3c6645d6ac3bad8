"""Tiny models of families that take pictures, and what their processors would make of tiny pictures."""

from __future__ import annotations

import inspect
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoConfig, AutoTokenizer
from transformers.models.auto.modeling_auto import AutoModelForImageTextToText

from petalnode.node.blocks.images.pictures import Picture as ReadPicture
from petalnode.node.blocks.images.pictures import PictureReader
from tests.greedy import generate
from tests.swarm.tokenizer import save_tokenizer
from tests.sweep.configs import VOCABULARY, fill, tiny_config

SIDE = 28  # pixels, of pictures of a fixed size
GRID = (4, 6)  # patches, of the others: six tokens
Picture = Callable[[torch.Generator, int], dict[str, torch.Tensor]]
"""What a processor makes of some pictures."""


def _square(generator: torch.Generator, count: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(count, 3, SIDE, SIDE, generator=generator)}


def _sized(generator: torch.Generator, count: int) -> dict[str, torch.Tensor]:
    return {**_square(generator, count), "image_sizes": torch.tensor([[SIDE, SIDE]] * count)}


def _tiled(generator: torch.Generator, count: int) -> dict[str, torch.Tensor]:
    """One tile a row."""
    return {"pixel_values": torch.randn(count, 1, 3, SIDE, SIDE, generator=generator)}


def _patches(generator: torch.Generator, count: int) -> dict[str, torch.Tensor]:
    return {
        "pixel_values": torch.randn(count, 16, 3 * 14 * 14, generator=generator),
        "spatial_shapes": torch.tensor([[4, 4]] * count),
        "pixel_attention_mask": torch.ones(count, 16, dtype=torch.long),
    }


def _positioned(generator: torch.Generator, count: int) -> dict[str, torch.Tensor]:
    """Twelve tokens."""
    places = torch.cartesian_prod(torch.arange(6), torch.arange(8)).flip(1)
    return {
        "pixel_values": torch.rand(count, len(places), 3 * 14 * 14, generator=generator),
        "image_position_ids": places.expand(count, -1, -1),
    }


def _grid(generator: torch.Generator, count: int) -> dict[str, torch.Tensor]:
    patches = count * GRID[0] * GRID[1]
    return {
        "pixel_values": torch.randn(patches, 3 * 2 * 14 * 14, generator=generator),
        "image_grid_thw": torch.tensor([[1, *GRID]] * count),
    }


@dataclass(frozen=True)
class Family:
    """`vision`, `text`, `outer`: changes of the parts of the tiny configuration. `types`: the argument that says which
    tokens are those of pictures. `beams`: transformers itself searches with pictures."""

    picture: Picture = _square
    vision: dict[str, Any] = field(default_factory=dict)
    text: dict[str, Any] = field(default_factory=dict)
    outer: dict[str, Any] = field(default_factory=dict)
    types: str = ""
    beams: bool = True


def _axes(sections: Sequence[int], **vision: Any) -> Family:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections)}
    return Family(_grid, vision, {"rope_parameters": rope}, types="mm_token_type_ids")


FAMILIES: dict[str, Family] = {
    "llava": Family(),
    "idefics3": Family(_tiled),
    "smolvlm": Family(_tiled),
    "internvl": Family(vision={"image_size": [SIDE, SIDE], "patch_size": [14, 14]}),
    "lfm2_vl": Family(_patches),
    "aya_vision": Family(),
    "cohere2_vision": Family(),
    "qwen2_vl": _axes([2, 3, 3]),
    "qwen2_5_vl": _axes([2, 3, 3]),
    "qwen3_5": Family(_grid, types="mm_token_type_ids"),
    "qwen3_5_moe": Family(_grid, types="mm_token_type_ids"),
    "glm4v": _axes([2, 3, 3]),
    "glm4v_moe": _axes([1, 2, 1]),
    "gemma3": Family(
        types="token_type_ids",
        vision={"patch_size": 7},
        text={"tie_word_embeddings": False},
        outer={"mm_tokens_per_image": 16, "tie_word_embeddings": False},
    ),
    "gemma4": Family(
        _positioned,
        types="mm_token_type_ids",
        vision={
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 16,
            "pooling_kernel_size": 2,
            "patch_size": 14,
            "position_embedding_size": 32,
        },
        text={"use_bidirectional_attention": "vision", "tie_word_embeddings": False},
        outer={"tie_word_embeddings": False, "audio_token_id": 0, "video_token_id": 0},  # transformers pads these
    ),
    "qwen3_vl": _axes([2, 3, 3], deepstack_visual_indexes=[0, 1]),
    "qwen3_vl_moe": _axes([2, 3, 3], deepstack_visual_indexes=[0, 1]),
    "mistral3": Family(_sized, vision={"patch_size": 7}, outer={"image_token_index": 290}),
    "llama4": Family(
        vision={
            "intermediate_size": 256,
            "projector_input_dim": 64,
            "projector_output_dim": 64,
            "vision_output_dim": 64,
        },
        beams=False,
    ),
}


def save_seeing(kind: str, folder: Path) -> Any:
    """Saves a tiny model of this family, and returns it as transformers loads it."""
    family, config = FAMILIES[kind], tiny_config(kind)
    if config.vision_config is None:
        config.vision_config = type(config).sub_configs["vision_config"](**family.vision)
    for part, changes in ((config.vision_config, family.vision), (config.get_text_config(), family.text)):
        for name, value in changes.items():
            setattr(part, name, value)
    for name, value in family.outer.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    made: Any = AutoModelForImageTextToText.from_config(config).eval()
    fill(made)
    made.generation_config.eos_token_id = None
    made.save_pretrained(folder)
    return AutoModelForImageTextToText.from_pretrained(folder).eval()


def seen(whole: Any, kind: str, texts: Sequence[tuple[int, int]] = ((5, 3),), seed: int = 3) -> dict[str, Any]:
    """Arguments for `generate`: per row a text with a picture in it, with some tokens before and behind it.
    Shorter rows are padded at the left."""
    family, generator = FAMILIES[kind], torch.Generator().manual_seed(seed)
    given: dict[str, Any] = dict(family.picture(generator, len(texts)))
    config = whole.config
    token = getattr(config, "image_token_id", None) or config.image_token_index
    features = getattr(whole, "get_image_features", None) or whole.model.get_image_features
    taken = inspect.signature(features).parameters
    with torch.no_grad():
        made = features(**{name: value for name, value in given.items() if name in taken or "kwargs" in taken})
    made = next(
        part for name in ("pooler_output", "last_hidden_state") if (part := getattr(made, name, made)) is not None
    )
    parts = made if isinstance(made, (list, tuple)) else [made]
    count = sum(part.reshape(-1, part.shape[-1]).shape[0] for part in parts) // len(texts)
    begin = [config.vision_start_token_id] if hasattr(config, "vision_start_token_id") else []
    rows = []
    for before, behind in texts:
        words = torch.randint(3, 250, (before + behind,), generator=generator).tolist()
        rows.append([*words[:before], *begin, *[token] * count, *words[before:]])
    longest = max(map(len, rows))
    given["input_ids"] = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    given["attention_mask"] = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    if family.types:
        given[family.types] = (given["input_ids"] == token).long()
    return given


@dataclass(frozen=True)
class Processor:
    """What a family's processor is made of.

    Attributes:
        kind: class of transformers for the pictures.
        fields: of `preprocessor_config.json`.
        tokens: by the names of their ids in the model's configuration, as far as it has them.
        shown: what the chat template writes for a picture.
        named: tokens by the names that the tokenizer has for them.
        outer: fields of `processor_config.json`.
        needs: a package that transformers wants for it, which is not a part of petalnode.
    """

    kind: str
    fields: dict[str, Any]
    tokens: dict[str, str]
    shown: str
    named: dict[str, str] = field(default_factory=dict)
    outer: dict[str, Any] = field(default_factory=dict)
    needs: str = ""


_QWEN = Processor(
    "Qwen2VLImageProcessor",
    {
        "patch_size": 14,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "min_pixels": SIDE * SIDE,
        "max_pixels": 6 * SIDE * SIDE,
    },
    {
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
        "video_token_id": "<|video_pad|>",
        "image_token_id": "<|image_pad|>",
    },
    "<|vision_start|><|image_pad|><|vision_end|>",
)
_FIXED = {"height": SIDE, "width": SIDE}
_GEMMA = {"image_token": "<image_soft>", "boi_token": "<image>", "eoi_token": "</image>"}
_SOUNDS = {"audio_token": "<audio_soft>", "boa_token": "<audio>", "eoa_token": "</audio>"}
_IMAGE_START, _IMAGE_END = "<|image_start|>", "<|image_end|>"
PROCESSORS: dict[str, Processor] = {
    "qwen2_vl": _QWEN,
    "qwen3_vl": _QWEN,
    "qwen3_5": _QWEN,
    "glm4v": Processor(
        "Glm4vImageProcessor",
        {"patch_size": 14, "merge_size": 2, "size": {"shortest_edge": 2 * SIDE**2, "longest_edge": 12 * SIDE**2}},
        {
            "image_token_id": "<|image|>",
            "video_token_id": "<|video|>",
            "image_start_token_id": "<|begin_of_image|>",
            "image_end_token_id": "<|end_of_image|>",
            "video_start_token_id": "<|begin_of_video|>",
            "video_end_token_id": "<|end_of_video|>",
        },
        "<|begin_of_image|><|image|><|end_of_image|>",
    ),
    "gemma3": Processor(
        "Gemma3ImageProcessor",
        {"size": _FIXED},
        {"image_token_id": "<image_soft>", "boi_token_index": "<image>", "eoi_token_index": "</image>"},
        "<image>",
        _GEMMA,
        {"image_seq_length": 16},
    ),
    "gemma4": Processor(
        "Gemma4ImageProcessor",
        {"patch_size": 14, "pooling_kernel_size": 2, "max_soft_tokens": 70},
        {"image_token_id": "<image_soft>", "boi_token_id": "<image>", "eoi_token_id": "</image>"},
        "<image_soft>",
        _GEMMA | _SOUNDS,
    ),
    "mistral3": Processor(
        "PixtralImageProcessor",
        {"patch_size": {"height": 7, "width": 7}, "size": {"longest_edge": SIDE}},
        {"image_token_id": "[IMG]"},
        "[IMG]",
        {"break": "[IMG_BREAK]", "end": "[IMG_END]"},
        {"patch_size": 7, "spatial_merge_size": 2},
        needs="torchvision",
    ),
    "llama4": Processor(
        "Llama4ImageProcessor",
        {"size": _FIXED, "max_patches": 4, "resize_to_max_canvas": False},
        {"image_token_id": "<|patch|>", "boi_token_index": _IMAGE_START, "eoi_token_index": _IMAGE_END},
        "<|image|>",
        {"image": "<|image|>", "x": "<|tile_x_separator|>", "y": "<|tile_y_separator|>"},
        {"patch_size": 14},
        needs="torchvision",
    ),
    "lfm2_vl": Processor(
        "Lfm2VlImageProcessor",
        {
            "tile_size": SIDE,
            "encoder_patch_size": 14,
            "downsample_factor": 2,
            "do_image_splitting": False,
            "min_image_tokens": 1,
            "max_image_tokens": 6,
            "max_num_patches": 24,
        },
        {"image_token_id": "<image>"},
        "<image>",
        {"image_start_token": _IMAGE_START, "image_end_token": _IMAGE_END, "image_thumbnail": "<|img_thumbnail|>"},
        needs="torchvision",
    ),
    "internvl": Processor(
        "GotOcr2ImageProcessor",
        {"size": _FIXED},
        {"image_token_id": "<IMG_CONTEXT>"},
        "<IMG_CONTEXT>",
        {
            "context_image_token": "<IMG_CONTEXT>",
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "video_token": "<video>",
        },
        {"image_seq_length": 1},
    ),
    "smolvlm": Processor(
        "SmolVLMImageProcessor",
        {"size": {"longest_edge": SIDE}, "max_image_size": {"longest_edge": SIDE}, "do_image_splitting": False},
        {"image_token_id": "<image>"},
        "<image>",
        {
            "fake_image_token": "<fake_token_around_image>",
            "global_image_token": "<global-img>",
            "end_of_utterance_token": "<end_of_utterance>",
        },
        {"image_seq_len": 1},
        needs="num2words",
    ),
}
"""Of every family that chats show pictures to in the tests."""
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}:{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for p in m['content'] %}{% if p['type'] == 'image' %}SHOWN"
    "{% else %}{{ p['text'] }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}a:"
)


def save_processor(folder: Path, kind: str = "qwen2_vl") -> None:
    """Writes tokenizer, chat template and image processor beside a tiny model of this family, or any other."""
    processor, config = PROCESSORS[kind], AutoConfig.from_pretrained(folder)
    save_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    first = len(tokenizer)
    places = {getattr(config, name, -1): token for name, token in processor.tokens.items()}
    places = {place: token for place, token in places.items() if place >= first}
    tokens = dict.fromkeys((*processor.tokens.values(), *processor.named.values()))
    others = iter([token for token in tokens if token not in places.values()])
    texts = [places.get(place) or next(others, f"<|unused{place}|>") for place in range(first, VOCABULARY)]
    tokenizer.add_special_tokens({"additional_special_tokens": texts})
    tokenizer.chat_template = TEMPLATE.replace("SHOWN", processor.shown)
    tokenizer.save_pretrained(folder)
    written = json.loads((folder / "tokenizer_config.json").read_text())
    written |= {"extra_special_tokens": processor.named, "model_input_names": ["input_ids", "attention_mask"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(written))
    described = {"image_processor_type": processor.kind, **processor.fields}
    (folder / "preprocessor_config.json").write_text(json.dumps(described))
    if processor.outer:
        (folder / "processor_config.json").write_text(json.dumps(processor.outer))


def png(width: int = 2 * SIDE, height: int = SIDE, colour: int = 0x3060C0) -> bytes:
    """A picture with a square in it."""
    picture = Image.new("RGB", (width, height), colour)
    picture.paste(0x10E0F0, (width // 4, height // 4, width // 2, height // 2))
    written = io.BytesIO()
    picture.save(written, "PNG")
    return written.getvalue()


def answer_of(whole: Any, folder: Path, *pictures: bytes, tokens: int) -> str:
    """What transformers says to somebody who shows these pictures and asks "What?"."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    shown = [{"type": "image", "image": ReadPicture.of(picture)} for picture in pictures]
    content = [*shown, {"type": "text", "text": "What?"}]
    read = PictureReader(folder, tokenizer).read([{"role": "user", "content": content}])
    values = {name: value.float() if value.is_floating_point() else value for name, value in read.values.items()}
    said = generate(whole, torch.tensor([read.ids]), max_new_tokens=tokens, **values)
    return str(tokenizer.decode(said[0, len(read.ids) :], skip_special_tokens=True))
