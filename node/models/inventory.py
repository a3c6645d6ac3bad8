"""The models on this disk: petalnode's own folders of its cache, and those in the hub's cache."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..errors import BadInput, MachineError, ModelError
from .cache_dir import disk_errors, imported_folder
from .checkpoint import Checkpoint
from .digests import known_trees, part_trees, sha256_of
from .disk_limit import disk_bytes, is_snapshot, last_use, users_of
from .folder import ModelFolder, open_folder
from .manifest import MANIFEST_FILE, MAX_FILE_BYTES, Manifest, canonical_architecture
from .parts import EMBEDDINGS, HEAD, Part, parts_of_need
from .progress import Progress
from .sources.alias import ALIASES
from .sources.gguf_files import packaged_key
from .sources.hub_parts import NAME_FILE

_PARTIAL: Final = ".partial"
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_MAX_NAME: Final = 512
_LISTED: Final = 8


@dataclass(frozen=True)
class LocalModel:
    """A model, or parts of one, on this disk.

    Attributes:
        nbytes: what its removal frees; of a GGUF file elsewhere only petalnode's notes.
        used: when it was last used, in seconds since 1970.
        held: the parts that are here.
        version: the model version in hexadecimal digits; empty where nothing that is known tells it.
        weights: files elsewhere that hold its weights, which stay when it is removed.
        complaint: why it cannot be used; empty if it can.
    """

    name: str
    path: Path
    nbytes: int
    used: float
    num_blocks: int = 0
    held: tuple[Part, ...] = ()
    version: str = ""
    weights: tuple[Path, ...] = ()
    complaint: str = ""

    @property
    def blocks(self) -> list[int]:
        return [part for part in self.held if isinstance(part, int)]

    @property
    def ends(self) -> bool:
        """Whether a client's part is here: embeddings, norm and head."""
        return EMBEDDINGS in self.held and HEAD in self.held

    @property
    def whole(self) -> bool:
        return self.ends and len(self.blocks) == self.num_blocks > 0


def local_models() -> list[LocalModel]:
    """All, the last used first. No weights are read."""
    found = [_look_at(path) for path in (*_own_folders(), *_snapshots())]
    return sorted(found, key=lambda model: (-model.used, model.name))


def find_local(name: str, models: Sequence[LocalModel]) -> LocalModel:
    """The one of `models` that a person calls `name`: its name, NAME@VERSION, or its folder.

    Raises:
        BadInput: there is none, or there are several.
    """
    named, _, version = name.rpartition("@")
    found = [model for model in models if name in (model.name, str(model.path), model.path.name)]
    if not found and named and len(version) >= _LISTED:
        found = [model for model in models if model.name == named and model.version.startswith(version.lower())]
    if len(found) == 1:
        return found[0]
    if found:
        folders = ", ".join(str(model.path) for model in found[:_LISTED])
        raise BadInput(f"{name!r} is on this disk {len(found)} times: give one of the folders {folders}")
    here = ", ".join(dict.fromkeys(model.name for model in models[:_LISTED])) or "none"
    raise BadInput(f"there is no model {name!r} on this disk (`petalnode models` lists them: {here})")


def open_local(model: LocalModel) -> ModelFolder:
    """
    Raises:
        ModelError: it is half written, or damaged.
    """
    if model.complaint:
        raise ModelError(f"{model.name}: {model.complaint}")
    return open_folder(model.path, model.name)


def known_manifest(folder: ModelFolder) -> Manifest | None:
    """The manifest of a model all of whose parts were hashed here before, else the one beside the weights."""
    with suppress(ModelError):
        parts = parts_of_need("all", folder.num_blocks)
        trees = known_trees(Checkpoint(folder.path, folder.num_blocks), parts)
        if len(trees) == len(parts):
            blocks = tuple(trees[block].digest for block in range(folder.num_blocks))
            config = canonical_architecture(folder.config)
            return Manifest(config, trees[EMBEDDINGS].digest, blocks, trees[HEAD].digest)
    with suppress(ModelError, OSError):
        file = folder.path / MANIFEST_FILE
        if file.stat().st_size <= MAX_FILE_BYTES:
            return Manifest.from_json(file.read_bytes())
    return None


def damaged_parts(model: LocalModel, progress: Progress) -> list[Part]:
    """The parts that are not what they were, or not what the model's manifest or the hub says; all are read.

    Raises:
        ModelError: as `open_local`; a file is truncated or malformed.
    """
    folder = open_local(model)
    checkpoint = Checkpoint(folder.path, folder.num_blocks)
    manifest = known_manifest(folder)
    known = known_trees(checkpoint, model.held)
    found = part_trees(checkpoint, model.held, progress, f"Checking {model.name}", anew=True)
    wrong_files = {file for file in _stated_hashes(checkpoint, model) if not _is_whole(file, progress)}
    return [
        part
        for part, tree in found.items()
        if (manifest is not None and tree.digest != manifest.digest_of(part))
        or (part in known and tree.digest != known[part].digest)
        or any(tensor.file in wrong_files for tensor in checkpoint.tensors(part))
    ]


