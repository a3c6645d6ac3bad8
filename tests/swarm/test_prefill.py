"""Prompts of many steps pass a chain whose servers are all at work; what comes out is that of plain transformers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import trio

from petalnode.node.blocks.cache import SpanCache
from petalnode.node.blocks.span import BlockSpan
from petalnode.node.client.api.causal_lm import AutoDistributedModelForCausalLM
from petalnode.node.errors import BadInput
from petalnode.node.testing import MemoryNetwork
from petalnode.node.testing.memory_servers import MemoryServer
from petalnode.protocols import wire_pb2 as wire
from tests.inspection import client_of, session_of
from tests.noted_blocks import NotedBlocks
from tests.peft_adapters import load_with, save_lora
from tests.swarm.fleet import Tap
from tests.swarm.memory_pool import MemoryPool, memory_pool
from tests.swarm.older_servers import Older
from tests.swarm.processes import until
from tests.tiny_models import HIDDEN, VOCABULARY, load_whole, save_tiny

SPANS = ("0:2", "2:4", "4:6")
CHUNK = 16
LONG = 7 * CHUNK + 5
"""Tokens of a prompt of eight chunks."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("prefill"), max_position_embeddings=512)


OLDER = Older()


class Prompts:
    """Servers that tell of each part of a prompt before they compute it."""

    def __init__(self) -> None:
        self.on_part: Callable[[int, int], object] = lambda first, position: None
        """Gets the first of the server's blocks and the position of the part, in the server's compute thread."""

    def computing(self, blocks: BlockSpan) -> Any:
        def told(caches: Sequence[SpanCache], tokens: int) -> None:
            if tokens > 1:
                self.on_part(blocks.span.start, caches[0].length)

        return NotedBlocks(blocks, before=told)


PROMPTS = Prompts()


@pytest.fixture(scope="module")
def pool(folder: Path) -> Iterator[MemoryPool]:
    with memory_pool(folder) as pool:
        for blocks in SPANS * 2:
            pool.start(blocks, prepare=OLDER.prepare, computing=PROMPTS.computing)
        yield pool


@contextmanager
def in_flight(most: int) -> Iterator[None]:
    """Servers let sessions that open meanwhile have no more bytes under way."""
    OLDER.said["bytes_in_flight"] = most
    try:
        yield
    finally:
        OLDER.said.clear()


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("petalnode.node.client.chunks.PIPELINE_TOKENS", CHUNK)


pytestmark = pytest.mark.usefixtures("blocks_as_served", "patient")


def prompt(rows: int = 1, tokens: int = LONG) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(rows))


def received(session: Any) -> list[int]:
    """Bytes that have come from each server."""
    return [back for _, back in session_of(session).traffic]


