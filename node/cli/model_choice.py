"""The model that a command works with: the one that is named, or the one that the swarm serves."""

from __future__ import annotations

import time
from typing import Annotated

import trio
import typer

from ..client.deadlines import REFRESH_TIMEOUT
from ..errors import BadInput, SwarmError
from ..models import ModelFolder, Need, resolve
from ..swarm.swarm import Swarm
from .output import Output, ProgressBars

SwarmModelArgument = Annotated[
    str | None, typer.Argument(help="Folder, .gguf file, hub id or alias. Default: the model of the swarm.")
]


async def served_model(swarm: Swarm) -> str:
    """The name of the one model that the swarm serves.

    Raises:
        SwarmError: it serves none.
        BadInput: it serves several.
    """
    view = await swarm.refresh(timeout=REFRESH_TIMEOUT)
    names = sorted({name for name, _ in view.models(now=time.time()).values()})
    if not names:
        raise SwarmError("nobody in this swarm serves a model (yet): start one with `petalnode serve`")
    if len(names) > 1:
        raise BadInput(f"this swarm serves several models: name one of {', '.join(names)}")
    return names[0]


async def model_folder(model: str, output: Output, *, need: Need) -> ModelFolder:
    """Finds the folder of a model, and downloads or imports what is missing, with progress bars.

    Raises:
        ModelError: the model cannot be found or used.
    """
    bars = ProgressBars(output.errors)
    try:
        # Ctrl-C is not to wait for a download, which the next run goes on with.
        return await trio.to_thread.run_sync(lambda: resolve(model, need=need, progress=bars), abandon_on_cancel=True)
    finally:
        bars.stop()
