"""The compiled kernels (`kernels.c`): finding them, building them, and calling them by ctypes.

They are never required: without them, or on a processor for which they were not built, torch computes. `make setup`
compiles them into build/kernels. The build of a wheel puts them beside this file (packaging/build_backend.py, which
runs this module alone). Where there is no C compiler, the compiler of the package `ziglang` does it, which also
compiles for other systems. Nothing is compiled when a program starts.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Final

_log = logging.getLogger(__name__)

SOURCE: Final = Path(__file__).with_name("kernels.c")
HEADERS: Final = (
    "plain.h",
    "x86.h",
    "arm.h",
    "products.h",
    "tiles.h",
    "bytes.h",
    "cache.h",
    "ahead.h",
    "pages.h",
    "rotary.h",
    "step.h",
    "attention.h",
    "latent.h",
    "recurrent.h",
    "packing.h",
    "threads.h",
    "vectors.h",
)
INTERFACE: Final = 17
"""As in kernels.c: goes up whenever a function or structure there changes."""
ISA_VARIABLE: Final = "PETALNODE_KERNELS_ISA"
"""One of `ISAS`, in place of the best that the processor has: for comparisons. `none`: no kernels."""
ISAS: Final = ("plain", "plainfma", "avx2", "avxvnni", "avx512", "avx512vnni", "neon", "neondot")
NOT_HERE: Final = (
    "--kernels native: the compiled kernels are not here; install the wheel named after this system, build them "
    "(`make setup`, `pip install .`), or take --kernels auto"
)
WITHOUT: Final = (
    "the compiled kernels are not here: torch computes, and a token takes two to four times as long on a CPU"
)
TO_HAVE: Final = (
    "install the wheel that is named after this system, or build them: `make setup` in a checkout, or `pip install .`"
)
MOST_THREADS: Final = 8
FLAGS: Final = (
    "-std=c11", "-O2", "-ftree-vectorize", "-ffp-contract=off", "-fno-math-errno", "-pthread", "-fPIC", "-shared",
)  # fmt: skip
_MOST_SECONDS: Final = 600
TARGETS: Final = {
    "manylinux_2_17_x86_64": ("x86_64-linux-gnu.2.17", ".so"),
    "manylinux_2_17_aarch64": ("aarch64-linux-gnu.2.17", ".so"),
    "macosx_11_0_x86_64": ("x86_64-macos.11.0", ".dylib"),
    "macosx_11_0_arm64": ("aarch64-macos.11.0", ".dylib"),
    "win_amd64": ("x86_64-windows-gnu", ".dll"),
}
"""What zig calls the systems that wheels are made for, and how a library ends there; by the wheel's tag."""
_SUFFIX: Final = {"win32": ".dll", "darwin": ".dylib"}.get(sys.platform, ".so")
SHIPPED: Final = Path(__file__).with_name(f"petalnode_kernels{_SUFFIX}")
"""Where a wheel has the library."""


class Matrix(ctypes.Structure):
    """`struct matrix`: a weight matrix in one of its forms. Whoever makes it keeps the memory alive."""

    _fields_ = (
        ("form", ctypes.c_int32), ("out", ctypes.c_int32), ("in_", ctypes.c_int32), ("block", ctypes.c_int32),
        ("codes", ctypes.c_void_p), ("scales", ctypes.c_void_p), ("offsets", ctypes.c_void_p),
        ("bias", ctypes.c_void_p), ("rounds", ctypes.c_int64),
    )  # fmt: skip


class Row(ctypes.Structure):
    """`struct row`: one row of a batch of decode steps, and its session's cache."""

    _fields_ = (
        ("memory", ctypes.c_void_p), ("batch", ctypes.c_int64), ("row", ctypes.c_int64),
        ("max_length", ctypes.c_int64), ("length", ctypes.c_int64), ("padding", ctypes.c_int64),
        ("states", ctypes.c_void_p),
    )  # fmt: skip