def generate(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    options.setdefault("attention_mask", torch.ones_like(ids))
    options |= {"max_new_tokens": 6, "min_new_tokens": 6, "pad_token_id": 0, "do_sample": False}
    out: torch.Tensor = model.generate(ids, **options)
    return out


@pytest.fixture
def model(pool: MemoryPool, folder: Path) -> Iterator[Any]:
    for server in pool.alive:
        assert server.ready
    with pool.swarm.open_model(AutoDistributedModelForCausalLM, folder) as model:
        yield model


@pytest.fixture
def tap(model: Any) -> Tap:
    return Tap(client_of(model).swarm)


def again(session: Any) -> None:
    """The next prompt is sent from its beginning."""
    session.position = 0
    session.tokens = None


@pytest.mark.usefixtures("pushes_awaited")
def test_servers_push_the_steps_of_a_prompt(model: Any, whole: Any, tap: Tap) -> None:
    ids = prompt()
    with model.inference_session(max_length=LONG + 8) as session:
        assert torch.equal(generate(model, ids), generate(whole, ids))
        inside = session_of(session)

        def pushes_all() -> bool:  # once the servers have their streams to each other
            again(session)
            sent, pushed = inside.traffic, inside.pushed_steps
            assert torch.equal(generate(model, ids), generate(whole, ids))
            if inside.pushed_steps - pushed < 2 * 13:
                return False
            traffic = [after - before for (after, _), (before, _) in zip(inside.traffic, sent, strict=True)]
            return traffic == [4 * HIDDEN * (LONG + 5), 0, 0]

        until(pushes_all, "all steps are pushed")
        assert session.recoveries == 0
        assert tap.most >= 4


@pytest.mark.parametrize("kind", ["padded rows", "embeddings"])
def test_prompts_of_all_kinds(model: Any, whole: Any, kind: str) -> None:
    ids = prompt(3)
    if kind == "padded rows":
        mask = torch.ones_like(ids)
        mask[0, :40] = mask[2, :7] = 0
        assert torch.equal(generate(model, ids, attention_mask=mask), generate(whole, ids, attention_mask=mask))
    else:
        with torch.no_grad(), model.inference_session(max_length=LONG) as session:
            embedded = torch.randn(3, LONG, HIDDEN, generator=torch.Generator().manual_seed(3))
            expected = whole.model(inputs_embeds=embedded).last_hidden_state
            assert torch.allclose(whole.model.norm(session.step(embedded)), expected, atol=1e-4)


@contextmanager
def apart(pool: MemoryPool) -> Iterator[None]:
    """Servers do not reach each other, as behind NATs."""

    def change(network: MemoryNetwork, down: bool) -> None:
        for one, other in combinations([server.peer_id for server in pool.alive], 2):
            link = network.link(one, other)
            link.take_down() if down else link.mend()

    pool.swarm.change(lambda network: change(network, True))
    try:
        yield
    finally:
        pool.swarm.change(lambda network: change(network, False))


@pytest.mark.parametrize("kind", ["apart", "trusted ends", "one at a time"])
def test_servers_that_do_not_push_or_are_older(pool: MemoryPool, folder: Path, whole: Any, kind: str) -> None:
    ids = prompt()
    for server in pool.alive:
        assert server.ready
    ends = [server.peer_id for server in pool.alive if server.span != (2, 4)]
    options = {"trusted_servers": ends} if kind == "trusted ends" else {}
    around = {"apart": apart(pool), "trusted ends": nullcontext(), "one at a time": in_flight(0)}[kind]
    with (
        around,
        pool.swarm.open_model(AutoDistributedModelForCausalLM, folder, **options) as model,
        model.inference_session(max_length=LONG + 8) as session,
    ):
        tap = Tap(client_of(model).swarm)
        assert torch.equal(generate(model, ids), generate(whole, ids))
        assert session.recoveries == 0
        sent = [there for there, _ in session_of(session).traffic]
    if kind == "one at a time":
        assert tap.most == 1
    else:
        relayed = 3 if kind == "apart" else 2  # the last one is trusted, and others may push to it
        assert sent[:relayed] == [4 * HIDDEN * (LONG + 5)] * relayed
        assert tap.most > 1


def test_no_more_is_under_way_than_server_grants(model: Any, whole: Any, tap: Tap) -> None:
    most = 3 * CHUNK * HIDDEN * 4
    ids = prompt()
    with in_flight(most), model.inference_session(max_length=LONG + 8):
        assert torch.equal(generate(model, ids), generate(whole, ids))
    assert max(map(sum, tap.under_way)) == most


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_server_is_killed_with_several_steps_under_way(
    place: int, rows: int, pool: MemoryPool, model: Any, whole: Any, tap: Tap
) -> None:
    ids = prompt(rows)
    with model.inference_session(max_length=LONG + 8) as session:
        generate(model, ids)  # the servers have had the time to open streams to each other
        again(session)
        killed: list[str] = []

        def on_answer(peer_id: str, count: int) -> None:
            if not killed and peer_id == session.route[place][0] and count == 2:
                killed.append(peer_id)
                pool.of(peer_id).kill()
                pool.start(SPANS[place], prepare=OLDER.prepare, computing=PROMPTS.computing)

        with tap.watching(on_answer):
            out = generate(model, ids)
        assert killed and session.recoveries == 1
        assert killed[0] not in [peer_id for peer_id, _ in session.route]
    assert torch.equal(out, generate(whole, ids))
    assert tap.most >= 4


def test_server_is_killed_and_others_have_no_room(pool: MemoryPool, model: Any, whole: Any, tap: Tap) -> None:
    """Steps behind the one that failed have taken what the next servers grant, and are never answered there."""
    ids = prompt()
    with in_flight(CHUNK * HIDDEN * 4), model.inference_session(max_length=LONG + 8) as session:
        generate(model, ids)  # the servers have had the time to open streams to each other
        again(session)
        killed: list[str] = []

        def on_answer(peer_id: str, count: int) -> None:
            if not killed and peer_id == session.route[1][0] and count == 2:
                killed.append(peer_id)
                pool.of(peer_id).kill()
                pool.start(SPANS[1], prepare=OLDER.prepare, computing=PROMPTS.computing)

        with tap.watching(on_answer):
            out = generate(model, ids)
        assert killed and session.recoveries == 1
    assert torch.equal(out, generate(whole, ids))


def test_prompts_rest_is_under_way_side_by_side(pool: MemoryPool, model: Any, whole: Any, tap: Tap) -> None:
    """After the first server was killed at its second chunk; one chunk goes alone behind the one that failed."""
    ids = prompt()

    def on_step(peer_id: str, step: wire.Step) -> None:
        if not session.recoveries:
            tap.under_way.clear()

    with model.inference_session(max_length=LONG + 8) as session:
        generate(model, ids)
        again(session)
        killed: list[str] = []

        def on_answer(peer_id: str, count: int) -> None:
            if not killed and peer_id == session.route[0][0] and count == 2:
                killed.append(peer_id)
                pool.of(peer_id).kill()
                pool.start(SPANS[0], prepare=OLDER.prepare, computing=PROMPTS.computing)

        tap.on_step = on_step
        with tap.watching(on_answer):
            assert torch.equal(generate(model, ids), generate(whole, ids))
        assert session.recoveries == 1
    assert tap.most > 2


def test_abandoned_prompt_leaves_the_session_as_before(pool: MemoryPool, model: Any, whole: Any, tap: Tap) -> None:
    ids = prompt()

    class GivenUp(Exception):
        pass

    def on_answer(peer_id: str, count: int) -> None:
        if count == 3:
            raise GivenUp

    with model.inference_session(max_length=LONG + 8) as session:
        first = generate(model, ids[:, :9])
        held = session.position
        with tap.watching(on_answer), pytest.raises((GivenUp, ExceptionGroup)):  # of all servers' tasks
            generate(model, ids)
        assert session.position <= held
        again(session)
        assert torch.equal(generate(model, ids), generate(whole, ids))
        assert torch.equal(first, generate(whole, ids[:, :9]))


@pytest.mark.parametrize("then", ["closed", "used"])
def test_sent_chunks_of_an_abandoned_prompt_are_uncomputed(
    then: str, pool: MemoryPool, model: Any, whole: Any, tap: Tap
) -> None:
    """The first server computes the first step until the client, which has sent it four more, has gone on."""
    begun, go = threading.Event(), threading.Event()
    computed: dict[int, list[int]] = {0: [], 2: [], 4: []}
    sent: list[int] = []

    class GivenUp(Exception):
        pass

    async def on_step(peer_id: str, step: wire.Step) -> None:
        if len(sent) == 5 and not go.is_set():
            await trio.to_thread.run_sync(begun.wait)
            raise GivenUp
        sent.append(step.sequence)

    def hold(first: int, position: int) -> None:
        computed[first].append(position)
        if not first:
            begun.set()
            go.wait()

    ids = prompt()
    try:
        with model.inference_session(max_length=LONG + 8) as session:
            generate(model, ids[:, :9])
            again(session)
            tap.on_step = on_step
            PROMPTS.on_part = hold
            with pytest.raises((GivenUp, ExceptionGroup)):
                generate(model, ids)
            if then == "used":
                go.set()
                again(session)
                assert torch.equal(generate(model, ids), generate(whole, ids))
                assert session.recoveries == 0
    finally:
        go.set()
    until(lambda: not any(sessions_at(server) for server in pool.alive), "all sessions are over")
    assert computed[0] == ([0] if then == "closed" else [0, *range(0, LONG, CHUNK)])
    if then == "closed":
        assert computed[2] == computed[4] == []


def sessions_at(server: MemoryServer) -> int:
    serving = server.tallies.serving
    return 0 if serving is None else serving().sessions


@pytest.mark.usefixtures("pushes_awaited")
def test_last_server_sends_no_more_than_needed(model: Any, whole: Any) -> None:
    """Receipts come for all of a prompt; its outputs only of the step in which its last token is."""
    ids = prompt(2)
    with model.inference_session(max_length=LONG + 8) as session:
        generate(model, ids)
        again(session)
        before = received(session)
        assert torch.equal(generate(model, ids), generate(whole, ids))
        got = [after - earlier for after, earlier in zip(received(session), before, strict=True)]
        token = 2 * 4 * HIDDEN
        assert got == [token * (LONG + 5), token * (LONG + 5), token * (5 + 5)]


@pytest.mark.usefixtures("pushes_awaited")
def test_server_that_knows_no_receipt_only_sends(model: Any, whole: Any) -> None:
    ids = prompt()
    with OLDER.without("receipt_only"), model.inference_session(max_length=LONG + 8) as session:
        generate(model, ids)
        again(session)
        before = received(session)
        assert torch.equal(generate(model, ids), generate(whole, ids))
        assert received(session)[-1] - before[-1] == 4 * HIDDEN * (LONG + 5)
        assert session.recoveries == 0


def test_outputs_of_all_tokens_come_where_wanted(model: Any, whole: Any) -> None:
    with torch.no_grad(), model.inference_session(max_length=2 * LONG) as session:
        embedded = torch.randn(1, 2 * LONG, HIDDEN, generator=torch.Generator().manual_seed(3))
        expected = whole.model(inputs_embeds=embedded).last_hidden_state
        first = session.step(embedded[:, :LONG])
        last = session.step(embedded[:, LONG:], outputs=CHUNK)
        assert torch.allclose(whole.model.norm(first), expected[:, :LONG], atol=1e-4)
        assert CHUNK <= last.shape[1] < 2 * CHUNK
        assert torch.allclose(whole.model.norm(last), expected[:, -last.shape[1] :], atol=1e-4)
        with pytest.raises(BadInput, match="outputs is 0"):
            session.step(embedded[:, :1], outputs=0)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_server_is_killed_with_three_steps_under_way(
    place: int, pool: MemoryPool, model: Any, whole: Any, tap: Tap
) -> None:
    """It is in the middle of the first of them; rows are padded."""
    begun, go = threading.Event(), threading.Event()
    ids, sent, killed = prompt(3), [0], []
    mask = torch.ones_like(ids)
    mask[0, :40] = mask[2, :7] = 0

    async def on_step(peer_id: str, step: wire.Step) -> None:
        first = peer_id == session.route[0][0]
        if first and sent[0] == 3 and not killed:
            await trio.to_thread.run_sync(begun.wait)
            killed.append(session.route[place][0])
            pool.of(killed[0]).kill()
            pool.start(SPANS[place], prepare=OLDER.prepare, computing=PROMPTS.computing)
            go.set()
        sent[0] += first

    def hold(first: int, position: int) -> None:
        if first == 2 * place and not go.is_set():
            begun.set()
            go.wait()

    try:
        with model.inference_session(max_length=LONG + 8) as session:
            generate(model, ids, attention_mask=mask)  # the servers have had the time to open streams to each other
            again(session)
            tap.on_step = on_step
            PROMPTS.on_part = hold
            out = generate(model, ids, attention_mask=mask)
            assert session.recoveries == 1 and killed[0] not in [peer_id for peer_id, _ in session.route]
    finally:
        go.set()
    assert torch.equal(out, generate(whole, ids, attention_mask=mask))


@pytest.mark.parametrize("kind", ["an adapter", "compared chains"])
def test_long_prompts_in_other_sessions(kind: str, pool: MemoryPool, folder: Path, tmp_path: Path) -> None:
    ids = prompt(2)
    for server in pool.alive:
        assert server.ready
    options: dict[str, Any] = {"compare_chains": 2}
    expected = load_whole(folder)
    if kind == "an adapter":
        adapter = save_lora(folder, tmp_path / "adapter", ["q_proj", "v_proj", "down_proj"], 1)
        options, expected = {"adapter": adapter}, load_with(folder, adapter)
    with (
        pool.swarm.open_model(AutoDistributedModelForCausalLM, folder, **options) as model,
        model.inference_session(max_length=LONG + 8) as session,
    ):
        for _ in range(2):  # servers push to each other at the second time
            again(session)
            assert torch.equal(generate(model, ids), generate(expected, ids))
        assert session.recoveries == 0
    if kind == "an adapter":
        assert not torch.equal(generate(expected, ids), generate(load_whole(folder), ids))
