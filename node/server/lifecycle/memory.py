"""How many blocks a machine takes, and how much attention cache it offers: pure functions of its memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ...errors import MachineError
from ...models.folder import TEXT_FIELDS

CACHE_SHARE: Final = 0.25
"""Part of the free memory that attention caches may take when nobody says otherwise."""
MAX_CACHE_TOKENS: Final = 1 << 17
MIN_CACHE_TOKENS: Final = 512
USUAL_CACHE_TOKENS: Final = 8192
"""Tokens that the cache is to have room for when the number of blocks is chosen."""
RESERVE_SHARE: Final = 0.1
RESERVE: Final = 512 << 20
"""Bytes, and the share of the whole memory, that stay free for everything else: whichever is more."""
STEP_TOKENS: Final = 2048
_COPIES: Final = 12
"""Hidden states that are there at once while a long prefill is computed, in float32."""
_GIB: Final = 1 << 30
_MIB: Final = 1 << 20


@dataclass(frozen=True)
class Memory:
    """Of the device that holds the blocks, in bytes; `place` is what a person calls it, `shared` whether it is that of
    all programs of the machine."""

    free: int
    total: int
    place: str = "memory"
    shared: bool = True


@dataclass(frozen=True)
class Sizing:
    """How many blocks, a sentence that says why, and the bytes that all of it will take."""

    count: int
    reason: str
    nbytes: int


def blocks_that_fit(
    memory: Memory,
    block_bytes: int,
    num_blocks: int,
    *,
    cache_bytes: int = 0,
    cache_tokens: int = USUAL_CACHE_TOKENS,
    hidden_size: int = 0,
    spare: int = 0,
) -> Sizing:
    """How many blocks of `block_bytes` the device holds, with room for `cache_bytes` of attention cache for each (of
    `cache_tokens` tokens), for what computing takes, for `spare` bytes and for a reserve.

    Raises:
        MachineError: if not even one fits.
    """
    # A machine with little memory keeps a quarter of what is free, or nothing would fit at all.
    reserve = min(max(RESERVE, int(memory.total * RESERVE_SHARE)), memory.free // 4)
    computing = STEP_TOKENS * hidden_size * 4 * _COPIES + spare
    each = max(1, block_bytes + cache_bytes)
    count = min(num_blocks, (memory.free - reserve - computing) // each)
    if count < 1:
        raise MachineError(
            f"one block of this model takes {size(each)} with its cache and {size(memory.free)} of {memory.place} are "
            f"free, of which {size(reserve + computing)} are for computing and for other programs: close some, or "
            "serve a smaller model, or --quant nf4"
        )
    whole = "the whole model" if count == num_blocks else f"{count} of {num_blocks} blocks"
    return Sizing(
        count,
        f"{whole}: {size(memory.free)} of {memory.place} are free, a block takes {size(block_bytes)} and "
        f"{size(cache_bytes)} for a cache of {cache_tokens} tokens; {size(computing)} are for computing and "
        f"{size(reserve)} stay free",
        count * each + computing,
    )


def cache_bytes_per_block(config: Mapping[str, Any], item_bytes: int, tokens: int = USUAL_CACHE_TOKENS) -> int:
    """About what `tokens` tokens of attention cache take in one block, by a model's `config.json`; never too little."""
    for name in TEXT_FIELDS:
        if isinstance(config.get(name), Mapping):
            config = config[name]
    hidden = _number(config, "hidden_size", "n_embd", "n_embed", "d_model")
    heads = _number(config, "num_attention_heads", "n_head", "n_heads") or 1
    shared = _number(config, "num_key_value_heads") or heads
    width = _number(config, "head_dim") or hidden // heads
    return 2 * shared * width * item_bytes * tokens


def cache_tokens_that_fit(free_bytes: int, bytes_per_token: int) -> int:
    """The attention cache that a server offers by default, in tokens through all of its blocks."""
    fitting = int(free_bytes * CACHE_SHARE) // max(1, bytes_per_token)
    return max(MIN_CACHE_TOKENS, min(MAX_CACHE_TOKENS, fitting))


def size(nbytes: int) -> str:
    if nbytes >= _GIB:
        return f"{nbytes / _GIB:.1f} GiB"
    return f"{nbytes / _MIB:.0f} MiB" if nbytes >= _MIB else f"{nbytes / 1024:.0f} KiB"


def _number(config: Mapping[str, Any], *names: str) -> int:
    return next((value for name in names if isinstance(value := config.get(name), int) and value > 0), 0)
