"""What the build puts into the wheel: libp2p as it is, and a stand-in for fastecdsa that computes as the real one."""

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
from types import ModuleType
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from petalnode.node import network
from petalnode.node.blocks.kernels import library
from tests.import_graph import ROOT

PACKAGING = ROOT / "packaging"


def load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def stand_in(name: str) -> ModuleType:
    """A module of packaging/fastecdsa, beside the real one if that is installed."""
    if "stand_in" not in sys.modules:
        load("stand_in", PACKAGING / "fastecdsa" / "__init__.py")
    return importlib.import_module(f"stand_in.{name}")


def secret_of(private: int, public: tuple[int, int]) -> int:
    """The secret that OpenSSL agrees on."""
    theirs = ec.EllipticCurvePublicNumbers(*public, ec.SECP256R1()).public_key()
    return int.from_bytes(ec.derive_private_key(private, ec.SECP256R1()).exchange(ec.ECDH(), theirs), "big")


# RFC 5903, section 8.1: both sides' private keys and points, and the point they agree on.
I = 0xC88F01F510D9AC3F70A292DAA2316DE544E9AAB8AFE84049C62A9C57862D1433  # noqa: E741
R = 0xC6EF9C5D78AE012A011164ACB397CE2088685D8F06BF9BE0B283AB46476BEE53
SHARED = (
    0xD6840F6B42F6EDAFD13116E0E12565202FEF8E9ECE7DCE03812464D04B9442DE,
    0x522BDE0AF0D8585B8DEF9C183B5AE38F50235206A8674ECB5D98EDB20EB153A2,
)


def test_both_sides_agree_on_the_point_of_the_rfc() -> None:
    public = stand_in("keys").get_public_key
    for point in (public(I) * R, R * public(I), I * public(R)):
        assert (point.x, point.y) == SHARED


@pytest.mark.parametrize("scalar", [1, 2, 3, 7, -2, -1])
def test_a_multiple_of_a_point_is_that_of_openssl(scalar: int) -> None:
    keys, curve = stand_in("keys"), stand_in("curve").P256
    point = keys.get_public_key(I)
    expected = keys.get_public_key(I * scalar % curve.q)
    assert point * scalar == point * (scalar + curve.q) == expected


def test_infinity_and_points_off_the_curve_are_refused() -> None:
    point = stand_in("keys").get_public_key(I)
    with pytest.raises(ValueError):  # noqa: PT011
        point * point.curve.q
    with pytest.raises(ValueError, match="not on curve"):
        type(point)(point.x, point.y + 1)


@pytest.mark.parametrize("compressed", [False, True])
def test_public_keys_survive_their_encoding(compressed: bool) -> None:
    encoder, point = stand_in("encoding.sec1").SEC1Encoder, stand_in("keys").get_public_key(R)
    data = encoder.encode_public_key(point, compressed=compressed)
    assert len(data) == (33 if compressed else 65)
    assert encoder.decode_public_key(data, point.curve) == point


@pytest.mark.parametrize("data", [b"", b"\0", b"\x04" + bytes(64), b"\x02" + b"\xff" * 32, bytes(65)])
def test_what_is_no_public_key_is_refused(data: bytes) -> None:
    sec1 = stand_in("encoding.sec1")
    with pytest.raises(sec1.InvalidSEC1PublicKey):
        sec1.SEC1Encoder.decode_public_key(data, stand_in("curve").P256)


def test_a_new_private_key_is_in_range_and_exported_as_openssl_reads_it() -> None:
    keys, curve = stand_in("keys"), stand_in("curve").P256
    private = keys.gen_private_key(curve)
    assert 0 < private < curve.q and keys.gen_private_key(curve) != private
    read = serialization.load_pem_private_key(keys.export_key(private, curve, encoder=keys.PEMEncoder).encode(), None)
    assert isinstance(read, ec.EllipticCurvePrivateKey)
    assert read.private_numbers().private_value == private
    public = keys.get_public_key(private, curve)
    assert (public * I).x == secret_of(I, (public.x, public.y))


@pytest.mark.parametrize("number", [0, 1, 255, 256, 2**255, 2**256 - 1])
def test_the_bytes_of_an_integer_are_counted(number: int) -> None:
    assert stand_in("encoding.util").int_bytelen(number) == len(number.to_bytes(40, "big").lstrip(b"\0"))


