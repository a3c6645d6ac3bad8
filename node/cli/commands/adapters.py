"""`petalnode adapters`: search, fetch and share adapters."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from ...errors import BadInput
from ...tuning.adapter_files import SharedAdapter, check_adapter, check_name
from ...tuning.repository import HUB, repository_of
from ..option import JsonFlag
from ..output import Output
from ..process import one_line

adapters = typer.Typer(
    no_args_is_help=True, help="Search, fetch and share adapters (in folders, git repositories or on the hub)."
)

_AT = "FOLDER|GIT|hub"


@adapters.command("search")
def search(
    at: Annotated[str, typer.Option(metavar=_AT, help="A folder, a git repository, or the Hugging Face hub.")] = HUB,
    model: Annotated[
        str | None, typer.Option(help="Only adapters of this model: its name, or at least 8 digits of its version.")
    ] = None,
    tag: Annotated[list[str] | None, typer.Option(help="Only adapters with this tag; repeatable.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """List the adapters of a folder, a git repository or the hub."""
    output = Output(as_json)
    found = repository_of(at).search(model, tuple(tag or ()))
    for adapter in found:
        output.emit(**asdict(adapter), at=at)
    if not found:
        output.say(f"no adapters {f'for {model} ' if model else ''}at {at}")
    elif not as_json:
        table = Table(box=None)
        for column in ("name", "method", "model", "version", "task", "tags"):
            table.add_column(column, overflow="fold")
        for adapter in found:
            version, tags = adapter.model_version[:12], ", ".join(adapter.tags)
            cells = (adapter.name, adapter.method, adapter.model, version, adapter.task, tags)
            table.add_row(*map(one_line, cells))
        output.table(table)


@adapters.command("push")
def push(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the adapter, as `petalnode tune` saves it.")],
    to: Annotated[
        str, typer.Option(metavar="FOLDER|GIT|[hub:]ORG/NAME", help="A folder, a git repository, or a hub id.")
    ],
    name: Annotated[str | None, typer.Option(help="Name to share it under. Default: the name of the folder.")] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace an adapter of the same name.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Share an adapter: uploads its safetensors, JSON and README.md, and no other file."""
    output = Output(as_json)
    if not folder.is_dir():
        raise BadInput(f"there is no folder {folder}")
    found = check_adapter(folder.absolute())
    name = check_name(name or folder.absolute().name)
    where = repository_of(to, writes=True).push(folder, name, replace=replace)
    if not found.model_version:
        output.note("the adapter does not record the version of its model, so others cannot check it")
    output.say(f"shared: {where}")
    output.emit(event="pushed", name=name, where=where)


@adapters.command("pull")
def pull(
    name: Annotated[str, typer.Argument(help="Name as in `petalnode adapters search`; on the hub ORG/NAME.")],
    at: Annotated[str, typer.Option(metavar=_AT, help="A folder, a git repository, or the Hugging Face hub.")] = HUB,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder to create. Default: the name.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the contents of --out.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Fetch an adapter into a folder."""
    output = Output(as_json)
    target = out or Path(check_name(name.partition("@")[0].rpartition("/")[2]))
    if target.exists() and not (target.is_dir() and (overwrite or not any(target.iterdir()))):
        raise BadInput(f"{target} is there already: give another --out, or --overwrite")
    found = repository_of(at).pull(name, target)
    output.say(f"{one_line(found.method)} for {one_line(found.model) or 'an unnamed model'}, saved in {target}")
    output.emit(event="pulled", path=str(target), **{key: value for key, value in _facts(found).items() if value})


def _facts(found: SharedAdapter) -> dict[str, object]:
    facts = asdict(found)
    del facts["name"]
    return facts
