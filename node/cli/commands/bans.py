"""`petalnode bans`: the servers that this user's nodes do not use because of a fault."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from ...errors import ExitCode
from ...models.cache_dir import data_folder
from ...trust.store import TrustStore, trust_file
from ..option import JsonFlag
from ..output import Output


def bans(
    forgive: Annotated[
        list[str] | None, typer.Option(metavar="PEER", help="Lift the ban of this server; repeatable.")
    ] = None,
    json: JsonFlag = False,
) -> None:
    """List the servers that your nodes do not use because of a fault, with the reason and for how long."""
    output = Output(json)
    book = TrustStore(trust_file(data_folder()))
    book.read()
    unknown = [peer_id for peer_id in forgive or () if not book.forgive(peer_id)]
    now = time.time()
    for ban in book.bans():
        hours = (ban.until - now) / 3600
        output.say(f"{ban.peer_id}  for {hours:.1f} h more: {ban.reason}")
        output.emit(
            event="ban", peer_id=ban.peer_id, seconds_left=round(ban.until - now), reason=ban.reason, source=ban.source
        )
    if not book.bans():
        output.say("nobody is banned")
    for peer_id in unknown:
        output.error(f"{peer_id} was not banned")
    raise typer.Exit(ExitCode.RESULT_SAYS_NO if unknown else ExitCode.DONE)
