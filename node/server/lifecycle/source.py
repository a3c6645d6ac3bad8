"""Which model it is, and where the weights of its blocks come from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import trio

from ....protocols.ids import Span
from ...errors import ModelError
from ...models import Manifest, ModelFolder, compute_manifest, resolve, verify_part
from ...models.disk_limit import evict_for_download
from ...models.progress import Progress
from ...swarm.swarm import Swarm
from .options import ServerOptions

T = TypeVar("T")

_ASK_TIMEOUT: Final = 5.0


class ModelSource:
    """A model of the swarm. `folder` may hold only a part of it; `weights` brings the blocks that are wanted."""

    def __init__(
        self, folder: ModelFolder, manifest: Manifest, whole: bool, options: ServerOptions, progress: Progress
    ) -> None:
        self.folder = folder
        self.manifest = manifest
        self._whole = whole
        self._options = options
        self._progress = progress

    async def weights(self, span: Span) -> Path:
        """A folder with the blocks of `span`, checked by the manifest.

        Raises:
            ModelError, MachineError: they cannot be had, or are others.
        """
        if self._whole:
            return self.folder.path
        part = await in_thread(lambda: _fetch(self._options, span, self._progress))
        await in_thread(lambda: verify_part(part, self.manifest, span, self._progress))
        return part.path


async def find_source(swarm: Swarm, folder: ModelFolder, options: ServerOptions, progress: Progress) -> ModelSource:
    """The manifest of the model in `folder`: its own if it is all there, else the swarm's.

    Raises:
        ModelError, MachineError: the model cannot be had.
    """
    try:
        manifest = await in_thread(lambda: compute_manifest(folder, progress))
        return ModelSource(folder, manifest, True, options, progress)
    except ModelError:
        # Only a part is on this disk: what the whole is, somebody else must say.
        remote = await _manifest_of_swarm(swarm, folder)
    if remote is not None:
        return ModelSource(folder, remote, False, options, progress)
    # The first server of a swarm makes the manifest, for which it needs the whole model once.
    whole = await in_thread(lambda: _fetch(options, "all", progress))
    manifest = await in_thread(lambda: compute_manifest(whole, progress))
    return ModelSource(whole, manifest, True, options, progress)


async def find_folder(options: ServerOptions, progress: Progress) -> ModelFolder:
    """The model's folder with its configuration, its weights perhaps not there yet.

    Raises:
        ModelError, MachineError: there is no such model.
    """
    return await in_thread(lambda: _fetch(options, "config", progress))


async def in_thread(function: Callable[[], T]) -> T:
    """Runs `function` in a worker thread, which is left behind if we are told to stop meanwhile."""
    return await trio.to_thread.run_sync(function, abandon_on_cancel=True)


def _fetch(options: ServerOptions, need: Any, progress: Progress) -> ModelFolder:
    return resolve(
        options.model,
        need=need,
        progress=progress,
        revision=options.revision,
        offline=options.offline,
        before_download=evict_for_download(options.max_disk),
    )


async def _manifest_of_swarm(swarm: Swarm, folder: ModelFolder) -> Manifest | None:
    async for version, data in swarm.manifests(folder.name, folder.num_blocks, timeout=_ASK_TIMEOUT):
        try:
            return Manifest.from_wire(data, version)
        except ModelError:
            continue
    return None
