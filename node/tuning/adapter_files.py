"""The files of an adapter that are shared; other files in a stranger's folder are never copied."""

from __future__ import annotations

import filecmp
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar

from ...crypto.bounded_json import BadJson, read_json_object
from ...protocols.adapter import MAX_ADAPTER_TENSORS, is_name
from ..errors import BadInput, MachineError, ModelError
from ..models.adapter import CONFIG_LIMITS, check_adapter_files
from ..models.adapter_note import NOTE, read_note
from ..models.cache_dir import data_folder, disk_errors
from ..models.checkpoint import read_header

FILES: Final = (
    "adapter_config.json",
    "adapter_model.safetensors",
    "deep_prompts.safetensors",
    NOTE,
    "README.md",
)
CHECKPOINT: Final = "checkpoint.safetensors"
"""Beside them while a training is not finished."""
MAX_FILE_BYTES: Final = 4 << 30
WRITE_ADVICE: Final = "Make room there, or give another folder."

T = TypeVar("T")


@dataclass(frozen=True)
class SharedAdapter:
    """The description of an adapter before it is fetched.

    Attributes:
        name: by which it is fetched.
        method: prompt, deep-prompt or lora; "" if unknown.
        model: name of its base model; "" if unknown.
        model_version: hexadecimal digits, of the hub only the first ones; "" if unknown.
        tags: of whoever shared it.
    """

    name: str
    method: str = ""
    model: str = ""
    model_version: str = ""
    task: str = ""
    tags: tuple[str, ...] = ()

    def matches(self, model: str | None, tags: tuple[str, ...]) -> bool:
        """Whether it is of this model (a name, or 8 or more first digits of a version) and has all `tags`."""
        if not set(tags) <= {*self.tags, self.method, self.task}:
            return False
        if model is None or model == self.model:
            return True
        shorter, longer = sorted((model.lower(), self.model_version), key=len)
        return len(shorter) >= 8 and longer.startswith(shorter)


def check_name(name: str) -> str:
    """
    Raises:
        BadInput: it could not be the name of a folder everywhere.
    """
    if not is_name(name):
        raise BadInput(f"{name!r} is no name for an adapter: letters, digits, '.', '_' and '-', at most 64 of them")
    return name


def files_of(folder: Path) -> list[Path]:
    """The files of the adapter in `folder` that are shared; links are not followed."""
    return [path for name in FILES if (path := folder / name).is_file() and not path.is_symlink()]


def check_adapter(folder: Path) -> SharedAdapter:
    """The description of the adapter in `folder`, after a check of its files.

    Raises:
        BadInput: it is none, or is damaged.
    """
    names = {path.name for path in files_of(folder)}
    weights = sorted(name for name in names if name.endswith(".safetensors"))
    if not weights or not names & {"adapter_config.json", NOTE}:
        raise BadInput(
            f"{folder} is no adapter: it needs adapter_config.json with adapter_model.safetensors, as `petalnode tune` "
            "and peft write them (weights in other formats are not shared)"
        )
    for name in weights:
        _check_safetensors(folder / name)
    found = describe(folder)
    check_adapter_files(folder)
    return found


def describe(folder: Path) -> SharedAdapter:
    """The description in the note and configuration of `folder`.

    Raises:
        BadInput: they are damaged.
    """
    names = {path.name for path in files_of(folder)}
    config: dict[str, Any] = {}
    if "adapter_config.json" in names:
        try:
            config = read_json_object(folder / "adapter_config.json", CONFIG_LIMITS)
        except (OSError, BadJson) as error:
            raise BadInput(f"{folder / 'adapter_config.json'} is damaged: {error}") from None
    note = read_note(folder) if NOTE in names else None
    shared = SharedAdapter(
        folder.name,
        {"LORA": "lora", "PROMPT_TUNING": "prompt"}.get(str(config.get("peft_type")), ""),
        str(config.get("base_model_name_or_path") or ""),
        task={"SEQ_CLS": "classification", "CAUSAL_LM": "language"}.get(str(config.get("task_type")), ""),
    )
    if note is None:
        return shared
    return SharedAdapter(folder.name, note.method, note.model, note.model_version, note.task, note.tags)


