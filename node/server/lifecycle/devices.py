"""How many blocks a server holds, and which of them on which of its devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise, product
from typing import TYPE_CHECKING, Final

from ....protocols.ids import ALIKE, Boundaries, Span
from ....protocols.inference import STEP_TOKENS
from ...errors import MachineError
from ...models import ModelFolder
from ...models.cache_dir import cache_dir, size
from .memory import (
    MEMORY_SHARES,
    Room,
    Sizing,
    blocks_that_fit,
    cache_bytes_per_block,
    claim,
    device_memory,
    fit_blocks,
)
from .options import ServerOptions

if TYPE_CHECKING:
    from ...blocks.architecture import BlockSizes


def share_out(count: int, rooms: Sequence[Room]) -> list[int]:
    """How many of `count` blocks each device computes: one at least, and by how many it has room for. The processor,
    which reads its memory the slowest, gets those for which others have no room.

    Raises:
        MachineError: there are fewer blocks than devices, or not room for all.
    """
    most = sum(room.blocks for room in rooms)
    if not len(rooms) <= count <= most:
        raise MachineError(
            f"{count} blocks cannot be on {_named(rooms)}: {len(rooms)} to {most} can (--num-blocks); or name other "
            "devices"
        )
    shares = [1] * len(rooms)
    for _ in range(count - len(rooms)):
        left = (at for at, room in enumerate(rooms) if shares[at] < room.blocks)
        shares[min(left, key=lambda at: (rooms[at].device == "cpu", (shares[at] + 1) / rooms[at].blocks))] += 1
    return shares


def _named(rooms: Sequence[Room]) -> str:
    held = ", ".join(f"{room.blocks} on {room.device}" for room in rooms)
    return f"{len(rooms)} devices, which have room for {held}"


def cut(span: Span, rooms: Sequence[Room], boundaries: Boundaries = ALIKE) -> list[Span]:
    """The blocks of each device; of one device, for which there are no `rooms`, all. Of a model some of whose blocks
    stay together, each device gets a number as near to that of `share_out` as they let.

    Raises:
        MachineError: as `share_out`; devices have not room for what stays together, or there are too many.
    """
    if not rooms:
        return [span]
    ends = tuple(accumulate(share_out(len(span), rooms), initial=span.start))
    if boundaries.undivided:
        inner = [*filter(boundaries.may_part, range(span.start + 1, span.end))]
        best: dict[tuple[int, ...], int] = {ends[:1]: 0}  # of the cuts that end at one block, the nearest to the shares
        for room, meant in zip(rooms, ends[1:], strict=True):
            further: dict[int, tuple[int, tuple[int, ...]]] = {}
            for (way, off), end in product(best.items(), inner if meant < span.end else [span.end]):
                if 0 < end - way[-1] <= room.blocks:
                    found = off + abs(end - meant), (*way, end)
                    further[end] = min(found, further.get(end, found))
            best = {way: off for off, way in further.values()}
        if not best:
            raise MachineError(
                f"blocks {span} cannot be on {_named(rooms)}: some stay on one device ({boundaries.named}). Leave a "
                "device out, or name others"
            )
        (ends,) = best
    return [Span(*part) for part in pairwise(ends)]


_LOCK: Final = "sizing.lock"


def plan_memory(folder: ModelFolder, options: ServerOptions, stored_block: int = 0) -> Sizing:
    """How many blocks to serve, by the memory that is free now; claims that for this process.

    Of the model in `folder` only the configuration has to be there. `stored_block` is as in `block_sizes`.

    Raises:
        ModelError: its architecture cannot be served.
        MachineError: the blocks that were asked for do not fit, or not even one does; or their cache does not.
    """
    from filelock import FileLock

    from ...blocks.architecture import block_sizes  # with torch: two seconds, for servers alone

    of_devices = {
        device: block_sizes(folder.path, options.dtype, options.quant, options.kernels, device, stored_block)
        for device in dict.fromkeys(options.devices)
    }
    sizes = of_devices[options.devices[0]]
    with FileLock(cache_dir() / _LOCK):  # of several that start at once each sees what the last one claimed
        if len(options.devices) > 1:
            return _plan_devices(folder, options, of_devices)
        memory, spare = device_memory(options.devices[0]), _spare(options, sizes)
        if options.blocks is not None or options.num_blocks is not None:
            named = options.blocks
            count = options.num_blocks or 0
            chosen = sizes.held[named.start : named.end] if named else [max(sizes.held)] * count
            experts = sizes.experts[named.start : named.end] if named else [max(sizes.experts, default=0)] * count
            sizing = fit_blocks(
                memory,
                chosen,
                experts,
                token_bytes=cache_bytes_per_block(folder.config, sizes.item, 1, options.cache_dtype),
                cache_tokens=options.cache_tokens,
                hidden_size=folder.boundaries.width(0),
                spare=spare,
            )
        else:
            tokens = options.cache_tokens or MEMORY_SHARES.usual_cache_tokens
            sizing = blocks_that_fit(
                memory,
                max(sizes.held),
                folder.num_blocks,
                cache_bytes=cache_bytes_per_block(folder.config, sizes.item, tokens, options.cache_dtype),
                cache_tokens=tokens,
                hidden_size=folder.boundaries.width(0),
                spare=spare,
            )
            sizing = _parted(sizing, folder)
        if memory.shared:
            claim(sizing.nbytes)
    return sizing


def _parted(sizing: Sizing, folder: ModelFolder) -> Sizing:
    """The most of these blocks that one server may hold.

    Raises:
        MachineError: none, since blocks that it has to hold together do not fit.
    """
    count = folder.boundaries.most(sizing.count)
    if count == sizing.count:
        return sizing
    named = folder.boundaries.named
    if not count:
        raise MachineError(
            f"blocks of {folder.name} that share something stay on one server ({named}), and {sizing.reason}"
        )
    return replace(sizing, count=count, reason=f"{count} blocks, since some stay together ({named}); {sizing.reason}")


def _spare(options: ServerOptions, sizes: BlockSizes) -> int:
    """While a block is quantised it is there as it was, too."""
    return 0 if options.quant == "none" else max(sizes.whole)


def _plan_devices(folder: ModelFolder, options: ServerOptions, of_devices: Mapping[str, BlockSizes]) -> Sizing:
    """As `plan_memory`, for several devices. Those in the memory of all programs have equal parts of it."""
    chosen = options.num_blocks if options.blocks is None else len(options.blocks)
    tokens = MEMORY_SHARES.usual_cache_tokens if chosen is None else MEMORY_SHARES.min_cache_tokens
    memories = {device: device_memory(device) for device in of_devices}
    parts = sum(memories[device].shared for device in options.devices)
    computing = STEP_TOKENS * folder.boundaries.width(0) * 4 * MEMORY_SHARES.copies
    computing += _spare(options, of_devices[options.devices[0]])  # as that of all
    rooms, per_block = list[Room](), dict[str, int]()
    for device in options.devices:
        sizes, memory = of_devices[device], memories[device]
        if memory.shared:
            memory = replace(memory, free=memory.free // parts, total=memory.total // parts)
        cache = cache_bytes_per_block(folder.config, sizes.item, options.cache_tokens or tokens, options.cache_dtype)
        per_block[device] = max(1, max(sizes.held) + cache)
        kept = computing + (memory.reserve if chosen is None else 0)
        rooms.append(Room(device, (memory.free - kept) // per_block[device]))
        if rooms[-1].blocks < 1:
            raise MachineError(
                f"--device {device} holds no block: one takes {size(per_block[device])} with its cache, and "
                f"{size(memory.free)} of {memory.place} are free, of which {size(kept)} are for computing and for "
                "other programs: leave this device out, or give fewer --cache-tokens, or --quant nf4"
            )
    most = chosen or min(folder.num_blocks, sum(room.blocks for room in rooms))
    count, held = _most_cut(folder.boundaries, options.blocks, most, rooms, fewer=chosen is None)
    shares = list(zip(options.devices, held, strict=True))
    taken = [(memories[device].shared, share * per_block[device] + computing) for device, share in shares]
    if parts:
        claim(sum(nbytes for shared, nbytes in taken if shared))
    reason = f"{count} of {folder.num_blocks} blocks: {', '.join(f'{share} on {device}' for device, share in shares)}"
    return Sizing(count, reason, sum(nbytes for _, nbytes in taken), rooms=tuple(rooms))


def _most_cut(
    boundaries: Boundaries, span: Span | None, most: int, rooms: Sequence[Room], *, fewer: bool
) -> tuple[int, list[int]]:
    """How many blocks, `most` or if allowed `fewer`, devices can share wherever a server takes them, or in `span`; and
    the most of these on each.

    Raises:
        MachineError: none can, as `cut` says it.
    """
    if not boundaries.undivided:
        return most, share_out(most, rooms)
    counts = [count for count in range(most, 0, -1) if boundaries.most(count) == count] if fewer else [most]
    problems = []
    for count in counts:
        starts = range(boundaries.num_blocks - count + 1)
        spans = [span] if span else [Span(start, start + count) for start in starts]
        try:
            cuts = [cut(one, rooms, boundaries) for one in spans if boundaries.refusal(one) is None]
            return count, [max(map(len, of_device)) for of_device in zip(*cuts, strict=True)]
        except MachineError as error:
            problems.append(error)
    stay = f"{most} blocks cannot be on {_named(rooms)}: some stay on one device ({boundaries.named})"
    raise problems[0] if problems else MachineError(f"{stay}. Leave a device out, or name others")