class Values(ctypes.Structure):
    """`struct values`: where some values stand in the outputs of a projection."""

    _fields_ = tuple((name, ctypes.c_int32) for name in ("projection", "first", "width", "pitch"))


class Delta(ctypes.Structure):
    """`struct delta`: a gated delta rule in the place of attention."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in (
            "projections", "key_heads", "heads", "key_dim", "value_dim", "decays", "taps", "held", "gate",
        )),
        ("most", ctypes.c_float), ("eps", ctypes.c_float), ("of", ctypes.c_int32 * 8), ("parts", Values * 6),
        ("projection", Matrix * 8),
        *((name, ctypes.c_void_p) for name in ("taps_of", "bias", "rates", "moved", "norm")),
    )  # fmt: skip


class Block(ctypes.Structure):
    """`struct block`: the weights of one transformer block."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "input_norm", "input_bias", "output_norm", "output_bias", "query_norm", "key_norm", "attention_norm",
            "mlp_norm", "sinks", "favours", "shared", "delta",
        )),
        ("window", ctypes.c_int64), ("whole", ctypes.c_int64), ("rotary", ctypes.c_int32), ("experts", ctypes.c_int32),
        ("scale", ctypes.c_float), ("each", ctypes.c_int32), ("turned", ctypes.c_int32),
        *((name, Matrix) for name in ("query", "key", "value", "output", "gate", "up", "down", "router", "low")),
        ("latent", ctypes.c_void_p), ("expert", ctypes.c_void_p), ("ranges", ctypes.c_void_p),
    )  # fmt: skip


class Shape(ctypes.Structure):
    """`struct shape`: what the blocks of a model have in common."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in (
            "hidden", "heads", "kv_heads", "head_dim", "value_dim", "inner", "rotary_dim", "activation", "chosen",
            "shares_add_up", "held", "routing", "groups", "kept", "mixing", "mixed", "pairs", "latent", "low",
        )),
        *((name, ctypes.c_float) for name in ("eps", "latent_eps", "softcap", "routed_scale", "alpha", "limit")),
    )  # fmt: skip


class Change(ctypes.Structure):
    """`struct change`: LoRA of one layer for some rows."""

    _fields_ = (
        ("block", ctypes.c_int32), ("layer", ctypes.c_int32), ("first", ctypes.c_int64), ("rows", ctypes.c_int64),
        ("down", Matrix), ("up", Matrix),
    )  # fmt: skip


class StepStruct(ctypes.Structure):
    """`struct step`: a decode step of a batch of rows."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("shape", "blocks", "rows", "changes")),
        *((name, ctypes.c_int64) for name in ("count", "number", "changed", "score_count", "several")),
        *((name, ctypes.c_void_p) for name in ("cosines", "sines", "hidden", "scratch", "counts")),
    )


class Range(ctypes.Structure):
    """`struct range`: some bytes of a mapped file."""

    _fields_ = (("start", ctypes.c_void_p), ("bytes", ctypes.c_int64))


class Convolution(ctypes.Structure):
    """`struct convolution`: a causal convolution of each channel by itself."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "bias", "state", "y")),
        *((name, ctypes.c_int64) for name in ("rows", "channels", "tokens", "taps", "held", "silu")),
    )


class DeltaRule(ctypes.Structure):
    """`struct delta_rule`: a gated delta rule, token by token."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "decay", "beta", "state", "out")),
        *((name, ctypes.c_int64) for name in (
            "rows", "tokens", "heads", "key_heads", "key_dim", "value_dim", "decays", "normed", "key_pitch",
            "value_pitch",
        )),
    )  # fmt: skip


STRUCTURES: Final = (Matrix, Row, Block, Shape, Change, StepStruct, Range, Convolution, DeltaRule, Delta)
"""What the library reads of this module's memory, in the order of `petalnode_size`."""


@dataclass(frozen=True)
class Vectors:
    """Random products and steps of all forms and families, and the digest that the exact kind has of them."""

    seed: int = 1
    products: int = 95
    steps: int = 24
    digest: int = 0xA23EB0FCF013F69E


