"""The model that a command works with: the one that is named, or the one that the swarm serves."""

from __future__ import annotations

import ctypes
import re
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Final

import trio
import typer

from ...protocols.announcement import Announcement
from ..client.deadlines import DEADLINES
from ..client.session_adapter import is_adapter_name
from ..errors import BadInput, MachineError, ModelError
from ..links.format import SwarmTarget, is_link
from ..models import ModelFolder, Need, resolve, split_version
from ..models.adapter import check_adapter_files
from ..models.sources.alias import ALIASES
from ..swarm.swarm import Swarm
from ..swarm.versions import VERSIONS
from ..weights.on_demand import OnDemandFolder
from ..weights.remote_model import find_instead
from .node_report import nobody_serves
from .output import Output, ProgressBars
from .terminal import aliases_first, choose_model

_ANNOUNCED: Final = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?(:[\w.-]+)?(@[\w][\w.-]*)?", re.ASCII)
_LOOKED_FOR: Final = 64  # models of a swarm that are looked for on this machine
_DEVICE: Final = re.compile(r"mps|cuda(:\d+)?")
_BUILT_FOR: Final = re.compile(r"^(cuda|hip)\b[^=\n]*= *(.+?) *$", re.MULTILINE)
"""In torch/version.py, which the build writes: a version, or None."""

SwarmModelArgument = Annotated[
    str | None,
    typer.Argument(
        help="Folder, .gguf file, hub id or alias, @VERSION pins its version. Default: the model of the swarm."
    ),
]


def check_model(model: str | None) -> ModelFolder | None:
    """The configuration of the model that is named, if it is on this machine; None if only a swarm or hub knows it.

    Raises:
        ModelError: no such model can be anywhere, or its folder cannot be used.
    """
    if model is None:
        return None
    named, _ = split_version(model)
    if named.endswith(".gguf") and Path(named).expanduser().is_file():
        return None
    elsewhere = named in ALIASES or not (Path(named).expanduser().exists() or named.startswith((".", "/", "~")))
    try:
        return resolve(model, need="config", offline=True)
    except ModelError:
        if elsewhere:
            return None
        raise


def local_folder(model: str | None) -> ModelFolder | None:
    """The model that is named, if all that a client needs of it is on this machine; nothing is fetched or imported."""
    if model is None or split_version(model)[0].endswith(".gguf"):
        return None
    try:
        return resolve(model, need="client", offline=True)
    except ModelError:
        return None


def check_seed(seed: int | None) -> None:
    """
    Raises:
        BadInput: torch takes no such seed of random numbers.
    """
    if seed is not None and not -(1 << 63) <= seed < 1 << 64:
        raise BadInput(f"--seed {seed}: give a number of at most 64 bits")


def check_adapter(adapter: str) -> None:
    """
    Raises:
        BadInput: it is neither a folder with a usable adapter nor the name of one that servers may hold.
    """
    if not is_adapter_name(adapter):
        check_adapter_files(Path(adapter))


def check_devices(devices: Sequence[str]) -> None:
    """
    Raises:
        BadInput: no such device name; or of several one is auto, or given twice and not the processor.
        MachineError: this machine has no such device.
    """
    named = ["cuda:0" if device == "cuda" else device for device in devices]
    for device in named:
        if device != "cpu" and named.count(device) > 1:
            raise BadInput(f"--device {device} is given twice: name each device once")
        if device == "auto" and named[1:]:
            raise BadInput("--device auto is one device: name all of them, or leave the others out")
        check_device(device)


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
    reason = why_no_device(device)
    if reason is not None:
        raise MachineError(f"this machine has no device {device!r} ({reason}): use --device auto or cpu")
    from ..blocks.config import choose_device  # torch knows how many there are, and takes two seconds to be imported

    choose_device(device)


def why_no_device(device: str, platform: str = sys.platform) -> str | None:
    """Why there can be no such device, as far as it can be told without importing torch; None if there may be one."""
    if device == "mps":
        return None if platform == "darwin" else "only macOS has it"
    found = find_spec("torch")
    folders = (found.submodule_search_locations if found is not None else None) or ()
    try:
        built = "".join(Path(folder, "version.py").read_text() for folder in folders)
    except OSError:
        return None
    kinds = dict(_BUILT_FOR.findall(built))
    if kinds.get("hip", "None") != "None" or "cuda" not in kinds:
        return None
    if kinds["cuda"] == "None":
        return "the installed build of PyTorch is one without CUDA"
    try:
        ctypes.CDLL("nvcuda.dll" if platform == "win32" else "libcuda.so.1")
    except OSError:
        return "there is no driver for NVIDIA cards"
    return None


def served_by(
    named: Collection[str], models: Mapping[bytes, tuple[str, int]], servers: Iterable[Announcement]
) -> dict[bytes, tuple[str, int]]:
    """Of several `models`, by version, those of the servers that were named; all where these serve none."""
    theirs = {server.model_version for server in servers if server.peer_id in named}
    return {version: models[version] for version in models if version in theirs} or dict(models)


