"""What a test may see of the inside of models, sessions and servers, and what it may do to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import trio

from petalnode.node.client.api.causal_lm import DistributedModelForCausalLM
from petalnode.node.client.api.inference_session import InferenceSession
from petalnode.node.client.api.model import DistributedModel
from petalnode.node.client.core import SwarmClient
from petalnode.node.client.session.stream import SessionStream
from petalnode.node.server.budget import MemoryBudget
from petalnode.node.server.requests.adapters import Adapters
from petalnode.node.server.requests.pushes import PushStream
from petalnode.node.server.requests.service import RequestService
from petalnode.node.server.requests.session import ServerSession
from petalnode.node.swarm.cost import Estimate
from petalnode.node.validator.auditing import ReceiptAuditService
from petalnode.protocols import wire_pb2 as wire


def client_of(model: DistributedModel) -> SwarmClient:
    """The client that a model runs its blocks with; it belongs to the model's trio thread."""
    return model._runtime.value


def call(model: DistributedModel, function: Callable[..., Awaitable[Any]], *args: Any) -> Any:
    """Runs `await function(*args)` in the model's trio thread."""
    return model._runtime.call(function, *args)


def tasks_of(client: SwarmClient) -> list[str]:
    """What a client does in the background."""
    return [task.name for task in client._nursery.child_tasks]


def loop_tasks(model: DistributedModel) -> Counter[str]:
    """The tasks of the model's trio thread by name, those of its connections and of the DHT among them."""

    async def living() -> Counter[str]:
        root, names = trio.lowlevel.current_root_task(), Counter[str]()
        left = [] if root is None else [root]
        while left:
            task = left.pop()
            names[task.name] += 1
            left += [child for nursery in task.child_nurseries for child in nursery.child_tasks]
        return names

    found: Counter[str] = call(model, living)
    return found


def session_of(session: InferenceSession) -> Any:
    """The asynchronous session behind one of the Python API; None before its first step."""
    return session._session


def allow_servers(model: DistributedModel, peer_ids: Sequence[str]) -> None:
    """From now on the model uses these servers only; all if there are none."""
    client_of(model)._allowed = frozenset(peer_ids)


def draft_gain_of(model: DistributedModelForCausalLM) -> Estimate:
    """What a model knows of its batches so far."""
    return model._draft_gain


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


def budgets_of(service: RequestService, adapters: Adapters) -> dict[str, MemoryBudget]:
    """What requests without a session may take of a server's memory."""
    memory = service._memory
    return {"batches": memory.requests, "kept": memory.kept, "adapters": adapters._budget}


def open_batches(service: RequestService) -> int:
    """Requests without a session, and the streams that they come on, which a server has open."""
    return service._batches.count + service._streams.count


def adapters_coming(adapters: Adapters) -> int:
    """Adapters that clients are sending."""
    return adapters._streams.count


# --- validators


def audits_of(service: ReceiptAuditService) -> dict[str, int]:
    """What a validator holds of the calls of its clients: open ones, bytes, and clients that it remembers."""
    return {"open": len(service._places), "bytes": service._bytes, "calls": len(service._calls)}


async def forget_audits(service: ReceiptAuditService) -> None:
    """As if a minute had passed, and everything been judged that came."""
    service._calls.remove_all()
    while service._receive.statistics().current_buffer_used:
        await service.next()
