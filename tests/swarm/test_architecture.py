"""docs/architecture.md lists the files of a decode step, a training step, an answer of the API and a probe
as they run."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import httpx
import pytest
import torch
import trio

from petalnode.node.client.api.causal_lm import AutoDistributedModelForCausalLM
from petalnode.node.testing.memory_servers import MemoryServer, MemorySwarm, memory_swarm
from tests.import_graph import ROOT
from tests.memory_api import memory_api
from tests.swarm.suspects import SuspectSwarm, validated
from tests.swarm.tokenizer import save_tokenizer
from tests.tiny_models import save_tiny

LOOP = "node/client/generation/decoding.py"
IN_SOME_MODELS = {"node/blocks/kernels/step.py"}


@contextmanager
def calls() -> Iterator[list[tuple[str, str]]]:
    """(file, function) of all calls of this project's functions, in threads that begin in the block and in trio's."""
    seen: list[tuple[str, str]] = []
    files: dict[str, str] = {}

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            name = frame.f_code.co_filename
            if name not in files:
                path = Path(name).resolve()
                files[name] = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else ""
            if files[name]:
                seen.append((files[name], frame.f_code.co_name))

    in_thread = trio.to_thread.run_sync

    async def run_sync(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        def followed(*given: Any) -> Any:
            sys.setprofile(note)  # the thread may be older than the block
            try:
                return function(*given)
            finally:
                sys.setprofile(None)

        return await in_thread(followed, *args, **options)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        with patch.object(trio.to_thread, "run_sync", run_sync):
            yield seen
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]  # as its documentation has it


def described(title: str) -> list[tuple[str, str]]:
    """(file, function) of each row of the table below this title."""
    _, _, rest = (ROOT / "docs/architecture.md").read_text().partition(f"\n## {title}\n")
    section, _, _ = rest.partition("\n## ")
    rows = re.findall(r"^\| `([\w/]+\.py)` \| `(\w+)` \|.*\|$", section, re.MULTILINE)
    assert len(rows) > 10
    return rows


def follow(ran: list[tuple[str, str]], rows: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The rows that do not come in this order, each behind the one before."""
    at, missing = 0, []
    for row in rows:
        if row in ran[at:]:
            at = ran.index(row, at)
        else:
            missing.append(row)
    return missing


@dataclass(frozen=True)
class Traced:
    """A swarm of two servers for a model, whose calls are noted."""

    seen: list[tuple[str, str]]
    swarm: MemorySwarm
    servers: tuple[MemoryServer, MemoryServer]
    folder: Path

    def ran(self, run: Callable[[], object]) -> list[tuple[str, str]]:
        """The calls of a second run: what is measured once is measured then."""
        run()
        before = len(self.seen)
        run()
        return self.seen[before:]


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    folder = save_tiny("llama", tmp_path_factory.mktemp("traced") / "tiny-llama")
    save_tokenizer(folder)
    with calls() as seen, memory_swarm() as swarm:
        servers = swarm.start(folder, "0:3"), swarm.start(folder, "3:6")
        assert all(server.ready for server in servers)
        yield Traced(seen, swarm, servers, folder)


def test_a_decode_step_runs_as_its_table_says(traced: Traced) -> None:
    ids = torch.tensor([[5, 6, 7]])
    options = {"do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    with traced.swarm.open_model(AutoDistributedModelForCausalLM, traced.folder) as model:
        ran = traced.ran(lambda: model.generate(ids, max_new_tokens=8, **options))
    rows = described("One decode step")
    loop = next(index for index, (file, _) in enumerate(rows) if file == LOOP) + 1
    assert not follow(ran, rows[:loop])
    # A function that waits is noted each time that it goes on; this one never waits.
    steps = [at for at, call in enumerate(ran) if call == (LOOP, "_goes_on")]
    step = ran[steps[3] : steps[4]]
    assert not follow(step, [row for row in rows[loop:] if row[0] not in IN_SOME_MODELS])


def test_a_training_step_runs_as_its_table_says(traced: Traced) -> None:
    ids = torch.tensor([[5, 6, 7], [8, 9, 10]])
    with traced.swarm.open_model(AutoDistributedModelForCausalLM, traced.folder) as model:
        model.get_input_embeddings().requires_grad_()
        ran = traced.ran(lambda: model(ids, labels=ids).loss.backward())
    assert not follow(ran, described("One training step"))


def test_answer_of_api_runs_as_its_table_says(traced: Traced) -> None:
    body = {"model": "tiny-llama", "prompt": "hello", "max_tokens": 4, "temperature": 0}
    before = len(traced.seen)
    with memory_api(traced.swarm, traced.folder) as api:
        assert httpx.post(f"{api.url}/v1/completions", json=body, timeout=None).status_code == 200
    assert not follow(traced.seen[before:], described("One answer of the HTTP API"))


def test_a_probe_runs_as_its_table_says(traced: Traced, tmp_path: Path) -> None:
    before = len(traced.seen)
    swarm = SuspectSwarm(traced.folder, tmp_path / "none.json", *traced.servers, memory=traced.swarm)
    assert {verdict.verdict for verdict in validated(swarm, tmp_path / "history.sqlite").values()} == {"ok"}
    assert not follow(traced.seen[before:], described("One probe"))
