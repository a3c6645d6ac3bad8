"""Adapters on the Hugging Face hub: a repository per adapter, found by tags."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, TypeVar

from ..errors import BadInput, PetalnodeError
from .adapter_files import FILES, MAX_FILE_BYTES, SharedAdapter, check_adapter, copy_adapter

T = TypeVar("T")

FOUND_AT_MOST: Final = 100
_VERSION_TAG: Final = "model-version:"
_BASE_TAG: Final = "base_model:"
_METHODS: Final = ("lora", "prompt", "deep-prompt")
_TIMEOUT_S: Final = 10.0


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

        def ask() -> Any:
            # One request: HfApi.list_models asks an unreachable hub for half a minute.
            asked: dict[str, Any] = {"filter": wanted, "limit": FOUND_AT_MOST, "search": self._repository or ""}
            address = f"{constants.ENDPOINT}/api/models"
            response = get_session().get(address, params=asked, headers=build_hf_headers(), timeout=_TIMEOUT_S)
            hf_raise_for_status(response)
            return response.json()

        found = [of_tags(str(info["id"]), map(str, info.get("tags") or ())) for info in _asking(ask)]
        return [adapter for adapter in found if adapter.matches(model, ())]

    def push(self, folder: Path, name: str, *, replace: bool) -> str:
        from huggingface_hub import HfApi, constants

        if self._repository is None:
            raise BadInput("which repository of the hub? Give --to ORG/NAME")
        repository = self._repository
        with tempfile.TemporaryDirectory(prefix="petalnode-hub-") as scratch:
            copy_adapter(folder, Path(scratch))

            def upload() -> None:
                api = HfApi()
                api.create_repo(repository, exist_ok=replace)
                api.upload_folder(
                    folder_path=scratch,
                    repo_id=repository,
                    allow_patterns=list(FILES),
                    commit_message=f"Adapter {name}",
                )

            _asking(upload)
        return f"{constants.ENDPOINT}/{repository}"

    def pull(self, name: str, target: Path) -> SharedAdapter:
        from huggingface_hub import HfApi, hf_hub_download

        repository, _, revision = (self._repository or name).partition("@")
        if "/" not in repository:
            raise BadInput(f"{name!r} is no repository of the hub: give ORG/NAME")
        with tempfile.TemporaryDirectory(prefix="petalnode-hub-") as scratch:

            def download() -> None:
                info = HfApi().model_info(
                    repository, revision=revision or None, files_metadata=True, timeout=_TIMEOUT_S
                )
                for file in info.siblings or ():
                    if file.rfilename in FILES:
                        if (file.size or 0) > MAX_FILE_BYTES:
                            raise BadInput(f"{file.rfilename} of {repository} is too large for an adapter")
                        got = hf_hub_download(repository, file.rfilename, revision=info.sha, etag_timeout=_TIMEOUT_S)
                        shutil.copyfile(got, Path(scratch) / file.rfilename)

            _asking(download)
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


def _asking(ask: Callable[[], T]) -> T:
    """
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
        return ask()
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
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise BadInput(
            f"{constants.ENDPOINT} cannot be reached ({reason}): try again later, or use a folder or a git repository"
        ) from None
    finally:
        if shown:
            enable_progress_bars()
