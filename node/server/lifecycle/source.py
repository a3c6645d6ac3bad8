"""Which model a server serves, by its manifest, and where the weights of its blocks come from."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import trio

from ....protocols.ids import Span
from ...errors import ModelError, SwarmError
from ...models import (
    Manifest,
    ModelFolder,
    check_pinned,
    compute_manifest,
    held_weights,
    resolve,
    stated_manifest,
    verify_part,
)
from ...models.disk_limit import evict_for_download
from ...models.manifest import canonical_architecture
from ...models.progress import Progress
from ...swarm.swarm import Swarm
from ...swarm.versions import choose_version, used_before
from ...weights.remote_model import RemoteModel, find_instead, find_remote_model
from ...weights.store import PeerFolder
from .options import ServerOptions

T = TypeVar("T")

_ASK_TIMEOUT: Final = 5.0


@dataclass(frozen=True)
class ModelSource:
    """A model of the swarm. `folder` holds the `whole` of it, or a part. `weights` brings the blocks that are wanted,
    from peers if it is `remote`, and calls `verified` when they are those of the manifest."""

    folder: ModelFolder
    manifest: Manifest
    whole: bool
    options: ServerOptions
    progress: Progress
    verified: Callable[[], None] = lambda: None
    remote: RemoteModel | None = None

    async def weights(self, span: Span) -> Path:
        """A folder with the blocks of `span`, checked by the manifest.

        Raises:
            ModelError, MachineError: they cannot be had, or are others.
        """
        if self.whole:
            return self.folder.path
        if self.remote is not None:
            part = await self._from(self.remote, span)
        else:
            part = await in_thread(lambda: _fetch(self.options, span, self.progress))
        await in_thread(lambda: verify_part(part, self.manifest, span, self.progress))
        self.verified()
        return part.path

    async def _from(self, remote: RemoteModel, span: Span) -> ModelFolder:
        try:
            return await remote.fetch(span, self.progress, max_disk=self.options.max_disk)
        except SwarmError:  # what could not be downloaded when others had it may be where it is public now
            with suppress(ModelError):
                return await in_thread(lambda: _fetch(self.options, span, self.progress))
            raise


async def find_source(
    swarm: Swarm,
    folder: ModelFolder,
    options: ServerOptions,
    progress: Progress,
    remote: RemoteModel | None = None,
) -> ModelSource:
    """The manifest of the model in `folder`: its own if it is all there, else the one that is beside the weights, else
    the swarm's. With `remote`, its parts come from peers.

    Raises:
        ModelError, MachineError: the model cannot be had.
    """
    try:
        manifest = await in_thread(lambda: compute_manifest(folder, progress))
    except ModelError:
        # Only a part is on this disk: what the whole is, somebody else must say.
        stated = await in_thread(lambda: stated_manifest(folder, "config", progress))
        if stated is not None:
            return ModelSource(folder, stated, False, options, progress, remote=remote)
        held = held_weights(folder, "config")
        theirs = await _manifest_of_swarm(swarm, folder, held)
    else:
        check_pinned(folder, manifest.version)
        return ModelSource(folder, manifest, True, options, progress)
    if theirs is not None:
        verified = partial(swarm.trust.note_version, held, theirs.version)
        return ModelSource(folder, theirs, False, options, progress, verified)
    # The first server of a swarm makes the manifest, for which it needs the whole model once.
    whole = await in_thread(lambda: _fetch(options, "all", progress))
    manifest = await in_thread(lambda: compute_manifest(whole, progress))
    check_pinned(whole, manifest.version)
    return ModelSource(whole, manifest, True, options, progress)


async def find_folder(
    swarm: Swarm, options: ServerOptions, progress: Progress
) -> tuple[ModelFolder, RemoteModel | None]:
    """The model's folder with its configuration, its weights perhaps not there yet; and whence these come, if it is
    from peers.

    Raises:
        ModelError, MachineError: there is no such model.
        SwarmError: peers have it, and do not hand it on.
    """
    try:
        folder = await in_thread(lambda: _fetch(options, "config", progress))
        if not PeerFolder.is_at(folder.path):
            return folder, None
        with suppress(SwarmError):
            remote = await find_remote_model(swarm, options.model, progress)
            return await remote.fetch("config", progress), remote
        return folder, None
    except ModelError as error:
        remote = await find_instead(swarm, options.model, progress, error)
        return await remote.fetch("config", progress), remote


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


async def _manifest_of_swarm(swarm: Swarm, folder: ModelFolder, held: bytes) -> Manifest | None:
    """The manifest of the version that is meant, by those of the swarm that have the architecture of `folder`.

    It may be another one than was served before: the blocks are checked against it.

    Raises:
        ModelError: they are several.
    """
    used = used_before(folder, held, swarm.view, swarm.trust)
    fitting: dict[bytes, Manifest] = {}
    pinned = folder.pinned or ("" if used is None else used.hex())
    async for version, data in swarm.manifests(folder.name, folder.num_blocks, pinned=pinned, timeout=_ASK_TIMEOUT):
        with suppress(ModelError):
            manifest = Manifest.from_wire(data, version)
            if manifest.config == canonical_architecture(folder.config):
                fitting[version] = manifest
    return fitting[choose_version(folder, fitting, swarm.view, swarm.trust)] if fitting else None
