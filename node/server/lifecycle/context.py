"""What a server keeps from span to span."""

from __future__ import annotations

from dataclasses import dataclass

from ...models import ModelFolder
from ...models.adapter import Adapter
from ...swarm.swarm import Swarm
from .options import ServerOptions, ServerParts
from .rebalancing import PlacementState
from .source import ModelSource
from .speed import SpeedKey


@dataclass(frozen=True)
class ServerContext:
    """What a server keeps from span to span.

    `source` is where its weights come from, `placement` how it sees the swarm. `speed_key` is what a measured speed is
    kept under, `adapters` are its owner's.
    """

    swarm: Swarm
    options: ServerOptions
    parts: ServerParts
    source: ModelSource
    placement: PlacementState
    speed_key: SpeedKey
    adapters: tuple[Adapter, ...]

    @property
    def folder(self) -> ModelFolder:
        return self.source.folder
