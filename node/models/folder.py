"""A model folder in Hugging Face layout, and what its configuration says in every architecture's words."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Final

from ...crypto.bounded_json import BadJson, JsonLimits, read_json_object
from ...protocols.ids import Boundaries, Span
from ..errors import ModelError
from .parts import Need, Part, parts_of_need
from .stored_scheme import StoredScheme, stored_scheme

MAX_BLOCKS = 4096
_CONFIG_LIMITS = JsonLimits(nbytes=4 << 20, values=200_000, depth=32, strict=False)

TEXT_FILES: Final[Mapping[str, int]] = {
    **dict.fromkeys(("generation_config.json", "chat_template*", "additional_chat_templates/*.jinja"), 4 << 20),
    **dict.fromkeys(("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"), 1 << 20),
    **dict.fromkeys(("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json"), 256 << 20),
    **dict.fromkeys(("*.tiktoken", "spiece.model", "sentencepiece*.model"), 256 << 20),
}
"""What a client needs beside the weights: names, and the bytes that each may have. Those of real models have up to
40 MiB; transformers reads them whole."""

_BLOCK_FIELDS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
_HIDDEN_FIELDS = ("hidden_size", "n_embd", "n_embed", "d_model")
_QUANTISED_FIELDS = {
    "quantization_config": "some method",
    "quantization": "MLX",
    "compression_config": "compressed-tensors",
}
"""Fields by which checkpoints say so, and whose they are if these do not name the method."""
_CROSSING_FIELDS: Final = (
    ("altup_num_inputs", "hc_count", "hc_mult"),
    ("hidden_size_per_layer_input",),
    ("num_kv_shared_layers",),
)
_CROSSING: Final = {
    "deepseek_v4": (4, 0, 0),
    "gemma3n_text": (4, 256, 15),
    "gemma4_text": (1, 256, 0),
    "hy_v4": (4, 0, 0),
    "qwen4_exp_text": (4, 0, 0),
}
"""What transformers takes for these fields where the configuration of such a model has none."""
_STREAM_AXES: Final = {"deepseek_v4": 2, "hy_v4": 2, "qwen4_exp_text": 3}
"""As `Boundaries.axis`."""
_INDEX_EVERY: Final = {"glm_moe_dsa": 1, "hy_v4": 4}
"""Models in which blocks take the tokens that an earlier one chose; every how manieth chooses where nothing is said."""
_MOST_STREAMS, _MOST_PER_BLOCK = 16, 4096
TEXT_FIELDS = ("text_config", "llm_config", "language_config")


@dataclass(frozen=True)
class ModelFolder:
    """A model on this machine's disk. A part of its weights may be missing if only a part was asked for.

    Attributes:
        name: what announcements call it: the alias, the hub id, or the folder's or file's own name.
        path: the folder, absolute.
        config: `config.json` as it is.
        num_blocks: transformer blocks of the whole model.
        hidden_size: width of a stream of hidden states.
        revision: the hub commit that it came from, else None.
        pinned: the first hexadecimal digits of the model version that was asked for, else None.
        asked: what a person called the model, without a version; empty where nobody did.
        fetches: whether weights come from peers while they are `held`.
    """

    fetches: ClassVar[bool] = False

    name: str
    path: Path
    config: Mapping[str, Any] = field(compare=False, repr=False)
    num_blocks: int
    hidden_size: int
    revision: str | None = None
    pinned: str | None = None
    asked: str = field(default="", compare=False)

    @property
    def boundaries(self) -> Boundaries:
        """Of its blocks."""
        return boundaries_of(self.config, self.hidden_size, self.num_blocks)

    def held(self, blocks: Span) -> AbstractContextManager[None]:
        """While it is entered, the weights of these blocks are here, if they ever are."""
        return nullcontext()

    def parts(self, need: Need) -> tuple[Part, ...]:
        """The parts that `need` asks for: as `parts_of_need`, with those whose weights its blocks use as well.

        Raises:
            ModelError: if a span passes the end of the model.
        """
        parts = parts_of_need(need, self.num_blocks)
        if not isinstance(need, Span):
            return parts
        sharing, kept = _weights_shared(_text_config(self.config), self.num_blocks)
        used = {sharing[place % kept] for place, block in enumerate(sharing) if block in need}
        return tuple(sorted(used.union(range(need.start, need.end))))


def open_folder(path: Path, name: str, revision: str | None = None) -> ModelFolder:
    """Reads the configuration in `path`; the weights are not looked at.

    Raises:
        ModelError: if this is no model folder, or no decoder model, or a file of its tokenizer is too large.
    """
    path = path.absolute()
    config = read_config(path)
    scheme_of(path, config)
    for pattern in TEXT_FILES:
        for file in path.glob(pattern):
            check_text_file(str(file), file.stat().st_size if file.is_file() else 0, pattern)
    try:
        found = ModelFolder(name, path, config, num_blocks(config), hidden_size(config), revision)
        boundaries_of(config, found.hidden_size, found.num_blocks)
        return found
    except ModelError as error:
        raise ModelError(f"{path / 'config.json'}: {error}") from None


def check_text_file(name: str, nbytes: int, pattern: str) -> None:
    """
    Raises:
        ModelError: no file of the kind `pattern`, a key of `TEXT_FILES`, has `nbytes` bytes.
    """
    most = TEXT_FILES[pattern]
    if nbytes > most:
        raise ModelError(
            f"{name} has {nbytes >> 20} MiB, where files of its kind have at most {most >> 20} MiB: it is not read. "
            "Take the model from somebody else, or remove the file if the model does not need it"
        )


def scheme_of(path: Path, config: Mapping[str, Any]) -> StoredScheme | None:
    """How the matrices of the model in `path` are quantised, by its configuration; None if they are plain.

    Raises:
        ModelError: in a way that is not loaded here.
    """
    parts: tuple[Any, ...] = (config, *(config.get(name) for name in TEXT_FIELDS))
    for part in parts:
        for field_name, usual in _QUANTISED_FIELDS.items():
            stated = part.get(field_name) if isinstance(part, Mapping) else None
            if not stated:
                continue
            try:
                if isinstance(stated, Mapping) and field_name == "quantization_config":
                    return stored_scheme({"expert_dtype": part.get("expert_dtype"), **stated})
                raise ModelError(f"weights quantised by {usual}")
            except ModelError as error:
                raise ModelError(
                    f"{path} holds {error}, which petalnode does not load: take the model with plain weights, or its "
                    ".gguf file"
                ) from None
    return None


def has_experts(path: Path) -> bool:
    """Whether the model in `path` is a mixture of experts, in which a rounding may choose another expert.

    Raises:
        ModelError: as `read_config`.
    """
    config = read_config(path)
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    return any("expert" in key and bool(value) for part in parts for key, value in part.items())


def read_config(path: Path) -> dict[str, Any]:
    """`config.json` of the folder `path`.

    Raises:
        ModelError: if it is missing or is not a JSON object.
    """
    if not path.is_dir():
        raise ModelError(f"{path} is not a folder.")
    file = path / "config.json"
    try:
        return read_json_object(file, _CONFIG_LIMITS)
    except FileNotFoundError:
        raise ModelError(
            f"{path} is no model folder: it has no config.json. It holds {_listing(path)}. A model folder "
            "has config.json, the weights as .safetensors, and the tokenizer's files."
        ) from None
    except OSError as error:
        raise ModelError(f"Cannot read {file}: {error.strerror}.") from error
    except BadJson as error:
        raise ModelError(f"{file} is no model configuration: {error}. Copy or download it again.") from None


def num_blocks(config: Mapping[str, Any]) -> int:
    """How many transformer blocks the model has.

    Raises:
        ModelError: if the configuration does not say, or is not that of a decoder-only model.
    """
    if config.get("is_encoder_decoder"):
        raise ModelError("this is an encoder-decoder model; petalnode hosts decoder-only language models.")
    found = _first_integer(_text_config(config), _BLOCK_FIELDS)
    if found is None:
        kinds = _text_config(config).get("layers_block_type")  # Nemotron-H, as transformers saves it
        found = len(kinds) if isinstance(kinds, list) and kinds else None
    if found is None:
        raise ModelError(f"it does not say how many blocks the model has ({', '.join(_BLOCK_FIELDS)}).")
    if not 1 <= found <= MAX_BLOCKS:
        raise ModelError(f"{found} blocks are out of range (1 to {MAX_BLOCKS}).")
    return found


def hidden_size(config: Mapping[str, Any]) -> int:
    """The width of the hidden states.

    Raises:
        ModelError: if the configuration does not say.
    """
    found = _first_integer(_text_config(config), _HIDDEN_FIELDS)
    if found is None or found < 1:
        raise ModelError(f"it does not say how wide the hidden states are ({', '.join(_HIDDEN_FIELDS)}).")
    return found


def boundaries_of(config: Mapping[str, Any], hidden: int, num_blocks: int) -> Boundaries:
    """Of the blocks of a model with this configuration.

    Raises:
        ModelError: numbers that no model has.
    """
    text = _text_config(config)
    usual = _CROSSING.get(str(text.get("model_type")), (1, 0, 0))
    found = [_first_integer(text, names) for names in _CROSSING_FIELDS]
    streams, per_block, sharing = (least if one is None else one for one, least in zip(found, usual, strict=True))
    if not (1 <= streams <= _MOST_STREAMS and 0 <= per_block <= _MOST_PER_BLOCK and 0 <= sharing < num_blocks):
        raise ModelError(
            f"{streams} streams of hidden states, {per_block} values for each block and {sharing} of {num_blocks} "
            "blocks that share keys and values are out of range."
        )
    shared, _ = _weights_shared(text, num_blocks)
    if not sharing:
        axis, ids = _STREAM_AXES.get(str(text.get("model_type")), 0), min(_blocks_with_ids(text), num_blocks)
        chosen = _by_one_choice(text, num_blocks)
        return Boundaries(hidden, num_blocks, streams, per_block, chosen, max(shared, default=-1) + 1, axis, ids)
    kinds = text.get("layer_types")
    own = num_blocks - sharing
    if (
        not isinstance(kinds, list)
        or len(kinds) != num_blocks
        or set(map(str, kinds[own:])) - set(map(str, kinds[:own]))
    ):
        raise ModelError("its layer_types do not say whose keys and values the last blocks take.")
    last = {str(kind): number for number, kind in enumerate(kinds[:own])}
    return Boundaries(hidden, num_blocks, streams, per_block, (Span(min(last.values()), num_blocks),))


def _by_one_choice(text: Mapping[str, Any], num_blocks: int) -> tuple[Span, ...]:
    """Blocks that look at the tokens which the first of them chose, by `indexer_types`, or as transformers makes these.

    Raises:
        ModelError: the configuration does not say which.
    """
    every = _INDEX_EVERY.get(str(text.get("model_type")))
    if every is None:
        return ()
    kinds = text.get("indexer_types") or text.get("index_topk_pattern")
    if kinds is None:
        every = _first_integer(text, ("index_topk_freq",)) or every
        offset = _first_integer(text, ("index_skip_topk_offset",))
        first = 2 if offset is None else offset
        kinds = ["F" if max(block - first + 1, 0) % every == 0 else "S" for block in range(num_blocks)]
    if not isinstance(kinds, (list, str)) or len(kinds) != num_blocks or kinds[0] not in ("F", "full"):
        raise ModelError("its indexer_types do not say which blocks choose the tokens that others look at.")
    choosing = [block for block, kind in enumerate(kinds) if kind in ("F", "full")]
    return tuple(Span(*ends) for ends in pairwise([*choosing, num_blocks]) if ends[1] - ends[0] > 1)


def _blocks_with_ids(text: Mapping[str, Any]) -> int:
    """How many of the first blocks look the ids of tokens up.

    Raises:
        ModelError: the configuration does not say which.
    """
    looked_up = text.get("ple_layer_ids") or [0]
    if text.get("model_type") == "deepseek_v4":
        kinds, first = text.get("mlp_layer_types"), text.get("num_hash_layers")
        looked_up = [3 if first is None else first]
        if isinstance(kinds, list):
            looked_up = [number for number, kind in enumerate(["", *kinds]) if kind == "hash_moe"]
    if not isinstance(looked_up, list) or not all(isinstance(one, int) for one in looked_up):
        raise ModelError("its ple_layer_ids or num_hash_layers do not say which blocks look tokens up.")
    return int(max((0, *looked_up)))


def _weights_shared(text: Mapping[str, Any], num_blocks: int) -> tuple[list[int], int]:
    """Blocks that use some weights in turns, and how many of the first have them.

    Raises:
        ModelError: the configuration does not say which.
    """
    if text.get("model_type") not in ("zamba", "zamba2"):
        return [], 1
    kinds, kept = text.get("layers_block_type"), text.get("num_mem_blocks", 1)
    if not isinstance(kinds, list) or len(kinds) != num_blocks or not isinstance(kept, int) or kept < 1:
        raise ModelError("its layers_block_type and num_mem_blocks do not say which blocks share weights.")
    return [number for number, kind in enumerate(kinds) if kind == "hybrid"], kept


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a configuration that may also describe towers for pictures or sound."""
    for name in TEXT_FIELDS:
        part = config.get(name)
        if isinstance(part, Mapping) and _first_integer(part, _BLOCK_FIELDS) is not None:
            return part
    return config


def _first_integer(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def _listing(path: Path) -> str:
    try:
        names = sorted(entry.name for entry in path.iterdir())
    except OSError as error:
        return f"nothing that can be read ({error.strerror})"
    if not names:
        return "nothing"
    shown = ", ".join(names[:8])
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"
