"""The tensors of a Hugging Face model folder: which there are, and a lazy handle on each."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from safetensors import SafetensorError, safe_open

from ..errors import ModelError

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


class Weights:
    """A checkpoint opened by memory map: nothing is read until a slice is asked for its values.

    A context manager; tensors that were taken out of it stay valid after it is closed.

    Raises:
        ModelError: the folder holds no safetensors, or a file of them is missing, truncated or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = ExitStack()
        self._holders: dict[str, Any] = {}
        try:
            for name in _file_names(folder):
                self._open(folder / name)
        except BaseException:
            self._files.close()
            raise

    def _open(self, path: Path) -> None:
        if not path.is_file():
            raise ModelError(f"{path} is missing: the model folder is incomplete, download it again")
        try:
            file = self._files.enter_context(safe_open(path, framework="pt", device="cpu"))
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"{path} cannot be read ({error}): it is truncated or damaged, download it again"
            ) from error
        self._holders.update(dict.fromkeys(file.keys(), file))

    def keys(self) -> list[str]:
        """The names of all tensors, in the order of the files."""
        return list(self._holders)

    def slice(self, key: str) -> Any:
        """A lazy handle on one tensor: `[...]` reads it, `get_dtype()` and `get_shape()` do not."""
        return self._holders[key].get_slice(key)

    def first_dtype(self) -> str | None:
        """The safetensors name of the first floating-point tensor's dtype, such as "BF16"."""
        for key in self._holders:
            dtype: str = self.slice(key).get_dtype()
            if dtype.startswith(("F", "BF")):
                return dtype
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._holders.clear()
        self._files.close()


def _file_names(folder: Path) -> list[str]:
    """The safetensors files of `folder`, in a fixed order."""
    if (folder / _SINGLE).exists():
        return [_SINGLE]
    index = folder / _INDEX
    if not index.exists():
        other = next((p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in sorted(folder.glob(pattern))), None)
        hint = f"; it has {other}, which petalnode does not read: save the model as safetensors" if other else ""
        raise ModelError(f"{folder} has no model weights: neither {_SINGLE} nor {_INDEX} is there{hint}")
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return sorted({str(name) for name in weight_map.values()})
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise ModelError(f"{index} cannot be read ({error!r}): download the model again") from error
