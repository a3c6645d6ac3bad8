"""A model version on this disk, of which parts come from peers: a folder of the cache with a file for each part.

A file gets its name when all of its pieces were checked and are on the disk; until then it ends in `.partial`. What a
partial file holds is checked again, piece by piece, by whoever goes on with it: nothing half written is believed.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from ...crypto.bounded_json import BadJson, JsonLimits, parse_json_object
from ...protocols.weights import PIECE_BYTES, TEXT_FORM, BadTree, Offer, Tree
from ...protocols.wire_pb2 import PartTree
from ..errors import ModelError
from ..models import EMBEDDINGS, HEAD, Manifest, ModelFolder, Need, Part
from ..models.cache_dir import disk_errors, import_once, imported_folder, one_at_a_time, sync_one
from ..models.checkpoint import INDEX, Checkpoint, write_gguf_note
from ..models.digests import note_trees
from ..models.folder import TEXT_FILES, open_folder
from ..models.gguf.header import ABSENT
from ..models.manifest import MANIFEST_FILE, MAX_CONFIG_BYTES, MAX_FILE_BYTES, canonical_architecture, write_manifest
from ..models.part_headers import gguf_header, safetensors_header
from ..models.progress import Progress, no_progress
from ..models.sources.hub_parts import NAME_FILE, PEERS_KEY, RESTRICTED, TEXTS_DONE

_CONFIG_LIMITS: Final = JsonLimits(MAX_CONFIG_BYTES, values=100_000, depth=32)
_DTYPES: Final = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
MAX_TEXT_BYTES: Final = 64 << 20
"""Of all the tokenizer's files that a peer hands on together; those of real models have up to 40 MiB."""
_MAX_TEXT_FILES: Final = 64
_WRITER: Final = "writing.pid"


def part_of_number(number: int, num_blocks: int) -> Part:
    return EMBEDDINGS if number == 0 else HEAD if number == num_blocks + 1 else number - 1


def number_of_part(part: Part, num_blocks: int) -> int:
    return 0 if part == EMBEDDINGS else num_blocks + 1 if part == HEAD else int(part) + 1


def is_text_file(name: str, nbytes: int) -> bool:
    """Whether a peer may hand on a file of this name and size as one of the tokenizer's."""
    if Path(name).name != name or name.startswith(".") or not name.isprintable() or "\\" in name:
        return False
    path = Path(name)
    return any(path.match(pattern) and nbytes <= most for pattern, most in TEXT_FILES.items() if "/" not in pattern)


def check_texts(tree: Tree) -> None:
    """
    Raises:
        BadTree: these are not the files of a tokenizer, or they are too large.
    """
    if tree.form != TEXT_FORM or len(tree.entries) > _MAX_TEXT_FILES or tree.nbytes > MAX_TEXT_BYTES:
        raise BadTree("more than the files of a tokenizer")
    for entry in tree.entries:
        if not is_text_file(entry.name, entry.nbytes):
            raise BadTree(f"a file {entry.name[:80]!r} that is none of a tokenizer, or too large for one")


def config_of(manifest: Manifest, trees: Mapping[int, Tree]) -> dict[str, Any]:
    """`config.json` as it follows from what the version stands for. No peer has to be believed.

    The type to compute in is that of most bytes of the weights. Special tokens are with the tokenizer.

    Raises:
        ModelError: the manifest has no configuration.
    """
    try:
        config = parse_json_object(manifest.config, _CONFIG_LIMITS)
    except BadJson as error:
        raise ModelError(f"the swarm's model {manifest.version.hex()[:12]} has no configuration: {error}") from None
    if canonical_architecture(config) != manifest.config:  # or it could name code to run, or how to compute
        raise ModelError(f"the swarm's model {manifest.version.hex()[:12]} has a configuration that no model has")
    nbytes: Counter[str] = Counter()
    for tree in trees.values():
        for entry in tree.entries:
            nbytes[entry.dtype] += entry.nbytes
    halves = [dtype for dtype in ("BF16", "F16") if nbytes[dtype]]
    usual = max(_DTYPES, key=lambda dtype: nbytes[dtype])
    if trees[0].form != "safetensors" and not (len(halves) == 1 and nbytes.keys() <= {*halves, "F32"}):
        usual = "F32"
    return {**config, "dtype": _DTYPES[usual], "pad_token_id": None}


