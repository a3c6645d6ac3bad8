"""Digests of random products and steps by every kind of instructions here, and by all others on emulated ones.

    python -m tests.parity.same_bits PRODUCTS STEPS [--seed N] [--names plainfma avx2 avx512 neon]

A product is one of a matrix and a row, a step one of a session through two blocks. They are computed in parts of
100,000 and 1,000, each by a seed of its own; each prints a line, and the last one a digest of all of them, by which
runs on several machines are compared. `--seed` goes on where another run was ended; without it, first of all a bit of
an answer is changed by each kind of instructions here, and found by the ARM one. Those for ARM need qemu-aarch64 and
a compiler; where the processor lacks AVX-512 or VNNI, `emulated.h` has the kernels for them computed by AVX2 (gcc).
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Final

import torch

from petalnode.node.blocks.kernels.library import FLAGS, ISAS, VECTORS, Library, compiler, library
from petalnode.node.verification.judging import judge_bits

WIDE: Final = ("avxvnni", "avx512", "avx512vnni")
SOURCE = Path(__file__).with_name("digests.c")
PART: Final = (100_000, 1_000)
Digests = dict[str, tuple[str, str]]
"""Of products, and of these and the steps, by instructions."""


def digests(
    kernels: Library, seed: int, products: int, steps: int, names: Iterable[str] = ISAS, function: str = "vectors"
) -> Digests:
    """As a function of vectors.h has them; the last instructions stay selected."""
    made: Digests = {}
    for isa in filter(kernels.select, names):
        found = (ctypes.c_uint64 * 2)()
        getattr(kernels.functions, f"petalnode_{function}")(seed, products, steps, ctypes.byref(found))
        made[isa] = f"{found[0]:016x}", f"{found[1]:016x}"
    return made


def program(found: str, into: Path, *more: str) -> Path:
    flags = [flag for flag in FLAGS if flag not in ("-fPIC", "-shared")]
    subprocess.run([found, *flags, *more, "-static", str(SOURCE), "-o", str(into)], check=True)
    return into


def answers(command: Sequence[str], seed: int, isa: str) -> torch.Tensor:
    """Of a session, float32 [1, tokens, 256]."""
    run = subprocess.run([*command, str(seed), isa], stdout=subprocess.PIPE, check=True)
    return torch.frombuffer(bytearray(run.stdout), dtype=torch.float32).view(1, -1, 256)


def convict(own: Path, arm: Sequence[str], names: Iterable[str], seed: int) -> None:
    """A server with these instructions changes one bit of its answers; who computes them again has those of ARM."""
    right = answers(arm, seed, "neon")
    for isa in names:
        claimed = answers([str(own)], seed, isa)
        honest = judge_bits(claimed, right)
        place, bit = random.randrange(claimed.numel()), random.randrange(31)
        claimed.view(torch.int32).view(-1)[place] ^= 1 << bit
        found = judge_bits(claimed, right)
        print(f"{isa}, judged by neon: {honest.reason}; with bit {bit} of value {place} changed: {found.reason}")
        if honest.result != "ok" or not (found.result == "faulty" and found.one_bit):
            sys.exit("which is not as it should be")


def everywhere(
    kernels: Library, emulators: Mapping[str, Sequence[str]], seed: int, size: tuple[int, int], names: Sequence[str]
) -> Digests:
    """By this processor and by emulated ones, side by side; by seed 0 those of docs/exact.md."""
    runs = {}
    for processor, command in emulators.items():
        own = names if seed == 0 or processor != "arm64" else [name for name in names if name.startswith("neon")]
        call = [*command, *map(str, (seed, *size)), *own]
        runs[processor] = subprocess.Popen(call, stdout=subprocess.PIPE, text=True)
    if seed:
        found = digests(kernels, seed, *size, names, "many")
    else:
        found = digests(kernels, VECTORS.seed, VECTORS.products, VECTORS.steps, names)
    for processor, run in runs.items():
        printed, _ = run.communicate()
        if run.returncode:
            sys.exit(f"{processor}: {run.returncode}")
        found |= {f"{name} ({processor})": (one, other) for name, one, other in map(str.split, printed.splitlines())}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("products", type=int)
    parser.add_argument("steps", type=int)
    parser.add_argument("--seed", type=int, default=0, help="0: first of all those of docs/exact.md")
    parser.add_argument("--names", nargs="+", choices=ISAS, default=[name for name in ISAS if name != "plain"])
    options = parser.parse_args()
    kernels = library()
    if kernels is None:
        sys.exit("the kernels are not built (make setup, with a C compiler)")
    products = steps = 0
    every = hashlib.sha256()
    with tempfile.TemporaryDirectory() as folder:
        emulators = {}
        if options.seed == 0 or any(name.startswith("neon") for name in options.names):
            emulators["arm64"] = "qemu-aarch64", str(program("aarch64-linux-gnu-gcc", Path(folder) / "arm"))
        if kernels.select("avx2") and any(name in WIDE and not kernels.select(name) for name in options.names):
            emulators["by AVX2"] = (str(program("gcc", Path(folder) / "wide", "-DEMULATED")),)
        if options.seed == 0:
            own = program(compiler() or "cc", Path(folder) / "own")
            convict(own, emulators["arm64"], filter(kernels.select, options.names), seed=1)
        for seed in count(options.seed):
            size = min(PART[0], options.products - products), min(PART[1], options.steps - steps)
            if max(size) <= 0:
                break
            found = everywhere(kernels, emulators, seed, size, options.names)
            if seed:
                products, steps = products + max(0, size[0]), steps + max(0, size[1])
            if len(set(found.values())) > 1:
                sys.exit(f"seed {seed}: they differ: {found}")
            told = " ".join(next(iter(found.values())))
            print(f"seed {seed}, {products} products, {steps} steps: {told} by {', '.join(found)}", flush=True)
            every.update(told.encode())
    print(f"seeds {options.seed} .. {seed - 1}: {every.hexdigest()[:16]}")


if __name__ == "__main__":
    main()