def linked_model(model: str | None, target: SwarmTarget) -> str | None:
    """MODEL, or where it is left out what the person's link names, with the version.

    Raises:
        BadInput: that would have to be fetched, and whoever made the link may be anybody; or MODEL is a link.
    """
    if model is not None and is_link(model):
        raise BadInput("this is a link, and no MODEL: give it as --peer LINK, or type `petalnode join LINK`")
    if model is not None or target.model is None:
        return model
    if not is_here(split_version(target.model)[0]):
        raise BadInput(
            f"the link names {target.model}, which is not on this machine: `petalnode join` with the link says what it "
            "would fetch, and asks (with --chat, to chat). Or give MODEL"
        )
    return target.model


async def served_model(swarm: Swarm, output: Output) -> str:
    """The name of the one model that the swarm serves, if it is an alias or on this machine; of several, the one of the
    peers that were named, or that a person at a terminal chooses.

    What servers call a model is theirs to say: nothing is downloaded because an announcement names it.

    Raises:
        SwarmError: it serves none.
        BadInput: it serves several, or one that would have to be downloaded.
    """
    view, now = await swarm.refresh(sample=True, timeout=DEADLINES.refresh), time.time()
    served = served_by(swarm.named, view.models(now=now), view.servers(now=now))
    names = sorted({name for name, _ in served.values()}, key=aliases_first)
    if not names:
        raise await nobody_serves(swarm, "a model", ": start one with `petalnode serve`")
    here = await trio.to_thread.run_sync(lambda: [name for name in names[:_LOOKED_FOR] if is_here(name)])
    version = b""
    if len(names) > 1:
        version = await choose_model(served, view.servers(now=now), output, here)
        names = [served[version][0]]
        here = [name for name in here if name in names]
    if not here:
        raise BadInput(
            f"this swarm says that it serves {names[0]}, which is not on this machine. What strangers name is not "
            "downloaded: give MODEL if it is what you want, with the version that you were told (MODEL@VERSION)"
        )
    several = [name for name, _ in served.values()].count(names[0]) > 1
    return f"{names[0]}@{version.hex()[: VERSIONS.digits]}" if version and several else names[0]


def is_here(name: str) -> bool:
    """Whether a model that strangers name is an alias, or here with all that a client needs of it: in the hub's cache,
    or a folder in the working folder."""
    if name in ALIASES:
        return True
    if name.endswith(".gguf") or not _ANNOUNCED.fullmatch(name):
        return False  # it would be imported, or leads elsewhere on this machine
    try:
        resolve(name, need="client", offline=True)
    except ModelError:
        return False
    return True


def is_named(model: str | None, name: str, version: bytes) -> bool:
    """Whether a served model is what the argument MODEL names: no other name, nor another version than it pins."""
    if model is None:
        return True
    named, pinned = split_version(model)
    return name in (model, named) and version.hex().startswith(pinned or "")


def _before_download(coming: Mapping[Path, int], needed: Collection[Path]) -> None:
    from ..blocks.architecture import check_download  # with torch: two seconds, which a download takes anyway

    check_download(coming, needed)


async def model_folder(model: str, output: Output, *, need: Need, swarm: Swarm | None = None) -> ModelFolder:
    """Finds the folder of a model, and downloads or imports what is missing, with progress bars; from peers of `swarm`
    what is neither on this machine nor on a hub.

    Raises:
        ModelError: the model cannot be found or used.
        SwarmError: it could come from peers only, and nobody hands it on.
    """
    try:
        return await _own_folder(model, output, need)
    except ModelError as error:
        if swarm is None:
            raise
        return await folder_from_peers(swarm, model, output, need, error)


async def folder_from_peers(swarm: Swarm, model: str, output: Output, need: Need, why: ModelError) -> ModelFolder:
    """What `need` asks for of a model that is neither on disk here nor, by `why`, in a hub.

    Raises:
        ModelError, SwarmError, MachineError: nobody serves it, then `why`; or nobody hands it on.
    """
    with ProgressBars(output.errors) as bars:
        remote = await find_instead(swarm, model, bars, why)
        if remote.missing(need):
            named = f"{remote.name} ({remote.version.hex()[:12]})"
            output.note(f"{named} cannot be downloaded here: peers of the swarm hand it on, and it stays on this disk")
        return await remote.fetch(need, bars)


async def on_demand_folder(model: str, output: Output, swarm: Swarm, max_disk: int) -> ModelFolder:
    """The folder of a model if all of it is on this machine; else one whose blocks come from peers of `swarm` while
    they are needed, within `max_disk` bytes.

    Raises:
        ModelError, SwarmError, MachineError: as `folder_from_peers`.
        BadInput: `max_disk` is too little for a block.
    """
    find = partial(resolve, model, need="all", offline=True)
    try:
        return await trio.to_thread.run_sync(find, abandon_on_cancel=True)
    except ModelError as error:
        why = error
    with ProgressBars(output.errors) as bars:
        remote = await find_instead(swarm, model, bars, why)
        output.note(f"fetching blocks of {remote.name} ({remote.version.hex()[:12]}) from peers as they are recomputed")
        return await OnDemandFolder.of(remote, max_disk, bars)


async def _own_folder(model: str, output: Output, need: Need) -> ModelFolder:
    with ProgressBars(output.errors) as bars:
        find = partial(resolve, model, need=need, progress=bars, before_download=_before_download)
        # Ctrl-C is not to wait for a download, which the next run goes on with.
        return await trio.to_thread.run_sync(find, abandon_on_cancel=True)