class PeerFolder:
    """The folder of one model version, and all parts' trees by their numbers on the wire."""

    def __init__(self, path: Path, name: str, manifest: Manifest) -> None:
        self.path = path
        self.name = name
        self.manifest = manifest
        self.num_blocks = len(manifest.blocks)
        self.trees: dict[int, Tree] = {}

    # --- the folder

    @classmethod
    def open(cls, name: str, manifest: Manifest, path: Path) -> PeerFolder:
        """The folder that is there already.

        Raises:
            ModelError: it is damaged.
        """
        folder = cls(path, name, manifest)
        for number in range(folder.num_blocks + 2):
            file = path / "trees" / str(number)
            try:
                tree = Tree.from_wire(PartTree.FromString(file.read_bytes()))
                damaged = tree.digest != manifest.digest_of(part_of_number(number, folder.num_blocks))
            except Exception:  # protobuf's DecodeError derives from Exception alone
                damaged = True
            if damaged:
                raise ModelError(f"{file} is damaged. Remove the folder {path}: then it is fetched again.")
            folder.trees[number] = tree
        return folder

    @classmethod
    def create(cls, name: str, manifest: Manifest, trees: Mapping[int, Tree], offer: Offer, progress: Progress) -> Path:
        """Makes the folder if it is not there: configuration, manifest, trees, and headers of files to come.

        Raises:
            ModelError: the version is that of no model that can be read.
            MachineError: the disk is full or cannot be written.
        """

        def build(path: Path) -> None:
            folder = cls(path, name, manifest)
            folder.trees.update(trees)
            (path / "trees").mkdir()
            for number, tree in trees.items():
                (path / "trees" / str(number)).write_bytes(tree.to_wire().SerializeToString(deterministic=True))
            (path / "config.json").write_text(json.dumps(config_of(manifest, trees), indent=2, sort_keys=True) + "\n")
            (path / NAME_FILE).write_text(name)
            if offer.restricted:
                (path / RESTRICTED).touch()
            folder._write_headers(offer)
            write_manifest(manifest, path)
            open_folder(path, name)  # before a byte of the weights comes
            Checkpoint(path, folder.num_blocks)

        return import_once(cls.key_of(manifest), f"Preparing {name}", build, progress)

    @staticmethod
    def key_of(manifest: Manifest) -> str:
        return PEERS_KEY.format(manifest.version.hex()[:32])

    @staticmethod
    def is_at(path: Path) -> bool:
        return (path / "trees").is_dir()

    @staticmethod
    def kept(name: str, pinned: str) -> list[Manifest]:
        """The manifests of versions of this model, with the digits `pinned`, that have a folder here."""
        found = []
        for path in imported_folder("any").parent.glob(PEERS_KEY.format("*")):
            with suppress(OSError, ModelError, UnicodeDecodeError):
                if (path / NAME_FILE).read_text() == name and (path / MANIFEST_FILE).stat().st_size <= MAX_FILE_BYTES:
                    manifest = Manifest.from_json((path / MANIFEST_FILE).read_bytes())
                    if manifest.version.hex().startswith(pinned) and PeerFolder.key_of(manifest) == path.name:
                        found.append(manifest)
        return found

    def _write_headers(self, offer: Offer) -> None:
        forms = {tree.form for tree in self.trees.values()}
        if len(forms) != 1 or TEXT_FORM in forms:
            raise ModelError(f"the parts of the swarm's model {self.name} are stored in different ways")
        (form,) = forms
        file_of: dict[str, str] = {}
        for number, tree in self.trees.items():
            keys = self._keys(number, offer)
            if form == "safetensors":
                header = safetensors_header(tree.entries, keys)
                file_of |= dict.fromkeys(keys, self.file(number).name)
            else:
                header = gguf_header(tree.entries, keys, form.removeprefix("gguf "))
            self._header(number).write_bytes(header)
        if form == "safetensors":
            (self.path / INDEX).write_text(json.dumps({"weight_map": file_of}))
        else:
            write_gguf_note(self.path, (self.file(number).name for number in sorted(self.trees)))

    def _keys(self, number: int, offer: Offer) -> list[str]:
        """The checkpoint's keys of a part, in the order of its tree."""
        names = [entry.name for entry in self.trees[number].entries]
        if self.trees[number].form != "safetensors":
            offer = Offer(frozenset(), blocks="blk.")
        if 0 < number <= self.num_blocks:
            return [f"{offer.blocks}{number - 1}.{name}" for name in names]
        first = tuple(name for name in offer.bare if name.endswith("."))
        return [name if name in offer.bare or name.startswith(first) else f"{offer.base}{name}" for name in names]

    def file(self, number: int) -> Path:
        """Where a part stands as soon as it is complete."""
        ending = "safetensors" if self.trees[0].form == "safetensors" else "gguf"
        return self.path / f"part-{number:05}.{ending}"

    def model_folder(self) -> ModelFolder:
        return open_folder(self.path, self.name)

    # --- parts

    def has(self, number: int) -> bool:
        return self.file(number).exists()

    def lacking(self, need: Need) -> list[int]:
        """The numbers of the parts that `need` asks for and that are not here.

        Raises:
            ModelError: a span passes the end of the model.
        """
        numbers = (number_of_part(part, self.num_blocks) for part in self.model_folder().parts(need))
        return [number for number in numbers if not self.has(number)]

    @contextmanager
    def locked(self) -> Iterator[bool]:
        """Whether this process alone may write parts during the block; another one may be doing so."""
        from filelock import FileLock, Timeout

        lock = FileLock(self.path / "writing.lock")
        with self._writing():
            try:
                lock.acquire(timeout=0)
            except Timeout:
                yield False
                return
        try:
            with self._writing():  # not into the lock's own file, which is emptied by whoever tries to have it
                (self.path / _WRITER).write_text(str(os.getpid()))
            yield True
        finally:
            lock.release()

    def writer(self) -> str:
        """What last had the right to write parts, in words."""
        try:
            return f"process {int((self.path / _WRITER).read_text())}"
        except (OSError, ValueError):
            return "another process"

    def written(self) -> int:
        """Changes whenever parts are written, by any process."""
        newest = 0
        for file in self.path.glob("part-*"):
            with suppress(OSError):  # it has just got its name
                newest = max(newest, file.stat().st_mtime_ns)
        return newest

    def missing(self, number: int) -> set[int]:
        """The pieces of a part that were not written yet, or are not what they should be. Only under `locked`.

        Raises:
            MachineError: the disk cannot be read.
        """
        tree, partial = self.trees[number], self._partial(number)
        wanted = set(range(len(tree)))
        with self._writing():
            origin = self._header(number).stat().st_size
            if partial.exists():
                with partial.open("rb", buffering=0) as stream:
                    for piece in range(len(tree)):
                        stream.seek(origin + piece * PIECE_BYTES)
                        if tree.has(piece, stream.read(tree.size_of(piece)) or b""):
                            wanted.discard(piece)
        return wanted

    def put(self, number: int, piece: int, data: bytes) -> bool:
        """Checks a piece and writes it; False if it is not that piece. Only under `locked`.

        Raises:
            MachineError: the disk is full or cannot be written.
        """
        if not self.trees[number].has(piece, data):
            return False
        with self._writing():
            self._write(number, self._header(number).stat().st_size + piece * PIECE_BYTES, data)
        return True

    def finish(self, number: int) -> None:
        """Gives a part its name; all of its pieces were put. Only under `locked`.

        Raises:
            MachineError: the disk is full or cannot be written.
        """
        with self._writing():
            self._write(number, 0, self._header(number).read_bytes())
            sync_one(self._partial(number))
            self._partial(number).rename(self.file(number))
            sync_one(self.path)
        part = part_of_number(number, self.num_blocks)
        note_trees(Checkpoint(self.path, self.num_blocks), {part: self.trees[number]})

    def remove(self, numbers: Collection[int]) -> None:
        """Takes parts from the disk again. One that a process has open stays usable for it, or stays at all, as the
        system has it."""
        for number in numbers:
            with suppress(OSError):
                self.file(number).unlink()

    def _write(self, number: int, place: int, data: bytes) -> None:
        partial = self._partial(number)
        partial.touch()
        with partial.open("r+b", buffering=0) as stream:
            stream.seek(place)
            left = memoryview(data)
            while left:
                left = left[stream.write(left) or 0 :]

    def _header(self, number: int) -> Path:
        file = self.file(number)
        return file.with_name(file.name + ABSENT)

    def _partial(self, number: int) -> Path:
        return self.path / f"part-{number:05}.partial"

    def _writing(self) -> Any:
        return disk_errors(self.path, f"Fetching {self.name}")

    # --- the tokenizer's files

    @property
    def has_texts(self) -> bool:
        return (self.path / TEXTS_DONE).exists()

    def write_texts(self, tree: Tree, data: bytes) -> None:
        """Writes the tokenizer's files, one behind the other in `data`, whose pieces were checked.

        Raises:
            MachineError: the disk is full or cannot be written.
        """
        place = 0
        with self._writing(), one_at_a_time(self.path / "texts.lock", f"Fetching {self.name}", no_progress):
            for entry in tree.entries:
                new = self.path / f"{entry.name}.new"
                new.write_bytes(data[place : place + entry.nbytes])
                sync_one(new)
                new.replace(self.path / entry.name)
                place += entry.nbytes
            sync_one(self.path)
            (self.path / TEXTS_DONE).write_text(tree.digest.hex() + "\n")


def stored_trees(folder: ModelFolder, manifest: Manifest) -> dict[int, Tree]:
    """The trees of all parts if the folder came from peers. Others may need them though the parts are not here."""
    if not PeerFolder.is_at(folder.path):
        return {}
    return dict(PeerFolder.open(folder.name, manifest, folder.path).trees)
