"""The build backend (PEP 517 and 660): that of setuptools, and libp2p inside the wheel.

libp2p requires fastecdsa 2.3.2, which has wheels for hardly any platform and is compiled against GMP elsewhere. pip
cannot leave out a requirement of a requirement, so whatever requires libp2p needs a compiler. petalnode does not
require libp2p but brings it along in `petalnode/bundled`: unchanged, as the package registry has it, checked by hash
(bundled.txt), with its licences. `petalnode/bundled/fallback` has a `fastecdsa` in pure Python (packaging/fastecdsa),
which is used where the real one is not installed. An editable install has both in build/bundled, and a .pth file that
leads there.

The wheel also has the compiled kernels (node/blocks/kernels), and is named after the platform that they are for. Where
there is no C compiler, the package `ziglang` is asked for, which has one. CC=/bin/false: no compiled file, a wheel for
any platform, and torch computes. `--config-settings platform=TAG` makes the wheel for another system (`make wheels`).

A build backend is not told the options of pip's command line: to fetch libp2p from elsewhere, set PIP_INDEX_URL,
PIP_FIND_LINKS or pip's configuration.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.util
import io
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
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
KERNELS: Final = "node/blocks/kernels"
_WANTED: Final = ("libp2p/", "libp2p-")  # its wheel has folders `docs`, `examples` and `interop` too
_UNWANTED: Final = ("RECORD", "entry_points.txt", "top_level.txt")  # of its dist-info: the commands are not installed


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    asked: list[str] = build_meta.get_requires_for_build_wheel(_of_setuptools(config_settings))
    if "platform" in (config_settings or {}) or ("CC" not in os.environ and kernels_library().compiler() is None):
        asked.append("ziglang>=0.16,<0.18")
    return asked


def build_wheel(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    shutil.rmtree(HERE.parent / "build" / "lib", ignore_errors=True)  # else what was deleted since is in the wheel, too
    tag = (config_settings or {}).get("platform")
    compiled = compiled_kernels(tag)
    settings = _of_setuptools(config_settings)
    if compiled:
        given = settings.get("--build-option", [])
        given = given.split() if isinstance(given, str) else [*given]
        settings["--build-option"] = [f"--plat-name={tag or platform_name()}", *given]
    name: str = build_meta.build_wheel(wheel_directory, settings, metadata_directory)
    added = {f"petalnode/bundled/{path}": data for path, data in bundled().items()}
    add_files(Path(wheel_directory) / name, added | compiled, for_platform=bool(compiled))
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


def _of_setuptools(settings: Any) -> dict[str, Any]:
    return {name: value for name, value in (settings or {}).items() if name != "platform"}


def kernels_library() -> Any:
    """The module that compiles the kernels, without the package that it is of."""
    spec = importlib.util.spec_from_file_location("kernels_library", HERE.parent / KERNELS / "library.py")
    assert spec is not None and spec.loader is not None
    library = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = library  # its dataclasses look for their module
    spec.loader.exec_module(library)
    return library


def compiled_kernels(tag: str | None = None) -> dict[str, bytes]:
    """The compiled kernels, by their path in the wheel: from build/kernels, or compiled now; none if they cannot be.

    Raises:
        SystemExit: they cannot be compiled for the system that `tag` names.
    """
    library = kernels_library()
    if tag is not None and tag not in library.TARGETS:
        raise SystemExit(f"platform={tag}: not one of {', '.join(library.TARGETS)}")
    file: Path = library.built_file(tag)
    if not file.is_file() and (problem := library.build(file, tag)) is not None:
        if tag is not None:
            raise SystemExit(f"kernels for {tag}: {problem}")
        print(f"kernels: not built, torch computes: {problem}")
        return {}
    return {f"petalnode/{KERNELS}/petalnode_kernels{file.suffix}": file.read_bytes()}


def platform_name() -> str:
    """The platform of a wheel with a file that was compiled here, as setuptools' option `--plat-name` takes it."""
    if sys.platform == "darwin":  # Python's own name may be that of an older macOS, and of two kinds of processors
        return f"macosx-{platform.mac_ver()[0].partition('.')[0]}.0-{platform.machine()}"
    return sysconfig.get_platform()


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


def add_files(wheel: Path, files: Mapping[str, bytes], *, for_platform: bool = False) -> None:
    """Adds files, by their path inside, to a wheel and its RECORD. `for_platform`: it is marked as not pure Python."""
    with zipfile.ZipFile(wheel) as archive:
        entries = {entry.filename: (entry, archive.read(entry)) for entry in archive.infolist()}
    (record,) = (name for name in entries if name.endswith(".dist-info/RECORD"))
    listed, rows = entries.pop(record)
    changed = {path: (zipfile.ZipInfo(path, date_time=listed.date_time), data) for path, data in files.items()}
    about = record.removesuffix("RECORD") + "WHEEL"
    if for_platform:
        entry, data = entries[about]
        changed[about] = entry, data.replace(b"Root-Is-Purelib: true", b"Root-Is-Purelib: false")
    kept = [row for row in csv.reader(rows.decode().splitlines()) if row and row[0] not in (record, *changed)]
    text = io.StringIO(newline="")
    new = [[path, digest(data), str(len(data))] for path, (_, data) in changed.items()]
    csv.writer(text, lineterminator="\n").writerows([*kept, *new, [record, "", ""]])
    made = wheel.with_suffix(".made")
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for entry, data in [*(entries | changed).values(), (listed, text.getvalue().encode())]:
            entry.external_attr = entry.external_attr or 0o644 << 16
            archive.writestr(entry, data, zipfile.ZIP_DEFLATED)
    made.replace(wheel)


def digest(data: bytes) -> str:
    """As a wheel's RECORD has it."""
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
