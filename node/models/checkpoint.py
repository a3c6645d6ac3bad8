"""The weights of a model folder: safetensors, in one file or in shards. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path

from ..errors import ModelError
from .folder import num_blocks as blocks_in
from .folder import read_config
from .parts import Part, find_layout, group_by_part, parts_of_need
from .safetensors_file import StoredTensor, read_header

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_MAX_INDEX_BYTES = 256 << 20


class Checkpoint:
    """The tensors of a model folder.

    Opening reads the index, or the header of the single file. Shards are opened as they are asked for, so a
    folder that holds only the shards of some blocks is as good as a whole one for those blocks.

    Args:
        folder: in Hugging Face layout.
        num_blocks: of the whole model; read from `config.json` if not given.

    Raises:
        ModelError: if there are no usable weights; names the file and what to do.
    """

    def __init__(self, folder: Path, num_blocks: int | None = None) -> None:
        self.folder = folder.absolute()
        self._headers: dict[str, Mapping[str, StoredTensor]] = {}
        index = self.folder / INDEX
        if index.is_file():
            self.file_of = read_index(index)
        elif (self.folder / SINGLE).is_file():
            self.file_of = dict.fromkeys(self._header(SINGLE), SINGLE)
        else:
            raise ModelError(_no_weights(self.folder))
        if num_blocks is None:
            num_blocks = blocks_in(read_config(self.folder))
        try:
            self.layout = find_layout(self.file_of, num_blocks)
        except ModelError as error:
            raise ModelError(f"{self.folder}: {error}") from None

    @property
    def keys(self) -> tuple[str, ...]:
        """All checkpoint keys, in the checkpoint's order."""
        return tuple(self.file_of)

    @cached_property
    def parts(self) -> Mapping[Part, tuple[str, ...]]:
        """The sorted keys of each part."""
        return group_by_part(self.file_of, self.layout)

    def block_of(self, key: str) -> int | None:
        """The number of the block that holds `key`, or None if no block does."""
        part = self.layout.part_of(key)
        return part if isinstance(part, int) else None

    def tensor(self, key: str) -> StoredTensor:
        """Where the tensor `key` stands.

        Raises:
            ModelError: if its file is missing, truncated or malformed, or does not hold what the index says.
            KeyError: if the checkpoint has no such key.
        """
        file = self.file_of[key]
        try:
            return self._header(file)[key]
        except KeyError:
            raise ModelError(
                f"{self.folder / file} does not hold {key!r}, although {INDEX} says so. Copy or download both again."
            ) from None

    def tensors(self, part: Part) -> tuple[StoredTensor, ...]:
        """The tensors of one part, sorted by key. Raises as `tensor` does."""
        return tuple(self.tensor(key) for key in self.parts[part])

    def check(self, parts: Iterable[Part] | None = None) -> None:
        """Checks that the files of these parts (default: of all) are there, whole and well-formed.

        Raises:
            ModelError: for the first that is not.
        """
        if parts is None:
            parts = parts_of_need("all", self.layout.num_blocks)
        for part in parts:
            self.tensors(part)

    def _header(self, file: str) -> Mapping[str, StoredTensor]:
        if file not in self._headers:
            self._headers[file] = read_header(self.folder / file)
        return self._headers[file]


def read_index(index: Path) -> dict[str, str]:
    """Key -> file name from a `model.safetensors.index.json`.

    Raises:
        ModelError: if it is malformed, or points outside its folder.
    """
    try:
        with index.open("rb") as stream:
            text = stream.read(_MAX_INDEX_BYTES)
        weight_map = json.loads(text)["weight_map"]
    except OSError as error:
        raise ModelError(f"Cannot read {index}: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ModelError(f"{index} is damaged (no JSON with a weight_map). Copy or download it again.") from None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} lists no weights. Copy or download it again.")
    for key, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise ModelError(f"{index} gives {file!r} as the file of {key!r}, which is no safetensors file beside it.")
    return weight_map


def _no_weights(folder: Path) -> str:
    found = sorted(file.name for file in folder.iterdir() if file.is_file()) if folder.is_dir() else []
    pickled = [name for name in found if name.endswith((".bin", ".pt", ".pth")) and "model" in name]
    if pickled:
        return (
            f"{folder} has its weights as {pickled[0]}, which can run code when it is read and cannot be "
            "read in part. Convert it once: load it with transformers' "
            "AutoModelForCausalLM.from_pretrained(...) and save it with save_pretrained(NEW_FOLDER), which "
            "writes safetensors (tokenizer too); then use the new folder."
        )
    other = [name for name in found if name.endswith(".safetensors")]
    if other:
        return (
            f"{folder} has neither {SINGLE} nor {INDEX}, only {', '.join(other[:4])}. Rename a single file "
            f"to {SINGLE}, or add the index of the shards."
        )
    gguf = [name for name in found if name.endswith(".gguf")]
    if gguf:
        return f"{folder} has no safetensors weights. For the GGUF in it, give the file: {folder / gguf[0]}"
    return f"{folder} has no weights ({SINGLE}, or shards with {INDEX}). Copy or download them."
