"""`petalnode credits`: the points that a validator has issued to a key, and transferring them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, TypeVar

import trio
import typer

from ....crypto.identity import Identity, IdentityError
from ...credits.wallet import Wallet
from ...errors import BadInput
from ...models.cache_dir import data_folder
from ...network.addresses import parse_peer
from ..join import JoinOptions, check_peer_id, joined, joins_swarm
from ..output import Output

credits = typer.Typer(no_args_is_help=True, help="Show and transfer points, which validators issue for verified work.")

_Validator = Annotated[
    str,
    typer.Argument(
        metavar="VALIDATOR", help="Address of the validator, as `petalnode validate --issue-points` prints it."
    ),
]
_Key = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Key file of the owner of the points. Default: that of `petalnode serve`."),
]
T = TypeVar("T")


@credits.command("balance")
@joins_swarm
def balance(validator: _Validator, key: _Key = None, *, join: JoinOptions) -> None:
    """Show how many points a key has at a validator."""
    join.check()
    parse_peer(validator)
    output, owner = Output(join.json), _owner(key)
    credit = trio.run(_ask, join, output, owner, validator, Wallet.credit)
    deposit = f", and {credit.deposit} more that it keeps for a pledge" if credit.deposit else ""
    output.say(f"{credit.holder} has {credit.points} points with {credit.issuer}{deposit}")
    output.emit(
        event="credit",
        issuer=credit.issuer,
        peer_id=credit.holder,
        points=credit.points,
        deposit=credit.deposit,
        deposit_until_ms=credit.deposit_until_ms,
    )


@credits.command("transfer")
@joins_swarm
def transfer(
    validator: _Validator,
    to: Annotated[str, typer.Argument(metavar="PEER", help="Peer id of the recipient.")],
    points: Annotated[int, typer.Argument(min=1, help="How many points.")],
    key: _Key = None,
    *,
    join: JoinOptions,
) -> None:
    """Transfer points to another key, for instance from a server to the client of its owner."""
    join.check()
    parse_peer(validator)
    output, owner = Output(join.json), _owner(key)
    check_peer_id(to, "PEER", client=True)
    clearing = trio.run(_ask, join, output, owner, validator, lambda wallet: wallet.transfer(to, points))
    done = clearing.transfer
    output.say(f"{done.recipient} has got {done.points} points of {done.spender}")
    output.emit(
        event="cleared",
        issuer=done.issuer,
        peer_id=done.spender,
        to=done.recipient,
        points=done.points,
        sequence=done.sequence,
    )


async def _ask(
    join: JoinOptions, output: Output, owner: Identity, validator: str, question: Callable[[Wallet], Awaitable[T]]
) -> T:
    if not join.peers:
        join = replace(join, peer=[validator])
    # The node has a key of its own: the owner's may be in use by a running server.
    async with joined(join, output, role="credits", listens=False) as (swarm, _):
        return await question(Wallet(swarm, owner, validator))


def _owner(key: Path | None) -> Identity:
    file = key or data_folder() / "serve.key"
    try:
        return Identity.load(file)
    except IdentityError as error:
        raise BadInput(f"{error}; give the key file of the owner of the points with --key FILE") from error
