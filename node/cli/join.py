"""Options that all commands which join a swarm share, and the joining itself."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import typing
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import platformdirs
import typer

from ...crypto.canonical import digest
from ...crypto.identity import Identity, IdentityError, IdentityLocked, held_identity
from ..errors import BadInput, MachineError
from ..swarm.swarm import Swarm, SwarmConfig, open_swarm
from .output import Output

PEERS_VARIABLE = "PETALNODE_PEERS"
_FIRST_PORT, _PORTS = 20000, 20000


@dataclass(frozen=True)
class JoinOptions:
    """How a command takes part in the swarm."""

    peer: Annotated[
        list[str] | None,
        typer.Option(
            "--peer",
            "-p",
            metavar="MULTIADDR",
            help=f"A node to join through, /ip4/../tcp/../p2p/..; repeatable. Also {PEERS_VARIABLE}, comma-separated.",
        ),
    ] = None
    new_swarm: Annotated[bool, typer.Option("--new-swarm", help="Join nobody: start a swarm of your own.")] = False
    identity: Annotated[
        Path | None, typer.Option(metavar="FILE", help="This node's key; made if missing. Default: one per role.")
    ] = None
    listen: Annotated[
        list[str] | None,
        typer.Option(metavar="MULTIADDR", help="Listen here; repeatable. Default: all interfaces, always one port."),
    ] = None
    announce: Annotated[
        list[str] | None,
        typer.Option(metavar="MULTIADDR", help="Tell others to dial this (a forwarded port); repeatable."),
    ] = None
    log_level: Annotated[str, typer.Option(metavar="LEVEL", help="debug, info, warning or error.")] = "warning"
    json: Annotated[bool, typer.Option("--json", help="One JSON object per line on standard output.")] = False

    @property
    def peers(self) -> tuple[str, ...]:
        """The nodes to join through: options first, then the environment.

        Raises:
            BadInput: --peer together with --new-swarm.
        """
        if self.new_swarm:
            if self.peer:
                raise BadInput("--new-swarm joins nobody, --peer joins somebody: give one of them")
            return ()
        given = self.peer or os.environ.get(PEERS_VARIABLE, "").split(",")
        return tuple(address.strip() for address in given if address.strip())


def joins_swarm(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the fields of JoinOptions to a typer command, which receives them as its last parameter, `join`."""
    fields = inspect.signature(JoinOptions).parameters.values()
    hints = typing.get_type_hints(JoinOptions, include_extras=True)
    own = [each for each in inspect.signature(command).parameters.values() if each.name != "join"]
    own_hints = typing.get_type_hints(command, include_extras=True)

    @functools.wraps(command)
    def wrapper(**arguments: Any) -> None:
        join = JoinOptions(**{name: arguments.pop(name) for name in hints if name in arguments})
        logging.getLogger("petalnode").setLevel(_level(join.log_level))
        command(**arguments, join=join)

    parameters = [
        each.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=own_hints[each.name]) for each in own
    ] + [each.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[each.name]) for each in fields]
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {each.name: each.annotation for each in parameters}
    del wrapper.__wrapped__  # typer would look through it, at the signature without the options
    return wrapper


def _level(name: str) -> int:
    level = logging.getLevelNamesMapping().get(name.upper())
    if level is None:
        raise BadInput(f"--log-level {name}: use debug, info, warning or error")
    return level


@asynccontextmanager
async def joined(
    join: JoinOptions, output: Output, *, role: str, listens: bool, identity: Identity | None = None
) -> AsyncIterator[tuple[Swarm, Identity]]:
    """The node on its swarm, with the identity of its role (for roles that do not listen: the one given, or a new one).

    Raises:
        BadInput, SwarmError, MachineError: an address is wrong, nobody answers, the port or the identity is taken.
    """
    with ExitStack() as stack:
        try:
            if listens or join.identity is not None:
                identity = stack.enter_context(
                    held_identity(join.identity, role, platformdirs.user_data_path("petalnode", appauthor=False))
                )
            elif identity is None:
                identity = Identity.generate()
        except IdentityLocked as error:
            raise MachineError(str(error)) from error
        except IdentityError as error:
            raise BadInput(str(error)) from error
        listen = tuple(join.listen or ())
        config = SwarmConfig(
            identity=identity,
            listen=listen or ((f"/ip4/0.0.0.0/tcp/{kept_port(identity)}",) if listens else ()),
            announce=tuple(join.announce or ()),
            peers=join.peers,
            serve_dht=listens,
        )
        async with _opened(config, fallback=listens and not listen) as swarm:
            yield swarm, identity


@asynccontextmanager
async def _opened(config: SwarmConfig, *, fallback: bool) -> AsyncIterator[Swarm]:
    """Opens the swarm; where a port that nobody asked for is taken, on any free one."""
    opened = False
    try:
        async with open_swarm(config) as swarm:
            opened = True
            yield swarm
            return
    except MachineError:
        if opened or not fallback:
            raise
    async with open_swarm(replace(config, listen=("/ip4/0.0.0.0/tcp/0",))) as swarm:
        yield swarm


def kept_port(identity: Identity) -> int:
    """A port that follows from the key, so that a node keeps its address from run to run."""
    return _FIRST_PORT + int.from_bytes(digest("petalnode/port/1", identity.public_key)[:4], "big") % _PORTS
