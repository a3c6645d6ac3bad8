"""What a test may see of the inside of models, sessions and servers, and what it may do to them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ...protocols import wire_pb2 as wire
from ..client.api.inference_session import InferenceSession
from ..client.api.model import DistributedModel
from ..client.core import SwarmClient
from ..client.session.stream import SessionStream
from ..server.requests.pushes import PushStream
from ..server.requests.service import RequestService
from ..server.requests.session import ServerSession


def client_of(model: DistributedModel) -> SwarmClient:
    """The client that a model runs its blocks with; it belongs to the model's trio thread."""
    return model._runtime.value


def call(model: DistributedModel, function: Callable[..., Awaitable[Any]], *args: Any) -> Any:
    """Runs `await function(*args)` in the model's trio thread."""
    return model._runtime.call(function, *args)


def tasks_of(client: SwarmClient) -> list[str]:
    """What a client does in the background."""
    return [task.name for task in client._nursery.child_tasks]


def session_of(session: InferenceSession) -> Any:
    """The asynchronous session behind one of the Python API; None before its first step."""
    return session._session


def allow_servers(model: DistributedModel, peer_ids: Sequence[str]) -> None:
    """From now on the model uses these servers only; all if there are none."""
    client_of(model)._allowed = frozenset(peer_ids)


def skip_reply(session: SessionStream, reply: wire.Reply, *, answered: int) -> None:
    """Has a client's session, which has had the replies up to `answered`, check one that nobody waits for.

    Raises:
        ServerCheated: it is not what the server sent before.
    """
    session._answered = answered
    session._skip(reply)


# --- servers


def sessions_of(service: RequestService) -> list[ServerSession]:
    """The sessions that a server holds."""
    return list(service._by_key.values())


def push_streams(session: ServerSession) -> list[PushStream | None]:
    """A server's streams to those that it hands outputs of this session on to; None where there is none right now."""
    return [] if session._pushes is None else [target.stream for target in session._pushes._known.values()]
