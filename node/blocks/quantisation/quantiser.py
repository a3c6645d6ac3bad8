"""Quantises the blocks of a span, one at a time, and keeps them on the disk for the next start.

A file for each block, in petalnode's cache. A missing or damaged file is made again; where the disk is nearly full, the
least recently used blocks are removed.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn

from ....crypto.canonical import digest
from ....protocols.ids import Span
from ...errors import MachineError, ModelError
from ...models.cache_dir import cache_dir
from ...models.checkpoint import Checkpoint
from ...models.digests import part_digests
from ...models.folder import read_config as read_raw_config
from ...models.manifest import canonical_architecture
from ...models.progress import Progress
from ...models.quantisation import Quantisation
from ..config import read_config
from ..skeleton import Skeleton, build, fill
from .matrix import Int8Matrix, QuantisedMatrix, bitsandbytes, nf4_kind, nf4_layout
from .slots import MatrixSlot, matrix_slots, put_matrices, quantised_share

_log = logging.getLogger(__name__)

_WORST: Final = {"int8": 0.1, "nf4": 0.2}
"""Relative rms errors of a matrix beyond which something is wrong with it; 0.01 and 0.09 are usual."""
_PRODUCT_TOLERANCE: Final = 0.05
_WORTH: Final = 0.5
"""Of a span's weights that quantisation must reach: it is asked for because memory is short."""

Matrices = Mapping[MatrixSlot, QuantisedMatrix]

_FOLDER: Final = "quantised"
_DOMAIN: Final = "petalnode/model/quantised/1"
_SUFFIX: Final = ".safetensors"
_READ_ONLY: Final = 0o444
"""Files are mapped: one that became shorter would kill the processes that use it, one that is removed does not."""
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
            if os.name == "posix":  # elsewhere such a file can be neither replaced nor removed
                temporary.chmod(_READ_ONLY)
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


