"""`petalnode models`: the models on this disk: listed, verified, removed; and what one needs, here and of a swarm.
`petalnode manifest`: the file with which a repository says which model version it is."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import trio
import typer
from rich.table import Table

from ....protocols.announcement import Announcement
from ...client.deadlines import DEADLINES
from ...errors import BadInput, ExitCode, MachineError, ModelError
from ...models import ALIASES, DEFAULT_MODEL, check_pinned, compute_manifest, resolve, split_version
from ...models.cache_dir import cache_dir
from ...models.inventory import LocalModel, damaged_parts, find_local, local_models, remove_local
from ...models.manifest import MANIFEST_FILE, write_manifest
from ...models.parts import describe
from ...placement.planning.model_sizes import WEIGHTS, ModelSize, fit_of, known_model, size_by_config
from ...swarm.routing import describe_blocks
from ...swarm.view import coverage_of, is_online
from ..join import JoinOptions, joined, joins_swarm
from ..option import JsonFlag
from ..output import Output, ProgressBars
from ..process import one_line
from .planning.fit import alone, in_words, stored_bytes, this_machine

models = typer.Typer(help="The models on this disk: list, verify, remove; and what one needs, here and of a swarm.")
_Name = Annotated[str, typer.Argument(metavar="NAME", help="Its name, NAME@VERSION, or its folder.")]
_DIGITS: Final = 12
_VERSIONS: Final = 8
"""Of a model that are shown: those on this disk, then the most served. Anybody can announce as many as they like."""


@models.callback(invoke_without_command=True)
def list_(context: typer.Context, as_json: JsonFlag = False) -> None:
    """List the models on this disk, the last used first. Nothing is read but headers."""
    if context.invoked_subcommand is not None:
        if as_json:
            raise BadInput(f"--json belongs behind the command: `petalnode models {context.invoked_subcommand} --json`")
        return
    _list(as_json)


@models.command("list")
def list_too(as_json: JsonFlag = False) -> None:
    """List the models on this disk, as without a command."""
    _list(as_json)


def _list(as_json: bool) -> None:
    output = Output(as_json)
    found = local_models()
    for model in found:
        output.emit(**_as_json(model))
    if as_json:
        return
    if not found:
        output.say("no models are on this disk yet: the first `petalnode demo` or `serve` fetches one")
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("name", overflow="fold", min_width=8)
    table.add_column("version")
    table.add_column("size", justify="right")
    table.add_column("parts", overflow="fold")
    table.add_column("last used", overflow="fold")
    for model in found:
        table.add_row(
            one_line(model.name), model.version[:_DIGITS], size_in_words(model.nbytes), _parts(model), _ago(model.used)
        )
    output.table(table)
    for model in found:
        if model.complaint:
            output.note(f"{one_line(model.name)}: {one_line(model.complaint)}")
    total = size_in_words(sum(model.nbytes for model in found))
    output.say(f"{total} in all; what petalnode has fetched or made is in {cache_dir()}")


@models.command("verify")
def verify(name: _Name, as_json: JsonFlag = False) -> None:
    """Read all parts of a model that are here: exit code 1 if one is not what it was, or not what its version says."""
    output = Output(as_json)
    model = find_local(name, local_models())
    with ProgressBars(output.errors) as bars:
        wrong = damaged_parts(model, bars)
    output.emit(**_as_json(model), damaged=[str(part) for part in wrong], ok=not wrong)
    if wrong:
        listed = ", ".join(describe(part) for part in wrong[:_DIGITS])
        output.say(f"{model.name} is damaged: {listed}. `petalnode models remove` it, and fetch or copy it again")
        raise typer.Exit(ExitCode.RESULT_SAYS_NO)
    known = f" of version {model.version[:_DIGITS]}" if model.version else ", whose version nothing here tells"
    output.say(f"{model.name}: {_parts(model)}{known}, undamaged")


@models.command("remove")
def remove(name: _Name, as_json: JsonFlag = False) -> None:
    """Remove a model from this disk. A GGUF file elsewhere stays; what the hub's cache has, other programs lose too."""
    output = Output(as_json)
    model = find_local(name, local_models())
    remove_local(model)
    stays = f"; {model.weights[0]} stays" if model.weights else ""
    output.say(f"removed {model.name} ({size_in_words(model.nbytes)}{stays})")
    output.emit(event="removed", name=model.name, path=str(model.path), bytes=model.nbytes)


