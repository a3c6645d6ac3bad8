"""Parts of a model on a hub: of its files only the bytes of the tensors that are needed, in petalnode's cache.

The folder has a file for each part, which gets its name when all of its bytes are there. Until then it ends in
`.partial`, and a log beside it has the hash of each piece that came. Who goes on with it believes no other bytes. The
hub states hashes of whole files only, so what the parts are is seen by the model version.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ....protocols.weights import TreeEntry
from ...errors import ModelError
from ..cache_dir import disk_errors, import_once, imported_folder, one_at_a_time, require_space, sync_one
from ..checkpoint import GGUF_NOTE, INDEX, MAX_HEADER_BYTES, Checkpoint, write_gguf_note
from ..disk_limit import BeforeDownload
from ..folder import num_blocks
from ..gguf.config import LONGROPE_FACTORS, ROPE_FACTORS
from ..gguf.header import ABSENT, CutHeader, read_gguf_header
from ..part_headers import gguf_header, safetensors_header
from ..parts import EMBEDDINGS, HEAD, Part
from ..progress import Progress, ProgressSum
from .gguf_files import write_folder
from .ranges import PIECE_BYTES, RangedFile, in_threads

RESTRICTED: Final = "restricted"
"""The name of a file that says: only who is told to hands this on."""
NAME_FILE: Final = "name"
"""In a folder of petalnode's cache, what people call its model."""
PEERS_KEY: Final = "peers-{}-1"
"""The name in the cache of the folder of a version from peers, by 32 digits of it; the last number is its format."""
TEXTS_DONE: Final = "texts.done"
"""In such a folder, the name of a file that says: the tokenizer is all here."""
_FORMAT: Final = 1
_FIRST_BYTES: Final = 4 << 20  # of a GGUF header
_NOTE: Final = "hub.json"
_HALVES: Final = ("F16", "BF16")


@dataclass(frozen=True)
class _PartRange:
    """What is asked for at once: bytes of a file, and where they go in the file of the part."""

    file: str
    start: int
    end: int
    place: int


