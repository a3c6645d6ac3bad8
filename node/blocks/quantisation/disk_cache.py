"""Quantised blocks on this disk, so that a server quantises a model once and not at every start.

A file for each block, in petalnode's cache. A missing or damaged file is made again; where the disk
is nearly full, the least recently used blocks are removed.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ....crypto.canonical import digest
from ...errors import MachineError
from ...models.cache_dir import cache_dir

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)

_FOLDER: Final = "quantised"
_DOMAIN: Final = "petalnode/model/quantised/1"
_SUFFIX: Final = ".safetensors"
KEPT_FREE: Final = 2 << 30
"""Bytes of the disk that this cache leaves to others."""


class QuantisedCache:
    """The blocks of one model in one form. Several processes may use it at once.

    Args:
        form: all that decides the bytes beside the weights and the architecture: quantisation, memory layout, dtype,
            version of the library, kind of device. Part of a file name.
        architecture: canonical JSON of it.
    """

    def __init__(self, form: str, architecture: bytes) -> None:
        self._form = form
        self._architecture = architecture

    def file(self, block_digest: bytes) -> Path:
        """Where the block is kept, or would be.

        Raises:
            MachineError: there can be no cache folder.
        """
        key = digest(_DOMAIN, self._form, self._architecture, block_digest).hex()[:40]
        return cache_dir() / _FOLDER / f"{self._form}-{key}{_SUFFIX}"

    def read(self, block_digest: bytes) -> dict[str, Tensor] | None:
        """The tensors of the block, memory-mapped; None if they are not there. A damaged file is removed."""
        from safetensors import SafetensorError, safe_open

        try:
            file = self.file(block_digest)
            with safe_open(file, framework="pt", device="cpu") as stored:
                tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118  (no mapping)
                said = (stored.metadata() or {}).get("sha256")
        except (FileNotFoundError, MachineError):
            return None
        except (SafetensorError, OSError, ValueError) as error:
            _forget(file, str(error))
            return None
        if said != _sha256(tensors):
            _forget(file, "its contents are not those that were written")
            return None
        with suppress(OSError):
            os.utime(file)  # used now
        return tensors

    def write(self, block_digest: bytes, tensors: Mapping[str, Tensor]) -> bool:
        """Keeps the block as a whole or not at all; false where the disk does not take it, which is no error."""
        from safetensors.torch import save_file

        kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        temporary: Path | None = None
        try:
            file = self.file(block_digest)
            file.parent.mkdir(exist_ok=True)
            if not _make_room(file.parent, sum(tensor.nbytes for tensor in kept.values())):
                return False
            with tempfile.NamedTemporaryFile(dir=file.parent, prefix=file.stem, suffix=".tmp", delete=False) as stream:
                temporary = Path(stream.name)
            save_file(kept, temporary, metadata={"sha256": _sha256(kept)})
            temporary.replace(file)
        except (OSError, MachineError) as error:
            _log.warning("quantised blocks are not kept on the disk: %s", error)
            return False
        finally:
            if temporary is not None:
                temporary.unlink(missing_ok=True)
        return True


def _forget(file: Path, reason: str) -> None:
    _log.warning("%s is damaged and is made again: %s", file, reason)
    with suppress(OSError):
        file.unlink()


def _sha256(tensors: Mapping[str, Tensor]) -> str:
    """Over names, dtypes, shapes and bytes: a file's header can be in order while its contents are not."""
    import torch

    sha = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        sha.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        sha.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def _make_room(folder: Path, nbytes: int) -> bool:
    """Removes blocks that were not used for longest until `nbytes` more leave `KEPT_FREE` on the disk."""
    wanted = nbytes + KEPT_FREE
    if shutil.disk_usage(folder).free >= wanted:
        return True
    for file in sorted(folder.iterdir(), key=_last_used):  # with what killed processes have left
        with suppress(OSError):
            file.unlink()
        if shutil.disk_usage(folder).free >= wanted:
            return True
    return False


def _last_used(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0  # another process has just removed it
