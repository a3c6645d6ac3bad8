"""What tests of recovery need: servers to end, and a client that tells when an answer arrives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from petalnode.node.client.api.causal_lm import AutoDistributedModelForCausalLM, DistributedModelForCausalLM
from petalnode.node.testing.memory_servers import MemoryServer
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.ids import INFERENCE
from tests.inspection import call, client_of
from tests.swarm.memory_pool import MemoryPool
from tests.swarm.processes import until
from tests.swarm.server_pool import PooledServer

Model = DistributedModelForCausalLM
CACHE = ("--cache-tokens", "60000")
"""Of servers that are processes; those in memory have this number by default."""
POSITIONS = ("0:2", "2:4", "4:6")


class At:
    """A streamer of transformers that calls what is due when this many tokens have come."""

    def __init__(self, due: dict[int, Callable[[], object]]) -> None:
        self._due = due
        self._tokens = -1  # the prompt comes first

    def put(self, _: object) -> None:
        self._tokens += 1
        if self._tokens in self._due:
            self._due[self._tokens]()

    def end(self) -> None:
        pass


class Tap:
    """Sees the answers that a client gets, at the moment they arrive, and may do something then."""

    def __init__(self, model: Model) -> None:
        self.on_answer: Callable[[str, int], object] | None = None
        self._answers: dict[str, int] = {}
        swarm = client_of(model).swarm
        connect = swarm.new_stream

        async def new_stream(peer_id: str, protocol: str, *arguments: Any, **options: Any) -> Any:
            stream = await connect(peer_id, protocol, *arguments, **options)
            return _TappedStream(stream, self) if protocol == INFERENCE else stream

        swarm.new_stream = new_stream  # type: ignore[method-assign]

    def answered(self, peer_id: str) -> None:
        self._answers[peer_id] = count = self._answers.get(peer_id, 0) + 1
        if self.on_answer is not None:
            self.on_answer(peer_id, count)

    @contextmanager
    def watching(self, on_answer: Callable[[str, int], object]) -> Iterator[None]:
        """Calls `on_answer(peer id, how many answers this peer has given)` for each."""
        self._answers = {}
        self.on_answer = on_answer
        try:
            yield
        finally:
            self.on_answer = None


class _TappedStream:
    def __init__(self, stream: Any, tap: Tap) -> None:
        self._stream = stream
        self._tap = tap

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def receive(self, **options: Any) -> tuple[wire.InferenceFrame, list[bytes]]:
        frame, payloads = await self._stream.receive(**options)
        if frame.WhichOneof("body") == "reply":
            self._tap.answered(self._stream.peer_id)
        return frame, payloads


class Fleet:
    """Three servers at each position of the chain, kept at three by starting another for each that is killed."""

    def __init__(self, pool: MemoryPool) -> None:
        self._pool = pool
        self._servers = [pool.start(blocks) for blocks in POSITIONS * 3]

    def at(self, session: Any, position: int) -> MemoryServer:
        """The server at a position of the session's chain; negative ones count from the end."""
        return self._pool.of(session.route[position][0])

    def kill(self, server: MemoryServer) -> None:
        server.kill()
        self._replace(server)

    def drain(self, server: MemoryServer) -> None:
        server.terminate()
        self._replace(server)

    def _replace(self, server: MemoryServer) -> None:
        self._servers.remove(server)
        self._servers.append(self._pool.start(f"{server.span[0]}:{server.span[1]}"))

    def kill_peer(self, peer_id: str) -> None:
        self.kill(self._pool.of(peer_id))

    def ready(self, model: Model) -> None:
        heard_of(model, self._servers)


def heard_of(model: Model, servers: Sequence[PooledServer | MemoryServer]) -> None:
    """Returns once the servers are up and the client knows of each."""
    client = client_of(model)
    wanted = {server.ready["peer_id"] for server in servers}

    def heard() -> bool:
        if wanted <= {server.peer_id for server in client.servers()}:
            return True
        call(model, client.refresh)
        return False

    until(heard, "the client hears of all servers")


@contextmanager
def opened_for(
    servers: Sequence[PooledServer | MemoryServer], folder: Path, peer: str | MemoryPool, **options: Any
) -> Iterator[Model]:
    """A client that uses these servers only, and knows of them."""
    options["allowed_servers"] = [server.peer_id for server in servers]
    if isinstance(peer, str):
        opened = AutoDistributedModelForCausalLM.from_pretrained(folder, initial_peers=[peer], **options)
    else:
        opened = peer.swarm.open_model(AutoDistributedModelForCausalLM, folder, **options)
    with opened:
        heard_of(opened, servers)
        yield opened
