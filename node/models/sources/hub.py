"""Models on the hub: of a model, only the files that are needed, into the hub's own cache on this machine.

Small files come by huggingface_hub. The weights come by our own download into the same cache: theirs starts from the
beginning after a restart. Each file is checked against the SHA-256 that the hub states.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from urllib.parse import urlsplit

from ...errors import ModelError
from ..cache_dir import disk_errors, is_disk_error, one_at_a_time, require_space
from ..checkpoint import INDEX, SINGLE, Checkpoint, read_index
from ..digests import sha256_of
from ..disk_limit import BeforeDownload, no_disk_limit
from ..folder import TEXT_FILES, ModelFolder, check_text_file, open_folder
from ..manifest import MANIFEST_FILE, MAX_FILE_BYTES
from ..parts import Need, Part, find_layout
from ..progress import Progress
from .gguf_files import choose_gguf, kind_of, name_of
from .hub_parts import NAME_FILE, HubParts
from .ranges import NoRanges, RangedFile

_TIMEOUT_S = 10.0
_DEFAULT_REVISION = "main"
_CONFIG = "config.json"
_WHOLE_BYTES = 64 << 20  # files of fewer bytes come whole
_FOR_EVERYBODY = "petalnode-for-everybody"
_SAFETENSORS = "safetensors"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class _Remote:
    """A model at one commit. `files`: name -> bytes. `for_everybody`: neither gated nor private."""

    model_id: str
    commit: str
    files: Mapping[str, int]
    for_everybody: bool = False


def fetch(
    model_id: str,
    revision: str | None,
    need: Need,
    progress: Progress,
    offline: bool,
    before_download: BeforeDownload = no_disk_limit,
    gguf: str = "",
) -> ModelFolder:
    """The folder that holds what `need` asks for of `model_id`; downloads what is not there yet. With `gguf`, a kind or
    file name, it is the model of these GGUF files.

    If the hub cannot be reached, what the cache has is used.

    Raises:
        ModelError: if there is no such model or revision, it is gated, or neither hub nor cache have it.
        MachineError: if the disk is full.
    """
    from huggingface_hub import constants

    name = f"{model_id}@{revision}" if revision else model_id
    cache = Path(constants.HF_HUB_CACHE)
    try:
        if offline or constants.HF_HUB_OFFLINE:
            raise _Unreachable("the hub is not to be asked (offline)")
        remote = _look_up(model_id, revision or _DEFAULT_REVISION)
        with _no_bars(), disk_errors(cache, f"Downloading {name}"):
            if gguf:
                folder = _gguf_parts(remote, gguf, need, progress, before_download)
                _write_reference(cache, remote, revision or _DEFAULT_REVISION)
                return folder
            path = _download_needed(remote, need, cache, progress, before_download)
            _write_reference(cache, remote, revision or _DEFAULT_REVISION)
            _note_access(cache, remote)
        return open_folder(path, name, remote.commit)
    except _Unreachable as error:
        if gguf:
            return _kept_gguf(model_id, revision or _DEFAULT_REVISION, gguf, need, cache, str(error))
        return _from_cache(model_id, revision or _DEFAULT_REVISION, name, need, cache, str(error))


def is_for_everybody(folder: ModelFolder) -> bool:
    """Whether the hub, asked by this machine, gave the model to everybody; True if it is not from a hub."""
    if folder.path.parent.name != "snapshots":
        return True
    return (folder.path.parent.parent / _FOR_EVERYBODY).exists()


def _note_access(cache: Path, remote: _Remote) -> None:
    note = _storage(cache, remote.model_id) / _FOR_EVERYBODY
    if remote.for_everybody:
        note.touch()
    else:
        note.unlink(missing_ok=True)


class _Unreachable(Exception):
    """The hub does not answer, or not as a hub; the text says why."""


def _look_up(model_id: str, revision: str) -> _Remote:
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        info = HfApi().model_info(model_id, revision=revision, files_metadata=True, timeout=_TIMEOUT_S)
    except GatedRepoError as error:
        raise ModelError(_gated(model_id)) from error
    except RevisionNotFoundError as error:
        raise ModelError(f"{model_id!r} has no revision {revision!r} on the hub.") from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"The hub has no model {model_id!r}. If it is private, set HF_TOKEN to a token that may read it."
        ) from error
    except Exception as error:
        # its HTTP library's own errors come through, and which library that is changes with the version
        raise _Unreachable(f"{constants.ENDPOINT} cannot be reached: {_first_line(error)}") from error
    if info.sha is None:
        raise _Unreachable(f"{constants.ENDPOINT} does not answer like a model hub")
    files = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    return _Remote(model_id, info.sha, files, info.gated is False and not info.private)


def _download_needed(
    remote: _Remote, need: Need, cache: Path, progress: Progress, before_download: BeforeDownload
) -> Path:
    """Returns the folder of the snapshot."""
    if _CONFIG not in remote.files:
        raise ModelError(f"{remote.model_id!r} is no transformers model: it has no {_CONFIG}.")
    path = _small_file(remote, _CONFIG, progress).parent
    folder = open_folder(path, remote.model_id)
    parts = folder.parts(need)
    if 0 < remote.files.get(MANIFEST_FILE, 0) <= MAX_FILE_BYTES:
        _small_file(remote, MANIFEST_FILE, progress)
    if need in ("client", "all"):
        wanted = {name: pattern for pattern in TEXT_FILES for name in fnmatch.filter(remote.files, pattern)}
        for name, pattern in wanted.items():
            check_text_file(f"{name} of {remote.model_id!r}", remote.files[name], pattern)
        for name in wanted:
            _small_file(remote, name, progress)
    needed = _weight_files(remote, folder, parts, progress)
    weights = [name for name in needed if not (path / name).exists()]
    if weights and _is_little(remote, weights, folder, parts):
        with suppress(NoRanges):
            return _safetensors_parts(remote, folder, parts, progress, before_download)
    if weights:
        missing = sum(remote.files[name] for name in weights)
        before_download({path / name: remote.files[name] for name in weights}, [path / name for name in needed])
        require_space(_existing(cache), missing, f"Downloading {remote.model_id}")
        for name in weights:
            _weights(remote, name, cache, progress)
    return path


def _is_little(remote: _Remote, weights: Sequence[str], folder: ModelFolder, parts: Sequence[Part]) -> bool:
    """Whether these parts are little of the files that would come whole for them."""
    few = len(parts) < folder.num_blocks + 2 and sum(remote.files[name] for name in weights) >= _WHOLE_BYTES
    if not few or INDEX not in remote.files:
        return few
    file_of = read_index(folder.path / INDEX)
    layout = find_layout(file_of, folder.num_blocks)
    keys = [key for key, file in file_of.items() if file in weights]
    return 2 * sum(layout.part_of(key) in parts for key in keys) < len(keys)


def _safetensors_parts(
    remote: _Remote, folder: ModelFolder, needed: Sequence[Part], progress: Progress, before_download: BeforeDownload
) -> Path:
    """The folder with these parts, and with the small files that came to `folder`."""
    indexed = INDEX in remote.files
    names = sorted(set(read_index(folder.path / INDEX).values())) if indexed else [SINGLE]
    _check_there(remote, names)  # those of other parts, too, whose headers tell what the parts are
    files = {name: _ranged(remote, name) for name in names}
    small = [file for file in folder.path.iterdir() if file.name not in names and file.is_file()]
    parts = HubParts(remote.model_id, remote.commit, _SAFETENSORS)
    about = {"model": remote.model_id, "commit": remote.commit}
    with _download_errors(remote, f"{names[0]} could not be downloaded: ", (OSError, HTTPException)):
        parts.create(folder.name, about, list(files.values()), small, progress, restricted=not remote.for_everybody)
        parts.restrict(not remote.for_everybody)
        parts.add([file for file in small if file.name != INDEX])
        parts.fetch(needed, files, progress, before_download)
    return parts.path


def _gguf_parts(
    remote: _Remote, wanted: str, need: Need, progress: Progress, before_download: BeforeDownload
) -> ModelFolder:
    names = choose_gguf(remote.model_id, remote.files, wanted)
    files = {Path(name).name: _ranged(remote, name) for name in names}
    name = name_of(remote.model_id, remote.files, names[0])
    parts = HubParts(remote.model_id, remote.commit, names[0])
    about = {"model": remote.model_id, "commit": remote.commit}
    with _download_errors(remote, f"{name} could not be downloaded: ", (OSError, HTTPException)):
        parts.create(name, about, list(files.values()), (), progress, restricted=not remote.for_everybody)
        parts.restrict(not remote.for_everybody)
        folder = open_folder(parts.path, name, remote.commit)
        needed = folder.parts(need)
        if needed:
            parts.fetch(needed, files, progress, before_download)
    return folder


def _ranged(remote: _Remote, name: str) -> RangedFile:
    """A file of the hub, for its bytes to be asked for."""
    from huggingface_hub import get_hf_file_metadata, get_token, hf_hub_url

    url, etags = hf_hub_url(remote.model_id, name, revision=remote.commit), set[str]()

    def locate() -> tuple[str, Mapping[str, str]]:
        with _download_errors(remote, f"{name} could not be downloaded: "):
            found = get_hf_file_metadata(url, timeout=_TIMEOUT_S)
        etags.add(found.etag or "")
        if len(etags) > 1 or found.size not in (None, remote.files[name]):
            raise ModelError(f"{name} of {remote.model_id!r} changed on the hub while it was downloaded. Run it again")
        token = get_token()
        same_host = urlsplit(found.location).netloc == urlsplit(url).netloc
        return found.location, {"Authorization": f"Bearer {token}"} if token and same_host else {}

    return RangedFile(Path(name).name, remote.files[name], locate)


def _kept_gguf(model_id: str, revision: str, wanted: str, need: Need, cache: Path, why: str) -> ModelFolder:
    """What came before of a GGUF file on the hub, which cannot be asked."""
    commit = revision
    if not _COMMIT.fullmatch(revision):
        with suppress(OSError):
            commit = (_storage(cache, model_id) / "refs" / revision).read_text()
    kept = {first: path for first, path in HubParts.kept(model_id, commit).items() if first.endswith(".gguf")}
    try:
        first = next(name for name in kept if wanted in (name, kind_of(name)) or kind_of(name) == wanted.upper())
        folder = open_folder(kept[first], (kept[first] / NAME_FILE).read_text(), commit)
        Checkpoint(folder.path, folder.num_blocks).check(folder.parts(need))
    except StopIteration:
        raise ModelError(f"'{model_id}:{wanted}' is not on this machine, and {why}. Try again later.") from None
    except ModelError as error:
        raise ModelError(f"'{model_id}:{wanted}' is only in part on this machine: {error} And {why}.") from error
    return folder


def _weight_files(remote: _Remote, folder: ModelFolder, parts: tuple[Part, ...], progress: Progress) -> list[str]:
    if not parts:
        return []
    if INDEX in remote.files:
        file_of = read_index(_small_file(remote, INDEX, progress))
        layout = find_layout(file_of, folder.num_blocks)
        needed = sorted({file for key, file in file_of.items() if layout.part_of(key) in parts})
        _check_there(remote, needed)
        return needed
    if SINGLE in remote.files:
        return [SINGLE]
    raise ModelError(
        f"{remote.model_id!r} has no safetensors weights ({SINGLE} or {INDEX}) on the hub. Take a model or "
        "revision that has them, or convert it with transformers' save_pretrained and give the folder; a .gguf in it "
        f"is named by its kind ({remote.model_id}:Q4_K_M) or by itself ({remote.model_id}/FILE.gguf)."
    )


def _check_there(remote: _Remote, names: Iterable[str]) -> None:
    absent = [name for name in names if name not in remote.files]
    if absent:
        raise ModelError(f"{remote.model_id!r} is incomplete on the hub: {absent[0]} is missing.")


def _small_file(remote: _Remote, name: str, progress: Progress) -> Path:
    from huggingface_hub import hf_hub_download

    size = remote.files[name]
    progress(f"Downloading {name}", 0, size)
    with _download_errors(remote, f"{name} could not be downloaded: "):
        file = hf_hub_download(remote.model_id, name, revision=remote.commit, etag_timeout=_TIMEOUT_S)
    progress(f"Downloading {name}", size, size)
    return Path(file)


def _weights(remote: _Remote, name: str, cache: Path, progress: Progress) -> None:
    """Puts a weights file into the hub's cache under its hash; huggingface_hub then finds it there."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(remote.model_id, name, revision=remote.commit)
    with _download_errors(remote, f"{name} could not be downloaded: "):
        found = get_hf_file_metadata(url, timeout=_TIMEOUT_S)
    if found.etag is not None and _SHA256.fullmatch(found.etag):
        blob = _storage(cache, remote.model_id) / "blobs" / found.etag
        blob.parent.mkdir(parents=True, exist_ok=True)
        partial = blob.with_name(f"{found.etag}.partial")
        lock = one_at_a_time(blob.with_name(f"{found.etag}.partial.lock"), f"Downloading {name}", progress)
        with lock, suppress(NoRanges):  # who sends whole files only is asked by huggingface_hub
            if not blob.exists():
                what = f"the download of {name} broke off, the next try goes on from there: "
                with _download_errors(remote, what, (OSError, HTTPException)):  # what `progress` raises passes
                    _ranged(remote, name).download(partial, progress)
                if sha256_of(partial, name, progress).hex() != found.etag:
                    partial.unlink()
                    raise ModelError(f"{name} of {remote.model_id!r} came damaged (wrong SHA-256). Try again.")
                partial.rename(blob)
    _small_file(remote, name, progress)


