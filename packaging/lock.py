"""Makes packaging/locked anew: the hashes of all files of every release that constraints.txt pins.

For each group of requirements `uv pip compile --universal` says which releases are installed on which system, and asks
the registry that pip is configured with for their hashes. `dev` has what `run` lacks, the others what both lack.
`build` is what the build of petalnode requires, `torch` and `cuda` are apart for install_locked.py.

    python packaging/lock.py
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from check_wheels import PIP, Registry, registry

HERE: Final = Path(__file__).resolve().parent
LOCKED: Final = HERE / "locked"
GROUPS: Final[Mapping[str, tuple[str, ...]]] = {
    "run": (),
    "dev": ("dev",),
    "docs": ("docs",),
    "more": ("traces", "benchmarks", "webrtc"),
    "compat": ("dev",),
    "zig": (),
}
"""The extras of each group."""
EVERYWHERE: Final = ("run", "dev")  # what `make setup` installs
BESIDE: Final = {
    "zig": ("ziglang>=0.16,<0.18",),  # compiles the kernels where there is no C compiler, and for other systems
    "more": ("playwright",),  # of `make web-check`
    # of `make compat`; the source distribution of openai, for its tests, is built by hatchling
    "compat": ("aiohttp", "hatch-fancy-pypi-readme", "hatchling", "langchain-openai", "lm-eval[api]", "pytest-asyncio"),
}
"""What is no extra."""
PYTHON: Final = "3.11"
LATER: Final = {"docs": "3.11.5"}  # pymdown-extensions has no use for earlier ones
CUDA: Final = re.compile(r"(nvidia|cuda)-|triton=")  # what torch requires where it computes on NVIDIA's GPUs
ELSEWHERE: Final = "sys_platform == 'emscripten'"

Pins = dict[str, frozenset[str]]
"""Hashes by requirement with its marker, such as `a==1 ; os_name == 'nt'`."""


def pins(text: str) -> Pins:
    """Reads requirements with hashes."""
    found: Pins = {}
    for line in text.replace("\\\n", " ").splitlines():
        requirement, *hashes = line.split("--hash=")
        if requirement.strip() and not requirement.startswith("#"):
            found[requirement.strip()] = frozenset(part.strip() for part in hashes)
    return found


def written(found: Pins) -> str:
    """As pip reads it."""
    return "".join(
        f"{requirement}" + "".join(f" \\\n    --hash={one}" for one in sorted(hashes)) + "\n"
        for requirement, hashes in sorted(found.items())
    )


def apart(resolved: Mapping[str, Pins]) -> dict[str, Pins]:
    """The files: of each group what `run` and `dev` before it lack, and of all of them torch and what CUDA takes."""
    files: dict[str, Pins] = {"torch": {}, "cuda": {}}
    seen: set[str] = set()
    for group, found in resolved.items():
        files[group] = {}
        for requirement in found.keys() - seen:
            if not requirement.endswith(ELSEWHERE):
                to = "torch" if requirement.startswith("torch==") else "cuda" if CUDA.match(requirement) else group
                files[to][requirement] = found[requirement]
        if group in EVERYWHERE:
            seen |= found.keys()
    return files


def unpinned(found: Iterable[str], constraints: str) -> list[str]:
    """The requirements whose release is not in constraints.txt."""

    def name(text: str) -> str:
        return re.sub(r"[-_.]+", "-", text.partition(" ")[0].lower())

    pinned = {name(line) for line in constraints.splitlines()}
    return sorted({requirement.partition(" ")[0] for requirement in found if name(requirement) not in pinned})


def compiled(where: Registry, requirements: Iterable[str], *options: str) -> Pins:
    """
    Raises:
        SystemExit: uv finds no such releases.
    """
    # Other registries and folders than the first are for one kind of machine only.
    only = Registry(index=where.index, insecure=where.insecure)
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-config", "--no-header", "--no-annotate"]
    command += ["--universal", "--generate-hashes", "--constraint", str(HERE / "constraints.txt"), *only.options()]
    environment = dict(os.environ)
    if where.certificates:
        environment["SSL_CERT_FILE"] = where.certificates
    with tempfile.TemporaryDirectory() as scratch:
        asked = Path(scratch, "requirements.in")
        asked.write_text("\n".join(requirements) + "\n")
        result = subprocess.run([*command, *options, str(asked)], env=environment, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"lock: {result.stderr.strip()}")
    return pins("".join(line for line in result.stdout.splitlines(keepends=True) if not line.startswith("-")))


def main() -> int:
    where = registry(subprocess.run([*PIP, "config", "list"], capture_output=True, text=True, check=True).stdout)
    about = tomllib.loads((HERE.parent / "pyproject.toml").read_text())
    project, extras = about["project"], about["project"]["optional-dependencies"]
    resolved = {"build": compiled(where, about["build-system"]["requires"], "--python-version", PYTHON)}
    for group, names in GROUPS.items():
        wanted = [*project["dependencies"], *BESIDE.get(group, ()), *(one for name in names for one in extras[name])]
        resolved[group] = compiled(where, wanted, "--python-version", LATER.get(group, PYTHON))
    files = {"build": resolved.pop("build"), **apart(resolved)}
    if missing := unpinned((one for found in files.values() for one in found), (HERE / "constraints.txt").read_text()):
        raise SystemExit("lock: nothing is written. To packaging/constraints.txt add\n" + "\n".join(missing))
    (torch,) = files["torch"]
    # Wheels of torch from elsewhere, such as those for CPUs only: those in pip's folders here, and those of before.
    local = (path for folder in where.links for path in Path(folder).glob(f"{torch.replace('==', '-')}[+-]*.whl"))
    more = {f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}" for path in local}
    old = pins((LOCKED / "torch.txt").read_text()) if (LOCKED / "torch.txt").exists() else {}
    files["torch"][torch] |= more | old.get(torch, frozenset())
    LOCKED.mkdir(exist_ok=True)
    for name, found in files.items():
        (LOCKED / f"{name}.txt").write_text("# Made by packaging/lock.py.\n" + written(found))
        print(f"packaging/locked/{name}.txt: {len(found)} releases, {sum(map(len, found.values()))} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