def test_files_are_added_to_a_wheel_and_its_record(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("compiler", ["true", "false"])
def test_a_wheel_with_the_compiled_kernels_is_for_their_platform_only(compiler: str, tmp_path: Path) -> None:
    """One that is made without a compiler has no compiled file and is for all platforms."""
    kernels = tmp_path / "node" / "blocks" / "kernels"
    kernels.mkdir(parents=True)
    for file in (ROOT / "node" / "blocks" / "kernels").glob("*.*"):
        if file.suffix in (".py", ".c", ".h"):
            (kernels / file.name).write_bytes(file.read_bytes())
    (tmp_path / "pyproject.toml").touch()
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


def test_what_comes_with_the_wheel_is_found_before_what_is_installed(tmp_path: Path) -> None:
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
def test_a_checkout_is_the_whole_package_whatever_is_installed(tmp_path: Path, start: str, bundled: str) -> None:
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


def test_the_libp2p_of_the_wheel_is_that_of_the_tests() -> None:
    pinned = (PACKAGING / "bundled.txt").read_text().splitlines()[-1].split()[0]
    assert Requirement(pinned).specifier.contains(metadata.version("libp2p"))
    assert f"\n{pinned}\n" in (PACKAGING / "constraints.txt").read_text()


@pytest.fixture
def wheels() -> ModuleType:
    return load("check_wheels", PACKAGING / "check_wheels.py")


def test_the_registry_is_the_one_that_pip_is_configured_with(wheels: ModuleType) -> None:
    settings = """\
global.index-url='https://a.example/simple'
:env:.index-url='https://b.example/simple'
global.extra-index-url='file:///one https://c.example/two'
global.find-links='/opt/wheels'
install.trusted-host='c.example'
global.cert='/etc/ssl/all.crt'
freeze.timeout='10'
"""
    found = wheels.registry(settings)
    assert found.certificates == "/etc/ssl/all.crt" and not found.offline
    assert found.options() == [
        *("--default-index", "https://b.example/simple"),
        *("--index", "file:///one", "--index", "https://c.example/two"),
        *("--find-links", "/opt/wheels", "--allow-insecure-host", "c.example"),
    ]
    assert wheels.registry("").options() == []
    assert wheels.registry(":env:.no-index='1'").offline


class Answers:
    """In place of `subprocess.run`: pip and uv as they answer. Remembers what was asked."""

    def __init__(
        self,
        *,
        pip: tuple[int, str] = (0, ""),
        uv: tuple[int, str] = (0, ""),
        built: str = "any",
        stops: str = "download",
    ) -> None:
        self.pip, self.uv, self.built, self.stops = pip, uv, built, stops
        self.asked: list[list[str]] = []

    def __call__(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        assert options["timeout"] > 0 and options["env"]["CC"] == "/bin/false"
        self.asked.append(command)
        if "uv" in command:
            return subprocess.CompletedProcess(command, self.uv[0], "trio==1\ntorch==2\n", self.uv[1])
        if "wheel" in command:
            folder = Path(command[command.index("-w") + 1])
            folder.mkdir(exist_ok=True)
            (folder / f"{command[-1].partition('=')[0]}-1-py3-none-{self.built}.whl").touch()
        failed = self.pip[0] if self.stops in command else 0
        return subprocess.CompletedProcess(command, failed, "", self.pip[1])


def checked(wheels: ModuleType, monkeypatch: pytest.MonkeyPatch, answers: Answers, *options: str) -> int:
    monkeypatch.setattr(wheels.subprocess, "run", answers)
    monkeypatch.setattr(sys, "argv", ["check_wheels.py", *options])
    return wheels.main()  # type: ignore[no-any-return]


def test_every_system_and_python_is_checked_with_the_pinned_versions(
    wheels: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = Answers()
    assert checked(wheels, monkeypatch, answers) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 12 and all(line.startswith("ok") and line.endswith("2 wheels") for line in lines)
    compiled = [command for command in answers.asked if "uv" in command]
    assert {command[command.index("--python-version") + 1] for command in compiled} == {"3.11", "3.12", "3.13"}
    assert all(str(PACKAGING / "constraints.txt") in command and "--only-binary" in command for command in compiled)


def test_the_newest_versions_are_those_that_pip_takes_wheel_or_not(
    wheels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = Answers()
    assert checked(wheels, monkeypatch, answers, "--newest") == 0
    compiled = [command for command in answers.asked if "uv" in command]
    assert len(compiled) == 24 and sum("--only-binary" in command for command in compiled) == 12
    assert not any(str(PACKAGING / "constraints.txt") in command for command in answers.asked)


BROKEN = "WARNING: Retrying (Retry(total=4)) after connection broken by 'X'\nERROR: No matching distribution found"
NO_SOLUTION = "x No solution found when resolving dependencies:\n hint: network-thing has no wheels"


@pytest.mark.parametrize(
    ("answers", "code", "says"),
    [
        (Answers(uv=(1, NO_SOLUTION)), 1, "NO  Linux x86-64, Python 3.11: x No solution"),
        (Answers(uv=(2, "error: unexpected argument")), 1, "unexpected argument"),
        (Answers(uv=(2, "error: Failed to fetch: `https://a.example`")), 0, "skipped: no registry (error: Failed"),
        (Answers(pip=(1, "ERROR: No matching distribution found")), 0, "skipped: no registry (ERROR: No matching"),
        (Answers(pip=(1, BROKEN), stops="wheel"), 0, "skipped: no registry (ERROR: No matching"),
        (
            Answers(pip=(1, "ERROR: command 'cc' failed"), stops="wheel"),
            1,
            "not built without a compiler: ERROR: command",
        ),
        (Answers(built="linux_x86_64"), 1, "varint-1-py3-none-linux_x86_64.whl is for this system only"),
    ],
    ids=["no wheel", "uv fails", "registry stops", "no registry", "registry stops early", "compiles", "compiled"],
)
def test_faults_are_told_and_a_missing_registry_is_none(
    wheels: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    answers: Answers,
    code: int,
    says: str,
) -> None:
    assert checked(wheels, monkeypatch, answers) == code
    assert says in capsys.readouterr().out


def test_a_registry_that_never_answers_is_given_up(
    wheels: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        if "config" in command:
            return subprocess.CompletedProcess(command, 0, "", "")
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr(wheels.subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["check_wheels.py"])
    assert wheels.main() == 0
    assert capsys.readouterr().out == "skipped: no registry (not done in 240 s)\n"


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
    assert result.returncode and "source, wheel, compiled or wheelhouse" in result.stderr
    assert not list(tmp_path.iterdir())


def test_the_source_distribution_has_the_build_backend() -> None:
    assert "graft packaging" in (ROOT / "MANIFEST.in").read_text()
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]
    assert (ROOT / build["backend-path"][0] / f"{build['build-backend']}.py").is_file()


def test_the_dockerfile_copies_what_exists_and_its_commands_are_shell() -> None:
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
