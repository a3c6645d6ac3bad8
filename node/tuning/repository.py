"""Where adapters are shared: a folder, a git repository or the Hugging Face hub.

Of a git repository, which is somebody else's, a shallow copy is made in a scratch folder with the `git` command. Links
stay texts, and nothing in it is run. On the hub an adapter has a repository of its own, found by tags.
"""

from __future__ import annotations

import difflib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from ..errors import BadInput, MachineError, PetalnodeError, reason_of
from .adapter_files import (
    FILES,
    MAX_FILE_BYTES,
    SharedAdapter,
    adapters_in,
    check_adapter,
    check_name,
    copy_adapter,
    same_adapter,
)

HUB: Final = "hub"
_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_URL: Final = re.compile(r"(https?|ssh|git|file)://.+|[\w.-]+@[\w.-]+:.+")


@dataclass(frozen=True)
class RepositoryLimits:
    """How long git and the hub may take, and what is listed."""

    git_timeout: float = 120.0
    """Seconds for one git command."""
    attempts: int = 3
    alike: float = 0.75
    """Of two names, by difflib: one or two letters are wrong."""
    found_at_most: int = 100
    timeout_s: float = 10.0


REPOSITORY: Final = RepositoryLimits()
T = TypeVar("T")

_VERSION_TAG: Final = "model-version:"
_BASE_TAG: Final = "base_model:"
_METHODS: Final = ("lora", "prompt", "deep-prompt")


class HubRepository:
    """The hub; with `repository` (org/name), that one."""

    def __init__(self, repository: str | None) -> None:
        self._repository = repository

    def search(self, model: str | None, tags: tuple[str, ...]) -> list[SharedAdapter]:
        from huggingface_hub import constants
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status  # type: ignore[attr-defined]

        wanted = ["petalnode", *tags]
        if model is not None and "/" in model:
            wanted.append(f"{_BASE_TAG}{model}")

        # One request: HfApi.list_models asks an unreachable hub for half a minute.
        asked: dict[str, Any] = {"filter": wanted, "limit": REPOSITORY.found_at_most, "search": self._repository or ""}
        with _asking():
            address = f"{constants.ENDPOINT}/api/models"
            response = get_session().get(
                address, params=asked, headers=build_hf_headers(), timeout=REPOSITORY.timeout_s
            )
            hf_raise_for_status(response)
            infos = response.json()
        found = [of_tags(str(info["id"]), map(str, info.get("tags") or ())) for info in infos]
        return [adapter for adapter in found if adapter.matches(model, ())]

    def push(self, folder: Path, name: str, *, replace: bool) -> str:
        from huggingface_hub import HfApi, constants

        if self._repository is None:
            raise BadInput("which repository of the hub? Give --to ORG/NAME")
        repository = self._repository
        with tempfile.TemporaryDirectory(prefix="petalnode-hub-") as scratch:
            copy_adapter(folder, Path(scratch))
            with _asking():
                api = HfApi()
                api.create_repo(repository, exist_ok=replace)
                api.upload_folder(
                    folder_path=scratch,
                    repo_id=repository,
                    allow_patterns=list(FILES),
                    commit_message=f"Adapter {name}",
                )
        return f"{constants.ENDPOINT}/{repository}"

    def pull(self, name: str, target: Path) -> SharedAdapter:
        from huggingface_hub import HfApi, hf_hub_download

        repository, _, revision = (self._repository or name).partition("@")
        if "/" not in repository:
            raise BadInput(f"{name!r} is no repository of the hub: give ORG/NAME")
        with tempfile.TemporaryDirectory(prefix="petalnode-hub-") as scratch:
            with _asking():
                info = HfApi().model_info(
                    repository, revision=revision or None, files_metadata=True, timeout=REPOSITORY.timeout_s
                )
                for file in info.siblings or ():
                    if file.rfilename in FILES:
                        if (file.size or 0) > MAX_FILE_BYTES:
                            raise BadInput(f"{file.rfilename} of {repository} is too large for an adapter")
                        got = hf_hub_download(
                            repository, file.rfilename, revision=info.sha, etag_timeout=REPOSITORY.timeout_s
                        )
                        shutil.copyfile(got, Path(scratch) / file.rfilename)

            try:
                found = check_adapter(Path(scratch))
            except BadInput as error:
                raise BadInput(str(error).replace(scratch, repository)) from None
            copy_adapter(Path(scratch), target)
        return found


def of_tags(name: str, tags: Iterable[str]) -> SharedAdapter:
    """An adapter as described by the tags of its repository."""
    given = list(tags)
    bases = [tag.removeprefix(_BASE_TAG) for tag in given if tag.startswith(_BASE_TAG)]
    known = ("petalnode", "peft", "safetensors", *_METHODS)
    return SharedAdapter(
        name,
        next((tag for tag in given if tag in _METHODS), ""),
        next((base for base in bases if ":" not in base), ""),
        next((tag.removeprefix(_VERSION_TAG) for tag in given if tag.startswith(_VERSION_TAG)), ""),
        tags=tuple(tag for tag in given if tag not in known and ":" not in tag),
    )


