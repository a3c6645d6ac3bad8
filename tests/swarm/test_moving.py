"""Sessions and pushes change from a relayed to a direct connection while steps run, and lose nothing.

Relay, servers and client are real hosts of this process, with real blocks, so that a test can say what happens when.
Nobody may take a server's place: what cannot go on where it is fails the test.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import trio

from petalnode.crypto.identity import Identity
from petalnode.node.blocks.span import BlockSpan, load_span
from petalnode.node.client.chunks import from_chunks, to_chunks
from petalnode.node.client.session.recovery import RECOVERY
from petalnode.node.client.session.session import ClientSession
from petalnode.node.client.session.stream import InferenceStream, SessionSpec
from petalnode.node.errors import NoChainError, ServerFailed
from petalnode.node.network.host import Host
from petalnode.node.network.transport.raw_connection import Path as Way
from petalnode.node.network.transport.stream_bytes import StreamBytes
from petalnode.node.server.budget import MemoryBudget
from petalnode.node.server.compute_thread import ComputeThread
from petalnode.node.server.requests.adapters import Adapters
from petalnode.node.server.requests.admission import Hosted
from petalnode.node.server.requests.pushes import PushStream
from petalnode.node.server.requests.request import RequestContext
from petalnode.node.server.requests.service import RequestService
from petalnode.node.swarm.routing import Hop
from petalnode.node.trust.receipt_log import ReceiptArchive
from petalnode.protocols.framing import MessageStream, PeerError, StreamClosed
from petalnode.protocols.ids import Span, StreamProtocol
from petalnode.protocols.inference import INFERENCE, PUSH
from tests.inspection import push_streams, sessions_of
from tests.swarm.relays import host_here, relay_here, reserve, until
from tests.tiny_models import HIDDEN

VERSION = b"m" * 32
CACHE = 1000


class Ways:
    """Streams over one host: what a client's router and a server's neighbours need of a swarm."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.peer_id = host.peer_id
        self._direct: dict[str, trio.Event] = {}
        host.on_connected(self._on_connected)

    def _on_connected(self, peer_id: str, way: Way) -> None:
        if way.direct:
            self._direct.pop(peer_id, trio.Event()).set()

    def watch_direct(self, peer_id: str) -> trio.Event:
        if self.host.is_direct(peer_id):
            event = trio.Event()
            event.set()
            return event
        return self._direct.setdefault(peer_id, trio.Event())

    async def stream(self, peer_id: str, protocol: StreamProtocol[Any], direct: bool) -> Any:
        try:
            with trio.fail_after(60):
                raw = await self.host.open_stream(peer_id, protocol.id, direct=direct)
        except (ConnectionError, trio.TooSlowError) as error:
            raise StreamClosed(str(error), peer_id) from error
        return MessageStream(raw, protocol, peer_id)

    async def open_push(self, peer_id: str, *, direct: bool = False) -> PushStream:
        stream: PushStream = await self.stream(peer_id, PUSH, direct)
        return stream


class OneRoute(Ways):
    """A router that knows one chain and no others."""

    def __init__(self, host: Host, route: Sequence[Hop], nursery: trio.Nursery) -> None:
        super().__init__(host)
        self._route = tuple(route)
        self._nursery = nursery
        self._asked = False

    async def route(self, spec: SessionSpec, excluded: Any = ()) -> tuple[Hop, ...]:
        if self._asked:
            raise NoChainError("nobody may take a server's place here", ())
        self._asked = True
        return self._route

    async def standby(self, spec: SessionSpec, route: Sequence[Hop], index: int, excluded: Any = ()) -> tuple[Hop, ...]:
        raise NoChainError("nobody may take a server's place here", ())

    async def connect(self, hop: Hop, *, direct: bool = False) -> InferenceStream:
        try:
            stream: InferenceStream = await self.stream(hop.peer_id, INFERENCE, direct)
        except PeerError as error:
            raise ServerFailed(str(error), hop.peer_id) from error
        return stream

    def suspect(self, peer_id: str, seconds: float = 0) -> None:
        pass

    def note_loss(self, peer_id: str, *, admitted: bool = False) -> None:
        pass

    def round_trip(self, peer_id: str) -> float | None:
        return None

    @property
    def receipts(self) -> ReceiptArchive:
        return ReceiptArchive()

    def claims_of(self, peer_id: str) -> None:
        pass

    def adapter_at(self, hop: Hop, spec: SessionSpec) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    async def payment(self, hop: Hop, spec: SessionSpec) -> None:
        pass

    def paid(self, payment: Any) -> None:
        pass

    def accuse(self, peer_id: str, reason: str, proof: Any = None) -> None:
        pass

    def note_tokens(self, peer_id: str, tokens: int) -> None:
        pass

    def note_transfer(self, timing: Any, nbytes: int) -> None:
        pass

    async def refresh(self) -> None:
        pass

    def start_soon(self, function: Callable[..., Awaitable[Any]], *arguments: Any) -> None:
        self._nursery.start_soon(function, *arguments)


