"""A model and honest servers of it, which the attacks are aimed at."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from petalnode.node.blocks.span import BlockSpan, load_span
from petalnode.node.models import compute_manifest
from petalnode.node.models.folder import ModelFolder, open_folder
from petalnode.node.testing.memory_servers import MemorySwarm, memory_swarm
from petalnode.protocols.ids import Span
from tests.signing_server import SigningServer
from tests.tiny_models import NUM_BLOCKS, save_tiny


@pytest.fixture
def swarm() -> Iterator[MemorySwarm]:
    """A network in memory; nobody is there yet."""
    with memory_swarm() as started:
        yield started


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    path = tmp_path_factory.mktemp("model")
    save_tiny("llama", path)
    return open_folder(path, "tiny")


@pytest.fixture(scope="session")
def server(folder: ModelFolder) -> SigningServer:
    return SigningServer(folder.path, compute_manifest(folder).version, Span(1, 4))


@pytest.fixture(scope="session")
def coarse(folder: ModelFolder, server: SigningServer) -> SigningServer:
    """Computes in bfloat16."""
    return SigningServer(folder.path, server.version, server.span, dtype="bfloat16")


@pytest.fixture(scope="session")
def blocks(folder: ModelFolder) -> BlockSpan:
    """All blocks of the model."""
    return load_span(folder.path, Span(0, NUM_BLOCKS))
