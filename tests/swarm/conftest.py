from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.swarm.lasting_nodes import LastingNodes
from tests.swarm.processes import Node, Nodes, nodes

if TYPE_CHECKING:
    from petalnode.node.swarm.swarm import Swarm
    from petalnode.node.testing.memory_servers import MemorySwarm
    from tests.swarm.memory_pool import MemoryPool
    from tests.swarm.raw import Run
    from tests.swarm.relays import RelayNode

CONTEXT = 4096
"""Positions of the tiny Llama: long enough that an answer can be interrupted."""


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of model folders: tiny-llama (with a tokenizer), tiny-gpt2, tiny-gemma3, other-llama."""

    from tests.swarm.tokenizer import save_tokenizer
    from tests.tiny_models import save_tiny

    root = tmp_path_factory.mktemp("models")
    endless = {"max_position_embeddings": CONTEXT, "eos_token_id": None}
    save_tokenizer(save_tiny("llama", root / "tiny-llama", **endless))
    save_tokenizer(save_tiny("llama", root / "other-llama", seed=1, **endless))
    save_tiny("gpt2", root / "tiny-gpt2")
    save_tiny("gemma3", root / "tiny-gemma3")
    return root


PIECE = 128
"""Two chunks of the gated delta rule. Some models are computed token by token."""


@pytest.fixture(scope="module")
def small_pieces() -> Iterator[None]:
    """Servers compute prompts in pieces of `PIECE` tokens, and keep states as often: half of what they usually do."""
    with pytest.MonkeyPatch.context() as patched:
        for name in ("server.turns.PREFILL_CHUNK", "blocks.cache.SNAPSHOT", "blocks.caches.states.SNAPSHOT"):
            patched.setattr(f"petalnode.node.{name}", PIECE)
        yield


_lasting = LastingNodes()


@pytest.fixture(scope="module")
def lasting_nodes() -> LastingNodes:
    return _lasting


@pytest.hookimpl(trylast=True)  # behind the file's own fixtures
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    _lasting.end_before(nextitem)


@pytest.fixture(scope="module")
def node_starter(home: Path) -> Iterator[Nodes]:
    """Those that it starts end with the file: an idle node takes a hundredth of a core."""
    with nodes(home) as started:
        yield started


@dataclass(frozen=True)
class SharedSwarm:
    """tiny-llama on three servers, tiny-gpt2 and tiny-gemma3 on one each, all met at one light node."""

    peer: str
    llama: tuple[Node, Node, Node]
    others: tuple[Node, Node]
    models: Path

    @property
    def folder(self) -> Path:
        return self.models / "tiny-llama"


@pytest.fixture(scope="module")
def shared_swarm(lasting_nodes: LastingNodes, home: Path, models: Path) -> SharedSwarm:
    return lasting_nodes.made("shared swarm", home, lambda starter: _start_shared_swarm(starter, models))


def _start_shared_swarm(starter: Nodes, models: Path) -> SharedSwarm:
    peer: str = starter.meeting_point().event("ready")["addrs"][0]
    started = [
        starter.server(models / name, blocks, "--cache-tokens", "100000", peer=peer)
        for name, blocks in (
            ("tiny-llama", "0:2"),
            ("tiny-llama", "2:4"),
            ("tiny-llama", "4:6"),
            ("tiny-gpt2", "0:6"),
            ("tiny-gemma3", "0:6"),
        )
    ]
    for node in started:
        node.ready  # noqa: B018  (waits)
    return SharedSwarm(peer, (started[0], started[1], started[2]), (started[3], started[4]), models)


@dataclass(frozen=True)
class ServedInMemory:
    """What `SharedSwarm` serves, on servers in memory: for tests of what is computed, whatever carries it."""

    swarm: MemorySwarm
    models: Path

    @property
    def folder(self) -> Path:
        return self.models / "tiny-llama"

    def serve(self, folder: Path, blocks: str) -> None:
        self.swarm.start(folder, blocks, cache_tokens=100_000).ready  # noqa: B018  (waits)

    def open(self, kind: Any, folder: Path | None = None, **options: Any) -> Any:
        """`kind.from_pretrained`, by default of tiny-llama."""
        return self.swarm.open_model(kind, folder or self.folder, **options)


@pytest.fixture(scope="module")
def served_in_memory(models: Path) -> Iterator[ServedInMemory]:
    from petalnode.node.testing.memory_servers import memory_swarm

    with memory_swarm() as swarm:
        served = ServedInMemory(swarm, models)
        for blocks in ("0:2", "2:4", "4:6"):
            served.serve(served.folder, blocks)
        for name in ("tiny-gpt2", "tiny-gemma3"):
            served.serve(models / name, "0:6")
        yield served


@pytest.fixture(scope="module")
def folder(models: Path) -> Path:
    """The model of a test, unless its file has another."""
    return models / "tiny-llama"


@pytest.fixture(scope="module")
def whole(folder: Path) -> Any:
    """The same by plain transformers, which looks at the tokens that petalnode looks at where several are as good."""
    from petalnode.node.blocks.caches.chosen_tokens import settle_choices
    from tests.tiny_models import load_whole

    model = load_whole(folder)
    settle_choices(model)
    return model


@pytest.fixture(scope="module")
def swarm() -> Iterator[MemorySwarm]:
    """A network in memory; nobody is there yet."""
    from petalnode.node.testing.memory_servers import memory_swarm

    with memory_swarm() as started:
        yield started


@pytest.fixture(scope="module")
def model(swarm: MemorySwarm, servers: Any, folder: Path) -> Iterator[Any]:
    """A client's model of `folder` over the `servers` of the file, unless it has another."""
    from petalnode.node.client.api.causal_lm import AutoDistributedModelForCausalLM

    with swarm.open_model(AutoDistributedModelForCausalLM, folder) as opened:
        yield opened


@pytest.fixture(scope="module")
def pool(folder: Path) -> Iterator[MemoryPool]:
    """Servers of `folder` in this process; none yet."""
    from tests.swarm.memory_pool import memory_pool

    with memory_pool(folder) as started:
        yield started


@pytest.fixture(scope="module")
def run(pool: MemoryPool) -> Run:
    """Runs what talks to the servers of `pool` as no client would."""
    from tests.swarm.memory_pool import raw_node_of
    from tests.swarm.raw import Run

    return Run(raw_node_of(pool), pool.swarm)


@pytest.fixture(scope="module")
def raw_node(run: Run) -> Swarm:
    """The node of `run`; an `async def` test that asks for it runs there."""
    return run.node


@pytest.fixture
def start() -> Iterator[Callable[..., RelayNode]]:
    """Starts relays."""
    from tests.swarm.relays import relay_nodes

    with relay_nodes() as start:
        yield start


@pytest.fixture(scope="module")
def lone_server(lasting_nodes: LastingNodes, home: Path, models: Path, shared_swarm: SharedSwarm) -> Node:
    """The whole of tiny-llama on one server in a swarm of its own, with room for 200 cache tokens."""

    def start(starter: Nodes) -> Node:
        return starter.server(models / "tiny-llama", "0:6", "--cache-tokens", "200")

    node = lasting_nodes.made("lone server", home, start)
    node.ready  # noqa: B018
    return node
