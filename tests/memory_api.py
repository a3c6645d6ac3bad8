"""`petalnode api` over the servers of a network in memory, on a loopback socket."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import trio
from starlette.routing import BaseRoute

from petalnode.crypto.identity import Identity
from petalnode.node.api.app import create_app
from petalnode.node.api.batches.runner import BatchRunner
from petalnode.node.api.engine.core import Core
from petalnode.node.api.engine.generation import ApiLimits, ServedModel
from petalnode.node.api.http.admission import Admission, AdmissionMiddleware
from petalnode.node.api.http.server import HttpLimits, serve_http
from petalnode.node.api.openai.endpoints import ResponseStore
from petalnode.node.blocks.client_part import load_client
from petalnode.node.client.chat import Text
from petalnode.node.client.core import ClientOptions, open_client
from petalnode.node.client.swarm_model import identify_model
from petalnode.node.models import resolve
from petalnode.node.monitoring.traces import Traces
from petalnode.node.swarm.config import SwarmConfig
from petalnode.node.testing.memory_servers import MemorySwarm, in_loop


class MemoryApi:
    """A running API.

    Attributes:
        url: with the port, without a path.
        core: which belongs to the swarm's trio thread, `token`.
    """

    def __init__(
        self, swarm: MemorySwarm, url: str, core: Core, admission: AdmissionMiddleware, token: trio.lowlevel.TrioToken
    ) -> None:
        self.swarm = swarm
        self.url = url
        self.core = core
        self._admission = admission
        self.token = token

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def open_sessions(self) -> int:
        """Sessions of it that servers hold, idle conversations included."""
        return in_loop(self.token, lambda: self.core.conversations.open_count)

    @property
    def running(self) -> int:
        """Requests that are being answered."""
        return in_loop(self.token, lambda: self._admission.running)

    @property
    def idle(self) -> int:
        """Conversations that are kept between two requests."""
        return in_loop(self.token, lambda: self.core.conversations.idle)


@contextmanager
def memory_api(
    swarm: MemorySwarm,
    folder: Path,
    *,
    models: Sequence[ServedModel] = (),
    limits: ApiLimits | None = None,
    admission: Admission | None = None,
    http_limits: HttpLimits | None = None,
    pages: Callable[[Core], Sequence[BaseRoute]] = lambda core: (),
    batches: BatchRunner | None = None,
    traces: Traces | None = None,
    responses: ResponseStore | None = None,
    reopen_timeout: float | None = None,
) -> Iterator[MemoryApi]:
    """The API of the model in `folder`, and of its `models` with adapters, for the length of the block."""

    @asynccontextmanager
    async def opened() -> AsyncIterator[MemoryApi]:
        given = resolve(str(folder), need="client", offline=True)
        config = SwarmConfig(identity=Identity.generate(), listen=(), peers=(), serve_dht=False)
        async with swarm.network.open_swarm(config) as node:
            identified = await identify_model(node, given)
            local, text = await trio.to_thread.run_sync(lambda: (load_client(folder), Text(given)))
            listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
            url = f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}"
            async with (
                open_client(node, identified, ClientOptions(reopen_timeout=reopen_timeout)) as client,
                trio.open_nursery() as nursery,
            ):
                core = Core(client, local, text, [ServedModel(given.name), *models], limits or ApiLimits())
                application = create_app(core, admission or Admission(), pages(core), batches, responses)
                nursery.start_soon(core.conversations.run)
                if batches is not None:
                    nursery.start_soon(batches.run, application)
                answering = application if traces is None else traces.application(application)
                if traces is not None:
                    client.state.on_session, core.tallies.on_answer = traces.session, traces.answered
                nursery.start_soon(serve_http, answering, listeners, http_limits)
                yield MemoryApi(swarm, url, core, application, trio.lowlevel.current_trio_token())
                nursery.cancel_scope.cancel()

    held = swarm.hold(opened())
    try:
        yield held.value
    finally:
        held.close()
