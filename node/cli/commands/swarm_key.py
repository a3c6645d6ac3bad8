"""`petalnode swarm-key`: make the key of a private swarm."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ....crypto.swarm_key import SwarmKeyError, make_swarm_key
from ...errors import BadInput
from ..output import Output


def swarm_key(
    file: Annotated[Path, typer.Argument(help="Where to write it; never replaces a file.")] = Path("swarm.key"),
    as_json: Annotated[bool, typer.Option("--json", help="The file's name as one JSON object.")] = False,
) -> None:
    """Make the key of a private swarm: nobody without this file gets in."""
    output = Output(as_json)
    try:
        make_swarm_key(file)
    except SwarmKeyError as error:
        raise BadInput(str(error)) from error
    output.say(f"a new swarm key is in {file}. Give a copy to everybody who may take part, by a safe way, and start")
    output.say(f"  petalnode serve --swarm-key {file}")
    output.emit(file=str(file))
