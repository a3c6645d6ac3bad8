"""The digests of tests/parity/digests.c on this processor and on an emulated ARM one: `make same-bits`."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from petalnode.node.blocks.kernels.library import FLAGS, compiler

SOURCE = Path(__file__).with_name("digests.c")


def build(compiler: str, program: Path, *more: str) -> None:
    flags = [flag for flag in FLAGS if flag not in ("-fPIC", "-shared")]
    subprocess.run([compiler, *flags, *more, str(SOURCE), "-o", str(program)], check=True)


def digests(command: Sequence[str | Path], seed: int, products: int, steps: int) -> dict[str, tuple[str, str]]:
    """Of products, and of these and the steps, by instruction set."""
    run = subprocess.run([*command, str(seed), str(products), str(steps)], capture_output=True, text=True, check=True)
    return {name: (first, last) for name, first, last in map(str.split, run.stdout.splitlines())}


def main(products: int, steps: int) -> None:
    own = compiler()
    if own is None:
        sys.exit("there is no C compiler (cc, gcc, clang, or what CC names)")
    with tempfile.TemporaryDirectory() as folder:
        here, arm = Path(folder) / "here", Path(folder) / "arm"
        build(own, here)
        build("aarch64-linux-gnu-gcc", arm, "-static")
        found = {
            **digests([here], 1, products, steps),
            **{f"{name} (arm64)": both for name, both in digests(["qemu-aarch64", arm], 1, products, steps).items()},
        }
    for name, (first, last) in found.items():
        print(f"{name:20} {first} {last}")
    kept = {both for name, both in found.items() if not name.startswith("plain ") and name != "plain"}
    sys.exit(0 if len(kept) == 1 else "they differ")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
