"""What tests of recovery need: servers to end, and a client that tells when an answer arrives."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from petalnode.crypto.identity import peer_id_from_bytes
from petalnode.node.client.api.causal_lm import AutoDistributedModelForCausalLM, DistributedModelForCausalLM
from petalnode.node.testing.memory_servers import MemoryServer
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.inference import INFERENCE
from tests.inspection import call, client_of
from tests.swarm.memory_pool import MemoryPool
from tests.swarm.processes import until
from tests.swarm.server_pool import PooledServer
from tests.swarm.watched_streams import watch_opened

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
    """Sees the steps and answers of a client, at the moment they are sent and arrive, and may do something then.

    Attributes:
        on_step: called with the peer and the step before it is sent there; may be a coroutine function.
        under_way: for each step that a server was sent, or is to be pushed, the bytes of those that it has not answered
            and that are wanted, this one included.
    """

    def __init__(self, swarm: Any) -> None:
        self.on_answer: Callable[[str, int], object] | None = None
        self.on_step: Callable[[str, wire.Step], object] | None = None
        self.under_way: list[list[int]] = []
        self._steps: dict[str, list[_Sent]] = {}
        self._answers: dict[str, int] = {}
        watch_opened(swarm, INFERENCE, sent=self._sent, received=self._received)

    @property
    def most(self) -> int:
        """Steps that were under way at one server."""
        return max(map(len, self.under_way))

    async def _sent(self, stream: Any, frame: wire.InferenceFrame, payloads: Sequence[Any]) -> None:
        step = frame.step
        if frame.WhichOneof("body") == "open":
            self._steps.pop(stream.peer_id, None)
        if frame.WhichOneof("body") != "step":
            return
        if self.on_step is not None and inspect.isawaitable(waited := self.on_step(stream.peer_id, step)):
            await waited
        pushed = [(peer_id_from_bytes(target.peer_id), target.sequence) for target in step.targets]
        for peer_id, sequence in ((stream.peer_id, step.sequence), *pushed):
            # A step of a later route, or one that goes back, makes others void.
            before = [
                sent
                for sent in self._steps.get(peer_id, ())
                if sent.route_epoch == step.route_epoch and sent.position < step.position
            ]
            nbytes = sum(map(len, payloads))
            self._steps[peer_id] = [*before, _Sent(sequence, step.position, step.route_epoch, nbytes)]
            self.under_way.append([sent.nbytes for sent in self._steps[peer_id]])

    def _received(self, stream: Any, frame: wire.InferenceFrame, payloads: Sequence[Any]) -> None:
        if frame.WhichOneof("body") != "reply":
            return
        peer_id = stream.peer_id
        self._steps[peer_id] = [sent for sent in self._steps.get(peer_id, ()) if sent.sequence > frame.reply.sequence]
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


@dataclass(frozen=True)
class _Sent:
    """A step that is under way at a server."""

    sequence: int
    position: int
    route_epoch: int
    nbytes: int


class Fleet:
    """`each` servers at each position of the chain, as many again after another is started for each that is killed."""

    def __init__(self, pool: MemoryPool, each: int = 3) -> None:
        self._pool = pool
        self._servers = [pool.start(blocks) for blocks in POSITIONS * each]

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
