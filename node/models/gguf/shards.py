"""Writing a checkpoint as safetensors, in one file if it is small and in shards if it is not."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from ..checkpoint import INDEX, SINGLE

if TYPE_CHECKING:
    import torch

_SHARD_BYTES = 1 << 30


class ShardWriter:
    """Takes tensors group by group and writes a shard whenever the next group would make it larger than 1 GiB.

    Not thread-safe. Nothing is usable in the folder before `close`, which gives the files their names.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._waiting: dict[str, torch.Tensor] = {}
        self._shards: list[tuple[Path, list[str]]] = []
        self._total = 0

    def add(self, tensors: dict[str, torch.Tensor]) -> None:
        """Keeps `tensors` (contiguous, on the CPU) for the current shard; keys must be new."""
        if self._waiting and _nbytes(self._waiting) + _nbytes(tensors) > _SHARD_BYTES:
            self._write()
        self._waiting.update(tensors)

    def close(self) -> None:
        """Writes what is left, and the index if there are several shards."""
        self._write()
        if len(self._shards) == 1:
            self._shards[0][0].rename(self._folder / SINGLE)
            return
        weight_map = {}
        for number, (file, keys) in enumerate(self._shards, start=1):
            name = f"model-{number:05}-of-{len(self._shards):05}.safetensors"
            file.rename(self._folder / name)
            weight_map.update(dict.fromkeys(keys, name))
        index = {"metadata": {"total_size": self._total}, "weight_map": dict(sorted(weight_map.items()))}
        (self._folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def _write(self) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        if not self._waiting:
            return
        file = self._folder / f"shard-{len(self._shards)}.partial"
        try:
            save_file(self._waiting, file, metadata={"format": "pt"})
        except SafetensorError as error:
            # it keeps the operating system's reason in its text alone
            reason = re.search(r"os error (\d+)", str(error))
            if reason is None:
                raise
            raise OSError(int(reason[1]), os.strerror(int(reason[1])), str(file)) from error
        file.chmod(0o644)  # written as 0600, unlike the files beside it: other users may share the cache
        self._shards.append((file, list(self._waiting)))
        self._total += _nbytes(self._waiting)
        self._waiting = {}


def _nbytes(tensors: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
