"""Installs what packaging/locked names, into the Python that runs this; pip refuses every file whose hash is not there.

    .venv/bin/python packaging/install_locked.py run dev               # groups: the names of the files
    .venv/bin/python packaging/install_locked.py run --wheels FOLDER   # their wheels, for another machine

pip resolves nothing and builds in no environment of its own, which it would fill with whatever the registry has. torch
is apart. pip takes the build that it finds first here: of the registry, or for CPUs only, from a folder of wheels. That
one is checked before anything of it is installed. A torch of the same version that is installed already stays.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Final

LOCKED: Final = Path(__file__).resolve().parent / "locked"
SOURCE_ONLY: Final = "python-baseconv,varint,rouge-score,sqlitedict,word2number"  # check_wheels.py's, and lm-eval's
ANOTHER_TORCH: Final = "Another build of torch: install it into this Python first; then it stays, and is not checked."


class Refused(Exception):
    """pip has said why."""


def pip(command: str, *options: str) -> None:
    """
    Raises:
        Refused: pip failed.
    """
    result = subprocess.run([sys.executable, "-m", "pip", command, "--quiet", "--disable-pip-version-check", *options])
    if result.returncode:
        raise Refused


def checked(groups: Sequence[str], wheels: str | None, *options: str) -> None:
    """Installs groups, or leaves their wheels in the folder `wheels`.

    Raises:
        Refused: a file is not there, or another one.
    """
    files = [part for group in groups for part in ("--requirement", str(LOCKED / f"{group}.txt"))]
    formats = ["--only-binary", ":all:", "--no-binary", SOURCE_ONLY, "--use-pep517", "--no-build-isolation"]
    to = ["install"] if wheels is None else ["wheel", "--wheel-dir", wheels]
    pip(*to, "--require-hashes", "--no-deps", *formats, *options, *files)


def torch(wheels: str | None) -> None:
    """Installs torch, and the CUDA libraries if it requires them.

    Raises:
        Refused: as `checked`.
    """
    (pinned,) = (line.split()[0] for line in (LOCKED / "torch.txt").read_text().splitlines() if line[:5] == "torch")
    installed = next(iter(metadata.distributions(name="torch")), None)
    requires = installed.requires if installed is not None else None
    if installed is None or wheels is not None or f"torch=={installed.version.partition('+')[0]}" != pinned:
        with tempfile.TemporaryDirectory() as scratch:
            pip("download", "--no-deps", "--only-binary", ":all:", "--dest", scratch, pinned)
            try:
                checked(["torch"], wheels, "--no-index", "--find-links", scratch)
            except Refused:
                print(ANOTHER_TORCH, file=sys.stderr)
                raise
            (found,) = metadata.distributions(name="torch", path=[str(path) for path in Path(scratch).glob("*.whl")])
            requires = found.requires
    if any(requirement.startswith(("cuda-", "nvidia-", "triton")) for requirement in requires or []):
        checked(["cuda"], wheels)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("groups", nargs="+", choices=sorted(path.stem for path in LOCKED.glob("*.txt")))
    parser.add_argument("--wheels", help="a folder for the wheels; nothing is installed but what builds them")
    arguments = parser.parse_args()
    try:
        checked(["build"], None)
        if "run" in arguments.groups:
            torch(arguments.wheels)
        checked(arguments.groups, arguments.wheels)
    except Refused:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