VECTORS: Final = Vectors()


class Unsuitable(Exception):
    """These blocks are not of the kind that the kernels know."""


@dataclass(frozen=True, eq=False)
class Library:
    """The loaded library. Its functions let other threads of Python run while they compute.

    Attributes:
        isa: the instruction set that it uses.
        functions: of kernels.c, without their prefix `petalnode_`.
    """

    isa: str
    functions: ctypes.CDLL

    def select(self, isa: str) -> bool:
        """Uses the kernels for this instruction set from now on; false if there are none here. For tests."""
        return self.functions.petalnode_select(isa.encode()) is not None

    @property
    def name(self) -> str:
        """Of its file; outside of wheels it tells the source."""
        return Path(self.functions._name).stem

    @cached_property
    def is_exact(self) -> bool:
        """Whether it computes the exact kind on this machine, as its compiler and processor made it."""
        found = (ctypes.c_uint64 * 2)()
        self.functions.petalnode_vectors(VECTORS.seed, VECTORS.products, VECTORS.steps, ctypes.byref(found))
        return found[1] == VECTORS.digest


@cache
def library() -> Library | None:
    """The compiled kernels; None where there are none that fit this software and this machine."""
    if os.environ.get(ISA_VARIABLE) == "none":
        return None
    for file in (SHIPPED, built_file()):
        if file is not None and file.is_file() and (loaded := _load(file)) is not None:
            return loaded
    return None


def usable_threads() -> int:
    """How many threads may compute: as many as torch uses, of the processors that this process may run on."""
    import torch  # not by those who build the library

    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(torch.get_num_threads(), allowed, MOST_THREADS))


def built_file(platform_tag: str | None = None) -> Path | None:
    """Where `python -m petalnode.node.blocks.kernels.library` puts the library; None outside of a checkout.

    The name tells the source, so that what was built of another one is never loaded. `platform_tag`: as in `build`.
    """
    root = SOURCE.resolve().parents[3]
    if not (root / "pyproject.toml").is_file():
        return None
    parts = [SOURCE.with_name(name).read_bytes() for name in (SOURCE.name, *HEADERS)]
    key = hashlib.sha256(b"".join(parts) + " ".join(FLAGS).encode()).hexdigest()[:12]
    name = f"{platform_tag or platform.machine() or 'any'}-{key}{TARGETS[platform_tag][1] if platform_tag else _SUFFIX}"
    return root / "build" / "kernels" / name


def compiler() -> str | None:
    """The compiler that the environment names (CC), or cc, gcc or clang; None if there is none."""
    named = os.environ.get("CC")
    return shutil.which(named) if named else next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)


def zig() -> str | None:
    """The compiler of the installed package `ziglang`; None if there is none."""
    spec = importlib.util.find_spec("ziglang")
    return None if spec is None or spec.origin is None else shutil.which("zig", path=str(Path(spec.origin).parent))


