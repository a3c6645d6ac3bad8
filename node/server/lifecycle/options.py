"""What a person may ask of a server, and how it tells what it does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ....protocols.ids import Span
from ...errors import BadInput
from ...models import ModelFolder
from ...models.quantisation import Quantisation

OnEvent = Callable[..., None]
"""Called with the event's name and its fields: "status" (text), "ready", "moving", "moved", "stopping"."""


@dataclass(frozen=True)
class ServerOptions:
    """What a person asked for; None means: decide. `throughput` in decode steps per second, `drain_timeout` seconds.

    `allow_clients` are the peer ids that may use this server; none lets everybody. `gain` is what a change of blocks
    has to gain (node/placement/plan.py), None: the blocks are never changed. `max_disk` is in bytes. `pledge` is how
    many points the server promises to lose when a fault of it is proved. `adapters` are folders of adapters that
    anybody may name. The validator at `deposit_at`, a multiaddr with /p2p, keeps the points that are pledged.
    """

    model: str
    blocks: Span | None = None
    num_blocks: int | None = None
    device: str = "auto"
    dtype: str = "auto"
    quant: Quantisation = "none"
    cache_tokens: int | None = None
    throughput: float | None = None
    name: str = ""
    revision: str | None = None
    offline: bool = False
    drain_timeout: float = 30.0
    allow_clients: tuple[str, ...] = ()
    gain: float | None = 0.2
    max_disk: int | None = None
    pledge: int = 0
    adapters: tuple[Path, ...] = ()
    deposit_at: str | None = None

    @property
    def stays(self) -> bool:
        """Whether the blocks are never changed."""
        return self.blocks is not None or self.gain is None


def check_blocks(options: ServerOptions, folder: ModelFolder) -> None:
    """
    Raises:
        BadInput: blocks that the model does not have.
    """
    if options.blocks is not None and options.blocks.end > folder.num_blocks:
        raise BadInput(
            f"--blocks {options.blocks}: {folder.name} has {folder.num_blocks} blocks, so the most is "
            f"0:{folder.num_blocks}"
        )
    if options.num_blocks is not None and not 1 <= options.num_blocks <= folder.num_blocks:
        raise BadInput(f"--num-blocks {options.num_blocks}: {folder.name} has {folder.num_blocks} blocks")
