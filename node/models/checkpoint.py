"""The weights of a model folder: safetensors, in one file or in shards, or GGUF files elsewhere, which a note names.

Headers are read without torch and checked before use, as files are truncated by failed copies. The format of a file: 8
bytes little-endian length, that many bytes of JSON (key -> dtype, shape, offsets from the header's end), then the
tensors' bytes, row-major.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, Final, Self

from ...crypto.bounded_json import BadJson, JsonLimits, read_json_object
from ...crypto.safetensors_header import LENGTH_BYTES, BadHeader, header_limits, parse_header
from ..errors import ModelError, memory_needed
from .folder import num_blocks as blocks_in
from .folder import read_config
from .gguf.header import ABSENT, read_gguf_header
from .parts import Part, find_layout, group_by_part, parts_of_need

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_WIDE: Final = ("F32", "F16", "BF16")
GGUF_NOTE: Final = "gguf.json"
"""Of a folder whose weights are those of GGUF files: where these are."""
_NOTE_LIMITS = JsonLimits(nbytes=8 << 20, values=2000, depth=3)
MAX_HEADER_BYTES = 64 << 20
_MAX_TENSORS = 200_000
"""In one file; the largest checkpoints have 100,000 in all of theirs."""
_INDEX_LIMITS = JsonLimits(nbytes=64 << 20, values=4 * _MAX_TENSORS, depth=4, strict=False)
_AGAIN = "Copy or download it again."


@dataclass(frozen=True)
class StoredTensor:
    """One tensor in a file: its bytes are `file[start:end]`. `dtype` is in the format's words ("F32", "Q4_K")."""

    key: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


def read_header(file: Path, most: int = _MAX_TENSORS) -> Mapping[str, StoredTensor]:
    """All tensors of `file` by key, of which there may be `most`.

    Raises:
        ModelError: if the file is missing, truncated or malformed; names it and what is wrong.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            start = stream.read(8)
            length = int.from_bytes(start, "little")
            if start == b"version ":
                raise ModelError(f"{file} is a Git LFS pointer, not the weights. Run `git lfs pull` in its folder.")
            if length > MAX_HEADER_BYTES:
                raise ModelError(f"{file} is not a safetensors file. {_AGAIN}")
            if length > size - 8:
                raise ModelError(f"{file} is truncated: it ends inside its header, at {size:,} bytes. {_AGAIN}")
            text = stream.read(length)
    except FileNotFoundError:
        raise ModelError(f"{file} is missing. {_AGAIN}") from None
    except OSError as error:
        raise ModelError(f"Cannot read {file}: {error.strerror}.") from error
    try:
        header = parse_header(text, header_limits(MAX_HEADER_BYTES, most))
    except BadHeader as error:
        raise ModelError(f"{file} has a damaged header: {error}. {_AGAIN}") from None
    origin = LENGTH_BYTES + length
    expected = origin + header.end
    if expected > size:
        raise ModelError(f"{file} is truncated: its tensors end at {expected:,} bytes, the file has {size:,}. {_AGAIN}")
    if expected < size:
        raise ModelError(f"{file} has {size - expected:,} bytes that belong to no tensor. {_AGAIN}")
    return {
        key: StoredTensor(key, file, said.dtype, said.shape, origin + said.start, origin + said.end)
        for key, said in header.tensors.items()
    }


class Checkpoint:
    """The tensors of a model folder. Those of GGUF files have the names that they have there.

    Opening reads the index, or the header of the single file. Shards are opened as they are asked for. So a folder with
    the shards of some blocks alone is a whole one for those blocks. A context manager, for `slice`: tensors that were
    taken out of it stay valid after it is closed.

    Args:
        folder: in Hugging Face layout.
        num_blocks: of the whole model; read from `config.json` if not given.
        drafts: whether the parts are those of manifests in which an MTP head counts.

    Raises:
        ModelError: if there are no usable weights; names the file and what to do.
    """

    def __init__(self, folder: Path, num_blocks: int | None = None, *, drafts: bool = True) -> None:
        self.folder = folder.absolute()
        self._headers: dict[str, Mapping[str, StoredTensor]] = {}
        self._open = ExitStack()
        self._mapped: dict[str, Any] = {}
        index, note = self.folder / INDEX, self.folder / GGUF_NOTE
        self.gguf = read_gguf_note(note) if note.is_file() else ()
        if self.gguf:
            self.file_of = {key: str(file) for file in self.gguf for key in self._header(str(file))}
        elif index.is_file():
            self.file_of = read_index(index)
        elif (self.folder / SINGLE).is_file():
            self.file_of = dict.fromkeys(self._header(SINGLE), SINGLE)
        else:
            raise ModelError(_no_weights(self.folder))
        if num_blocks is None:
            num_blocks = blocks_in(read_config(self.folder))
        try:
            layout = find_layout(self.file_of, num_blocks)
            self.layout = replace(layout, drafts=drafts and layout.drafts)
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

    @property
    def form(self) -> str:
        """How the tensors are stored, and by whose rules they are read: "safetensors", or "gguf ARCHITECTURE"."""
        if not self.gguf:
            return "safetensors"
        return f"gguf {read_gguf_header(self.gguf[0]).metadata.get('general.architecture', '')}"

    def tensor(self, key: str) -> StoredTensor:
        """Where the tensor `key` stands.

        Raises:
            ModelError: if its file is missing, truncated or malformed, or does not hold what the index says.
            KeyError: if the checkpoint has no such key.
        """
        file = self.file_of[key]
        if file.endswith(ABSENT):
            raise ModelError(f"{file.removesuffix(ABSENT)} is missing. {_AGAIN}")
        try:
            return self._header(file)[key]
        except KeyError:
            raise ModelError(
                f"{self.folder / file} does not hold {key!r}, although {INDEX} says so. Copy or download both again."
            ) from None

    def tensors(self, part: Part) -> tuple[StoredTensor, ...]:
        """The tensors of one part, sorted by key. Raises as `tensor` does."""
        return tuple(self.tensor(key) for key in self.parts[part])

    def nbytes(self, part: Part) -> int:
        """Bytes of the part's tensors in the files."""
        return sum(tensor.nbytes for tensor in self.tensors(part))

    def opened_nbytes(self, part: Part, packed: Collection[str] = ()) -> int:
        """The same where tensors of fewer than 16 bits a value are opened to float32, but for kinds `packed`."""
        as_they_are = {*_WIDE, *packed}
        return sum(
            held.nbytes if held.dtype in as_they_are or not self.gguf else 4 * prod(held.shape)
            for held in self.tensors(part)
        )

    def slice(self, key: str) -> Any:
        """safetensors' lazy handle on a tensor of one of its files, as torch has it: `[...]` reads the mapped file.

        Raises:
            ModelError: as `tensor`.
        """
        # Imported for tensors only: most who look at a checkpoint read headers.
        from safetensors import SafetensorError, safe_open

        file = self.tensor(key).file  # a clearer error than safetensors' own
        if file.name not in self._mapped:
            try:
                with memory_needed(f"Mapping {file}"):
                    self._mapped[file.name] = self._open.enter_context(safe_open(file, framework="pt", device="cpu"))
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{file} cannot be read ({error}). Copy or download it again.") from error
        return self._mapped[file.name].get_slice(key)

    def release(self) -> None:
        """Closes the files until they are needed again, and so frees the memory of their mapped pages."""
        self._mapped.clear()
        self._open.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

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
            path = self.folder / file
            self._headers[file] = _gguf_tensors(path) if path in self.gguf else read_header(path)
        return self._headers[file]