@asynccontextmanager
async def server_here(blocks: BlockSpan) -> AsyncIterator[tuple[Host, RequestService]]:
    identity = Identity.generate()
    async with host_here(listens=True, identity=identity) as host:
        compute = ComputeThread(blocks)
        compute.start()
        hosted = Hosted(VERSION, "tiny", 6, blocks.span, HIDDEN, "float32", "none", blocks.max_positions)
        context = RequestContext(hosted, compute, identity)
        service = RequestService(context, MemoryBudget(CACHE), Ways(host), Adapters(context))

        async def serve(raw: StreamBytes, peer_id: str) -> None:
            await service.handle_session(MessageStream(raw, INFERENCE, peer_id))

        async def serve_push(raw: StreamBytes, peer_id: str) -> None:
            stream = MessageStream(raw, PUSH, peer_id)
            try:
                await service.handle_push(stream)
            except PeerError:
                await stream.reset()

        host.set_stream_handler(INFERENCE.id, serve)
        host.set_stream_handler(PUSH.id, serve_push)
        try:
            yield host, service
        finally:
            await compute.stop()


@asynccontextmanager
async def chain_here(spans: Sequence[BlockSpan]) -> AsyncIterator[tuple[ClientSession, Host, list[Host], list[Any]]]:
    """An open session of a client that knows its servers, as they know each other, by circuits only."""
    async with AsyncExitStack() as stack:
        relay, _ = await stack.enter_async_context(relay_here())
        servers = [await stack.enter_async_context(server_here(blocks)) for blocks in spans]
        hosts = [host for host, _ in servers]
        client = await stack.enter_async_context(host_here())
        nursery = await stack.enter_async_context(trio.open_nursery())
        for host in hosts:
            circuits = await reserve(host, relay)
            for other in (client, *hosts):
                if other is not host:
                    other.remember(host.peer_id, circuits)
        hops = [Hop(host.peer_id, blocks.span) for host, blocks in zip(hosts, spans, strict=True)]
        spec = SessionSpec(VERSION, Span(0, 6), batch=1, max_length=200)
        session = ClientSession(OneRoute(client, hops, nursery), spec, wait=False)
        await session.open()
        yield session, client, hosts, [service for _, service in servers]
        await session.close()
        nursery.cancel_scope.cancel()


async def go_direct(host: Host, target: Host) -> None:
    """What a punch would do."""
    host.remember(target.peer_id, target.addrs())
    with trio.fail_after(60):
        await host.connect(target.peer_id, direct=True)


async def step(session: ClientSession, hidden: torch.Tensor) -> torch.Tensor:
    with trio.fail_after(60):
        return from_chunks(await session.step(to_chunks(hidden, "none", 512)))


@pytest.fixture(scope="module")
def halves(models: Path) -> list[BlockSpan]:
    return [load_span(models / "tiny-llama", span) for span in (Span(0, 3), Span(3, 6))]


@pytest.fixture(scope="module")
def expected(halves: list[BlockSpan]) -> tuple[torch.Tensor, torch.Tensor]:
    """200 inputs, and what the blocks make of each, one after the other."""
    hidden = torch.randn(1, 200, HIDDEN, generator=torch.Generator().manual_seed(0))
    caches = [blocks.make_cache(1, 200, None) for blocks in halves]
    outputs = []
    for index in range(hidden.shape[1]):
        out = hidden[:, index : index + 1]
        for blocks, cache in zip(halves, caches, strict=True):
            out = blocks.forward(out, cache)
        outputs.append(out)
    return hidden, torch.cat(outputs, 1)


