from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from petalnode.node.testing.memory_servers import MemorySwarm
    from tests.memory_api import MemoryApi

CONTEXT = 1024


@dataclass(frozen=True)
class Served:
    """tiny-llama with a tokenizer that ends answers and a template with tools, on three servers in memory."""

    swarm: MemorySwarm
    folder: Path

    def python_model(self, **options: Any) -> Any:
        """The same model by the Python API."""
        from petalnode import AutoDistributedModelForCausalLM

        return self.swarm.open_model(AutoDistributedModelForCausalLM, self.folder, **options)


@pytest.fixture(scope="session")
def api_model(tmp_path_factory: pytest.TempPathFactory) -> Path:

    from tests.api.tokenizer import EOS, save_api_tokenizer
    from tests.tiny_models import save_tiny

    root = tmp_path_factory.mktemp("api-models")
    folder = save_tiny("llama", root / "tiny-llama", max_position_embeddings=CONTEXT, eos_token_id=EOS)
    save_api_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def served(api_model: Path) -> Iterator[Served]:
    from petalnode.node.testing.memory_servers import memory_swarm

    with memory_swarm() as swarm:
        options = {"cache_tokens": 100_000, "kernels": "auto"}
        started = [swarm.start(api_model, blocks, **options) for blocks in ("0:2", "2:4", "4:6")]
        for server in started:
            server.ready  # noqa: B018  (waits)
        yield Served(swarm, api_model)


@pytest.fixture(scope="session")
def api(served: Served) -> Iterator[MemoryApi]:
    from petalnode.node.api.engine.generation import ApiLimits
    from tests.memory_api import memory_api

    # How long a form may take to be made ready is the subject of tests of its own.
    with memory_api(served.swarm, served.folder, limits=ApiLimits(grammar_seconds=600)) as running:
        yield running


@pytest.fixture(scope="session")
def client(api: MemoryApi) -> Iterator[Any]:
    """The official client."""
    from openai import OpenAI

    with OpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0) as opened:
        yield opened
