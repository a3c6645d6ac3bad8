"""The model that a command works with: the one that is named, or the one that the swarm serves."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Annotated, Final

import trio
import typer

from ..client.deadlines import REFRESH_TIMEOUT
from ..errors import BadInput, ModelError, SwarmError
from ..models import ModelFolder, Need, resolve
from ..models.sources.alias import ALIASES
from ..swarm.swarm import Swarm
from .output import Output, ProgressBars

_DEVICE: Final = re.compile(r"mps|cuda(:\d+)?")

SwarmModelArgument = Annotated[
    str | None, typer.Argument(help="Folder, .gguf file, hub id or alias. Default: the model of the swarm.")
]


def check_model(model: str | None) -> ModelFolder | None:
    """The configuration of the model that is named, if it is on this machine; None if only a swarm or hub knows it.

    Raises:
        ModelError: no such model can be anywhere, or its folder cannot be used.
    """
    if model is None or (model.endswith(".gguf") and Path(model).expanduser().is_file()):
        return None
    elsewhere = model in ALIASES or not (Path(model).expanduser().exists() or model.startswith((".", "/", "~")))
    try:
        return resolve(model, need="config", offline=True)
    except ModelError:
        if elsewhere:
            return None
        raise


def check_device(device: str) -> None:
    """
    Raises:
        BadInput: no such device name.
        MachineError: this machine has no such device.
    """
    if device in ("auto", "cpu"):
        return
    if not _DEVICE.fullmatch(device):
        raise BadInput(f"--device {device}: use auto, cpu, mps, cuda or cuda:N")
    from ..blocks.config import choose_device  # torch knows which there are, and takes a second to be imported

    choose_device(device)


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
