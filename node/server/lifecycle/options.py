"""What a person may ask of a server, checked before anything is loaded, and how it tells what it does."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ....protocols.ids import Span
from ...errors import BadInput
from ...models import ModelFolder
from ...models.adapter import Adapter, read_adapter
from ...models.progress import Progress
from ...models.quantisation import Activations, CacheDtype, Kernels, Numerics, Quantisation
from ...weights.holder import Share
from ..requests.admission import PrefixCache, PriorityPayments
from ..tallies import ServerTallies
from .pausing import Pause
from .pledging import Depositor

if TYPE_CHECKING:
    from ...blocks.kernels.choice import Known
    from ...blocks.span import BlockSpan

MAX_ADAPTERS: Final = 32
"""Each takes a line of the announcement."""
MakePayments = Callable[[Collection[str]], PriorityPayments]
"""Called with the validators (peer ids) whose points are taken."""
OnEvent = Callable[..., None]
"""Called with the event's name and its fields: "status" (text), "ready", "moving", "moved", "stopping", "stopped",
"pausing", "paused", "resumed"."""


@dataclass(frozen=True)
class ServerOptions:
    """What a person asked for; None means: decide. `throughput` in decode steps per second, `drain_timeout` seconds.

    `allow_clients` are the peer ids that may use this server; none lets everybody. `gain` is what a change of blocks
    has to gain (node/placement/plan.py), None: the blocks are never changed. `max_disk` is in bytes. `pledge` is how
    many points the server promises to lose when a fault of it is proved. `adapters` are folders of adapters that
    anybody may name. `devices` compute consecutive parts of the blocks. `share_weights`: whether the weights are handed
    on to peers. `exact`: sessions are computed as docs/exact.md has it, or nothing is served; `exact_if_cheap`: where
    `exactness.py` chooses so.
    """

    model: str
    blocks: Span | None = None
    num_blocks: int | None = None
    devices: tuple[str, ...] = ("auto",)
    dtype: str = "auto"
    quant: Quantisation = "none"
    activations: Activations = "float32"
    cache_dtype: CacheDtype = "auto"
    kernels: Kernels = "torch"
    exact: bool = False
    exact_if_cheap: bool = False
    cache_tokens: int | None = None
    prefix_cache: PrefixCache = "own"
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
    share_weights: Share = "auto"

    @property
    def numerics(self) -> Numerics:
        """What the server announces and signs as its quantisation."""
        return Numerics(self.quant, self.activations, self.cache_dtype, self.exact)

    @property
    def stays(self) -> bool:
        """Whether the blocks are never changed."""
        return self.blocks is not None or self.gain is None


@dataclass(frozen=True)
class ServerParts:
    """What the process of a server has made for it.

    `on_event` and `progress` tell a person what it does. `payments` makes what takes points of some validators for
    priority; `depositor` leaves those of a pledge with one. `tallies` is what all spans count in. While a `pause` is
    wanted, the server takes no sessions. It has no announcement once those that it had have gone. `known` is what was
    found out about blocks, by model version and how they were loaded: it is not measured again for others. `computing`
    is given the blocks that were loaded, and returns what computes in their place. A process that is `shared` with
    others keeps the memory that one of them has no use for.
    """

    on_event: OnEvent
    progress: Progress
    payments: MakePayments
    depositor: Depositor | None = None
    tallies: ServerTallies = field(default_factory=ServerTallies)
    pause: Pause = field(default_factory=Pause)
    known: dict[object, Known] = field(default_factory=dict)
    computing: Callable[[BlockSpan], BlockSpan] | None = None
    shared: bool = False


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
    count = options.num_blocks or len(options.blocks or range(folder.num_blocks))
    if count < len(options.devices):
        raise BadInput(f"{len(options.devices)} devices are more than {count} blocks: give --device fewer times")
    boundaries = folder.boundaries
    if options.blocks is not None and (refused := boundaries.refusal(options.blocks)):
        raise BadInput(f"--blocks {options.blocks}: {refused}")
    if options.num_blocks is not None and boundaries.most(options.num_blocks) < options.num_blocks:
        most = boundaries.most(options.num_blocks)
        few = f"at most {most}, or at least" if most else "at least"
        held = range(options.num_blocks, folder.num_blocks + 1)
        more = next(count for count in held if boundaries.most(count) == count)
        raise BadInput(
            f"--num-blocks {options.num_blocks}: blocks of {folder.name} that share something stay on one server "
            f"({boundaries.named}): take {few} {more}"
        )


def read_adapters(folders: Sequence[Path], model_version: bytes, model: str) -> list[Adapter]:
    """The adapters that a server's owner names.

    Raises:
        BadInput: one cannot be used for this model, two have one name, or there are too many.
    """
    adapters = _read_all(folders)
    for adapter in adapters:
        adapter.check_model(model_version, model)
    return adapters


def check_adapters(folders: Sequence[Path], model: ModelFolder | None) -> None:
    """What can be told of adapters before a swarm is joined; `model` if its configuration is on this machine.

    Raises:
        BadInput: one cannot be used, or is for another architecture, two have one name, or there are too many.
    """
    from ...blocks.architecture import linear_layers  # with torch: two seconds, for servers with adapters only

    adapters = _read_all(folders)
    if model is not None:
        blocks, linears = Span(0, model.num_blocks), dict(enumerate(linear_layers(model.path)))
        for adapter in adapters:
            adapter.check_fits(blocks, linears, model.hidden_size, model.num_blocks)


def _read_all(folders: Sequence[Path]) -> list[Adapter]:
    if len(folders) > MAX_ADAPTERS:
        raise BadInput(
            f"{len(folders)} adapters are more than a server announces: give --adapter at most {MAX_ADAPTERS} times"
        )
    adapters: list[Adapter] = []
    for folder in folders:
        adapter = read_adapter(folder)
        if adapter.soft_prompt is not None or not adapter.tensors:
            raise BadInput(f"{folder} is a prompt, which its user has: a server loads LoRA adapters only")
        if any(other.name == adapter.name for other in adapters):
            raise BadInput(f"two adapters are called {adapter.name}: rename the folder of one of them")
        adapters.append(adapter)
    return adapters
