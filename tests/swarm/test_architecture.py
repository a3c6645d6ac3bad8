"""docs/architecture.md lists the files of a decode step, an answer, a training step and a probe as they run."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import FrameType
from unittest.mock import patch

import httpx
import pytest
import torch

from petalnode import PromptTuning
from petalnode.crypto.identity import Identity
from petalnode.node.blocks.client_part import load_client
from petalnode.node.client.api.causal_lm import AutoDistributedModelForCausalLM
from petalnode.node.client.chat import Text
from petalnode.node.client.swarm_model import identify_model
from petalnode.node.models import resolve
from petalnode.node.swarm.config import SwarmConfig
from petalnode.node.testing.memory_servers import MemorySwarm, memory_swarm
from petalnode.node.validator import prober
from petalnode.node.validator.history import History
from petalnode.node.validator.probe_inputs import ProbeModel
from petalnode.node.validator.service import Validator, ValidatorOptions
from petalnode.node.verification.verdicts import Judge, Verdict
from tests.import_graph import ROOT, TREES, described_way
from tests.memory_api import memory_api
from tests.swarm.tokenizer import save_tokenizer
from tests.tiny_models import save_tiny

LOOP = "node/client/generation/decoding.py"
IN_SOME_MODELS = {"node/blocks/kernels/step.py"}


@contextmanager
def calls() -> Iterator[list[tuple[str, str]]]:
    """(file, function) of all calls of this project's functions, in all threads that begin in the block."""
    seen: list[tuple[str, str]] = []
    files: dict[str, str] = {}

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            name = frame.f_code.co_filename
            if name not in files:
                path = Path(name).resolve()
                own = path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in TREES
                files[name] = str(path.relative_to(ROOT)) if own else ""
            if files[name]:
                seen.append((files[name], frame.f_code.co_name))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield seen
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]  # as its documentation has it


def described(what: str) -> list[tuple[str, str]]:
    """(file, function) of each row of the table."""
    rows = [(file, function) for file, function, _ in described_way(what)]
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
    folder: Path

    def ran(self, run: Callable[[], object]) -> list[tuple[str, str]]:
        """The calls of a second run: what is measured once is measured then."""
        run()
        before = len(self.seen)
        run()
        return self.seen[before:]


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    folder = save_tiny("llama", tmp_path_factory.mktemp("traced"))
    save_tokenizer(folder)
    with calls() as seen, memory_swarm() as swarm:
        assert all(server.ready for server in [swarm.start(folder, blocks) for blocks in ("0:3", "3:6")])
        yield Traced(seen, swarm, folder)


def test_a_decode_step_runs_through_the_files_of_the_table_in_their_order(traced: Traced) -> None:
    ids = torch.tensor([[5, 6, 7]])
    options = {"do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    with traced.swarm.open_model(AutoDistributedModelForCausalLM, traced.folder) as model:
        ran = traced.ran(lambda: model.generate(ids, max_new_tokens=8, **options))
    rows = described("decode step")
    loop = next(index for index, (file, _) in enumerate(rows) if file == LOOP) + 1
    assert not follow(ran, rows[:loop])
    # A function that waits is noted each time that it goes on; this one never waits.
    steps = [at for at, call in enumerate(ran) if call == (LOOP, "_goes_on")]
    step = ran[steps[3] : steps[4]]
    assert not follow(step, [row for row in rows[loop:] if row[0] not in IN_SOME_MODELS])


def test_a_training_step_runs_through_the_files_of_its_table(traced: Traced) -> None:
    ids = torch.tensor([[5, 6, 7, 8]])
    with traced.swarm.open_model(AutoDistributedModelForCausalLM, traced.folder) as model:
        tuned = PromptTuning(model, 2)
        ran = traced.ran(lambda: tuned(ids, labels=ids).loss.backward())
    assert not follow(ran, described("training step"))


def test_an_answer_of_the_api_runs_through_the_files_of_its_table(traced: Traced) -> None:
    asked = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 6, "model": traced.folder.name}

    def ask() -> None:
        assert httpx.post(f"{api.url}/v1/chat/completions", json=asked, timeout=60).status_code == 200

    with memory_api(traced.swarm, traced.folder) as api:
        ran = traced.ran(ask)
    assert not follow(ran, described("answer of the API"))


def test_a_probe_runs_through_the_files_of_its_table(traced: Traced, tmp_path: Path) -> None:
    network, folder = traced.swarm.network, resolve(str(traced.folder), need="all")
    config = SwarmConfig(identity=Identity.generate())

    async def validate() -> list[Verdict]:
        async with network.open_swarm(config) as node:
            model = ProbeModel(await identify_model(node, folder), load_client(folder.path, device="cpu"), Text(folder))
            with History(tmp_path / "history.sqlite") as history:
                options = ValidatorOptions(
                    config=config,
                    model=model,
                    judge=Judge(folder.path),
                    history=history,
                    on_verdict=lambda verdict: None,
                    random=Random(0),
                )
                return await Validator(node, options).once()

    before = len(traced.seen)
    with patch.object(prober, "open_swarm", network.open_swarm):
        assert {verdict.verdict for verdict in traced.swarm.call(validate)} == {"ok"}
    assert not follow(traced.seen[before:], described("probe"))
