"""`petalnode bans`: which servers nodes of this person do not use, and why."""

from __future__ import annotations

import time
from typing import Annotated

import platformdirs
import typer

from ...errors import ExitCode
from ...trust.store import TrustStore, trust_file
from ..output import Output


def bans(
    forgive: Annotated[
        list[str] | None, typer.Option(metavar="PEER", help="Use this server again; repeatable.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object per line on standard output.")] = False,
) -> None:
    """List the servers that nodes of yours do not use any more, with the reason and for how long."""
    output = Output(json)
    book = TrustStore(trust_file(platformdirs.user_data_path("petalnode", appauthor=False)))
    book.load()
    unknown = [peer_id for peer_id in forgive or () if not book.forgive(peer_id)]
    now = time.time()
    for each in book.bans():
        hours = (each.until - now) / 3600
        output.say(f"{each.peer_id}  for {hours:.1f} h more: {each.reason}")
        output.emit(
            event="ban",
            peer_id=each.peer_id,
            seconds_left=round(each.until - now),
            reason=each.reason,
            source=each.source,
        )
    if not book.bans():
        output.say("nobody is banned")
    for peer_id in unknown:
        output.error(f"{peer_id} was not banned")
    raise typer.Exit(ExitCode.RESULT_SAYS_NO if unknown else ExitCode.DONE)