def copy_adapter(source: Path, target: Path) -> None:
    """Puts the adapter's files into `target`, which then holds no other files of an adapter.

    Raises:
        MachineError: the disk is full or cannot be written; what was there before is unchanged.
    """
    files = {path.name: path for path in files_of(source)}
    with disk_errors(target, "Copying the adapter", WRITE_ADVICE):
        write_files(target, files)
        for stale in FILES:
            if stale not in files:
                (target / stale).unlink(missing_ok=True)


def write_files(folder: Path, files: Mapping[str, bytes | Path]) -> None:
    """Puts `files` into `folder`, each whole: all are written, or copied, before the first one takes its name.

    Raises:
        OSError: they cannot be written; what was there before is unchanged.
    """
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = {name: folder / f".{name}.{os.getpid()}.tmp" for name in files}
    try:
        for name, path in unfinished.items():
            content = files[name]
            if isinstance(content, Path):
                shutil.copyfile(content, path)
            else:
                path.write_bytes(content)
            with path.open("rb+") as file:
                os.fsync(file.fileno())
        for name, path in unfinished.items():
            os.replace(path, folder / name)
    finally:
        for path in unfinished.values():
            path.unlink(missing_ok=True)


def other_folders(out: Path) -> list[Path]:
    """Where a result is saved when `out` cannot be written; none of them exists yet."""
    name = f"{out.absolute().name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    return [data_folder() / "results" / name, Path(tempfile.gettempdir()) / f"petalnode-{name}", Path.home() / name]


class ResultFolder:
    """Where a training saves: the folder that was asked for, and others while that one cannot be written.

    Args:
        wanted: the folder that was asked for.
        others: folders to save in instead, the best first.
        tell: called with one sentence whenever another folder is used than before.

    Attributes:
        path: the folder that was written last.
    """

    def __init__(self, wanted: Path, others: Sequence[Path], tell: Callable[[str], None]) -> None:
        self.wanted = wanted
        self.path = wanted
        self._others = others
        self._tell = tell

    def save(self, write: Callable[[Path], T]) -> T:
        """What `write(folder)` returns for the first folder that it can write.

        Raises:
            MachineError: it can write none of them.
        """
        failed: MachineError | None = None
        for folder in dict.fromkeys((self.wanted, *self._others)):
            try:
                done = write(folder)
            except MachineError as error:
                failed = failed or error
                continue
            if folder != self.path:
                self.path = folder
                self._tell(f"{failed} Saved in {folder} instead." if failed else f"{folder} can be written again.")
            return done
        assert failed is not None
        tried = ", ".join(map(str, self._others))
        raise MachineError(f"{failed} These could not be written either: {tried}.")


def same_adapter(one: Path, other: Path) -> bool:
    """Whether they hold the same bytes under the same names."""
    names = [path.name for path in files_of(one)]
    return names == [path.name for path in files_of(other)] and all(
        filecmp.cmp(one / name, other / name, shallow=False) for name in names
    )


def adapters_in(folder: Path) -> Iterator[SharedAdapter]:
    """The adapters in the subfolders of `folder`; damaged ones are left out."""
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink() and is_name(path.name) and files_of(path):
            try:
                yield replace(check_adapter(path), name=path.name)
            except BadInput:
                continue


def _check_safetensors(file: Path) -> None:
    """Checks the header only: its tensors, and that they fit the file."""
    size = file.stat().st_size
    if size > MAX_FILE_BYTES:
        raise BadInput(f"{file} is larger than {MAX_FILE_BYTES >> 30} GiB: that is no adapter")
    try:
        read_header(file, MAX_ADAPTER_TENSORS)
    except ModelError as error:
        raise BadInput(f"{file} is no safetensors file ({error}): copy or save it again") from None