@contextmanager
def _download_errors(remote: _Remote, what: str, kinds: tuple[type[Exception], ...] = (Exception,)) -> Iterator[None]:
    """Turns errors of these kinds, but those of the disk, into ModelError or `_Unreachable`."""
    from huggingface_hub.errors import GatedRepoError

    try:
        yield
    except GatedRepoError as error:
        raise ModelError(_gated(remote.model_id)) from error
    except kinds as error:  # the hub's HTTP library's own errors come through
        if is_disk_error(error):
            raise
        raise _Unreachable(what + _first_line(error)) from error


def _from_cache(model_id: str, revision: str, name: str, need: Need, cache: Path, why: str) -> ModelFolder:
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(model_id, _CONFIG, cache_dir=cache, revision=revision)
    instead = "Try again later, or give a model folder, a .gguf file or an alias such as smollm2."
    if not isinstance(config, str):
        raise ModelError(f"{name!r} is not in the hub's cache on this machine ({cache}), and {why}. {instead}")
    path = Path(config).parent
    by_parts = HubParts.kept(model_id, path.name).get(_SAFETENSORS)
    if by_parts is not None:
        with suppress(ModelError):
            folder = open_folder(by_parts, name, path.name)
            if need != "config":
                Checkpoint(by_parts, folder.num_blocks).check(folder.parts(need))
                return folder
    folder = open_folder(path, name, path.name)
    parts = folder.parts(need)
    try:
        if parts:
            Checkpoint(path, folder.num_blocks).check(parts)
    except ModelError as error:
        held = ", ".join(sorted(file.name for file in path.iterdir()))
        raise ModelError(
            f"{name!r} is only in part in the hub's cache on this machine ({held}): {error} And {why}. {instead}"
        ) from error
    return folder


def _write_reference(cache: Path, remote: _Remote, revision: str) -> None:
    """Writes the commit of a branch or tag into the cache, as huggingface_hub does, for when the hub is unreachable."""
    if _COMMIT.fullmatch(revision):
        return
    reference = _storage(cache, remote.model_id) / "refs" / revision
    reference.parent.mkdir(parents=True, exist_ok=True)
    reference.write_text(remote.commit)


def _gated(model_id: str) -> str:
    from huggingface_hub import constants

    return (
        f"{model_id!r} is gated: its owners want you to accept their terms first. Do so on "
        f"{constants.ENDPOINT}/{model_id}, make an access token in your settings there, and set HF_TOKEN to "
        "it."
    )


def _storage(cache: Path, model_id: str) -> Path:
    """Where the hub's cache keeps a model."""
    return cache / f"models--{model_id.replace('/', '--')}"


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path


@contextmanager
def _no_bars() -> Iterator[None]:
    """Keeps huggingface_hub from drawing progress bars of its own: what people see is the caller's."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    shown = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            enable_progress_bars()


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0].rstrip(".") if text else type(error).__name__