def remove_local(model: LocalModel) -> None:
    """Removes it from the disk. What a snapshot of the hub shares with others stays.

    Raises:
        MachineError: a process uses or writes it, or it cannot be removed.
    """
    from filelock import FileLock, Timeout

    users = users_of(model.path)
    if users:
        raise MachineError(
            f"{model.name} is in use by process {', '.join(map(str, users))}: stop that server first (Ctrl-C, or "
            "`petalnode pause`)"
        )
    key = model.path.name.removesuffix(_PARTIAL)
    locks = [] if is_snapshot(model.path) else [model.path.parent / f"{key}.lock", model.path / "writing.lock"]
    with disk_errors(model.path, f"Removing {model.name}", "Remove it by hand."):
        held = [FileLock(lock) for lock in locks if lock.parent.is_dir()]
        try:
            for lock in held:
                lock.acquire(timeout=0)
            _remove(model.path)
        except Timeout:
            raise MachineError(f"another process is fetching {model.name} just now: end it first") from None
        finally:
            for lock in held:
                lock.release()


def _remove(path: Path) -> None:
    if is_snapshot(path):
        from huggingface_hub import scan_cache_dir

        scan_cache_dir(path.parents[2]).delete_revisions(path.name).execute()
    else:
        aside = path.with_name(f"{path.name.removesuffix(_PARTIAL)}{_PARTIAL}")  # a cut leaves nothing to be believed
        if aside != path:
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
        shutil.rmtree(aside)


def _own_folders() -> Iterator[Path]:
    with suppress(OSError):
        yield from (path for path in imported_folder("any").parent.iterdir() if path.is_dir())


def _snapshots() -> Iterator[Path]:
    from huggingface_hub import constants

    for path in Path(constants.HF_HUB_CACHE).glob("models--*/snapshots/*"):
        if (path / "config.json").is_file():
            yield path


def _look_at(path: Path) -> LocalModel:
    name, nbytes, used = _name_of(path), disk_bytes(path), last_use(path)
    if path.name.endswith(_PARTIAL):
        return LocalModel(name, path, nbytes, used, complaint="it is half written: remove it, or fetch it again")
    try:
        folder = open_folder(path, name)
    except ModelError as error:
        return LocalModel(name, path, nbytes, used, complaint=str(error))
    manifest = known_manifest(folder)
    version = "" if manifest is None else manifest.version.hex()
    model = LocalModel(name, path, nbytes, used, folder.num_blocks, (), version)
    try:
        checkpoint = Checkpoint(path, folder.num_blocks)
    except ModelError as error:
        complaint = "" if is_snapshot(path) else str(error)  # of the hub, none may have been asked for
        return LocalModel(name, path, nbytes, used, folder.num_blocks, version=version, complaint=complaint)
    held = tuple(part for part in parts_of_need("all", folder.num_blocks) if _is_here(checkpoint, part))
    elsewhere = tuple(file for file in checkpoint.gguf if path.resolve() not in file.resolve().parents)
    return LocalModel(name, path, nbytes, used, model.num_blocks, held, version, elsewhere)


def _is_here(checkpoint: Checkpoint, part: Part) -> bool:
    try:
        checkpoint.tensors(part)
    except ModelError:
        return False
    return True


def _name_of(path: Path) -> str:
    if is_snapshot(path):
        return path.parents[1].name.removeprefix("models--").replace("--", "/", 1)
    for alias, packaged in ALIASES.items():
        if path.name == packaged_key(packaged.sha256):
            return alias
    with suppress(OSError), (path / NAME_FILE).open("rb") as stream:
        return stream.read(_MAX_NAME).decode(errors="replace")
    with suppress(ModelError):
        return Checkpoint(path).gguf[0].stem
    return path.name.removesuffix(_PARTIAL)


def _stated_hashes(checkpoint: Checkpoint, model: LocalModel) -> set[Path]:
    """The files of a snapshot whose SHA-256 the hub states: links to files that are named by it."""
    files = {tensor.file for part in model.held for tensor in checkpoint.tensors(part)}
    return {file for file in files if is_snapshot(model.path) and _SHA256.fullmatch(file.resolve().name)}


def _is_whole(file: Path, progress: Progress) -> bool:
    return sha256_of(file, file.name, progress).hex() == file.resolve().name
