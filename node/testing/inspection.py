"""What a test may see of the inside of models, sessions, nodes and streams, and what it may do to them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from multiaddr import Multiaddr

from ...protocols.framing import MessageStream, RawStream
from ..client.api.inference_session import InferenceSession
from ..client.api.model import DistributedModel
from ..client.core import SwarmClient
from ..network.host import Host


def client_of(model: DistributedModel) -> SwarmClient:
    """The client that a model runs its blocks with; it belongs to the model's trio thread."""
    return model._runtime.value


def call(model: DistributedModel, function: Callable[..., Awaitable[Any]], *args: Any) -> Any:
    """Runs `await function(*args)` in the model's trio thread."""
    return model._runtime.call(function, *args)


def session_of(session: InferenceSession) -> Any:
    """The asynchronous session behind one of the Python API; None before its first step."""
    return session._session


def raw_of(stream: MessageStream[Any]) -> RawStream:
    """The bytes below a message stream, to write what is no message."""
    return stream._raw


def allow_servers(model: DistributedModel, peer_ids: Sequence[str]) -> None:
    """From now on the model uses these servers only; all if there are none."""
    client_of(model)._allowed = frozenset(peer_ids)


def dial_at(host: Host, addresses: Callable[[str], Sequence[Multiaddr] | None]) -> None:
    """From now on a peer is dialed where `addresses(peer id)` says; None: where it is known to be."""
    network: Any = host._network
    known = network._addresses

    def chosen(peer_id: Any) -> Sequence[Multiaddr]:
        given = addresses(str(peer_id))
        return tuple(known(peer_id) if given is None else given)

    network._addresses = chosen