@dataclass(frozen=True)
class Quantiser:
    """Makes `quantisation` of blocks of the model in `folder`, or finds what it has made before.

    Attributes:
        skeleton: of the whole model, to see what its blocks are made of.
        progress: told while blocks are quantised; it counts the bytes that they have in the checkpoint.
        tiled: by the name of the quantisation, the kind of matrix that the compiled kernels take, where they are used.
            The files on the disk are made in that form.
    """

    folder: Path
    weights: Checkpoint
    skeleton: Skeleton
    device: torch.device
    quantisation: Quantisation
    progress: Progress
    tiled: Mapping[str, type[QuantisedMatrix]] = field(default_factory=dict)

    def replace(self, span: Span, blocks: Mapping[int, nn.Module]) -> set[str]:
        """Puts quantised modules into `blocks`, which have no weights yet, and returns the parameters they stand for.

        No more than one block is held unquantised at any time.

        Raises:
            ModelError: too little of the blocks can be quantised, or a quantised matrix is too far from the original.
        """
        self._refuse_useless(blocks)
        cache = QuantisedCache(self._form(), canonical_architecture(read_raw_config(self.folder)))
        digests = part_digests(self.weights, blocks, self.progress)
        kept = {number: self._cached(cache, digests[number], block) for number, block in blocks.items()}
        missing = [number for number, matrices in kept.items() if matrices is None]
        total = sum(self.weights.nbytes(number) for number in missing)
        done = 0
        for number in missing:
            self.progress(f"Quantising blocks {span} to {self.quantisation}", done, total)
            made = self._make(number)
            # What was kept is used at once: mapped from the file, it is shared with other servers of this machine.
            if cache.write(digests[number], _tensors(made)):
                made = self._cached(cache, digests[number], blocks[number]) or made
            kept[number] = made
            done += self.weights.nbytes(number)
            self.progress(f"Quantising blocks {span} to {self.quantisation}", done, total)
        gone: set[str] = set()
        products = _Products(self.skeleton.dtype, self.device)
        for number, block in blocks.items():
            matrices = kept[number] or {}
            for matrix in matrices.values():
                products.check(matrix)
            put_matrices(block, matrices, self.skeleton.dtype)
            gone.update(self.skeleton.parameter(number, slot.parameter) for slot in matrices)
        return gone

    def _refuse_useless(self, blocks: Mapping[int, nn.Module]) -> None:
        counts = [quantised_share(block) for block in blocks.values()]
        part = sum(quantised for quantised, _ in counts) / sum(weights for _, weights in counts)
        if part < _WORTH:
            raise ModelError(
                f"--quant {self.quantisation} reaches only {100 * part:.0f} % of the weights of these blocks, because "
                f"a {self.skeleton.config.model_type!r} model keeps the others in a form of its own: serve it with "
                "--quant none"
            )

    def _form(self) -> str:
        layout = nf4_layout(self.device) if self.quantisation == "nf4" else self.quantisation
        if self.quantisation in self.tiled:
            layout = f"{self.quantisation}tiled"
        dtype = str(self.skeleton.dtype).removeprefix("torch.")
        return f"{layout}-{dtype}-{self.device.type}-bitsandbytes{bitsandbytes().__version__}"

    def _cached(self, cache: QuantisedCache, digest: bytes, block: nn.Module) -> Matrices | None:
        tensors = cache.read(digest)
        if tensors is None:
            return None
        matrices = {}
        try:
            for slot in matrix_slots(block):
                own = {kind: tensors.pop(f"{slot.name}.{kind}") for kind in ("weight", "scale")}
                matrices[slot] = self._kind(slot.shape).restore(own, slot.shape, self.device)
        except (KeyError, ValueError) as error:
            _log.warning("a quantised block in the cache is damaged and is made again: %s", error)
            return None
        return matrices

    def _make(self, number: int) -> Matrices:
        """Loads one block as it is and quantises it, a matrix after the other."""
        alone = build(read_config(self.folder), self.skeleton.dtype)
        (block,) = alone.keep_only(Span(number, number + 1))
        fill(alone, self.weights, lambda wanted: wanted == number, self.device)
        matrices = {}
        for slot in matrix_slots(block):
            weight = slot.weight(block)
            matrix = self._kind(slot.shape).quantise(weight)
            error = matrix.error(weight)
            if not error <= _WORST[self.quantisation]:
                raise ModelError(
                    f"{self.quantisation} does not hold the weights of block {number} ({slot.name}: relative error "
                    f"{error:.2g}): serve this model with --quant none"
                )
            matrices[slot] = matrix
        self.weights.release()
        return matrices

    def _kind(self, shape: tuple[int, int]) -> type[QuantisedMatrix]:
        if self.quantisation in self.tiled:
            return self.tiled[self.quantisation]
        return Int8Matrix if self.quantisation == "int8" else nf4_kind(shape, self.device)


class _Products:
    """Sees to it that products are right: each kind of matrix is tried once, as kernels differ by machine."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self._right: dict[tuple[type, tuple[int, int]], bool] = {}

    def check(self, matrix: QuantisedMatrix) -> None:
        """Lets torch multiply with `matrix` if bitsandbytes does it wrongly."""
        kind = (type(matrix), matrix.shape)
        if kind not in self._right:
            self._right[kind] = self._is_right(matrix)
        if not self._right[kind]:
            matrix.product = matrix.product_in_pieces  # type: ignore[method-assign]

    def _is_right(self, matrix: QuantisedMatrix) -> bool:
        generator = torch.Generator().manual_seed(0)
        values = torch.randn(2, matrix.shape[1], generator=generator).to(self._device, self._dtype)
        expected = matrix.product_in_pieces(values).float()
        right = bool((matrix.product(values).float() - expected).norm() <= _PRODUCT_TOLERANCE * expected.norm())
        if not right:
            _log.warning(
                "bitsandbytes multiplies by %s of %s wrongly on this machine; torch does it instead, more slowly",
                type(matrix).__name__,
                matrix.shape,
            )
        return right


def _tensors(matrices: Matrices) -> dict[str, torch.Tensor]:
    return {
        f"{slot.name}.{kind}": tensor for slot, matrix in matrices.items() for kind, tensor in matrix.tensors().items()
    }