class HubParts:
    """The folder of a model at one commit, `selection` of its files: "safetensors", or the first GGUF file."""

    def __init__(self, model_id: str, commit: str, selection: str) -> None:
        named = "\0".join((model_id, commit, selection))
        self.key = f"hub-{hashlib.sha256(named.encode()).hexdigest()[:32]}-{_FORMAT}"
        self.path = imported_folder(self.key)
        self.name = selection

    @staticmethod
    def kept(model_id: str, commit: str) -> dict[str, Path]:
        """The selections of a model that have a folder here."""
        found = {}
        for note in imported_folder("any").parent.glob(f"hub-*-{_FORMAT}/{_NOTE}"):
            with suppress(OSError, ValueError, KeyError, TypeError):
                said = json.loads(note.read_bytes())
                selection = said["selection"]
                if (said["model"], said["commit"]) == (model_id, commit):
                    found[str(selection)] = note.parent
        return dict(sorted(found.items()))

    def add(self, texts: Sequence[Path]) -> None:
        """Copies files that stand beside the weights into the folder, as far as it has none of their names."""
        with disk_errors(self.path, f"Downloading {self.name}"):
            for text in texts:
                if not (self.path / text.name).exists():
                    new = self.path / f"{text.name}.new"
                    shutil.copyfile(text, new)
                    new.rename(self.path / text.name)

    def restrict(self, restricted: bool) -> None:
        """Says whether the model is not for everybody."""
        if restricted:
            (self.path / RESTRICTED).touch()
        else:
            (self.path / RESTRICTED).unlink(missing_ok=True)

    def create(
        self,
        name: str,
        about: Mapping[str, str],
        files: Sequence[RangedFile],
        texts: Sequence[Path],
        progress: Progress,
        *,
        restricted: bool = False,
    ) -> None:
        """Makes the folder: configuration and tokenizer, and what each part will be made of; by the files' headers.

        `texts` are files beside the weights, config.json among them for safetensors; `about` has model and commit.

        Raises:
            ModelError: the files are those of no model that can be used.
            MachineError: the disk is full or cannot be written.
            OSError, HTTPException: the hub cannot be reached.
        """

        def build(folder: Path) -> None:
            for text in texts:
                target = folder / text.name
                shutil.copyfile(text, target)
            headers = folder / "headers"  # the files without their tensors: holes
            headers.mkdir()
            in_threads(lambda file, stop: fetch_header(file, headers, stop), files)
            if files[0].name.endswith(".gguf"):
                _describe_gguf(files, headers, folder, progress)
            config = json.loads((folder / "config.json").read_bytes())
            blocks = num_blocks(config)
            (headers / "config.json").write_text(json.dumps(config))
            if (folder / INDEX).exists():
                (folder / INDEX).rename(headers / INDEX)
            self._write_parts(Checkpoint(headers, blocks), blocks, folder)
            shutil.rmtree(headers)
            if restricted:
                (folder / RESTRICTED).touch()
            (folder / NAME_FILE).write_text(name)
            (folder / _NOTE).write_text(json.dumps({**about, "selection": self.name}))

        import_once(self.key, f"Preparing {name}", build, progress)

    def _write_parts(self, whole: Checkpoint, blocks: int, folder: Path) -> None:
        """Says in `folder` what each part is made of, in the order in which the files have it."""
        parts: dict[str, list[tuple[str, int, int]]] = {}
        file_of: dict[str, str] = {}
        for number, part in enumerate(_in_order(blocks)):
            tensors = sorted(whole.tensors(part), key=lambda tensor: (tensor.file.name, tensor.start))
            entries = [TreeEntry(tensor.key, tensor.dtype, tensor.shape, tensor.nbytes) for tensor in tensors]
            keys = [tensor.key for tensor in tensors]
            file = _file(folder, number, whole.form)
            if whole.gguf:
                header = gguf_header(entries, keys, whole.form.removeprefix("gguf "))
            else:
                header = safetensors_header(entries, keys)
                file_of |= dict.fromkeys(keys, file.name)
            file.with_name(file.name + ABSENT).write_bytes(header)
            parts[str(number)] = [(held.file.name, held.start, held.end) for held in tensors]
        (folder / "ranges.json").write_text(json.dumps({"form": whole.form, "parts": parts}))
        if whole.gguf:
            write_gguf_note(folder, (_file(folder, number, whole.form).name for number in range(blocks + 2)))
        else:
            (folder / INDEX).write_text(json.dumps({"weight_map": file_of}))

    def fetch(
        self, parts: Sequence[Part], files: Mapping[str, RangedFile], progress: Progress, before: BeforeDownload
    ) -> None:
        """Brings these parts into the folder; what came before a cut is not asked for again.

        Raises: as `create`.
        """
        what = f"Downloading parts of {self.name}"
        with disk_errors(self.path, what), one_at_a_time(self.path / "writing.lock", what, progress):
            said = self._ranges()
            order = {part: number for number, part in enumerate(_in_order(len(said["parts"]) - 2))}
            numbers = [order[part] for part in parts]
            coming = [
                _PartFile(self.path, _file(self.path, number, said["form"]), said["parts"][str(number)])
                for number in numbers
                if not _file(self.path, number, said["form"]).exists()
            ]
            if not coming:
                return
            missing = [(part, piece) for part in coming for piece in part.missing()]
            total = sum(piece.end - piece.start for _, piece in missing)
            before({part.file: part.nbytes for part in coming}, [self.path])
            require_space(self.path, total, what)
            count = ProgressSum(what, total, progress)
            in_threads(lambda item, stop: item[0].fetch(item[1], files[item[1].file], count, stop), missing)
            for part in coming:
                part.finish()

    def _ranges(self) -> dict[str, Any]:
        try:
            said: dict[str, Any] = json.loads((self.path / "ranges.json").read_bytes())
            return {"form": str(said["form"]), "parts": dict(said["parts"])}
        except (OSError, ValueError, KeyError, TypeError):
            raise ModelError(
                f"{self.path} is damaged: `petalnode models remove {self.path}`, then run it again"
            ) from None


