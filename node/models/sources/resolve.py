"""From what a person calls a model to a folder on this disk: folder, GGUF file, hub id or alias."""

from __future__ import annotations

import difflib
import os
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ...errors import ModelError
from ..checkpoint import Checkpoint
from ..disk_limit import BeforeDownload, no_disk_limit
from ..folder import ModelFolder, open_folder
from ..parts import Need
from ..progress import Progress, no_progress
from .alias import ALIASES, import_alias, kept_folder
from .gguf_files import open_gguf
from .hub import fetch
from .hub_parts import TEXTS_DONE

DEFAULT_MODEL = "smollm2"

_HUB_ID = re.compile(
    r"(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*)(:(?P<kind>[\w.-]+)|/(?P<file>[\w./-]+\.gguf))?(@(?P<revision>[\w./-]+))?",
    re.ASCII,
)
_FORMS = (
    "A model is a folder in Hugging Face layout, a .gguf file, a hub id (org/name, org/name@revision, "
    "org/name:Q4_K_M or org/name/file.gguf), or "
    f"one of the aliases: {', '.join(ALIASES)}."
)
_PINNED = re.compile(r"(?P<model>.+)@(?P<version>[0-9A-Fa-f]+)", re.DOTALL)
_LEAST_DIGITS, _ALL_DIGITS = 12, 64
_COMMIT_DIGITS = 40


def split_version(model: str) -> tuple[str, str | None]:
    """`MODEL@VERSION` as the model and the first 12 to 64 hexadecimal digits of its version; None without a version.

    A file or folder of the whole name is that one. 40 digits behind a hub id are a commit, other than 12 to 64 a branch
    or tag.

    Raises:
        ModelError: too few or too many digits behind what has no revisions.
    """
    found = _PINNED.fullmatch(model)
    if found is None or Path(model).expanduser().exists():
        return model, None
    named, version = found["model"], found["version"].lower()
    at_hub = _HUB_ID.fullmatch(named) is not None and not Path(named).expanduser().exists()
    if at_hub and "@" not in named and len(version) == _COMMIT_DIGITS:
        return model, None
    if not _LEAST_DIGITS <= len(version) <= _ALL_DIGITS:
        if at_hub:
            return model, None
        raise ModelError(f"{model!r}: a model version has {_LEAST_DIGITS} to {_ALL_DIGITS} hexadecimal digits.")
    return named, version


def resolve(
    model: str | os.PathLike[str],
    *,
    need: Need = "all",
    progress: Progress = no_progress,
    revision: str | None = None,
    offline: bool = False,
    before_download: BeforeDownload = no_disk_limit,
) -> ModelFolder:
    """Finds or fetches `model` and returns its folder, with at least the parts that `need` asks for.

    Blocks for as long as a download takes, or the tokenizer of a GGUF file, which is converted once. An alias always
    wins over a file of the same name in the working folder: write `./name` for that one.

    Args:
        model: a folder, a `.gguf` file, a hub id, or an alias; `MODEL@VERSION` sets `ModelFolder.pinned`, and
            `ModelFolder.asked` is what comes before.
        need: "client" (embeddings, norm, head), a Span of blocks, "all", or "config" for no weights at all.
        revision: branch, tag or commit on the hub; `org/name@revision` says the same.
        offline: fetch nothing; only what is on this disk already is used.
        before_download: is called before weights come from the hub.

    Raises:
        ModelError: if there is no such model, or it cannot be used; says what was found and what to do.
        MachineError: if the disk is full.
    """
    name = os.fspath(model)
    if not name.strip():
        raise ModelError(f"No model was given. {_FORMS}")
    pinned = None
    if isinstance(model, str):
        name, pinned = split_version(name)
    folder = _kept(name, pinned, need) if isinstance(model, str) and name in ALIASES and revision is None else None
    folder = folder or _find(name, isinstance(model, str), need, progress, revision, offline, before_download)
    return replace(folder, pinned=pinned, asked=name)


def _kept(name: str, pinned: str | None, need: Need) -> ModelFolder | None:
    """The aliased model as peers have handed it on, if `need` is all there."""
    with suppress(ModelError):
        folder = kept_folder(name, pinned)
        if folder is not None and (need not in ("client", "all") or (folder.path / TEXTS_DONE).exists()):
            return _checked(folder, need)
    return None


def _find(
    name: str,
    may_be_alias: bool,
    need: Need,
    progress: Progress,
    revision: str | None,
    offline: bool,
    before_download: BeforeDownload,
) -> ModelFolder:
    if may_be_alias and name in ALIASES:
        _no_revision(name, revision)
        return _checked_import(import_alias(name, progress, offline), need)
    path = Path(name).expanduser()
    if path.is_dir():
        _no_revision(name, revision)
        path = path.absolute()
        return _checked(open_folder(path, path.resolve().name or str(path)), need)
    if path.is_file():
        _no_revision(name, revision)
        return _checked_import(_open_file(path.absolute(), progress), need)
    found = _HUB_ID.fullmatch(name)
    if found and (found["file"] or not name.endswith(".gguf")):
        if revision and found["revision"] and revision != found["revision"]:
            raise ModelError(f"{name!r} and revision {revision!r} contradict each other: give one revision.")
        gguf = found["kind"] or found["file"] or ""
        return _checked(
            fetch(found["id"], revision or found["revision"], need, progress, offline, before_download, gguf), need
        )
    raise ModelError(_unknown(name))


def _open_file(path: Path, progress: Progress) -> ModelFolder:
    if path.suffix.lower() != ".gguf":
        raise ModelError(f"{path} is a file but no .gguf file. {_FORMS}")
    return open_gguf(path, progress)


def _checked(folder: ModelFolder, need: Need) -> ModelFolder:
    """Checks that the weights that are needed are there and whole, before anybody builds on them."""
    parts = folder.parts(need)
    if parts:
        Checkpoint(folder.path, folder.num_blocks).check(parts)
    return folder


def _checked_import(folder: ModelFolder, need: Need) -> ModelFolder:
    folder.parts(need)  # a span that passes the end is no fault of the folder
    try:
        return _checked(folder, need)
    except ModelError as error:
        raise ModelError(f"{error} petalnode's own notes of this file are in {folder.path}.") from error


def _no_revision(name: str, revision: str | None) -> None:
    if revision is not None:
        raise ModelError(f"Only models on the hub have revisions: {name!r} is none, leave {revision!r} out.")


def _unknown(name: str) -> str:
    looks_like_path = name.startswith((".", "~", os.sep)) or name.endswith(".gguf") or name.count("/") > 1
    if looks_like_path:
        return f"There is no folder or file {Path(name).expanduser().absolute()}. {_FORMS}"
    close = difflib.get_close_matches(name.lower(), ALIASES, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"There is no model {name!r} here.{hint} {_FORMS}"
