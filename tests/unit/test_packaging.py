"""What the build puts into the wheel, what a checkout is beside an installed one, and what a release asks for."""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from petalnode.node import network
from petalnode.node.blocks.kernels import library
from tests.import_graph import ROOT

PACKAGING = ROOT / "packaging"


def test_files_are_added_to_wheel_and_its_record(tmp_path: Path) -> None:
    wheel, record = tmp_path / "a-1-py3-none-any.whl", "a-1.dist-info/RECORD"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("a/__init__.py", "x = 1\n")
        archive.writestr(record, f"a/__init__.py,sha256=abc,6\n{record},,\n")
    # In a process of its own: setuptools cannot be imported once the standard library's distutils has been.
    added = {"a/bundled/b.py": b"y = 2\n", "a/odd, name": b""}
    script = (
        f"import sys; sys.path.insert(0, {str(PACKAGING)!r}); import build_backend, pathlib; "
        f"build_backend.add_files(pathlib.Path({str(wheel)!r}), {added!r}); "
        f"print(build_backend.digest({added['a/bundled/b.py']!r}))"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    with zipfile.ZipFile(wheel) as archive:
        assert archive.testzip() is None
        assert set(archive.namelist()) == {"a/__init__.py", record, "a/bundled/b.py", "a/odd, name"}
        assert archive.read("a/bundled/b.py") == b"y = 2\n"
        rows = list(csv.reader(archive.read(record).decode().splitlines()))
    assert ["a/bundled/b.py", done.stdout.strip(), "6"] in rows
    assert ["a/odd, name", "sha256=47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU", "0"] in rows
    assert [record, "", ""] in rows


_BUILD = """
import json, pathlib, sys, zipfile
sys.path.insert(0, {packaging!r})
import build_backend

def setuptools_build(folder, settings, metadata):
    (tag,) = [option.partition("=")[2] for option in settings.get("--build-option", [])] or ["any"]
    name = f"a-1-py3-none-{{tag.replace('-', '_').replace('.', '_')}}.whl"
    with zipfile.ZipFile(pathlib.Path(folder) / name, "w") as archive:
        archive.writestr("a-1.dist-info/WHEEL", f"Root-Is-Purelib: true\\nTag: {{name[4:-4]}}\\n")
        archive.writestr("a-1.dist-info/RECORD", "a-1.dist-info/WHEEL,sha256=x,1\\na-1.dist-info/RECORD,,\\n")
    return name

build_backend.HERE = pathlib.Path({checkout!r}, "packaging")
build_backend.build_meta.build_wheel = setuptools_build
build_backend.bundled = lambda: {{"libp2p/__init__.py": b""}}
name = build_backend.build_wheel({out!r})
with zipfile.ZipFile(pathlib.Path({out!r}, name)) as archive:
    texts = {{path: archive.read(path).decode() for path in archive.namelist()}}
print("\\n" + json.dumps([name, texts]))
"""


def copy_kernels(checkout: Path) -> None:
    """Makes a folder a checkout, of which nothing but the kernels is there."""
    kernels = checkout / "node" / "blocks" / "kernels"
    kernels.mkdir(parents=True)
    for file in (ROOT / "node" / "blocks" / "kernels").glob("*.*"):
        if file.suffix in (".py", ".c", ".h"):
            (kernels / file.name).write_bytes(file.read_bytes())
    (checkout / "pyproject.toml").touch()


@pytest.mark.parametrize("compiler", ["true", "false"])
def test_wheel_with_kernels_is_for_its_platform(compiler: str, tmp_path: Path) -> None:
    """One that is made without a compiler has no compiled file and is for all platforms."""
    copy_kernels(tmp_path)
    (tmp_path / "build" / "lib").mkdir(parents=True)
    (tmp_path / "build" / "lib" / "petalnode_kernels.so").write_text("of another version")
    cc = tmp_path / "cc"
    cc.write_text('#!/bin/sh\nfor target; do :; done; echo compiled > "$target"\n' if compiler == "true" else "")
    cc.chmod(0o755)
    script = _BUILD.format(packaging=str(PACKAGING), checkout=str(tmp_path), out=str(tmp_path))
    told = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, env=os.environ | {"CC": str(cc)}
    ).stdout
    name, texts = json.loads(told.splitlines()[-1])
    (about,) = (texts[path] for path in texts if path.endswith("/WHEEL"))
    compiled = [path for path in texts if path.startswith("petalnode/node/blocks/kernels/")]
    assert not (tmp_path / "build" / "lib").exists()
    if compiler == "true":
        assert compiled == [f"petalnode/node/blocks/kernels/{library.SHIPPED.name}"]
        assert not name.endswith("-any.whl") and "Root-Is-Purelib: false" in about
    else:
        assert not compiled and name.endswith("-any.whl") and "Root-Is-Purelib: true" in about
        assert "kernels: not built, torch computes" in told
    assert name[4:-4] in about
    rows = {row[0]: row[1:] for row in csv.reader(texts["a-1.dist-info/RECORD"].splitlines())}
    assert set(rows) == set(texts)
    if compiled:
        sha = base64.urlsafe_b64encode(hashlib.sha256(b"compiled\n").digest()).rstrip(b"=").decode()
        assert rows[compiled[0]] == [f"sha256={sha}", "9"]


