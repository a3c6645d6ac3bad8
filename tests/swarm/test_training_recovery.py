"""Whatever happens to servers in a forward or backward pass, the gradients are those of plain transformers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import trio

from petalnode import PromptTuning
from petalnode.node.client import round_trips
from petalnode.node.client.batch import batch_client
from petalnode.node.errors import NoChainError, SwarmError
from petalnode.node.testing.memory_servers import MemoryServer
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.training import BACKWARD, FORWARD, BatchProtocol
from tests.inspection import client_of
from tests.swarm.faulty_server import WORK_FAULTS, order
from tests.swarm.fleet import Model, opened_for
from tests.swarm.memory_pool import MemoryPool
from tests.swarm.plain_tuning import PlainTuning
from tests.swarm.watched_streams import watch_opened
from tests.tiny_models import HIDDEN, VOCABULARY, load_whole

TOLERANCE = 1e-4
ROWS, TOKENS, PREFIX = 24, 40, 4
MICRO_BATCHES = 5


@pytest.fixture(autouse=True)
def _every_chain_gets_something(monkeypatch: pytest.MonkeyPatch) -> None:
    """How fast servers happen to be here must not decide which of them a test is about."""
    monkeypatch.setattr(
        batch_client, "apportion", lambda count, chains: [number % len(chains) for number in range(count)]
    )
    slow = replace(round_trips.DEADLINES, rtt=round_trips.DEADLINES.measure)
    monkeypatch.setattr(round_trips, "DEADLINES", slow)  # one that is slow to answer counts, too


class SeenRequests:
    """Sees the replies to batch requests that a client gets, as they arrive, and may do something then."""

    def __init__(self, model: Model) -> None:
        self.replies: Counter[tuple[BatchProtocol, str]] = Counter()
        self.late_gradients: Counter[str] = Counter()
        self.streams: dict[tuple[BatchProtocol, str], list[Any]] = defaultdict(list)
        self._due: Callable[[BatchProtocol, str], object] = lambda protocol, peer_id: None
        for protocol in (FORWARD, BACKWARD):
            received = partial(self._received, protocol)
            watch_opened(client_of(model).swarm, protocol, sent=partial(self._sent, protocol), received=received)

    @contextmanager
    def at_first(self, protocol: BatchProtocol, peer_id: str, due: Callable[[], object]) -> Iterator[None]:
        """Calls `due` when the first reply of this kind comes from this server."""
        done = []

        def look(came: str, sender: str) -> None:
            if not done and (came, sender) == (protocol, peer_id):
                done.append(due())

        self._due = look
        yield
        assert done, "no such reply came"

    def _sent(self, protocol: BatchProtocol, stream: Any, frame: wire.BatchFrame, payloads: Sequence[Any]) -> None:
        if frame.WhichOneof("body") == "open":
            self.streams[protocol, stream.peer_id].append(stream)
        self.late_gradients[stream.peer_id] += frame.WhichOneof("body") == "gradient"

    def _received(self, protocol: BatchProtocol, stream: Any, frame: wire.BatchFrame, payloads: Sequence[Any]) -> None:
        if frame.WhichOneof("body") == "reply":
            self.replies[protocol, stream.peer_id] += 1
            self._due(protocol, stream.peer_id)


def tokens() -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))


class Trial:
    """Deep prompts in a model of the swarm, and the same in plain transformers."""

    def __init__(self, model: Model, folder: Path) -> None:
        torch.manual_seed(0)
        self.tuned = PromptTuning(model, PREFIX, deep=True)
        assert self.tuned.deep_prompts is not None
        self.tuned.deep_prompts.data.normal_(0, 0.1)
        whole: Any = load_whole(folder).requires_grad_(False)
        plain = PlainTuning(whole, self.tuned.prompt_embeddings, self.tuned.deep_prompts)
        self._expected = self._gradients(plain)

    @staticmethod
    def _gradients(tuned: Any) -> list[torch.Tensor]:
        for parameter in tuned.parameters():
            parameter.grad = None
        loss = tuned(tokens(), labels=tokens()).loss
        loss.backward()
        return [loss.detach(), *(parameter.grad for parameter in tuned.parameters())]

    def run(self) -> None:
        for got, expected in zip(self._gradients(self.tuned), self._expected, strict=True):
            difference = float((got - expected).abs().max() / expected.abs().max())
            assert difference <= TOLERANCE, f"differs by {difference:.2g}"


@contextmanager
def trial(
    pool: MemoryPool, folder: Path, *servers: MemoryServer, **options: Any
) -> Iterator[tuple[Trial, SeenRequests]]:
    with opened_for(servers, folder, pool, **options) as model:
        requests = SeenRequests(model)
        yield Trial(model, folder), requests


@pytest.fixture(scope="module")
def steady(pool: MemoryPool) -> tuple[MemoryServer, MemoryServer]:
    """Two servers that outlive all tests."""
    return pool.start("0:3"), pool.start("3:6")


def test_batch_goes_over_all_servers_that_there_are(
    pool: MemoryPool, folder: Path, steady: tuple[MemoryServer, MemoryServer]
) -> None:
    servers = [*steady, pool.start("0:3"), pool.start("3:6")]
    with trial(pool, folder, *servers) as (comparison, requests):
        comparison.run()
        for protocol in (FORWARD, BACKWARD):
            counts = [requests.replies[protocol, server.peer_id] for server in servers]
            assert all(counts) and counts[0] + counts[2] == counts[1] + counts[3] == MICRO_BATCHES
    for server in servers[2:]:
        server.kill()


def test_servers_compute_ahead_of_their_gradients(
    pool: MemoryPool, folder: Path, steady: tuple[MemoryServer, MemoryServer]
) -> None:
    first, last = steady
    with trial(pool, folder, first, last) as (comparison, requests):
        comparison.run()
        count = requests.replies[BACKWARD, first.peer_id]
        assert count == requests.late_gradients[first.peer_id] > 1 and not requests.late_gradients[last.peer_id]
        [stream] = requests.streams[BACKWARD, first.peer_id]
        # What waits for its gradient is lost with its stream; it is done again as a whole, and nobody is to blame.
        with requests.at_first(BACKWARD, last.peer_id, lambda: trio.lowlevel.spawn_system_task(stream.reset)):
            comparison.run()
        assert len(requests.streams[BACKWARD, first.peer_id]) == 2
        assert not requests.late_gradients[last.peer_id]


@pytest.mark.parametrize("protocol", [FORWARD, BACKWARD])
@pytest.mark.parametrize("blocks", ["0:3", "3:6"])
def test_a_server_is_killed(
    protocol: BatchProtocol, blocks: str, pool: MemoryPool, folder: Path, steady: tuple[MemoryServer, MemoryServer]
) -> None:
    victim = pool.start(blocks)
    with trial(pool, folder, victim, *steady) as (comparison, requests):
        with requests.at_first(protocol, victim.peer_id, victim.kill):
            comparison.run()
        comparison.run()  # and the next batch without it


@pytest.mark.parametrize("protocol", [FORWARD, BACKWARD])
def test_others_with_other_boundaries_take_over(protocol: BatchProtocol, pool: MemoryPool, folder: Path) -> None:
    victim, *others = [pool.start(blocks) for blocks in ("0:6", "0:2", "2:5", "5:6")]
    with trial(pool, folder, victim, *others) as (comparison, requests):
        with requests.at_first(protocol, victim.peer_id, victim.kill):
            comparison.run()
        assert all(requests.replies[BACKWARD, other.peer_id] for other in others)
    for server in others:
        server.kill()


def test_a_server_freezes(pool: MemoryPool, folder: Path, steady: tuple[MemoryServer, MemoryServer]) -> None:
    victim = pool.start("0:3")
    with (
        trial(pool, folder, victim, *steady) as (comparison, requests),
        requests.at_first(BACKWARD, victim.peer_id, victim.freeze),
    ):
        comparison.run()
    victim.kill()


def test_a_server_leaves(pool: MemoryPool, folder: Path, steady: tuple[MemoryServer, MemoryServer]) -> None:
    leaving = pool.start("0:3")
    with trial(pool, folder, leaving, *steady) as (comparison, requests):
        with requests.at_first(FORWARD, leaving.peer_id, leaving.terminate):
            comparison.run()
        comparison.run()


@pytest.fixture(scope="module")
def liar(pool: MemoryPool, home: Path) -> tuple[MemoryServer, Path]:
    control = home / "training-fault.json"
    return pool.start("0:6", fault=control), control


@pytest.mark.parametrize("fault", WORK_FAULTS)
def test_a_server_that_lies_is_not_believed(
    fault: str,
    pool: MemoryPool,
    folder: Path,
    steady: tuple[MemoryServer, MemoryServer],
    liar: tuple[MemoryServer, Path],
) -> None:
    server, control = liar
    with trial(pool, folder, server, *steady) as (comparison, requests):
        order(control, fault)
        comparison.run()
        assert requests.replies[BACKWARD, steady[0].peer_id] == requests.replies[BACKWARD, steady[1].peer_id] >= 2


def test_a_server_that_says_nothing_is_given_up(
    pool: MemoryPool, folder: Path, steady: tuple[MemoryServer, MemoryServer], liar: tuple[MemoryServer, Path]
) -> None:
    server, control = liar
    with trial(pool, folder, server, *steady, request_timeout=8.0) as (comparison, requests):
        order(control, "silence")
        comparison.run()
        assert requests.replies[BACKWARD, steady[0].peer_id]


def test_server_without_gradients_is_still_used(
    pool: MemoryPool, folder: Path, steady: tuple[MemoryServer, MemoryServer], liar: tuple[MemoryServer, Path]
) -> None:
    server, control = liar
    with trial(pool, folder, server, *steady) as (comparison, requests):
        order(control, "no gradients")
        comparison.run()  # finds it out in the backward pass
        comparison.run()
        assert requests.replies[FORWARD, server.peer_id] in (2, 3) and requests.replies[BACKWARD, server.peer_id] == 0
        assert all(requests.replies[BACKWARD, other.peer_id] == 2 * MICRO_BATCHES for other in steady)
    with opened_for([server], folder, pool) as model:
        loss = model(tokens(), labels=tokens()).loss
        assert not loss.requires_grad
        hidden = torch.zeros(1, 4, HIDDEN, requires_grad=True)
        with pytest.raises(NoChainError, match="no gradients from this server: it is a test"):
            model.remote_blocks(hidden).sum().backward()


def test_nobody_is_left(
    pool: MemoryPool, folder: Path, steady: tuple[MemoryServer, MemoryServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_client, "DEADLINES", replace(batch_client.DEADLINES, recovery=1.0))
    victim = pool.start("0:3")
    with (
        trial(pool, folder, victim, steady[1]) as (comparison, requests),
        requests.at_first(BACKWARD, steady[1].peer_id, victim.kill),
        pytest.raises(NoChainError, match="0:3"),
    ):
        comparison.run()


def test_a_batch_that_no_server_takes_is_refused(
    pool: MemoryPool, folder: Path, steady: tuple[MemoryServer, MemoryServer]
) -> None:
    with opened_for(steady, folder, pool) as model, pytest.raises(SwarmError, match="4096"):
        model.remote_blocks(torch.zeros(1, 5000, HIDDEN))
