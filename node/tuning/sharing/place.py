"""Where adapters are shared: a folder, a git repository or the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, Protocol

from ...errors import BadInput
from .adapter_files import SharedAdapter, adapters_in, check_adapter, check_name, copy_adapter, same_adapter

HUB: Final = "hub"
_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_URL: Final = re.compile(r"(https?|ssh|git|file)://.+|[\w.-]+@[\w.-]+:.+")


class AdapterRepository(Protocol):
    """What can be done at one of them. All raise BadInput, or MachineError where this machine cannot."""

    def search(self, model: str | None, tags: tuple[str, ...]) -> list[SharedAdapter]: ...

    def push(self, folder: Path, name: str, *, replace: bool) -> str:
        """Puts the adapter in `folder` there; returns where it is, for people."""
        ...

    def pull(self, name: str, target: Path) -> SharedAdapter:
        """Fetches an adapter into the folder `target`."""
        ...


def repository_of(where: str) -> AdapterRepository:
    """The place that a person means.

    "hub" is the hub; a folder that exists is itself, or the git repository that it is; an address with a scheme, or
    one that ends in .git, is a git repository; org/name is one of the hub; all else is a folder to be made.

    Raises:
        BadInput: none of them.
    """
    from .git_place import GitRepository, is_repository
    from .hub_place import HubRepository

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
    if _HUB_ID.fullmatch(where):
        return HubRepository(where)
    return FolderRepository(path)


class FolderRepository:
    """A folder with a folder for each adapter."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def search(self, model: str | None, tags: tuple[str, ...]) -> list[SharedAdapter]:
        if not self._folder.is_dir():
            raise BadInput(f"there is no folder {self._folder}")
        try:
            return [each for each in adapters_in(self._folder) if each.matches(model, tags)]
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
            held = ", ".join(each.name for each in self.search(None, ())) or "none"
            raise BadInput(f"there is no adapter {name!r} in {self._folder}; it has {held}")
        found = check_adapter(source)
        copy_adapter(source, target)
        return found