@pytest.mark.parametrize("tag", ["macosx_11_0_arm64", "win_amd64", "solaris"])
def test_other_systems_wheel_has_kernels_by_zig(tag: str, tmp_path: Path) -> None:
    copy_kernels(tmp_path)
    (tmp_path / "ziglang").mkdir()
    (tmp_path / "ziglang" / "__init__.py").touch()
    zig = tmp_path / "ziglang" / "zig"
    zig.write_text('#!/bin/sh\nfor target; do :; done; echo "$@" > "$target"\n')
    zig.chmod(0o755)
    script = _BUILD.format(packaging=str(PACKAGING), checkout=str(tmp_path), out=str(tmp_path))
    script = script.replace(
        f"build_wheel({str(tmp_path)!r})", f"build_wheel({str(tmp_path)!r}, {{'platform': {tag!r}}})"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(tmp_path), "CC": "/bin/false"},
    )
    if tag == "solaris":
        assert done.returncode and "platform=solaris: not one of manylinux_2_17_x86_64" in done.stderr
        return
    name, texts = json.loads(done.stdout.splitlines()[-1])
    assert name == f"a-1-py3-none-{tag}.whl"
    ((path, flags),) = ((path, text) for path, text in texts.items() if path.startswith("petalnode/node/blocks/"))
    target, suffix = library.TARGETS[tag]
    assert path.endswith(f"petalnode_kernels{suffix}") and f"cc -target {target} -s" in flags
    assert ("-fPIC" in flags) == (tag != "win_amd64")


@pytest.mark.parametrize(
    ("cc", "platform", "asked"), [("", "", True), ("false", "", False), ("false", "win_amd64", True)]
)
def test_zig_is_asked_for_only_where_it_compiles(tmp_path: Path, cc: str, platform: str, asked: bool) -> None:
    script = (
        f"import sys; sys.path.insert(0, {str(PACKAGING)!r}); import build_backend; "
        f"print(build_backend.get_requires_for_build_wheel({{'platform': {platform!r}}} if {platform!r} else None))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "CC"} | {"PATH": str(tmp_path)}
    told = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        env=environment | ({"CC": cc} if cc else {}),
    ).stdout
    assert ("ziglang" in told) == asked


def test_wheels_own_parts_precede_installed_ones(tmp_path: Path) -> None:
    path = ["installed"]
    network._add_to_path([tmp_path / "none"], path)
    assert path == ["installed"]
    for _ in range(2):  # a second import changes nothing
        network._add_to_path([tmp_path / "none", tmp_path, tmp_path.parent], path)
        assert path == [str(tmp_path), "installed", str(tmp_path / "fallback")]


