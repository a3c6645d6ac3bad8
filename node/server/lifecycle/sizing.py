"""How many blocks a server takes, and whether those that a person chose fit, decided before any weights are read."""

from __future__ import annotations

from typing import Final

from ...models import ModelFolder
from ...models.cache_dir import cache_dir
from .memory import (
    MEMORY_SHARES,
    Sizing,
    blocks_that_fit,
    cache_bytes_per_block,
    check_blocks_fit,
    claim,
    device_memory,
)
from .options import ServerOptions

_LOCK: Final = "sizing.lock"


def plan_memory(folder: ModelFolder, options: ServerOptions) -> Sizing:
    """How many blocks to serve, by the memory that is free now; claims that for this process.

    Of the model in `folder` only the configuration has to be there.

    Raises:
        ModelError: its architecture cannot be served.
        MachineError: the blocks that were asked for do not fit, or not even one does; or their cache does not.
    """
    from filelock import FileLock

    from ...blocks.architecture import block_sizes  # with torch: two seconds, for servers alone

    sizes = block_sizes(folder.path, options.dtype, options.quant, options.kernels, options.device)
    # While a block is quantised it is there as it was, too.
    spare = 0 if options.quant == "none" else max(sizes.whole)
    with FileLock(cache_dir() / _LOCK):  # of several that start at once each sees what the last one claimed
        memory = device_memory(options.device)
        if options.blocks is not None or options.num_blocks is not None:
            named = options.blocks
            chosen = sizes.held[named.start : named.end] if named else [max(sizes.held)] * (options.num_blocks or 0)
            nbytes = check_blocks_fit(
                memory,
                list(chosen),
                token_bytes=cache_bytes_per_block(folder.config, sizes.item, 1, options.cache_dtype),
                cache_tokens=options.cache_tokens,
                hidden_size=folder.hidden_size,
                spare=spare,
            )
            sizing = Sizing(len(chosen), "", nbytes)
        else:
            tokens = options.cache_tokens or MEMORY_SHARES.usual_cache_tokens
            sizing = blocks_that_fit(
                memory,
                max(sizes.held),
                folder.num_blocks,
                cache_bytes=cache_bytes_per_block(folder.config, sizes.item, tokens, options.cache_dtype),
                cache_tokens=tokens,
                hidden_size=folder.hidden_size,
                spare=spare,
            )
        if memory.shared:
            claim(sizing.nbytes)
    return sizing