@contextmanager
def _asking() -> Iterator[None]:
    """The hub is asked in the block.

    Raises:
        BadInput: the hub says no, or cannot be reached.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if constants.HF_HUB_OFFLINE:
        raise BadInput("the hub is not to be asked (HF_HUB_OFFLINE is set): use a folder or a git repository")
    shown = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    except PetalnodeError:
        raise
    except RepositoryNotFoundError:
        raise BadInput(
            "the hub has no such repository, or you may not see it: check the name, and set HF_TOKEN if it is private"
        ) from None
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        why = {
            401: "it does not know you: set HF_TOKEN to a token that may write",
            403: "your token may not do that: make one that may write there",
            409: "the repository is there already: give another name, or --replace",
        }.get(status, str(error).strip().splitlines()[0][:300])
        raise BadInput(f"the hub says no: {why}") from None
    except Exception as error:
        # its HTTP library's own errors come through, and which library that is changes with the version
        raise BadInput(
            f"{constants.ENDPOINT} cannot be reached ({reason_of(error)}): try again later, or use a folder or a git "
            "repository"
        ) from None
    finally:
        if shown:
            enable_progress_bars()


class AdapterRepository(Protocol):
    """A place where adapters are shared. All methods raise BadInput, or MachineError where this machine cannot."""

    def search(self, model: str | None, tags: tuple[str, ...]) -> list[SharedAdapter]: ...

    def push(self, folder: Path, name: str, *, replace: bool) -> str:
        """Uploads the adapter in `folder`; returns where it is, for people."""
        ...

    def pull(self, name: str, target: Path) -> SharedAdapter:
        """Fetches an adapter into the folder `target`."""
        ...


class FolderRepository:
    """A folder with a subfolder per adapter."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def search(self, model: str | None, tags: tuple[str, ...]) -> list[SharedAdapter]:
        if not self._folder.is_dir():
            raise BadInput(f"there is no folder {self._folder}")
        try:
            return [adapter for adapter in adapters_in(self._folder) if adapter.matches(model, tags)]
        except OSError as error:
            raise BadInput(f"cannot read {self._folder}: {error.strerror}") from None

    def push(self, folder: Path, name: str, *, replace: bool) -> str:
        target = self._folder / check_name(name)
        if target.exists() and not replace and not same_adapter(folder, target):
            raise BadInput(f"{target} is there already, and another one: give another --name, or --replace")
        copy_adapter(folder, target)
        return str(target)

    def pull(self, name: str, target: Path) -> SharedAdapter:
        source = self._folder / check_name(name)
        if not source.is_dir():
            held = ", ".join(adapter.name for adapter in self.search(None, ())) or "none"
            raise BadInput(f"there is no adapter {name!r} in {self._folder}; it has {held}")
        found = check_adapter(source)
        copy_adapter(source, target)
        return found


class GitRepository:
    """The default branch of a git repository, with a folder per adapter at its top."""

    def __init__(self, address: str) -> None:
        self._address = address

    def search(self, model: str | None, tags: tuple[str, ...]) -> list[SharedAdapter]:
        with self._copy() as folder:
            return FolderRepository(folder).search(model, tags)

    def push(self, folder: Path, name: str, *, replace: bool) -> str:
        said = ""
        for _ in range(REPOSITORY.attempts):  # somebody else may push in between
            with self._copy() as copy:
                try:
                    FolderRepository(copy).push(folder, name, replace=replace)
                except BadInput as error:
                    raise BadInput(str(error).replace(str(copy), self._address)) from None
                _git("add", "--force", "--", name, cwd=copy)
                if not _git("status", "--porcelain", cwd=copy).strip():
                    return f"{self._address} ({name} is there already, just so)"
                _git("commit", "--quiet", "--no-verify", "--message", f"Adapter {name}", cwd=copy)
                try:
                    _git("push", "--quiet", "origin", "HEAD", cwd=copy)
                    return f"{name} in {self._address}"
                except BadInput as error:
                    said = str(error)
                    if "fetch first" not in said and "non-fast-forward" not in said and "cannot lock" not in said:
                        raise
        raise BadInput(said)

    def pull(self, name: str, target: Path) -> SharedAdapter:
        with self._copy() as folder:
            try:
                return FolderRepository(folder).pull(name, target)
            except BadInput as error:
                raise BadInput(str(error).replace(str(folder), self._address)) from None

    @contextmanager
    def _copy(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="petalnode-git-") as scratch:
            folder = Path(scratch) / "copy"
            address = self._address
            # A repository on this disk, too, shall give its last commit only.
            if Path(address).is_dir():
                address = Path(address).absolute().as_uri()
            _git("clone", "--quiet", "--depth", "1", "--no-tags", "--", address, str(folder), cwd=Path(scratch))
            yield folder


