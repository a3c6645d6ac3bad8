"""Answers of plain transformers, and a swarm in which nobody takes the place of a lost server."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from petalnode.node.client.api.causal_lm import AutoDistributedModelForCausalLM
from tests.greedy import generate, prompt
from tests.swarm.fleet import At
from tests.swarm.memory_pool import MemoryPool


class Expected:
    """Answers of plain transformers, each computed once."""

    def __init__(self, whole: Any) -> None:
        self._whole = whole
        self._known: dict[str, torch.Tensor] = {}

    def __call__(self, ids: torch.Tensor, **options: Any) -> torch.Tensor:
        key = f"{ids.tolist()} {options}"
        if key not in self._known:
            self._known[key] = generate(self._whole, ids, **options)
        return self._known[key]


class Lonely:
    """A swarm in which nobody else holds what is lost. It runs beside the other tests, because it waits for long.

    The only server of the last blocks is killed while two clients generate; one waits and one gives up after a while.
    Then a server comes back.
    """

    def __init__(self, pool: MemoryPool, folder: Path, expected: Expected) -> None:
        self.ids = prompt(1, 9)
        self.expected = expected(self.ids, max_new_tokens=20)
        self._pool = pool
        self._folder = folder
        self._first = pool.start("0:4")
        self._only = pool.start("4:6")
        self._lost = threading.Event()
        self._threads = ThreadPoolExecutor(3)
        self.waits: Future[torch.Tensor] = self._threads.submit(self._generate, True)
        self.gives_up: Future[torch.Tensor] = self._threads.submit(self._generate, False)
        self._threads.submit(self._lose)

    def _generate(self, wait: bool) -> torch.Tensor:
        for server in (self._first, self._only):
            server.ready  # noqa: B018  (waits)

        def pause() -> None:
            assert self._lost.wait(300)

        with self._pool.swarm.open_model(AutoDistributedModelForCausalLM, self._folder, wait=wait) as model:
            return generate(model, self.ids, max_new_tokens=20, streamer=At({8: pause}))

    def _lose(self) -> None:
        self._only.ready  # noqa: B018
        self._only.kill()
        self._lost.set()
        try:
            self.gives_up.exception(200)
        finally:
            self._pool.start("3:6")

    def close(self) -> None:
        self._threads.shutdown()