def build(target: Path, platform_tag: str | None = None) -> str | None:
    """Compiles the library into the file `target`, as a whole or not at all; None, or why it cannot be done.

    `platform_tag`: one of `TARGETS`, which zig compiles for; otherwise this system.
    """
    if platform_tag is None and ctypes.sizeof(ctypes.c_void_p) != 8:
        return "this machine has no addresses of 64 bits"
    found = zig() if platform_tag is not None else compiler()
    command = [] if found is None else [found]
    if found is None and "CC" not in os.environ and (platform_tag := platform_tag or own_tag()) is not None:
        found = zig()
    if found is None:
        return "there is no C compiler (cc, gcc, clang, what CC names, or the package ziglang)"
    windows = sys.platform == "win32"
    if platform_tag is not None:
        command, windows = [found, "cc", "-target", TARGETS[platform_tag][0], "-s"], platform_tag.startswith("win")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        flags = [flag for flag in FLAGS if not (windows and flag in ("-fPIC", "-pthread"))]
        try:
            run = subprocess.run(
                [*command, *flags, str(SOURCE), "-o", str(made)], capture_output=True, text=True, timeout=_MOST_SECONDS
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{found} cannot be run ({error})"
        if run.returncode or not made.is_file():
            last = (run.stderr.strip() or f"it ended with {run.returncode}").splitlines()[-1]
            return f"{found} does not compile them ({last})"
        made.replace(target)
    return None


def own_tag() -> str | None:
    """The one of `TARGETS` that is this system; None if none is."""
    system = {"win32": "win", "darwin": "macosx", "linux": "manylinux"}.get(sys.platform, "-")
    machine = platform.machine().lower()
    return next((tag for tag in TARGETS if tag.startswith(system) and tag.endswith(machine)), None)


def _load(file: Path) -> Library | None:
    try:
        functions = ctypes.CDLL(str(file))
        functions.petalnode_interface.restype = ctypes.c_int32
        if functions.petalnode_interface() != INTERFACE:
            _log.warning("%s is of another version of this software and is not used", file)
            return None
        if (wrong := _other_size(functions)) is not None:
            _log.warning("%s is not used: its %s has another size than here", file, wrong)
            return None
    except (OSError, AttributeError) as error:
        _log.warning("%s cannot be used: %s", file, error)
        return None
    _declare(functions)
    wanted = os.environ.get(ISA_VARIABLE)
    isa = functions.petalnode_select(wanted.encode() if wanted else None)
    if isa is None:
        _log.warning("%s=%s: this machine has no such instructions; torch computes", ISA_VARIABLE, wanted)
        return None
    return Library(isa.decode(), functions)


def _other_size(functions: ctypes.CDLL) -> str | None:
    """The first structure that a compiler laid out otherwise than ctypes does, by name; None if all agree."""
    functions.petalnode_size.restype, functions.petalnode_size.argtypes = ctypes.c_int64, (ctypes.c_int32,)
    for number, structure in enumerate(STRUCTURES):
        if functions.petalnode_size(number) != ctypes.sizeof(structure):
            return structure.__name__
    return None if functions.petalnode_size(len(STRUCTURES)) == 0 else "list of structures"


def _declare(functions: ctypes.CDLL) -> None:
    number, pointer = ctypes.c_int64, ctypes.c_void_p
    signatures: dict[str, tuple[object, tuple[object, ...]]] = {
        "select": (ctypes.c_char_p, (ctypes.c_char_p,)),
        "multiply": (None, (ctypes.POINTER(Matrix), pointer, number, pointer, pointer, number)),
        "unpack": (None, (ctypes.POINTER(Matrix), number, number, pointer)),
        "pack": (ctypes.c_int32, (ctypes.c_int32, pointer, number, number, pointer, pointer, pointer)),
        "tile_nf4": (None, (pointer, number, number, pointer)),
        "ask_for": (ctypes.c_int32, (pointer, number)),
        "step": (None, (ctypes.POINTER(StepStruct), number)),
        "convolve": (ctypes.c_int32, (ctypes.POINTER(Convolution), number)),
        "delta": (ctypes.c_int32, (ctypes.POINTER(DeltaRule), number)),
        "rotary": (None, (pointer, number, ctypes.c_float, pointer, number, pointer, pointer)),
        "vectors": (None, (number, number, number, pointer)),
        "many": (None, (number, number, number, pointer)),
        "step_scratch": (number, (ctypes.POINTER(Shape), number, number, number)),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(functions, f"petalnode_{name}")
        function.restype, function.argtypes = result, arguments


def main() -> None:
    """Builds the library for this checkout where that is possible; it is no error where it is not."""
    target = built_file()
    if target is None:
        print("kernels: no checkout, nothing is built")
    elif target.is_file():
        print(f"kernels: {target} is there")
    else:
        problem = build(target)
        print(f"kernels: built {target}" if problem is None else f"kernels: not built, torch computes: {problem}")


if __name__ == "__main__":
    main()
