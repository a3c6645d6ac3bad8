"""`petalnode adapters`: find, fetch and share what was tuned."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from ...errors import BadInput
from ...tuning.adapter_files import SharedAdapter, check_adapter, check_name
from ...tuning.repository import HUB, repository_of
from ..output import Output

adapters = typer.Typer(
    no_args_is_help=True, help="Find, fetch and share adapters (folders, git repositories, the hub)."
)

_AT = "FOLDER|GIT|hub"
_Json = Annotated[bool, typer.Option("--json", help="One JSON object per line on standard output.")]


@adapters.command("search")
def search(
    at: Annotated[str, typer.Option(metavar=_AT, help="Where to look.")] = HUB,
    model: Annotated[
        str | None, typer.Option(help="Only those of this model: its name, or the first 8 digits of a version.")
    ] = None,
    tag: Annotated[list[str] | None, typer.Option(help="Only those with this tag; repeatable.")] = None,
    as_json: _Json = False,
) -> None:
    """List the adapters that are shared at a place."""
    output = Output(as_json)
    found = repository_of(at).search(model, tuple(tag or ()))
    for each in found:
        output.emit(**asdict(each), at=at)
    if not found:
        output.say(f"no adapters {f'for {model} ' if model else ''}at {at}")
    elif not as_json:
        table = Table(box=None)
        for column in ("name", "method", "model", "version", "task", "tags"):
            table.add_column(column, overflow="fold")
        for each in found:
            cells = (each.name, each.method, each.model, each.model_version[:12], each.task, ", ".join(each.tags))
            table.add_row(*map(_printable, cells))
        output.console.print(table)


@adapters.command("push")
def push(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The adapter's folder, as `petalnode tune` saves it.")],
    to: Annotated[str, typer.Option(metavar="FOLDER|GIT|ORG/NAME", help="A folder, a git repository, or a hub id.")],
    name: Annotated[str | None, typer.Option(help="Its name there. Default: the folder's.")] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace the one of this name.")] = False,
    as_json: _Json = False,
) -> None:
    """Share an adapter. Only its safetensors, JSON and README.md leave this machine."""
    output = Output(as_json)
    if not folder.is_dir():
        raise BadInput(f"there is no folder {folder}")
    found = check_adapter(folder.absolute())
    name = check_name(name or folder.absolute().name)
    where = repository_of(to).push(folder, name, replace=replace)
    if not found.model_version:
        output.errors.print("it has no note of its model's version: others cannot tell whether it fits", style="dim")
    output.say(f"shared: {where}")
    output.emit(event="pushed", name=name, where=where)


@adapters.command("pull")
def pull(
    name: Annotated[str, typer.Argument(help="As `petalnode adapters search` shows it; on the hub ORG/NAME.")],
    at: Annotated[str, typer.Option(metavar=_AT, help="Where it is.")] = HUB,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Where to put it. Default: its name.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the adapter in --out.")] = False,
    as_json: _Json = False,
) -> None:
    """Fetch an adapter."""
    output = Output(as_json)
    target = out or Path(check_name(name.partition("@")[0].rpartition("/")[2]))
    if target.exists() and not (target.is_dir() and (overwrite or not any(target.iterdir()))):
        raise BadInput(f"{target} is there already: give another --out, or --overwrite")
    found = repository_of(at).pull(name, target)
    output.say(f"{_printable(found.method)} for {_printable(found.model) or 'an unnamed model'}, saved in {target}")
    output.emit(event="pulled", path=str(target), **{key: value for key, value in _facts(found).items() if value})


def _facts(found: SharedAdapter) -> dict[str, object]:
    facts = asdict(found)
    del facts["name"]
    return facts


def _printable(text: str) -> str:
    """A stranger's text without what would move the cursor or pass for markup."""
    return "".join(each for each in text if each.isprintable()).replace("[", "\\[")
