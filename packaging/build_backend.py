"""The build backend (PEP 517 and 660): that of setuptools, and libp2p inside the wheel.

libp2p requires fastecdsa 2.3.2, which has wheels for hardly any platform and is compiled against GMP elsewhere. pip
cannot leave out a requirement of a requirement, so whatever requires libp2p needs a compiler. petalnode does not
require libp2p but brings it along in `petalnode/bundled`: unchanged, as the package registry has it, checked by hash
(bundled.txt), with its licences. `petalnode/bundled/fallback` has a `fastecdsa` in pure Python (packaging/fastecdsa),
which is used where the real one is not installed. An editable install has both in build/bundled, and a .pth file that
leads there.

A build backend is not told the options of pip's command line: to fetch libp2p from elsewhere, set PIP_INDEX_URL,
PIP_FIND_LINKS or pip's configuration.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from setuptools import build_meta
from setuptools.build_meta import (
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

HERE: Final = Path(__file__).resolve().parent
FALLBACK: Final = "fallback"
_WANTED: Final = ("libp2p/", "libp2p-")  # its wheel has folders `docs`, `examples` and `interop` too
_UNWANTED: Final = ("RECORD", "entry_points.txt", "top_level.txt")  # of its dist-info: the commands are not installed


def build_wheel(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    name: str = build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)
    add_files(Path(wheel_directory) / name, {f"petalnode/bundled/{path}": data for path, data in bundled().items()})
    return name


def build_editable(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    name: str = build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
    folder = HERE.parent / "build" / "bundled"
    shutil.rmtree(folder, ignore_errors=True)
    for path, data in bundled().items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    # Lines of a .pth file are searched after site-packages: what is installed there comes first.
    add_files(Path(wheel_directory) / name, {"petalnode_bundled.pth": f"{folder}\n{folder / FALLBACK}\n".encode()})
    return name


def bundled() -> dict[str, bytes]:
    """The files of `petalnode/bundled`, by path.

    Raises:
        SystemExit: libp2p cannot be fetched.
    """
    files = {}
    with tempfile.TemporaryDirectory() as scratch, zipfile.ZipFile(_fetched(Path(scratch))) as wheel:
        for name in wheel.namelist():
            if name.startswith(_WANTED) and not name.endswith(("/", *_UNWANTED)):
                files[name] = wheel.read(name)
    for path in sorted((HERE / "fastecdsa").rglob("*.py")):
        files[f"{FALLBACK}/{path.relative_to(HERE).as_posix()}"] = path.read_bytes()
    return files


def _fetched(folder: Path) -> Path:
    """The wheel of libp2p, downloaded into `folder`."""
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:", "--require-hashes"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder)]
    result = subprocess.run([*command, "--requirement", str(HERE / "bundled.txt")], stderr=subprocess.PIPE, text=True)
    wheels = list(folder.glob("*.whl"))
    if result.returncode or not wheels:
        reason = [line for line in result.stderr.splitlines() if line.startswith("ERROR")] or ["pip gave no reason"]
        raise SystemExit(
            f"libp2p, which the wheel of petalnode contains, could not be fetched: {reason[0]}\n"
            "Another registry: PIP_INDEX_URL=URL; a folder of wheels: PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER."
        )
    return wheels[0]


def add_files(wheel: Path, files: Mapping[str, bytes]) -> None:
    """Adds files, by their path inside, to a wheel and its RECORD."""
    with zipfile.ZipFile(wheel) as archive:
        entries = [(entry, archive.read(entry)) for entry in archive.infolist()]
    (record,) = (number for number, (entry, _) in enumerate(entries) if entry.filename.endswith(".dist-info/RECORD"))
    listed, rows = entries.pop(record)
    text = io.StringIO(rows.decode(), newline="")
    text.seek(0, io.SEEK_END)
    csv.writer(text, lineterminator="\n").writerows((path, digest(data), len(data)) for path, data in files.items())
    added = [(zipfile.ZipInfo(path, date_time=listed.date_time), data) for path, data in files.items()]
    made = wheel.with_suffix(".made")
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for entry, data in [*entries, *added, (listed, text.getvalue().encode())]:
            entry.external_attr = entry.external_attr or 0o644 << 16
            archive.writestr(entry, data, zipfile.ZIP_DEFLATED)
    made.replace(wheel)


def digest(data: bytes) -> str:
    """As a wheel's RECORD has it."""
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
