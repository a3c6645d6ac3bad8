"""The tensors of a Hugging Face model folder: which there are, and a lazy handle on each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from safetensors import SafetensorError, safe_open

from ..errors import ModelError
from ..models.checkpoint import Checkpoint
from ..models.digests import part_digests
from ..models.parts import Part
from ..models.progress import Progress


class Weights:
    """A checkpoint opened by memory map: nothing is read until a slice is asked for its values.

    Shards are opened as they are needed, so a folder may hold only those of some blocks. A context manager;
    tensors that were taken out of it stay valid after it is closed.

    Raises:
        ModelError: the folder holds no safetensors, or a file of them is missing, truncated or damaged.
    """

    def __init__(self, folder: Path, num_blocks: int) -> None:
        self._checkpoint = Checkpoint(folder, num_blocks)
        self._open = ExitStack()
        self._files: dict[str, Any] = {}

    def keys(self) -> tuple[str, ...]:
        """The names of all tensors, also of those whose shard is not here."""
        return self._checkpoint.keys

    def slice(self, key: str) -> Any:
        """A lazy handle on one tensor: `[...]` reads it."""
        stored = self._checkpoint.tensor(key)  # says in words what is wrong with the file
        name = stored.file.name
        if name not in self._files:
            try:
                self._files[name] = self._open.enter_context(safe_open(stored.file, framework="pt", device="cpu"))
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{stored.file} cannot be read ({error}). Copy or download it again.") from error
        return self._files[name].get_slice(key)

    def digests(self, blocks: Iterable[int], progress: Progress) -> Mapping[Part, bytes]:
        """What identifies the weights of each block; read once and remembered."""
        return part_digests(self._checkpoint, blocks, progress)

    def nbytes(self, block: int) -> int:
        """Bytes of the block's tensors in the files."""
        return sum(tensor.nbytes for tensor in self._checkpoint.tensors(block))

    def release(self) -> None:
        """Closes the files until they are needed again, and so gives back the memory of what was read of them."""
        self._files.clear()
        self._open.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
