"""Whether all that `pip install` installs comes as wheels, on every system and Python that petalnode supports.

For each pair of system and Python the requirements of pyproject.toml are resolved as they are there, from wheels only,
with the versions of constraints.txt: by `uv pip compile`, which, unlike `pip --platform`, evaluates markers such as
`sys_platform` for the other system. Little more than metadata is downloaded. The few packages that the registry has as
source only are built here without a compiler, and have to become wheels for any system. It asks the registry that pip
is configured with; where none answers it says so, and exits with 0.

    python packaging/check_wheels.py             # the pinned versions
    python packaging/check_wheels.py --newest    # the versions that `pip install petalnode` takes today
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Final

HERE: Final = Path(__file__).resolve().parent
PYTHONS: Final = ("3.11", "3.12", "3.13")
SYSTEMS: Final = {
    "Linux x86-64": "x86_64-manylinux_2_31",
    "Linux arm64": "aarch64-manylinux_2_31",
    "Windows x86-64": "x86_64-pc-windows-msvc",
    "macOS arm64": "aarch64-apple-darwin",
}
"""The names that uv has for them. PyTorch has no wheels for Macs with Intel processors."""
MACOS: Final = "14.0"  # the least that PyTorch's and bitsandbytes' wheels run on
SOURCE_ONLY: Final = ("python-baseconv", "varint")  # of libp2p's formats: some dozen lines of Python each
NO_COMPILER: Final = {"CC": "/bin/false", "CXX": "/bin/false"}
AT_ONCE: Final = 4
TIME: Final = 240.0  # seconds for all
OUT_OF_REACH: Final = re.compile(
    r"failed to fetch|request failed|timed out|connect|dns error|network|status code", re.I
)
"""In what uv says, beside "No solution found"."""
RETRIED: Final = re.compile(r"connection broken|timed out|max retries", re.I)
"""In what pip says, whatever it concludes in the end."""


class NoRegistry(Exception):
    """The registry does not answer, or not in time."""


@dataclass(frozen=True)
class Registry:
    """Where pip is told to look for packages."""

    index: str | None = None
    more: tuple[str, ...] = ()
    links: tuple[str, ...] = ()
    insecure: tuple[str, ...] = ()
    certificates: str | None = None
    offline: bool = False

    def options(self) -> list[str]:
        """The same for uv."""
        named = [("--default-index", (self.index,) if self.index else ()), ("--index", self.more)]
        named += [("--find-links", self.links), ("--allow-insecure-host", self.insecure)]
        return [text for option, values in named for value in values for text in (option, value)]


def registry(settings: str) -> Registry:
    """Reads what `pip config list` prints. What comes later in it (the environment) counts, as with pip."""
    found: dict[str, str] = {}
    order = ("global", "wheel", "install", "download", ":env:")
    lines = [match.groups() for match in re.finditer(r"^(\S+?)\.([\w-]+)=(.*)$", settings, re.M)]
    for _, name, value in sorted(lines, key=lambda line: order.index(line[0]) if line[0] in order else -1):
        found[name] = str(ast.literal_eval(value))

    def many(name: str) -> tuple[str, ...]:
        return tuple(found.get(name, "").split())

    return Registry(
        index=found.get("index-url"),
        more=many("extra-index-url"),
        links=many("find-links"),
        insecure=many("trusted-host"),
        certificates=found.get("cert"),
        offline=found.get("no-index", "").lower() in ("1", "true", "yes", "on"),
    )


class Checks:
    """One run: its scratch folder, its registry and the time that is left."""

    def __init__(self, scratch: Path, *, newest: bool) -> None:
        self.scratch, self.newest = scratch, newest
        self.until = monotonic() + TIME
        self.registry = registry(self.run([*PIP, "config", "list"]).stdout)
        self.requirements = scratch / "requirements.in"
        project = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]
        self.requirements.write_text("\n".join(project["dependencies"]) + "\n")

    def run(self, command: Sequence[str], env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """
        Raises:
            NoRegistry: the time is over.
        """
        environment = os.environ | NO_COMPILER | dict(env or {})
        left = max(0.1, self.until - monotonic())
        try:
            return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=left, check=False)
        except subprocess.TimeoutExpired:
            raise NoRegistry(f"not done in {TIME:.0f} s") from None

    def reach(self) -> None:
        """
        Raises:
            NoRegistry: pip gets nothing from it.
        """
        if self.registry.offline:
            raise NoRegistry("pip is configured with no-index")
        result = self.run([*PIP, "download", "-q", "--retries", "1", "--no-deps", "-d", str(self.scratch), "packaging"])
        if result.returncode:
            raise NoRegistry(_last(result.stderr))

    def build_source_only(self) -> Iterator[str]:
        """Builds wheels of SOURCE_ONLY; yields what is wrong with them."""
        locked, asked = (HERE / "locked" / "run.txt").read_text(), self.scratch / "requirement.txt"
        for name in SOURCE_ONLY:
            # From --hash to --hash, and nothing is fetched to build with.
            pinned = re.findall(rf"^{name}==(?:.*\\\n)*.*\n", locked, re.M)
            asked.write_text(name if self.newest else "".join(pinned))
            options = [] if self.newest else ["--require-hashes", "--use-pep517", "--no-build-isolation"]
            command = [*PIP, "wheel", "-q", "--no-deps", *options, "-w", str(self.scratch / "built"), "-r", str(asked)]
            result = self.run(command)
            if result.returncode:
                if RETRIED.search(result.stderr):
                    raise NoRegistry(_last(result.stderr))
                yield f"{name} is not built without a compiler: {_last(result.stderr)}"
        for wheel in sorted((self.scratch / "built").glob("*.whl")):
            if not wheel.name.endswith("-none-any.whl"):
                yield f"{wheel.name} is for this system only"

    def resolve(self, system: str, python: str) -> tuple[int, str]:
        """How many packages are installed there, and what is wrong ("" if nothing is).

        Raises:
            NoRegistry: it stopped answering.
        """
        pins = HERE / "constraints.txt"
        if self.newest:
            # What pip takes, wheel or not: those very versions have to have wheels.
            taken, fault = self._compile(system, python)
            if fault:
                return 0, fault
            pins = self.scratch / f"{SYSTEMS[system]}-{python}.txt"
            pins.write_text(taken)
        found, fault = self._compile(system, python, "--only-binary", ":all:", "--constraint", str(pins))
        return len(re.findall(r"^[\w.-]+ ?[=@]", found, re.M)), fault

    def _compile(self, system: str, python: str, *options: str) -> tuple[str, str]:
        """The versions that are installed, and what is wrong."""
        uv = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-config", "--no-header", "--no-annotate"]
        where = ["--python-platform", SYSTEMS[system], "--python-version", python, *self.registry.options()]
        found = ["--index-strategy", "unsafe-best-match", "--find-links", str(self.scratch / "built")]
        environment = {"MACOSX_DEPLOYMENT_TARGET": MACOS, "UV_CACHE_DIR": str(self.scratch / "cache")}
        if self.registry.certificates:
            environment["SSL_CERT_FILE"] = self.registry.certificates
        for attempt in (1, 2):
            result = self.run([*uv, *where, *found, *options, str(self.requirements)], environment)
            if not result.returncode:
                break
            if "No solution found" in result.stderr or not OUT_OF_REACH.search(result.stderr):
                return "", " ".join(result.stderr.split())
            if attempt == 2:
                raise NoRegistry(_last(result.stderr))
        return result.stdout, ""


PIP: Final = (sys.executable, "-m", "pip", "--disable-pip-version-check")


def _last(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith("error")]
    return (errors or lines or ["no reason given"])[-1]


def check(checks: Checks) -> int:
    """Prints a line per pair of system and Python; the exit code."""
    checks.reach()
    faults = 0
    for fault in checks.build_source_only():
        faults += 1
        print(f"NO  {fault}")
    pairs = [(system, python) for system in SYSTEMS for python in PYTHONS]
    with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:  # most of it is waiting for the registry
        results = pool.map(lambda pair: checks.resolve(*pair), pairs)
        for (system, python), (count, fault) in zip(pairs, results, strict=True):
            print(f"{'NO' if fault else 'ok'}  {system}, Python {python}: {fault or f'{count} wheels'}")
            faults += bool(fault)
    return 1 if faults else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--newest", action="store_true", help="not the versions of constraints.txt, but the newest")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="petalnode-wheels-") as scratch:
        try:
            return check(Checks(Path(scratch), newest=arguments.newest))
        except NoRegistry as error:
            print(f"skipped: no registry ({error})")
            return 0


if __name__ == "__main__":
    sys.exit(main())
