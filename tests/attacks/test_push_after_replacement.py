"""The bounds on who may push cost honest servers nothing: a replacement pushes and is pushed to as the one before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from petalnode.node.client.api.causal_lm import AutoDistributedModelForCausalLM
from petalnode.node.models.folder import ModelFolder
from tests.inspection import session_of
from tests.swarm.memory_pool import memory_pool
from tests.tiny_models import load_whole

OPTIONS = {"do_sample": False}


@pytest.mark.usefixtures("patient", "pushes_awaited")
@pytest.mark.parametrize("place", [0, 1, 2])
def test_pushes_go_on_with_a_replacement(place: int, folder: ModelFolder) -> None:
    path = Path(folder.path)
    spans = ["0:2", "2:4", "4:6"]
    prompt = torch.arange(3, 12)[None]
    with memory_pool(path) as pool:
        for span in (*spans, spans[place]):
            pool.start(span)
        for server in pool.servers:
            server.ready  # noqa: B018  (waits)
        with (
            pool.swarm.open_model(AutoDistributedModelForCausalLM, path) as model,
            model.inference_session(100) as session,
        ):
            first = model.generate(prompt, session=session, max_new_tokens=10, min_new_tokens=10, **OPTIONS)
            pool.of(session.route[place][0]).kill()
            second = model.generate(first, session=session, max_new_tokens=10, min_new_tokens=10, **OPTIONS)
            before = [link.server.pushed_steps for link in session_of(session).links]
            last = model.generate(second, session=session, max_new_tokens=20, min_new_tokens=20, **OPTIONS)
            after = [link.server.pushed_steps for link in session_of(session).links]
    assert session.recoveries == 1
    assert [now - then for now, then in zip(after, before, strict=True)] == [0, 20, 20]
    whole = load_whole(path).generate(prompt, max_new_tokens=40, min_new_tokens=40, **OPTIONS)
    assert torch.equal(last, whole)
