"""How many blocks and how much attention cache fit, decided before any weights are read; and memory given back."""

from __future__ import annotations

import ctypes
import gc
import json
import mmap
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from ....protocols.inference import STEP_TOKENS
from ...errors import MachineError
from ...models.cache_dir import began_at, cache_dir, keep_json, size, still_runs
from ...models.folder import TEXT_FIELDS
from ...models.quantisation import CacheDtype, key_bytes
from ...network.transport.memory import group_limits
from ...placement.planning.machines_file import MACHINES


@dataclass(frozen=True)
class MemoryShares:
    """How much of the free memory goes to the attention cache and to what else a server needs."""

    cache_share: float = 0.25  # Part of the free memory that attention caches may take when nobody says otherwise
    max_cache_tokens: int = 1 << 17
    min_cache_tokens: int = 512
    usual_cache_tokens: int = MACHINES.cache_tokens
    reserve_share: float = 0.1
    reserve: int = 512 << 20
    """Bytes, and the share of the whole memory, that stay free for everything else: whichever is more."""
    copies: int = MACHINES.copies
    server: int = 300 << 20  # What a server takes before it has any block: the interpreter, PyTorch, transformers
    experts: float = 0.25
    """Part of the experts that memory has to have room for, so that the others may be left on the disk."""


MEMORY_SHARES: Final = MemoryShares()
STATES, REWOUND = 4, 16  # as `caches/states.py` has them, which imports torch