_WHERE = """
import petalnode
from petalnode import PetalnodeError, __version__
from petalnode.node import errors, network
from petalnode.node.cli import deferred
deferred.defer()  # as commands do: the rest of libp2p takes two seconds
from petalnode.protocols import framing
from petalnode.crypto import identity
import libp2p.host, fastecdsa.keys
print(*(module.__file__ for module in (petalnode, errors, framing, identity, libp2p)), sep="\\n")
"""


@pytest.mark.parametrize(
    ("start", "bundled"),
    [
        ("in the checkout", "of the wheel"),
        ("in the checkout", "of an editable install"),
        ("in the checkout", "installed"),
        ("elsewhere", "of the wheel"),
        ("elsewhere", "installed"),
    ],
)
def test_checkout_is_whole_package_whatever_is_installed(tmp_path: Path, start: str, bundled: str) -> None:
    """Python finds the checkout's face before the package that is installed; the checkout's rooms belong to it."""
    checkout, site = tmp_path / "petal-node", tmp_path / "site"
    installed, elsewhere = site / "petalnode", tmp_path / "home"
    elsewhere.mkdir()
    for folder, rooms in ((checkout, checkout), (site, installed)):
        (folder / "petalnode").mkdir(parents=True)
        for file in (ROOT / "petalnode").glob("*.py"):
            (folder / "petalnode" / file.name).symlink_to(file)
        for room in ("node", "protocols", "crypto"):
            (rooms / room).symlink_to(ROOT / room)
    brought = {"of the wheel": installed / "bundled", "of an editable install": checkout / "build" / "bundled"}
    target = brought.get(bundled, site)
    fallback = target if target == site else target / "fallback"
    fallback.mkdir(parents=True, exist_ok=True)
    (fallback / "fastecdsa").symlink_to(PACKAGING / "fastecdsa")
    libp2p = Path(next(iter(importlib.import_module("libp2p").__path__)))
    for source in (libp2p, *libp2p.parent.glob("libp2p-*.dist-info")):
        (target / source.name).symlink_to(source)
    # No .pth file is read from there, so that the editable install of the tests plays no part.
    dependencies = Path(importlib.import_module("trio").__file__ or "").parents[1]
    done = subprocess.run(
        [sys.executable, "-S", "-c", _WHERE],
        cwd=checkout if start == "in the checkout" else elsewhere,
        env=os.environ | {"PYTHONPATH": f"{site}{os.pathsep}{dependencies}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    rooms = checkout if start == "in the checkout" else installed
    face = checkout / "petalnode" if start == "in the checkout" else installed
    assert [Path(line) for line in done.stdout.splitlines()] == [
        face / "__init__.py",
        rooms / "node" / "errors.py",
        rooms / "protocols" / "framing.py",
        rooms / "crypto" / "identity.py",
        target / "libp2p" / "__init__.py",
    ]


# No module of libp2p that petalnode imports needs these.
NOT_IMPORTED = {"fastecdsa", "grpcio", "lru-dict", "mypy-protobuf", "rpcudp", "types-requests"}


def test_what_libp2p_requires_is_required() -> None:
    """The wheel has libp2p without its metadata being seen by pip."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ours = {canonicalize_name(entry.name): entry for entry in map(Requirement, project["dependencies"])}
    for theirs in map(Requirement, metadata.requires("libp2p") or ()):
        name = canonicalize_name(theirs.name)
        if theirs.marker is not None and not theirs.marker.evaluate({"extra": ""}):
            continue
        if name in NOT_IMPORTED:
            assert name not in ours
            continue
        assert name in ours, f"libp2p requires {theirs}"
        least = [part.version for part in ours[name].specifier if part.operator in (">=", "==")]
        assert least and all(theirs.specifier.contains(version) for version in least), (str(theirs), str(ours[name]))


def test_libp2p_of_wheel_is_that_of_tests() -> None:
    pinned = (PACKAGING / "bundled.txt").read_text().splitlines()[-1].split()[0]
    assert Requirement(pinned).specifier.contains(metadata.version("libp2p"))
    assert f"\n{pinned}\n" in (PACKAGING / "constraints.txt").read_text()


def git(folder: Path, *arguments: str) -> None:
    who = (
        "-c",
        "user.name=n",
        "-c",
        "user.email=n@example.org",
        "-c",
        "commit.gpgsign=false",
        "-c",
        "tag.gpgsign=false",
    )
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.mark.parametrize(
    ("version", "mistake", "says"),
    [
        ("1.2", "", "1.2 is no version"),
        ("1.2.3", "pyproject.toml", "pyproject.toml has another version"),
        ("1.2.3", "node/version.py", "node/version.py has another version"),
        ("1.2.3", "CHANGELOG.md", "CHANGELOG.md has no section ## [1.2.3]"),
        ("1.2.3", "other", "there are changes that are not committed"),
        ("1.2.3", "tag", "the tag v1.2.3 exists"),
    ],
)
def test_a_release_that_is_not_prepared_is_refused(tmp_path: Path, version: str, mistake: str, says: str) -> None:
    files = {
        "packaging/release.sh": (PACKAGING / "release.sh").read_text(),
        "pyproject.toml": 'version = "1.2.3"\n',
        "node/version.py": '__version__ = "1.2.3"\n',
        "CHANGELOG.md": "## [1.2.3] - 2030-01-01\n",
        "Makefile": "setup check-wheels:\n\tfalse\n",  # nothing is built here, whatever is refused or not
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("" if name == mistake else text)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "a")
    if mistake == "other":
        (tmp_path / "other").touch()
    if mistake == "tag":
        git(tmp_path, "tag", "-a", "v1.2.3", "-m", "a")
    result = subprocess.run(["bash", "packaging/release.sh", version], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 2 and f"release: {says}" in result.stderr, result
    assert len(result.stderr.splitlines()) == 1


def test_a_clean_install_wants_to_know_from_where(tmp_path: Path) -> None:
    script, empty = PACKAGING / "clean_install.sh", {"PATH": "/usr/bin:/bin", "TMPDIR": str(tmp_path)}
    result = subprocess.run(["bash", str(script)], env=empty, capture_output=True, text=True)
    assert result.returncode and "source, wheel, locked, compiled or wheelhouse" in result.stderr
    assert not list(tmp_path.iterdir())


def test_the_source_distribution_has_the_build_backend() -> None:
    assert "graft packaging" in (ROOT / "MANIFEST.in").read_text()
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]
    assert (ROOT / build["backend-path"][0] / f"{build['build-backend']}.py").is_file()


def test_dockerfile_copies_what_exists_with_shell_commands() -> None:
    """It is not built here: the image that it begins with comes from no package registry."""
    lines = (PACKAGING / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    steps = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    runs = [rest for step, rest in steps if step == "RUN"]
    assert len(runs) == 5
    for run in runs:
        subprocess.run(["bash", "-n", "-c", run], check=True)
    copied = [rest.split()[0] for step, rest in steps if step == "COPY" and not rest.startswith("--from")]
    assert copied and all((ROOT / path).exists() for path in copied)
    assert not any("build-essential" in run for run in runs)
    assert "\ntorch==" in (PACKAGING / "constraints.txt").read_text()  # which a step looks for


def test_every_file_of_the_pages_is_package_data() -> None:
    """Which setuptools puts into the wheel and into the source distribution."""
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    room = ROOT / "node" / "web"
    matched = {path for pattern in data["package-data"]["petalnode.node.web"] for path in room.glob(pattern)}
    assert matched == set((room / "static").iterdir())
    assert "petalnode.node.web" in data["packages"]