def is_repository(folder: Path) -> bool:
    """Whether git can clone it: a bare repository, or the top of a work tree."""
    return (folder / ".git").exists() or all((folder / name).exists() for name in ("HEAD", "objects", "refs"))


def _git(*arguments: str, cwd: Path) -> str:
    """What the command prints.

    Raises:
        BadInput: git says no.
        MachineError: there is no git, or it does not come to an end.
    """
    git = shutil.which("git")
    if git is None:
        raise MachineError("git is not installed: install it, or share by a folder")
    environment = {
        "GIT_ALLOW_PROTOCOL": "file:git:http:https:ssh",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_SSH_COMMAND": "ssh -o BatchMode=yes",
        "GIT_AUTHOR_NAME": "petalnode",
        "GIT_AUTHOR_EMAIL": "",
        **{f"GIT_COMMITTER_{field}": value for field, value in (("NAME", "petalnode"), ("EMAIL", ""))},
    }
    if _has_identity(git, cwd):
        for role in ("AUTHOR", "COMMITTER"):
            del environment[f"GIT_{role}_NAME"], environment[f"GIT_{role}_EMAIL"]
    command = [git, "-c", "core.symlinks=false", "-c", "core.hooksPath=/dev/null", "-c", "commit.gpgSign=false"]
    try:
        done = subprocess.run(
            [*command, *arguments],
            cwd=cwd,
            env={**environment, **_own_environment(), "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=REPOSITORY.git_timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise MachineError(
            f"git {arguments[0]} took longer than {REPOSITORY.git_timeout:.0f} s: try again later"
        ) from None
    if done.returncode:
        said = [
            line for line in done.stderr.splitlines() if line.strip() and not line.startswith(("hint:", "warning:"))
        ]
        raise BadInput(f"git {arguments[0]} failed: {'; '.join(said)[:500] or 'it gave no reason'}")
    return done.stdout


def _own_environment() -> dict[str, str]:
    """The environment without variables that point git to another repository, as hooks have them."""
    leading = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_COMMON_DIR")
    return {name: value for name, value in os.environ.items() if name not in leading}


def _has_identity(git: str, cwd: Path) -> bool:
    command = [git, "config", "user.email"]
    done = subprocess.run(command, cwd=cwd, env=_own_environment(), capture_output=True, timeout=10, check=False)
    return done.returncode == 0


def _meant_folder(path: Path) -> Path | None:
    """A folder on this disk that `path`, of two names, may be mistyped for. None if there is none like it."""
    parent = path.parent
    if not parent.is_dir():
        folders = [found.name for found in Path().iterdir() if found.is_dir()]
        alike = difflib.get_close_matches(str(parent), folders, n=1, cutoff=REPOSITORY.alike)
        if not alike:
            return None
        parent = Path(alike[0])
    folders = [found.name for found in parent.iterdir() if found.is_dir()]
    alike = difflib.get_close_matches(path.name, folders, n=1, cutoff=REPOSITORY.alike)
    return parent / alike[0] if alike else parent


def repository_of(where: str, *, writes: bool = False) -> AdapterRepository:
    """The repository that a person names.

    "hub" is the hub. A folder that exists is itself, or the git repository that it is; an address with a scheme, or
    one that ends in .git, is a git repository; hub:org/name, or org/name, is one of the hub. All else is a folder to be
    made. With `writes`, org/name is one of the hub only if it cannot be meant for a folder. What is shared there is
    public.

    Raises:
        BadInput: none of them.
    """
    path = Path(where).expanduser()
    if not where or where.startswith("-"):
        raise BadInput(f"{where!r} is no place: give a folder, a git repository, or 'hub'")
    if where == HUB:
        return HubRepository(None)
    if path.is_dir():
        return GitRepository(str(path.absolute())) if is_repository(path) else FolderRepository(path)
    if path.exists():
        raise BadInput(f"{path} is a file: give a folder, a git repository, or 'hub'")
    if _URL.fullmatch(where):
        return GitRepository(where)
    if "://" in where:
        raise BadInput(f"{where} cannot be used: git repositories go by https, ssh, git or file")
    if where.endswith(".git"):
        raise BadInput(f"there is no git repository {path}: make it with `git init --bare {path}`")
    if (named := where.removeprefix(f"{HUB}:")) != where:
        if not _HUB_ID.fullmatch(named):
            raise BadInput(f"{where} names no repository of the hub: give {HUB}:ORG/NAME")
        return HubRepository(named)
    if _HUB_ID.fullmatch(where):
        if writes and (meant := _meant_folder(Path(where))):
            raise BadInput(
                f"there is no folder {where}, but there is {meant}: give that one, ./{where} to make a folder, or "
                f"{HUB}:{where} to share it on the hub"
            )
        return HubRepository(where)
    return FolderRepository(path)