def _gguf_tensors(file: Path) -> Mapping[str, StoredTensor]:
    return {
        tensor.name: StoredTensor(
            tensor.name, file, tensor.kind, tensor.shape, tensor.start, tensor.start + tensor.nbytes
        )
        for tensor in read_gguf_header(file).tensors
    }


def read_gguf_note(note: Path) -> tuple[Path, ...]:
    """The GGUF files that a folder's note names.

    Raises:
        ModelError: it is malformed.
    """
    try:
        files = read_json_object(note, _NOTE_LIMITS)["files"]
    except OSError as error:
        raise ModelError(f"Cannot read {note}: {error.strerror}.") from error
    except (BadJson, KeyError):
        files = None
    if not isinstance(files, list) or not files or not all(isinstance(file, str) for file in files):
        raise ModelError(f"{note} is damaged: it names no GGUF files. Remove its folder.")
    found = (note.parent / file for file in files)
    try:
        return tuple(file if file.exists() else absent_file(file) for file in found)
    except OSError as error:  # a name that no file can have
        raise ModelError(f"{note} is damaged: {error.strerror}. Remove its folder.") from error


def absent_file(file: Path) -> Path:
    """Where the header of a GGUF file stands whose tensors are not on this disk, or not yet; else `file` itself."""
    absent = file.with_name(file.name + ABSENT)
    return absent if absent.exists() else file


def write_gguf_note(folder: Path, files: Iterable[str]) -> None:
    """Says in `folder` that its weights are those of these files, absolute or relative to the folder."""
    (folder / GGUF_NOTE).write_text(json.dumps({"files": list(files)}) + "\n")


def read_index(index: Path) -> dict[str, str]:
    """Key -> file name from a `model.safetensors.index.json`.

    Raises:
        ModelError: if it is malformed, or points outside its folder.
    """
    try:
        weight_map = read_json_object(index, _INDEX_LIMITS)["weight_map"]
    except OSError as error:
        raise ModelError(f"Cannot read {index}: {error.strerror}.") from error
    except (BadJson, KeyError):
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
