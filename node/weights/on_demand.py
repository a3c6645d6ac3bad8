"""A model of the swarm whose blocks come from peers when needed, and go when the disk is to hold no more.

So that a validator recomputes a model of which it can keep a few blocks only.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar, Self

import trio

from ...protocols.ids import Span
from ..errors import BadInput
from ..models import ModelFolder, Progress, no_progress
from ..models.disk_limit import keep_within, users_of
from .remote_model import RemoteModel

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class OnDemandFolder(ModelFolder):
    """Embeddings, norm, head and tokenizer are here, and of the blocks as many as fit into `max_disk` bytes."""

    fetches: ClassVar[bool] = True

    remote: RemoteModel = field(compare=False, repr=False)
    max_disk: int

    @classmethod
    async def of(cls, remote: RemoteModel, max_disk: int, progress: Progress) -> Self:
        """With what a client needs of the model, which is fetched.

        Raises:
            BadInput: that and the largest block are more than `max_disk`.
            SwarmError, ModelError, MachineError: as `RemoteModel.fetch`.
        """
        trees = remote.stored.trees
        ends = trees[0].nbytes + trees[remote.num_blocks + 1].nbytes
        least = ends + max(trees[number].nbytes for number in range(1, remote.num_blocks + 1))
        if least > max_disk:
            size = f"{-(-least >> 20)} MiB"
            raise BadInput(f"--max-disk is too little: embeddings, head and a block of {remote.name} are {size}")
        client = await remote.fetch("client", progress, max_disk=max_disk)
        return cls(**vars(client), remote=remote, max_disk=max_disk)

    @contextmanager
    def held(self, blocks: Span) -> Iterator[None]:
        """While it is entered, the weights of these blocks are here. In a thread that trio has started.

        Raises:
            SwarmError: nobody hands them on.
            ModelError: a span passes the end of the model.
            MachineError: the disk is full or cannot be written.
        """
        lacking = self.remote.stored.lacking(blocks)
        if lacking:
            trio.from_thread.run(self.remote.fetch, blocks, no_progress)
        try:
            yield
        finally:
            self._give_back(lacking)

    def _give_back(self, numbers: Collection[int]) -> None:
        """Removes the parts with these numbers, if they are too much and no other process may use them."""
        stored = self.remote.stored
        kept = sum(tree.nbytes for number, tree in stored.trees.items() if stored.has(number))
        if numbers and kept > self.max_disk:
            if set(users_of(self.path)) - {os.getpid()}:
                log.warning("another process uses %s: what was fetched of it stays, beyond --max-disk", self.path)
                return
            stored.remove(numbers)
        keep_within(self.max_disk, [self.path])  # quantised blocks and other models go, too