async def test_a_session_moves_between_two_steps(
    halves: list[BlockSpan], expected: tuple[torch.Tensor, torch.Tensor]
) -> None:
    hidden, right = expected
    async with chain_here(halves) as (session, client, hosts, _):
        for index in range(40):
            out = await step(session, hidden[:, index : index + 1])
            assert torch.allclose(out, right[:, index : index + 1], atol=1e-5)
            if index == 10:
                assert [link.server.direct for link in session.links] == [False, False]
                await go_direct(client, hosts[0])
                await until(lambda: session.paths.moved == 1, "the first one moves")
                assert [link.server.direct for link in session.links] == [True, False]
            if index == 20:
                await go_direct(client, hosts[1])  # and goes on at once
        await until(lambda: session.paths.moved == 2, "both have moved")
        assert session.recoveries == session.paths.rejoined == 0
        assert not client.connections(hosts[0].peer_id, direct=False)[0].is_lost


async def test_pushes_move_and_none_is_lost(
    halves: list[BlockSpan], expected: tuple[torch.Tensor, torch.Tensor]
) -> None:
    hidden, right = expected
    async with chain_here(halves) as (session, _, hosts, services):
        (sender,) = sessions_of(services[0])
        await until(lambda: push_stream(sender) is not None, "the stream between the servers")
        for index in range(40):
            out = await step(session, hidden[:, index : index + 1])
            assert torch.allclose(out, right[:, index : index + 1], atol=1e-5)
            if index == 10:
                assert not push_stream(sender).direct
                await go_direct(hosts[0], hosts[1])
        await until(lambda: push_stream(sender).direct, "the pushes go directly")
        await step(session, hidden[:, 40:41])
        assert session.pushed_steps == 41
        assert session.recoveries == session.paths.rejoined == 0


async def test_push_stream_that_was_lost_is_opened_again(
    halves: list[BlockSpan], expected: tuple[torch.Tensor, torch.Tensor]
) -> None:
    hidden, right = expected
    async with chain_here(halves) as (session, _, hosts, services):
        (sender,) = sessions_of(services[0])
        await until(lambda: push_stream(sender) is not None, "the stream between the servers")
        await step(session, hidden[:, :1])
        await hosts[0].disconnect(hosts[1].peer_id)
        await until(lambda: push_stream(sender) is None, "it is lost")
        index = 1
        while push_stream(sender) is None:
            out = await step(session, hidden[:, index : index + 1])
            assert torch.allclose(out, right[:, index : index + 1], atol=1e-5)
            index += 1
            await trio.sleep(0.05)
        before = session.pushed_steps
        await step(session, hidden[:, index : index + 1])
        assert session.pushed_steps == before + 1
        assert session.recoveries == 0


def push_stream(sender: Any) -> Any:
    (stream,) = push_streams(sender)
    return stream


@pytest.mark.parametrize("seed", [1, 2])
async def test_connections_that_come_and_go_at_any_moment(
    seed: int, halves: list[BlockSpan], expected: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """Direct connections are made and broken, and circuits too, while steps run without a pause."""
    hidden, right = expected
    rng = random.Random(seed)
    async with chain_here(halves) as (session, client, hosts, services), trio.open_nursery() as nursery:

        async def shake() -> None:
            shaken = Counter[int]()
            while True:
                # A server may be lost four times in one step, however slow this machine is.
                while shaken[index] == RECOVERY.most_losses:  # noqa: ASYNC110  (told by no event)
                    await trio.sleep(0.005)
                shaken[index] += 1
                one, other = rng.choice([(client, hosts[0]), (client, hosts[1]), (hosts[0], hosts[1])])
                act = rng.choice(["connect", "lose all", "lose circuits", "wait"])
                if act == "connect":
                    await go_direct(one, other)
                elif act != "wait":
                    await one.close_path(other.peer_id, relayed_only=act == "lose circuits")
                await trio.sleep(rng.uniform(0, 0.06))

        index = 0
        nursery.start_soon(shake)
        for index in range(150):
            out = await step(session, hidden[:, index : index + 1])
            assert torch.allclose(out, right[:, index : index + 1], atol=1e-5)
        nursery.cancel_scope.cancel()
        assert session.recoveries == 0
        assert session.paths.rejoined + session.paths.moved > 0
        await session.close()
        await until(lambda: all(service.sessions == 0 for service in services), "no session is left")
        assert all(service.cache.free == CACHE for service in services)
