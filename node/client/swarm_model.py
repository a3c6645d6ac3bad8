"""The model that a client uses, and which version of it that is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import trio

from ..errors import ModelError, SwarmError
from ..models import (
    Manifest,
    ModelFolder,
    Progress,
    check_pinned,
    compute_manifest,
    held_weights,
    stated_manifest,
    verify_part,
)
from ..models.progress import no_progress
from ..swarm.swarm import Swarm
from ..swarm.versions import choose_version, used_before
from .deadlines import DEADLINES

_LONGROPE: Final = frozenset({"longrope", "su", "yarn"})
"""The names that longrope has in configurations of transformers (two old ones of Phi-3; yarn may be its own kind)."""


@dataclass(frozen=True)
class SwarmModel:
    """The model that a client uses: `folder` holds at least embeddings, norm and head.

    `held` stands for these weights where the version was taken from what servers say (`held_weights`), else None.
    """

    version: bytes
    folder: ModelFolder
    held: bytes | None = None

    async def original_length(self) -> int | None:
        """As `blocks.config` has it."""
        kinds = _rotary_kinds(self.folder.config)
        return await trio.to_thread.run_sync(_original_length, self.folder.path) if kinds & _LONGROPE else None

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def num_blocks(self) -> int:
        return self.folder.num_blocks


def _rotary_kinds(config: Mapping[str, Any]) -> set[Any]:
    """What a `config.json` may mean by the kind of its rotary embeddings, found without transformers."""
    found: set[Any] = set()
    waiting: list[Any] = [config]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Mapping):
            found |= {part[name] for name in ("rope_type", "type") if isinstance(part.get(name), str)}
            waiting += part.values()
    return found


@cache
def _original_length(folder: Path) -> int | None:
    from ..blocks.config import original_length, read_config  # torch

    return original_length(read_config(folder))


async def identify_model(swarm: Swarm, folder: ModelFolder, progress: Progress = no_progress) -> SwarmModel:
    """Finds out which model version `folder` is.

    Its own weights say so where it has them all, else a manifest that whoever published the model has put there. Else
    it is the version that this node has used with these weights before, if it is served. Else servers that announce a
    model of this name are asked for manifests, and the client's part is checked against them. Other blocks with the
    same embeddings and head make a version that fits as well: see `choose_version`.

    Raises:
        ModelError: the folder's part is not that of the swarm's model, or of the version that was asked for; or several
            versions fit, or another one than was used before.
        SwarmError: the folder holds a part only, and no server tells what the whole is.
    """
    try:
        # Hashing a large model takes minutes, for which Ctrl-C does not wait.
        manifest = await trio.to_thread.run_sync(compute_manifest, folder, progress, abandon_on_cancel=True)
    except ModelError:
        # Not the whole model: that is how it is on a laptop that uses a model which it cannot hold.
        pass
    else:
        check_pinned(folder, manifest.version)
        return SwarmModel(manifest.version, folder)
    stated = await trio.to_thread.run_sync(stated_manifest, folder, "client", progress, abandon_on_cancel=True)
    if stated is not None:
        return SwarmModel(stated.version, folder)
    held = await trio.to_thread.run_sync(held_weights, folder, "client", progress, abandon_on_cancel=True)
    used = swarm.trust.version_used(held)
    if used is not None and not folder.pinned:
        await swarm.refresh(model_version=used, sample=True, timeout=DEADLINES.refresh)
        if used_before(folder, held, swarm.view, swarm.trust) is not None:
            return SwarmModel(used, folder, held)
    await swarm.refresh(sample=True, timeout=DEADLINES.refresh)
    mismatch: ModelError | None = None
    fitting: set[bytes] = set()
    pinned = folder.pinned or ""
    async for version, data in swarm.manifests(
        folder.name, folder.num_blocks, pinned=pinned, timeout=DEADLINES.refresh
    ):
        try:
            manifest = Manifest.from_wire(data, version)
            await trio.to_thread.run_sync(verify_part, folder, manifest, "client", progress, abandon_on_cancel=True)
        except ModelError as error:
            mismatch = error
        else:
            fitting.add(version)
    if fitting:
        return SwarmModel(choose_version(folder, fitting, swarm.view, swarm.trust, held), folder, held)
    if mismatch is not None:
        raise mismatch
    asked_for = f" in version {pinned}" if pinned else ""
    raise SwarmError(
        f"{folder.path} holds only a part of {folder.name}, and no server of the swarm can tell what the whole"
        f"{asked_for} is: check --peer, or start a server of this model"
    )