@dataclass(frozen=True)
class Memory:
    """Of the device that holds the blocks, in bytes. `place` is what a person calls it, `shared` whether it is that of
    all programs of the machine."""

    free: int
    total: int
    place: str = "memory"
    shared: bool = True

    @property
    def reserve(self) -> int:
        """What stays free for everything else. A machine with little memory keeps a quarter of what is free, or nothing
        would fit at all."""
        return min(max(MEMORY_SHARES.reserve, int(self.total * MEMORY_SHARES.reserve_share)), self.free // 4)


@dataclass(frozen=True)
class Room:
    """How many `blocks` one of several devices holds at the most."""

    device: str
    blocks: int


@dataclass(frozen=True)
class Sizing:
    """How many blocks, a sentence that says why, and the bytes that all of it will take. `on_disk`: their experts are
    left on the disk, and read as they are needed. `rooms`: of the devices, if there are several."""

    count: int
    reason: str
    nbytes: int
    on_disk: bool = False
    rooms: tuple[Room, ...] = ()


def blocks_that_fit(
    memory: Memory,
    block_bytes: int,
    num_blocks: int,
    *,
    cache_bytes: int = 0,
    cache_tokens: int = MEMORY_SHARES.usual_cache_tokens,
    hidden_size: int = 0,
    spare: int = 0,
) -> Sizing:
    """How many blocks of `block_bytes` the device holds, each with `cache_bytes` of attention cache (of `cache_tokens`
    tokens). Room for computing, for `spare` bytes and for a reserve is left.

    Raises:
        MachineError: if not even one fits.
    """
    reserve = memory.reserve
    computing = STEP_TOKENS * hidden_size * 4 * MEMORY_SHARES.copies + spare
    per_block = max(1, block_bytes + cache_bytes)
    count = min(num_blocks, (memory.free - reserve - computing) // per_block)
    if count < 1:
        left = memory.free - reserve - computing - block_bytes
        fewer = left * cache_tokens // max(1, cache_bytes)
        raise MachineError(
            f"one block of this model takes {size(per_block)} with its cache of {cache_tokens} tokens and "
            f"{size(memory.free)} of {memory.place} are free, of which {size(reserve + computing)} are for computing "
            "and for other programs: "
            + (
                f"--cache-tokens {fewer} is the most that fits one block, or "
                if fewer >= MEMORY_SHARES.min_cache_tokens
                else ""
            )
            + "close some, or serve a smaller model, or --quant nf4"
        )
    whole = "the whole model"
    if count < num_blocks:
        whole = f"{count} of {num_blocks} blocks ({_others(num_blocks, count)} the rest)"
    return Sizing(
        count,
        f"{whole}: {size(memory.free)} of {memory.place} are free, a block takes {size(block_bytes)} and "
        f"{size(cache_bytes)} for a cache of {cache_tokens} tokens; {size(computing)} are for computing and "
        f"{size(reserve)} stay free",
        count * per_block + computing,
    )


def fit_blocks(
    memory: Memory,
    blocks: Sequence[int],
    experts: Sequence[int],
    *,
    token_bytes: int,
    cache_tokens: int | None,
    hidden_size: int = 0,
    spare: int = 0,
) -> Sizing:
    """What blocks of these sizes, chosen by a person, will take. They may fit only with a part of their `experts`
    (bytes of each block). Then the experts are left on the disk, and memory keeps those that were used last.

    Raises:
        MachineError: as `check_blocks_fit`.
    """
    wanted: Any = {
        "token_bytes": token_bytes, "cache_tokens": cache_tokens, "hidden_size": hidden_size, "spare": spare
    }  # fmt: skip
    try:
        return Sizing(len(blocks), "", check_blocks_fit(memory, blocks, **wanted))
    except MachineError:
        least = [of - int((1 - MEMORY_SHARES.experts) * own) for of, own in zip(blocks, experts, strict=False)]
        if not sum(experts):
            raise
        with suppress(MachineError):
            nbytes = check_blocks_fit(memory, least, **wanted)
            room = memory.free - nbytes + int(MEMORY_SHARES.experts * sum(experts))
            reason = (
                f"{size(memory.free)} of {memory.place} are free and these blocks take {size(sum(blocks))}: their "
                f"experts, {size(sum(experts))}, stay on the disk, and about {100 * room // sum(experts)} % of them in "
                "memory; a token that needs others waits for the disk"
            )
            return Sizing(len(blocks), reason, memory.free, on_disk=True)
        raise


def _others(blocks: int, fitting: int) -> str:
    """Who would hold those of the blocks that do not fit, of which `fitting` do."""
    more = -(-(blocks - fitting) // fitting)
    return f"{more} more machine{'s' * (more > 1)} like this one would hold"


def check_blocks_fit(
    memory: Memory,
    blocks: Sequence[int],
    *,
    token_bytes: int,
    cache_tokens: int | None,
    hidden_size: int = 0,
    spare: int = 0,
) -> int:
    """The bytes that blocks of these sizes, chosen by a person, will take in all. Nothing is kept in reserve for them.

    `token_bytes` is what a token takes in the attention cache of one block; `cache_tokens` None: the least that a
    server offers.

    Raises:
        MachineError: they do not fit, or their cache does not fit beside them; says how much would.
    """
    computing = STEP_TOKENS * hidden_size * 4 * MEMORY_SHARES.copies + spare
    weights, per_token = sum(blocks), token_bytes * len(blocks)
    needed = weights + computing + per_token * MEMORY_SHARES.min_cache_tokens
    if needed > memory.free:
        per_block = max(1, max(blocks) + token_bytes * MEMORY_SHARES.min_cache_tokens)
        fitting = max(0, memory.free - computing) // per_block
        advice = "not even one of them fits"
        if fitting:
            advice = f"at most {fitting} fit (--num-blocks {fitting}), {_others(len(blocks), fitting)} the rest"
        raise MachineError(
            f"{len(blocks)} blocks of this model take {size(weights)}, {size(needed)} with the smallest cache and what "
            f"computing needs, and {size(memory.free)} of {memory.place} are free: {advice}. Close other programs, or "
            "serve a smaller model, or hold the blocks in fewer bits (--quant nf4)"
        )
    if cache_tokens is not None:
        check_cache_fits(memory, memory.free - weights - computing, cache_tokens, per_token)
    return weights + computing + per_token * (cache_tokens or MEMORY_SHARES.min_cache_tokens)


def check_cache_fits(memory: Memory, left: int, tokens: int, token_bytes: int) -> None:
    """
    Raises:
        MachineError: an attention cache of `tokens` tokens takes more than the `left` bytes.
    """
    if tokens * token_bytes > left:
        fitting = max(0, left) // token_bytes
        raise MachineError(
            f"--cache-tokens {tokens} takes {size(tokens * token_bytes)}, and {size(max(0, left))} of {memory.place} "
            f"are left beside the blocks: at most {fitting} tokens fit. Give fewer, or leave it out: then as many are "
            "offered as are sensible here"
        )


def cache_bytes_per_block(
    config: Mapping[str, Any],
    item_bytes: int,
    tokens: int = MEMORY_SHARES.usual_cache_tokens,
    held: CacheDtype = "auto",
) -> int:
    """About what `tokens` tokens of attention cache take in one block on average, by a model's `config.json`. Of a
    hybrid, a session's states of each other block are among them, for a session of `tokens` tokens.

    `item_bytes` of the dtype that is computed in; `held` is what keys and values are kept in.
    """
    for name in TEXT_FIELDS:
        if isinstance(config.get(name), Mapping):
            config = config[name]
    hidden = _number(config, "hidden_size", "n_embd", "n_embed", "d_model")
    heads = _number(config, "num_attention_heads", "n_head", "n_heads") or 1
    shared = _number(config, "num_key_value_heads") or heads
    width = _number(config, "head_dim") or hidden // heads
    latent = _number(config, "kv_lora_rank")  # multi-head latent attention: one latent and turned key for all heads
    sizes = (latent, _number(config, "qk_rope_head_dim")) if latent else (width, width)
    growing = (1 if latent else shared) * sum(key_bytes(held, size, item_bytes) for size in sizes) * tokens
    kinds = config.get("layer_types") or config.get("layers_block_type")
    if not isinstance(kinds, list) or not {"linear_attention", "mamba", "conv"}.intersection(map(str, kinds)):
        return growing
    having = sum(kind == "hybrid" or "attention" in str(kind).removeprefix("linear_attention") for kind in kinds)
    having /= len(kinds)
    keys = _number(config, "linear_num_key_heads") * _number(config, "linear_key_head_dim")
    values = _number(config, "linear_num_value_heads") * _number(config, "linear_value_head_dim")
    delta = values * _number(config, "linear_key_head_dim")
    mamba = _number(config, "mamba_num_heads", "mamba_n_heads", "n_mamba_heads")
    mamba *= _number(config, "mamba_head_dim", "mamba_d_head", "mamba_headdim")
    mamba *= _number(config, "ssm_state_size", "mamba_d_state")
    states = STATES * (max(delta, mamba) or heads * width * width) + REWOUND * (3 * keys + 2 * values)
    return int(having * growing + (1 - having) * (4 * states if tokens > 1 else 0))


def cache_tokens_that_fit(free_bytes: int, bytes_per_token: int) -> int:
    """The attention cache that a server offers by default, in tokens through all of its blocks."""
    fitting = int(free_bytes * MEMORY_SHARES.cache_share) // max(1, bytes_per_token)
    return max(MEMORY_SHARES.min_cache_tokens, min(MEMORY_SHARES.max_cache_tokens, fitting))


def _number(config: Mapping[str, Any], *names: str) -> int:
    return next((value for name in names if isinstance(value := config.get(name), int) and value > 0), 0)


_CLAIMS: Final = "claims"


def has_accelerator(device: str) -> bool:
    """Whether this may be about another device than the CPU; quick, and without torch."""
    return device != "cpu" and (sys.platform != "linux" or Path("/dev/nvidia0").exists() or device != "auto")


def device_memory(device: str) -> Memory:
    """Of the device of this name (auto: of the one that is chosen).

    That of a CPU is what programs can have without swapping, within the limit of a container. What other servers on
    this machine have claimed, but not used yet, is left out.
    """
    if has_accelerator(device):
        import torch

        from ...blocks.config import choose_device

        chosen = choose_device(device)
        if chosen.type == "cuda":
            free, total = torch.cuda.mem_get_info(chosen)
            return Memory(free, total, f"the memory of {torch.cuda.get_device_name(chosen)}", False)
    memory = psutil.virtual_memory()
    free, total = memory.available, memory.total
    limit = container_limit()
    if limit is not None and limit.total < total:
        free, total = min(free, limit.free), limit.total
    return Memory(max(0, free - claimed_by_others()), total)


def unused(nbytes: int) -> int:
    """Of `nbytes` bytes that this process will use: those that still count as free, because they are mapped files."""
    return max(0, nbytes - _private(psutil.Process()))


def container_limit(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> Memory | None:
    """What the control group of this process may use, and has left; None if it is not limited."""
    found = [Memory(free, limit) for free, limit in group_limits(root, own)]
    return min(found, key=lambda memory: memory.free, default=None)


def claim(nbytes: int) -> None:
    """Tells other servers on this machine that this process will use so much in all.

    That it cannot be written is no error: then the others go by what is in use.
    """
    pid = os.getpid()
    keep_json(cache_dir() / _CLAIMS / f"{pid}.json", {"started": began_at(pid), "bytes": nbytes})


def claimed_by_others() -> int:
    """Bytes that other processes have claimed and do not use yet. Claims of processes that are gone are removed."""
    total = 0
    for file in _files(cache_dir() / _CLAIMS):
        with suppress(OSError, ValueError, KeyError, TypeError):
            claimed = json.loads(file.read_bytes())
            pid = int(file.stem)
            if pid == os.getpid():
                continue
            try:
                if not still_runs(pid, float(claimed["started"])):
                    raise psutil.NoSuchProcess(pid)
                total += max(0, int(claimed["bytes"]) - _private(psutil.Process(pid)))
            except psutil.NoSuchProcess:
                file.unlink()
            except psutil.AccessDenied:
                total += int(claimed["bytes"])
    return total


def _files(folder: Path) -> list[Path]:
    with suppress(OSError):
        return sorted(folder.glob("*.json"))
    return []


def _private(process: psutil.Process) -> int:
    """Bytes that are in use and counted as such; mapped files are not, they count as free."""
    memory = process.memory_info()
    return int(memory.rss - getattr(memory, "shared", 0))


def library_pages(smaps: str) -> list[tuple[int, int]]:
    """Where pages of shared libraries are mapped that nobody has written to, by `/proc/self/smaps`: (start, end)."""
    pattern = r"^([0-9a-f]+)-([0-9a-f]+) r-[-x]p \S+ \S+ \S+ +/.*\.so[.\d]*\n(?:[A-Z]\w+: .*\n)*?Anonymous: +0 kB\n"
    found = re.finditer(pattern, smaps, re.MULTILINE)
    return [(int(region[1], 16), int(region[2], 16)) for region in found]


def return_memory() -> None:
    """Returns memory of this process to the system: what is freed, where the C library can (glibc), and pages of
    libraries, of which the start used more than what follows, and which come back from the file. Elsewhere it does
    nothing."""
    gc.collect()
    with suppress(AttributeError, OSError, TypeError):  # another C library keeps or returns it by rules of its own
        library = ctypes.CDLL(None)
        library.malloc_trim(0)
        for start, end in library_pages(Path("/proc/self/smaps").read_text()):
            library.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)