@models.command("show")
@joins_swarm
def show(
    name: Annotated[str, typer.Argument(metavar="NAME|MODEL", help="A model on this disk, a file, or a hub id.")],
    *,
    join: JoinOptions,
) -> None:
    """Say what a model needs, whether it fits here, and with --peer what the swarm has. No weights are fetched."""
    output = Output(join.json)
    here = [model for model in local_models() if name in (model.name, str(model.path), model.path.name)]
    size, facts = _size_of(name, here, output)
    host = this_machine()
    fits = [fit_of([host], alone(), size, weights) for weights in WEIGHTS] if size is not None else []
    room = int(host.memory // facts["block_bytes"]) if facts["block_bytes"] else None
    facts["blocks_that_fit"] = room
    facts["estimates"] = [
        {"weights": fit.weights, "bytes": round(fit.nbytes), "fits": fit.fits, "missing_bytes": round(fit.missing)}
        for fit in fits
    ]
    facts["swarm"], facts["other_versions"] = None, 0
    if join.peers:
        facts["swarm"], facts["other_versions"] = trio.run(_in_swarm, split_version(name)[0], here, join, output)
    output.emit(**facts)
    _say(facts, here, [f"in {fit.weights} {size_in_words(fit.nbytes)}: {in_words(fit)}" for fit in fits], output)


def _size_of(name: str, here: Sequence[LocalModel], output: Output) -> tuple[ModelSize | None, dict[str, Any]]:
    """
    Raises:
        ModelError: it is neither here nor a model that is known, or on a hub.
    """
    facts: dict[str, Any] = {"model": name, "here": [_as_json(model) for model in here]}
    block_bytes = ends = blocks = None
    try:
        known = str(here[0].path) if here and not here[0].complaint else name
        with ProgressBars(output.errors) as bars:
            # The configuration of an alias comes with its weights.
            folder = resolve(known, need="config", progress=bars, offline=split_version(name)[0] in ALIASES)
    except ModelError:
        size = known_model(split_version(name)[0])
        if size is None:
            raise
    else:
        size, blocks = size_by_config(name, folder.config, folder.boundaries), folder.num_blocks
        block_bytes, ends = stored_bytes(folder.path, folder.num_blocks)
    blocks = blocks or (size.blocks if size is not None else 0)
    return size, facts | {"num_blocks": blocks, "block_bytes": block_bytes, "client_bytes": ends}


async def _in_swarm(
    name: str, here: Sequence[LocalModel], join: JoinOptions, output: Output
) -> tuple[list[dict[str, Any]], int]:
    """What the swarm has of a model: a row for each of its versions, and how many more there are."""
    join.check()
    async with joined(join, output, role="plan", listens=False) as (swarm, _):
        view, now = await swarm.refresh(sample=True, timeout=DEADLINES.refresh), time.time()
    found = [
        (version, num_blocks, view.servers(version, now=now))
        for version, (called, num_blocks) in view.models(now=now).items()
        if called == name
    ]
    ours = {model.version for model in here}
    found.sort(key=lambda row: (row[0].hex() not in ours, -len(row[2])))
    return [swarm_row(*row) for row in found[:_VERSIONS]], max(0, len(found) - _VERSIONS)


def swarm_row(version: bytes, num_blocks: int, servers: Sequence[Announcement]) -> dict[str, Any]:
    """What the servers of a version hold together."""
    online = [server for server in servers if is_online(server, num_blocks)]
    coverage = coverage_of(online, num_blocks)
    missing = [block for block, count in enumerate(coverage) if not count]
    return {
        "model_version": version.hex(),
        "num_blocks": num_blocks,
        "servers": len(online),
        "coverage": coverage,
        "missing": missing,
    }


def _say(facts: dict[str, Any], here: Sequence[LocalModel], fits: Sequence[str], output: Output) -> None:
    if output.as_json:
        return
    output.say(f"{facts['model']}: {facts['num_blocks']} blocks")
    if facts["block_bytes"]:
        ends = f", a client's part {size_in_words(facts['client_bytes'])}" if facts["client_bytes"] else ""
        output.say(
            f"as stored, a block has {size_in_words(facts['block_bytes'])}{ends}; "
            f"{min(facts['blocks_that_fit'], facts['num_blocks'])} blocks fit in the memory that is free"
        )
    for line in fits:
        output.say(f"  about, {line}")
    for model in here:
        output.say(f"on this disk: {_parts(model)}, {size_in_words(model.nbytes)}, in {model.path}")
    if not here:
        output.say("on this disk: nothing of it")
    for row in facts["swarm"] or ():
        lacking = f", {describe_blocks(row['missing'])} missing" if row["missing"] else ", all blocks"
        output.say(f"in this swarm: version {row['model_version'][:_DIGITS]}, {row['servers']} servers{lacking}")
    if facts["other_versions"]:
        output.say(f"in this swarm: {facts['other_versions']} more versions by that name")
    if facts["swarm"] == []:
        output.say("in this swarm: nobody serves it")


def _as_json(model: LocalModel) -> dict[str, Any]:
    return {
        "name": model.name,
        "path": str(model.path),
        "model_version": model.version,
        "bytes": model.nbytes,
        "num_blocks": model.num_blocks,
        "blocks": model.blocks,
        "ends": model.ends,
        "complete": model.whole,
        "used": round(model.used),
        "files": [str(file) for file in model.weights],
        "complaint": model.complaint,
    }


def _parts(model: LocalModel) -> str:
    if model.complaint:
        return "cannot be used"
    if model.whole:
        return f"all {model.num_blocks} blocks"
    held = [describe_blocks(model.blocks)] if model.blocks else []
    if model.ends:
        held.append("a client's part")
    return f"{' and '.join(held) or 'none'} of {model.num_blocks}"


def size_in_words(nbytes: float) -> str:
    """For a person: three digits at most, and a unit."""
    for unit, limit in (("B", 1e3), ("KB", 1e6), ("MB", 1e9)):
        if nbytes < limit * 0.9995:
            return f"{nbytes / (limit / 1e3):.3g} {unit}"
    return f"{nbytes / 1e9:.1f} GB"


def _ago(used: float) -> str:
    days = max(0, int((time.time() - used) // 86400))
    return "today" if not days else "yesterday" if days == 1 else f"{days} days ago"


def manifest(
    model: Annotated[
        str, typer.Argument(help="The model: a folder, .gguf file, hub id or alias; all of it is read.")
    ] = DEFAULT_MODEL,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help=f"Folder to write {MANIFEST_FILE} into; a file there is replaced.")
    ] = Path(),
    as_json: JsonFlag = False,
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
