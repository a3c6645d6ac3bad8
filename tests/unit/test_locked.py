"""What is installed by hash: packaging/locked has all that constraints.txt pins, and another file is refused."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.import_graph import ROOT

PACKAGING = ROOT / "packaging"
LOCKED = PACKAGING / "locked"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def lock() -> ModuleType:
    sys.path.insert(0, str(PACKAGING))  # it imports check_wheels
    try:
        return importlib.import_module("lock")
    finally:
        sys.path.remove(str(PACKAGING))


def locked(lock: ModuleType, *groups: str) -> dict[str, Requirement]:
    """The requirements of some files, or of all, by name."""
    files = [LOCKED / f"{group}.txt" for group in groups] or sorted(LOCKED.glob("*.txt"))
    found = [Requirement(text) for path in files for text in lock.pins(path.read_text())]
    return {canonicalize_name(one.name): one for one in found}


def test_every_pin_and_nothing_else_has_hashes(lock: ModuleType) -> None:
    lines = (PACKAGING / "constraints.txt").read_text().splitlines()
    pinned = {canonicalize_name(one.name): str(one.specifier) for one in map(Requirement, lines[2:])}
    del pinned["libp2p"]  # bundled.txt has its hash
    assert {name: str(one.specifier) for name, one in locked(lock).items()} == pinned
    for path in LOCKED.glob("*.txt"):
        text = path.read_text()
        for requirement, hashes in lock.pins(text).items():
            assert hashes and all(re.fullmatch("sha256:[0-9a-f]{64}", one) for one in hashes), requirement
        assert "://" not in text and not re.search("^-", text, re.M)  # no registry's name, no option


def test_pyprojects_needs_are_locked_in_installed_groups(lock: ModuleType) -> None:
    project = PROJECT["project"]
    for group, extras in lock.GROUPS.items():
        wanted = [
            *project["dependencies"],
            *(one for extra in extras for one in project["optional-dependencies"][extra]),
        ]
        found = locked(lock, "run", "torch", "dev", group)
        for requirement in map(Requirement, wanted):
            assert requirement.specifier.contains(str(found[canonicalize_name(requirement.name)].specifier)[2:])
    assert set(project["optional-dependencies"]) == {extra for extras in lock.GROUPS.values() for extra in extras}


def test_what_the_build_requires_is_locked(lock: ModuleType) -> None:
    found = locked(lock, "build")
    wanted = [Requirement(one) for one in PROJECT["build-system"]["requires"]]
    assert {one.name for one in wanted} == set(found)
    assert all(one.specifier.contains(str(found[one.name].specifier)[2:]) for one in wanted)


@pytest.mark.parametrize("file", ["Makefile", "packaging/Dockerfile", "packaging/release.sh"])
def test_pip_and_npm_resolve_and_fetch_nothing_themselves(file: str) -> None:
    text = (ROOT / file).read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if not line.startswith(("#", "\t@echo"))]
    calls = [line for line in lines if re.search(r"pip (.* )?(install|wheel|download)\b", line)]
    # A wheel of torch, the one exception, is not built.
    assert calls and all(
        "--no-deps" in call and ("--no-build-isolation" in call or "torch==" in call) for call in calls
    )
    assert not re.search(r"npm.*\Winstall\b", text), "`npm ci` goes by the hashes"


def test_what_npm_installs_is_there_by_its_hash() -> None:
    for folder in (LOCKED / "npm").iterdir():
        wanted = json.loads((folder / "package.json").read_text())["dependencies"]
        packages = json.loads((folder / "package-lock.json").read_text())["packages"]
        assert packages.pop("")["dependencies"] == wanted
        versions = {name.removeprefix("node_modules/"): one["version"] for name, one in packages.items()}
        assert wanted.items() <= versions.items()
        assert all(one["integrity"].startswith("sha512-") and "resolved" not in one for one in packages.values())


def test_a_lock_is_read_as_it_is_written(lock: ModuleType) -> None:
    found = {"a==1 ; os_name == 'nt'": frozenset({"sha256:1", "sha256:0"}), "b==2": frozenset({"sha256:2"})}
    text = "a==1 ; os_name == 'nt' \\\n    --hash=sha256:0 \\\n    --hash=sha256:1\nb==2 \\\n    --hash=sha256:2\n"
    assert lock.written(found) == text and lock.pins("# a comment\n\n" + text) == found


def test_group_adds_what_earlier_lack_beside_torch(lock: ModuleType) -> None:
    one, web = frozenset({"sha256:1"}), "c==1 ; sys_platform == 'emscripten'"
    nvidia = "nvidia-x==1 ; sys_platform == 'linux'"
    first = {
        "a==1 ; os_name == 'nt'": one,
        "torch==2": one,
        nvidia: one,
        "triton==1": one,
        web: one,
        "torchfix==1": one,
    }
    assert lock.apart({"run": first, "dev": first | {"b==1": one}, "docs": {"a==1": one, "b==1": one}}) == {
        "run": {"a==1 ; os_name == 'nt'": one, "torchfix==1": one},
        "torch": {"torch==2": one},
        "cuda": {nvidia: one, "triton==1": one},
        "dev": {"b==1": one},
        "docs": {"a==1": one},
    }


def test_a_release_that_is_not_pinned_is_named(lock: ModuleType) -> None:
    assert lock.unpinned(["a-b==1 ; os_name == 'nt'", "c==2", "d==1"], "# a\nA_b==1\nc==1\n") == ["c==2", "d==1"]


def wheel(folder: Path, name: str, version: str, *requires: str) -> str:
    """Makes a wheel without code; its hash."""
    folder.mkdir(exist_ok=True)
    about = f"{name}-{version}.dist-info"
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        *(f"Requires-Dist: {one}" for one in requires),
    ]
    files = {
        "METADATA": "\n".join(lines) + "\n",
        "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in (files | {"RECORD": ""}).items():
            archive.writestr(f"{about}/{file}", text)
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("other", ["", "a", "torch", "nvidia_x"])
def test_a_file_with_another_hash_is_refused(tmp_path: Path, other: str) -> None:
    links, got = tmp_path / "links", tmp_path / "got"
    hashes = {
        "a": wheel(links, "a", "1"),
        "torch": wheel(links, "torch", "2+cpu", "nvidia-x==1"),
        "nvidia_x": wheel(links, "nvidia_x", "1"),
    }
    if other:
        hashes[other] = "0" * 64
    lines = {
        "build": f"none==1 ; os_name == 'none' --hash=sha256:{'0' * 64}",
        "run": f"a==1 --hash=sha256:{hashes['a']}",
        "torch": f"torch==2 --hash=sha256:{hashes['torch']}",
        "cuda": f"nvidia-x==1 --hash=sha256:{hashes['nvidia_x']}",
    }
    (tmp_path / "locked").mkdir()
    for group, line in lines.items():
        (tmp_path / "locked" / f"{group}.txt").write_text(line + "\n")
    script = shutil.copy(PACKAGING / "install_locked.py", tmp_path)
    environment = os.environ | {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(links)}
    command = [sys.executable, str(script), "run", "--wheels", str(got)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    names = {path.name.partition("-")[0] for path in got.glob("*.whl")}
    if not other:
        assert result.returncode == 0 and names == set(hashes), result
        return
    assert result.returncode == 1 and "DO NOT MATCH THE HASHES" in result.stderr and other not in names, result
    assert ("Another build of torch" in result.stderr) == (other == "torch")
    assert "Traceback" not in result.stderr