class _PartFile:
    """One part on its way."""

    def __init__(self, folder: Path, file: Path, ranges: Sequence[Sequence[Any]]) -> None:
        self.file = file
        self._header = file.with_name(file.name + ABSENT).read_bytes()
        self._partial, self._log = folder / f"{file.stem}.partial", folder / f"{file.stem}.log"
        self._ranges = ranges
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        return sum(end - start for _, start, end in self._ranges)

    def _pieces(self) -> list[_PartRange]:
        """Tensors behind each other in a file are asked for together."""
        runs: list[tuple[str, int, int]] = []
        for file, start, end in self._ranges:
            if runs and runs[-1][0] == file and runs[-1][2] == start:
                runs[-1] = (file, runs[-1][1], end)
            else:
                runs.append((file, start, end))
        found, place = [], len(self._header)
        for file, start, end in runs:
            for begin in range(start, end, PIECE_BYTES):
                stop = min(begin + PIECE_BYTES, end)
                found.append(_PartRange(file, begin, stop, place))
                place += stop - begin
        return found

    def missing(self) -> list[_PartRange]:
        """The pieces that did not come, or are not what came."""
        said: dict[int, str] = {}
        with suppress(OSError):
            for line in self._log.read_text(errors="replace").splitlines():
                place, _, sha = line.partition(" ")
                if place.isdecimal():
                    said[int(place[:20])] = sha
        self._partial.touch()
        wanted = []
        with self._partial.open("rb", buffering=0) as stream:
            for piece in self._pieces():
                stream.seek(piece.place)
                if piece.place not in said or _sha(stream.read(piece.end - piece.start)) != said[piece.place]:
                    wanted.append(piece)
        return wanted

    def fetch(self, piece: _PartRange, file: RangedFile, count: ProgressSum, stop: threading.Event) -> None:
        sha, done = hashlib.sha256(), 0
        with self._partial.open("r+b", buffering=1 << 20) as stream:
            stream.seek(piece.place)
            for data in file.stream(piece.start, piece.end, stop):
                stream.write(data)
                sha.update(data)
                done += len(data)
                count.add(len(data))
        if done == piece.end - piece.start:
            with self._lock, self._log.open("a") as log:
                log.write(f"\n{piece.place} {sha.hexdigest()}\n")  # a line that was cut stays by itself

    def finish(self) -> None:
        """Gives the part its name, if no piece of it is missing: what is on the disk is read once more."""
        with self._partial.open("r+b", buffering=0) as stream:
            stream.write(self._header)
            stream.truncate(len(self._header) + self.nbytes)
        if self.missing():
            raise ModelError(f"{self._partial} is not what was written to it: the disk may be failing. Run it again")
        sync_one(self._partial)
        self._partial.rename(self.file)
        self._log.unlink()
        sync_one(self.file.parent)


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _in_order(blocks: int) -> tuple[Part, ...]:
    return (EMBEDDINGS, *range(blocks), HEAD)


def _file(folder: Path, number: int, form: str) -> Path:
    return folder / f"part-{number:05}.{'safetensors' if form == 'safetensors' else 'gguf'}"


def fetch_header(file: RangedFile, folder: Path, stop: threading.Event) -> None:
    """Writes a file of the full size into `folder` that has the header, and nothing behind it."""
    target = folder / file.name
    if file.name.endswith(".gguf"):
        header = _gguf_header_bytes(file, target.with_name(file.name + ABSENT), stop)
    else:
        length = int.from_bytes(file.read(0, min(8, file.nbytes), stop), "little")
        if length > min(MAX_HEADER_BYTES, file.nbytes - 8):
            raise ModelError(f"{file.name} on the hub is no safetensors file")
        header = file.read(0, 8 + length, stop)
    with target.open("wb") as stream:
        stream.write(header)
        stream.truncate(file.nbytes)


def _gguf_header_bytes(file: RangedFile, scratch: Path, stop: threading.Event) -> bytes:
    """As much of the file as its header has; how much that is only the header itself says."""
    data, wanted = b"", _FIRST_BYTES
    while True:
        wanted = min(wanted, file.nbytes)
        data += file.read(len(data), wanted, stop)
        scratch.write_bytes(data)
        try:
            read_gguf_header(scratch)
        except CutHeader:
            if wanted >= min(file.nbytes, MAX_HEADER_BYTES):
                raise
            wanted *= 2
        else:
            return data
        finally:
            scratch.unlink()


def _describe_gguf(files: Sequence[RangedFile], headers: Path, folder: Path, progress: Progress) -> None:
    """Writes configuration and tokenizer into `folder`; of the tensors only those come that the configuration is of."""
    paths = [headers / file.name for file in files]
    tensors = [
        (file, tensor) for file, path in zip(files, paths, strict=True) for tensor in read_gguf_header(path).tensors
    ]
    kinds = {tensor.kind for _, tensor in tensors}
    plain = kinds <= {"F32", *_HALVES} and kinds & {*_HALVES}  # the type to compute in follows from the values
    rotary = (ROPE_FACTORS, *LONGROPE_FACTORS)
    wanted = [(file, one) for file, one in tensors if one.name in rotary or (plain and one.kind == "F32")]

    def fill(item: Any, stop: threading.Event) -> None:
        file, tensor = item
        if tensor.nbytes > MAX_HEADER_BYTES:
            raise ModelError(f"{file.name} on the hub has {tensor.name!r} in {tensor.nbytes:,} bytes: it is no norm")
        data = file.read(tensor.start, tensor.start + tensor.nbytes, stop)
        with (headers / file.name).open("r+b") as stream:
            stream.seek(tensor.start)
            stream.write(data)

    in_threads(fill, wanted)
    write_folder(paths, folder, progress)
    (folder / GGUF_NOTE).unlink()
    write_gguf_note(headers, [path.name for path in paths])
