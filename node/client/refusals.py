"""What a client makes of servers that failed or said no: whether to go on looking, and what to tell a person."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from ...protocols import wire_pb2 as wire
from ..errors import NoChainError, ServerCheated, ServerFailed, SwarmError
from .deadlines import NOT_ALLOWED_SECONDS, SUSPECT_SECONDS
from .request import ServerRefused
from .router import Router

MAX_FAILURES: Final = 8
"""Servers for the same blocks that may fail at one step, one after another."""


def give_up_on_the_step(failures: Sequence[ServerFailed]) -> None:
    """
    Raises:
        SwarmError: when it is the step that is at fault, not the servers.
    """
    refusals = [error for error in failures if _code(error) == wire.ERROR_BAD_REQUEST]
    if len(refusals) > 1 or len(failures) > MAX_FAILURES:
        raise SwarmError(f"{len(failures)} servers in a row failed at one step: {failures[-1]}")


def note_failure(router: Router, error: ServerFailed) -> None:
    """Lets the client know what to think of a server that failed or said no."""
    if isinstance(error, ServerCheated):
        router.accuse(error.peer_id, str(error), error.proof)
    else:
        router.suspect(error.peer_id, NOT_ALLOWED_SECONDS if not_allowed(error) else SUSPECT_SECONDS)


def is_lost(error: ServerFailed) -> bool:
    """Whether a server is gone or going, so that another may come to its place; others have said no, and mean it."""
    return not isinstance(error, ServerRefused) or error.code == wire.ERROR_DRAINING


def not_allowed(error: ServerFailed) -> bool:
    """Whether the server's owner has listed clients, and this is none of them."""
    return _code(error) == wire.ERROR_NOT_ALLOWED


def with_refusals(error: NoChainError, refused: Mapping[str, ServerFailed], peer_id: str) -> NoChainError:
    """The error with what was tried, by the client `peer_id`, and what a person can do about it."""
    if not refused:
        return error
    text = f"{error}. Tried: {'; '.join(str(each) for each in refused.values())}"
    if any(not_allowed(each) for each in refused.values()):
        text += (
            f". Ask the owner to restart the server with --allow-client {peer_id}, the peer id of this client; "
            "`petalnode chat --identity FILE` keeps its peer id from run to run and prints it, "
            "from_pretrained(identity=FILE) keeps it too"
        )
    return NoChainError(text, error.missing)


def _code(error: ServerFailed) -> int | None:
    return error.code if isinstance(error, ServerRefused) else None
