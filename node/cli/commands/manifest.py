"""`petalnode manifest`: the file with which a repository says which model version it is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...errors import BadInput, MachineError
from ...models import DEFAULT_MODEL, check_pinned, compute_manifest, resolve
from ...models.manifest import MANIFEST_FILE, write_manifest
from ..output import Output, ProgressBars


def manifest(
    model: Annotated[
        str, typer.Argument(help="The model: a folder, .gguf file, hub id or alias; all of it is read.")
    ] = DEFAULT_MODEL,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help=f"Folder to write {MANIFEST_FILE} into; a file there is replaced.")
    ] = Path(),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write the manifest of a model, for its repository to say which version it is to whoever has a part of it."""
    output = Output(as_json)
    if not out.is_dir():
        raise BadInput(f"--out: {out} is no folder")
    with ProgressBars(output.errors) as bars:
        folder = resolve(model, progress=bars)
        found = compute_manifest(folder, bars)
    check_pinned(folder, found.version)
    try:
        file = write_manifest(found, out)
    except OSError as error:
        raise MachineError(f"{out / MANIFEST_FILE} cannot be written: {error.strerror}") from error
    output.say(f"{folder.name} is model version {found.version.hex()}")
    output.say(f"its manifest is in {file}: put it beside the weights, in the model's repository")
    output.emit(model=folder.name, model_version=found.version.hex(), file=str(file))
