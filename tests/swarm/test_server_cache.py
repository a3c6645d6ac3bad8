"""A server's attention cache as a hard budget: counted exactly, waited for in turn, freed with its owner."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from petalnode.node.client.api.causal_lm import AutoDistributedModelForCausalLM, DistributedModelForCausalLM
from petalnode.node.errors import SwarmError
from petalnode.node.swarm.swarm import Swarm
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.framing import StreamTimeout
from tests.swarm.free_tokens import TOKENS, announced_free
from tests.swarm.processes import Node, Nodes, Running, petalnode
from tests.swarm.raw import TIMEOUT, RawSession, Run, raw_client


@pytest.fixture(scope="module")
def run(lone_server: Node) -> Iterator[Run]:
    with raw_client(lone_server.address) as runs:
        yield runs


@pytest.fixture(scope="module")
def model(lone_server: Node, models: Path) -> Iterator[DistributedModelForCausalLM]:
    with AutoDistributedModelForCausalLM.from_pretrained(
        models / "tiny-llama", initial_peers=[lone_server.address]
    ) as opened:
        yield opened


@pytest.fixture(autouse=True)
def _all_free_before_and_after(run: Run, lone_server: Node) -> Iterator[None]:
    async def everything(swarm: Swarm) -> None:
        session = await RawSession.opened(swarm, lone_server.ready, max_length=TOKENS, wait_ms=30_000)
        await session.close()

    run(everything)
    yield
    run(everything)


async def test_free_tokens_fall_by_rows_times_length(raw_node: Swarm, lone_server: Node) -> None:
    await announced_free(raw_node, lone_server, TOKENS)
    outer = await RawSession.opened(raw_node, lone_server.ready, max_length=50)
    assert outer.granted.cache_tokens == 50
    await announced_free(raw_node, lone_server, TOKENS - 50)
    inner = await RawSession.opened(raw_node, lone_server.ready, max_length=25, batch=4)
    assert inner.granted.cache_tokens == 100
    await announced_free(raw_node, lone_server, TOKENS - 150)
    await inner.close()
    await announced_free(raw_node, lone_server, TOKENS - 50)
    await outer.stream.reset()
    await announced_free(raw_node, lone_server, TOKENS)


async def test_status_shows_what_is_free(raw_node: Swarm, lone_server: Node, node_starter: Nodes) -> None:
    session = await RawSession.opened(raw_node, lone_server.ready, max_length=30, batch=2)
    await announced_free(raw_node, lone_server, TOKENS - 60)
    outcome = await trio.to_thread.run_sync(
        lambda: petalnode("status", "--json", "--peer", lone_server.address, env=node_starter.env)
    )
    assert outcome.code == 0, outcome
    assert outcome.objects[0]["servers"][0]["cache_tokens_free"] == TOKENS - 60
    await session.close()


async def queued(swarm: Swarm, server: Node, tokens: int) -> None:
    """Returns once somebody is in the queue: then even `tokens` that are free are not given out of turn."""
    with trio.fail_after(TIMEOUT):
        while True:
            session = await RawSession.connect(swarm, server.ready)
            answer = await session.open(max_length=tokens)
            if answer.WhichOneof("body") == "error":
                assert answer.error.code == wire.ERROR_CACHE_FULL
                return
            await session.close()


async def test_who_waits_is_granted_when_the_first_closes(raw_node: Swarm, lone_server: Node) -> None:
    first = await RawSession.opened(raw_node, lone_server.ready, max_length=150)
    second = await RawSession.connect(raw_node, lone_server.ready)
    await second.send_open(max_length=100, wait_ms=40_000)
    await queued(raw_node, lone_server, 40)
    with pytest.raises(StreamTimeout):
        await second.stream.receive(timeout=0.01)
    await first.close()
    frame, _ = await second.receive()
    assert frame.granted.cache_tokens == 100
    await second.close()


async def test_who_waits_too_long_is_refused(raw_node: Swarm, lone_server: Node) -> None:
    first = await RawSession.opened(raw_node, lone_server.ready, max_length=150)
    second = await RawSession.connect(raw_node, lone_server.ready)
    answer = await second.open(max_length=51, wait_ms=200)
    assert answer.error.code == wire.ERROR_CACHE_FULL
    assert "50 of 200" in answer.error.message
    await first.close()


HOLDER = """
import sys, json, trio
from tests.swarm.raw import RawSession, raw_swarm
async def main(ready, tokens, step):
    async with raw_swarm(ready["addrs"][0]) as swarm:
        session = await RawSession.connect(swarm, ready)
        await session.send_open(max_length=tokens, wait_ms=50_000)
        if step:
            frame, _ = await session.receive()
            assert frame.WhichOneof("body") == "granted", frame
            await session.step(1, 0, bytes(4 * 64 * 5))
        print("there", flush=True)
        await trio.sleep_forever()
trio.run(main, json.loads(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "granted")
"""


def holder(node_starter: Nodes, server: Node, tokens: int, how: str) -> Running:
    """Another process that holds, or waits for, cache."""
    import json

    root = str(Path(__file__).parents[2])
    process = node_starter.script(
        f"import sys; sys.path.insert(0, {root!r})" + HOLDER, json.dumps(server.ready), str(tokens), how
    )
    assert process.line() == "there"
    return process


async def test_killed_client_s_cache_is_free_at_once(raw_node: Swarm, lone_server: Node, node_starter: Nodes) -> None:
    process = await trio.to_thread.run_sync(holder, node_starter, lone_server, 150, "granted")
    await announced_free(raw_node, lone_server, TOKENS - 150)
    waiting = await RawSession.connect(raw_node, lone_server.ready)
    await waiting.send_open(max_length=TOKENS, wait_ms=30_000)
    process.kill()
    frame, _ = await waiting.receive()
    assert frame.granted.cache_tokens == TOKENS, frame
    await waiting.close()


async def test_client_that_dies_in_queue_loses_its_place(
    raw_node: Swarm, lone_server: Node, node_starter: Nodes
) -> None:
    first = await RawSession.opened(raw_node, lone_server.ready, max_length=150)
    process = await trio.to_thread.run_sync(holder, node_starter, lone_server, 100, "waiting")
    await queued(raw_node, lone_server, 40)
    second = await RawSession.connect(raw_node, lone_server.ready)
    await second.send_open(max_length=40, wait_ms=30_000)
    await trio.to_thread.run_sync(process.kill)
    frame, _ = await second.receive()
    assert frame.granted.cache_tokens == 40, frame
    await second.close()
    await first.close()


def test_python_api_says_that_cache_is_full(model: DistributedModelForCausalLM) -> None:
    import torch

    with pytest.raises(SwarmError, match="201 cache tokens are wanted"), model.inference_session(201) as session:
        session.step(torch.zeros(1, 1, 64))
    with pytest.raises(SwarmError, match="300 cache tokens are wanted"), model.inference_session(100) as session:
        session.step(torch.zeros(3, 1, 64))


async def test_chat_with_a_server_that_is_full(
    raw_node: Swarm, lone_server: Node, node_starter: Nodes, models: Path
) -> None:
    session = await RawSession.opened(raw_node, lone_server.ready, max_length=TOKENS)
    outcome = await trio.to_thread.run_sync(
        lambda: petalnode(
            *("chat", "--prompt", "hi", "--max-new-tokens", "5", "--peer", lone_server.address),
            env=node_starter.env,
            cwd=models,
        )
    )
    assert outcome.code == 3, outcome
    assert "cache tokens are wanted, 0 of 200 are free" in outcome.err and "Traceback" not in outcome.err, outcome
    await session.close()
