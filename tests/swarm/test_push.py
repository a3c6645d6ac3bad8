"""Servers hand their outputs to each other, and the client fills in where they cannot; servers that stop are left."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from petalnode.node.client.api.causal_lm import AutoDistributedModelForCausalLM
from petalnode.node.client.api.inference_session import InferenceSession
from petalnode.node.testing.memory_servers import MemorySwarm, memory_swarm
from petalnode.protocols.inference import PUSH
from tests.inspection import call, client_of, session_of
from tests.swarm.conftest import SharedSwarm
from tests.swarm.fleet import Model, heard_of
from tests.swarm.memory_pool import started
from tests.swarm.processes import Nodes
from tests.tiny_models import load_whole

pytestmark = pytest.mark.usefixtures("dials_awaited")
NEW_TOKENS = 20
OPTIONS: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}


@cache
def answered(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """A prompt, and what plain transformers says to it."""
    prompt = torch.randint(3, 100, (2, 9), generator=torch.Generator().manual_seed(3))
    return prompt, load_whole(folder).generate(prompt, **OPTIONS)


def generated(model: Model, session: InferenceSession, folder: Path) -> Any:
    """Generates in `session` and checks the tokens against plain transformers; the session's inside."""
    prompt, expected = answered(folder)
    assert torch.equal(model.generate(prompt, session=session, **OPTIONS), expected)
    return session_of(session)


def open_model(folder: Path, peer: str) -> Model:
    return AutoDistributedModelForCausalLM.from_pretrained(folder, initial_peers=[peer])


def test_a_step_goes_from_server_to_server(shared_swarm: SharedSwarm) -> None:
    with open_model(shared_swarm.folder, shared_swarm.peer) as model, model.inference_session(64) as session:
        inside = generated(model, session, shared_swarm.folder)
        steps = NEW_TOKENS
        # The streams between servers are opened beside the first steps, which the client relays: on a busy machine
        # these are more than four.
        while steps < 2 * NEW_TOKENS or inside.pushed_steps < 2 * steps - max(4, steps // 10):
            inside_again = generated(model, session, shared_swarm.folder)
            assert inside is inside_again
            steps += NEW_TOKENS
        (first_sent, first_received), *others = inside.traffic
        for sent, received in others:
            assert sent <= first_sent / 2  # nearly all of its input came from the server before it
            assert received == first_received  # while the client has a copy of every junction


async def swallow(stream: Any) -> None:
    while True:
        await stream.receive(timeout=None)


async def refuse(stream: Any) -> None:
    await stream.reset()


@pytest.fixture(scope="module", params=[swallow, refuse], ids=["swallow", "refuse"])
def deaf(request: pytest.FixtureRequest, blocks_as_served: None, folder: Path) -> Iterator[tuple[MemorySwarm, Model]]:
    """Two servers, of which the second has its neighbours' pushes go wrong; a client."""
    with memory_swarm() as swarm:
        _, second = started(swarm, folder, "0:3", "3:6")
        swarm.change(lambda network: second.node.set_handler(PUSH, request.param))
        with swarm.open_model(AutoDistributedModelForCausalLM, folder) as model:
            yield swarm, model


def test_client_relays_where_push_does_not_arrive(deaf: tuple[MemorySwarm, Model], folder: Path) -> None:
    _, model = deaf
    with model.inference_session(64) as session:
        inside = generated(model, session, folder)
        assert inside.pushed_steps == 0
        assert session.recoveries == 0  # not a step was lost, and nobody was blamed for it


def test_receiver_of_lost_push_keeps_its_place(deaf: tuple[MemorySwarm, Model], folder: Path) -> None:
    swarm, model = deaf
    other = swarm.start(folder, "3:6")
    heard_of(model, [other])

    async def prefer_the_deaf_one() -> None:
        client_of(model).suspect(other.peer_id)

    stayed = False
    while not stayed:  # on a busy machine its answer to the step that is sent again may be late as well
        call(model, prefer_the_deaf_one)
        with model.inference_session(64) as session:
            inside = generated(model, session, folder)
            asked = [peer for peer, _ in session.route]
            stayed = inside.pushed_steps == 0 and session.recoveries == 0 and other.peer_id not in asked


def test_stopping_server_is_left_in_order(node_starter: Nodes, models: Path) -> None:
    folder = models / "tiny-llama"
    leaving = node_starter.server(folder, "0:6")
    staying = [node_starter.server(folder, blocks, peer=leaving.address) for blocks in ("0:4", "3:6")]
    peers = [node.peer_id for node in staying]
    with open_model(folder, staying[0].address) as model, model.inference_session(120) as session:

        async def prefer_the_one_that_will_leave() -> None:
            client_of(model).suspect(peers[0])

        call(model, prefer_the_one_that_will_leave)
        prompt, _ = answered(folder)
        first = model.generate(prompt[:1], session=session, max_new_tokens=5, min_new_tokens=5, do_sample=False)
        assert [peer for peer, _ in session.route] == [leaving.peer_id]
        leaving.signal(signal.SIGTERM)
        leaving.event("stopping")
        options = {"max_new_tokens": 60, "min_new_tokens": 60, "do_sample": False}
        output = model.generate(first, session=session, **options)
        assert torch.equal(output, load_whole(folder).generate(first, **options))
        while session.recoveries == 0:  # the standby may need longer than these tokens on a busy machine
            session.position -= 1
            session.tokens = output[:, : session.position].tolist()
            again = model.generate(output[:, : session.position + 1], session=session, max_new_tokens=1)
            assert torch.equal(again, output[:, : again.shape[1]])
        assert [peer for peer, _ in session.route] == peers
        assert session.recoveries == 1
        assert leaving.wait() == 0  # it went as soon as its clients had
    for node in staying:
        node.stop()
