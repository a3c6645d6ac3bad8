"""The digests of vectors.h by the compiled kernels, and by those for ARM on an emulated one: `make same-bits`."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import tempfile
from pathlib import Path

from petalnode.node.blocks.kernels.library import FLAGS, ISAS, Library, library

SOURCE = Path(__file__).with_name("digests.c")


def digests(kernels: Library, seed: int, products: int, steps: int) -> dict[str, tuple[str, str]]:
    """Of products, and of these and the steps, by instruction set; the last one stays selected."""
    made: dict[str, tuple[str, str]] = {}
    for isa in filter(kernels.select, ISAS):
        found = (ctypes.c_uint64 * 2)()
        kernels.functions.petalnode_vectors(seed, products, steps, ctypes.byref(found))
        made[isa] = f"{found[0]:016x}", f"{found[1]:016x}"
    return made


def emulated(seed: int, products: int, steps: int) -> dict[str, tuple[str, str]]:
    """The same of an ARM processor, which digests.c prints."""
    flags = [flag for flag in FLAGS if flag not in ("-fPIC", "-shared")]
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "arm"
        subprocess.run(["aarch64-linux-gnu-gcc", *flags, "-static", str(SOURCE), "-o", str(program)], check=True)
        command = ["qemu-aarch64", str(program), str(seed), str(products), str(steps)]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
    return {f"{name} (arm64)": (first, last) for name, first, last in map(str.split, run.stdout.splitlines())}


def main(products: int, steps: int) -> None:
    kernels = library()
    if kernels is None:
        sys.exit("the kernels are not built (make setup, with a C compiler)")
    found = digests(kernels, 1, products, steps) | emulated(1, products, steps)
    for name, (first, last) in found.items():
        print(f"{name:20} {first} {last}")
    kept = {both for name, both in found.items() if not name.startswith("plain ") and name != "plain"}
    sys.exit(0 if len(kept) == 1 else "they differ")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
