"""Whatever happens to the servers of a chain, what comes out is what plain transformers says.

The servers are real ones on a network in memory; in test_chaos.py they are processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import trio

from petalnode.node.client import deadlines
from petalnode.node.client.api.causal_lm import AutoDistributedModelForCausalLM
from petalnode.node.client.chunks import to_chunks
from petalnode.node.errors import NoChainError, SwarmError
from petalnode.node.testing.memory_servers import MemoryServer
from tests.greedy import generate, prompt
from tests.inspection import call, client_of, session_of
from tests.swarm.faulty_server import FAULTS, order
from tests.swarm.fleet import POSITIONS, At, Fleet, Model, Tap, opened_for
from tests.swarm.lonely_swarm import Expected, Lonely
from tests.swarm.memory_pool import MemoryPool, memory_pool
from tests.tiny_models import HIDDEN, NUM_BLOCKS

pytestmark = pytest.mark.usefixtures("blocks_as_served")
LONG = 800
"""Tokens of a prompt that is sent in four chunks and replayed in two steps."""
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def expected(whole: Any) -> Expected:
    return Expected(whole)


@pytest.fixture(scope="module")
def lonely(folder: Path, expected: Expected) -> Iterator[Lonely]:
    with memory_pool(folder) as apart:
        started = Lonely(apart, folder, expected)
        yield started
        started.close()


@pytest.fixture(scope="module")
def fleet(pool: MemoryPool, lonely: Lonely) -> Fleet:
    return Fleet(pool)


@pytest.fixture(scope="module")
def client(pool: MemoryPool, fleet: Fleet, folder: Path) -> Iterator[tuple[Model, Tap]]:
    with pool.swarm.open_model(AutoDistributedModelForCausalLM, folder) as opened:
        yield opened, Tap(client_of(opened).swarm)


@pytest.fixture
def model(client: tuple[Model, Tap], fleet: Fleet) -> Model:
    fleet.ready(client[0])
    return client[0]


@pytest.fixture
def tap(client: tuple[Model, Tap]) -> Tap:
    return client[1]


# --- one server dies


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("position", [0, 1, 2])
def test_server_is_killed_while_it_takes_long_prompt(
    position: int, model: Model, tap: Tap, fleet: Fleet, expected: Expected
) -> None:
    ids = prompt(1, LONG)
    with model.inference_session(max_length=LONG + 8) as session:
        killed: list[str] = []

        def on_answer(peer_id: str, count: int) -> None:
            if not killed and peer_id == session.route[position][0] and count == 2:
                killed.append(peer_id)
                fleet.kill_peer(peer_id)

        with tap.watching(on_answer):
            out = generate(model, ids)
        assert killed and session.recoveries == 1
        assert killed[0] not in [peer_id for peer_id, _ in session.route]
    assert torch.equal(out, expected(ids))


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("token", [0, 1, 5], ids=["before the first token", "first decode", "mid decode"])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_server_is_killed(position: int, token: int, model: Model, fleet: Fleet, expected: Expected) -> None:
    ids = prompt(1, 40)
    with model.inference_session(max_length=60) as session:
        model.generate(ids, max_new_tokens=1, pad_token_id=0)  # there is a chain before the prompt is sent again
        session.position = 0
        session.tokens = None
        out = generate(model, ids, streamer=At({token: lambda: fleet.kill(fleet.at(session, position))}))
        assert session.recoveries == 1
        assert session.position == 47
    assert torch.equal(out, expected(ids))


@pytest.mark.parametrize("position", [0, 2])
def test_replacement_is_killed_during_the_replay(
    position: int, model: Model, tap: Tap, fleet: Fleet, expected: Expected
) -> None:
    ids = prompt(1, LONG)
    with model.inference_session(max_length=LONG + 8) as session:
        first: list[str] = []
        second: list[str] = []

        def on_answer(peer_id: str, count: int) -> None:
            if first and not second and peer_id not in first:
                second.append(peer_id)
                fleet.kill_peer(peer_id)

        def begin() -> None:
            first.extend(peer_id for peer_id, _ in session.route)
            fleet.kill(fleet.at(session, position))

        with tap.watching(on_answer):
            out = generate(model, ids, streamer=At({3: begin}))
        assert second and second[0] not in [peer_id for peer_id, _ in session.route]
        assert session.recoveries >= 1
    assert torch.equal(out, expected(ids))


# --- several die


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("positions", [(0, 1), (0, 2)], ids=["neighbours", "first and last"])
def test_two_are_killed_at_once(positions: Sequence[int], model: Model, fleet: Fleet, expected: Expected) -> None:
    ids = prompt(1, 40)
    with model.inference_session(max_length=60) as session:

        def kill() -> None:
            for server in [fleet.at(session, position) for position in positions]:
                fleet.kill(server)

        out = generate(model, ids, streamer=At({4: kill}))
        assert session.recoveries == 2
    assert torch.equal(out, expected(ids))


@pytest.mark.usefixtures("patient")
def test_the_whole_chain_is_killed_one_after_another(model: Model, fleet: Fleet, expected: Expected) -> None:
    ids = prompt(1, 12)
    with model.inference_session(max_length=220) as session:

        def killing(position: int) -> Callable[[], None]:
            return lambda: fleet.kill(fleet.at(session, position))

        due = {20: killing(0), 60: killing(1), 100: killing(-1), 140: killing(0), 141: killing(1), 190: killing(-1)}
        out = generate(model, ids, max_new_tokens=200, streamer=At(due))
        assert session.recoveries == len(due)
    assert torch.equal(out, expected(ids, max_new_tokens=200))


# --- what a session can be in the middle of


def beams_killing(model: Model, fleet: Fleet, session: Any, token: int, position: int, **options: Any) -> torch.Tensor:
    """Beam search, in which the server at `position` dies after `token` steps; transformers takes no streamer there."""
    from transformers.generation.logits_process import LogitsProcessor

    class Killing(LogitsProcessor):
        calls = 0

        def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
            self.calls += 1
            if self.calls == token:
                fleet.kill(fleet.at(session, position))
            return scores

    return generate(model, session=session, logits_processor=[Killing()], **options)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("position", [0, 2])
def test_beam_search_goes_on(position: int, model: Model, fleet: Fleet, expected: Expected) -> None:
    ids = prompt(2, 11)
    mask = torch.tensor([[1] * 11, [0] * 4 + [1] * 7])
    options: dict[str, Any] = {"attention_mask": mask, "num_beams": 4, "max_new_tokens": 12}
    with model.inference_session(max_length=30) as session:
        out = beams_killing(model, fleet, session, 7, position, ids=ids, **options)
        assert session.recoveries == 1
    assert torch.equal(out, expected(ids, **options))


@pytest.mark.usefixtures("patient")
def test_a_padded_batch_goes_on(model: Model, fleet: Fleet, expected: Expected) -> None:
    ids = prompt(3, 11)
    mask = torch.tensor([[1] * 11, [0] * 4 + [1] * 7, [0] * 8 + [1] * 3])

    class Killing:
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
            self.calls += 1
            if self.calls == 5:
                for server in [fleet.at(session, position) for position in (0, 1)]:
                    fleet.kill(server)
            return scores

    with model.inference_session(max_length=30) as session:
        out = generate(model, ids, session=session, attention_mask=mask, logits_processor=[Killing()])
        assert session.recoveries == 2
    assert torch.equal(out, expected(ids, attention_mask=mask))


@pytest.mark.usefixtures("patient")
def test_a_rollback_is_not_forgotten(model: Model, fleet: Fleet) -> None:
    """Servers die after a rollback was carried out, and between setting the position and the next step."""
    hidden = torch.randn(1, 30, HIDDEN, generator=torch.Generator().manual_seed(0))
    other = torch.randn(1, 30, HIDDEN, generator=torch.Generator().manual_seed(1))
    with model.inference_session(max_length=30) as session:
        session.step(hidden[:, :20])
        session.position = 7
        session.step(other[:, 7:12])
        fleet.kill(fleet.at(session, 1))
        session.step(other[:, 12:15])
        session.position = 9
        for server in (fleet.at(session, 0), fleet.at(session, -1)):
            fleet.kill(server)
        out = session.step(hidden[:, 9:11])
        assert session.position == 11 and session.recoveries == 3
    sequence = torch.cat([hidden[:, :7], other[:, 7:9], hidden[:, 9:11]], dim=1)
    assert (out - model.remote_blocks(sequence)[:, -2:]).abs().max() <= TOLERANCE


@pytest.mark.parametrize("reorder", [(), (1, 0)])
def test_cut_off_step_changes_nothing_or_ends_all(reorder: tuple[int, ...], model: Model, pool: MemoryPool) -> None:
    """Nobody knows at which servers rows have changed places: their beams would go on with each other's caches."""
    hidden = torch.randn(2, 6, HIDDEN, generator=torch.Generator().manual_seed(0))
    with model.inference_session(max_length=12) as session:
        session.step(hidden[:, :3])
        inner = session_of(session)
        chunks = to_chunks(hidden[:, 3:4], inner.spec.codec, inner.max_step_tokens)
        chain = [pool.of(peer_id) for peer_id, _ in session.route]
        chain[-1].freeze()

        async def cut_off() -> None:
            with trio.move_on_after(0.1) as scope:
                await inner.step(chunks, reorder)
            assert scope.cancelled_caught

        call(model, cut_off)
        chain[-1].thaw()
        if reorder:
            for later in ((), (0, 1)):
                with pytest.raises(SwarmError, match="changed places"):
                    session.step(hidden[:, 3:4], reorder=later)
            assert session.position == 3
        else:
            out = session.step(hidden[:, 3:])
            assert session.position == 6
            assert (out - model.remote_blocks(hidden)[:, 3:]).abs().max() <= TOLERANCE


@pytest.mark.usefixtures("patient")
def test_rows_that_changed_places_stay_there(model: Model, fleet: Fleet) -> None:
    """A reorder behind the point that is rolled back to has moved the rows before it as well."""
    hidden = torch.randn(3, 12, HIDDEN, generator=torch.Generator().manual_seed(0))
    with model.inference_session(max_length=12) as session:
        session.step(hidden[:, :4])
        session.step(hidden[:, 4:5], reorder=(2, 0, 0))
        session.step(hidden[:, 5:6], reorder=(1, 1, 0))
        session.position = 3
        fleet.kill(fleet.at(session, 1))
        out = session.step(hidden[:, 6:8])
        assert session.recoveries == 1
    rows = torch.tensor([2, 0, 0])[torch.tensor([1, 1, 0])]
    sequence = torch.cat([hidden[rows, :3], hidden[:, 6:8]], dim=1)
    assert (out - model.remote_blocks(sequence)[:, -2:]).abs().max() <= TOLERANCE


@pytest.mark.usefixtures("patient")
def test_others_with_other_boundaries_take_over(
    pool: MemoryPool, fleet: Fleet, folder: Path, expected: Expected, model: Model
) -> None:
    ids = prompt(1, 40)
    whole_span = pool.start("0:6", throughput=900000.0)
    parts = [pool.start(blocks, throughput=1.0) for blocks in ("0:3", "2:4", "3:6")]
    with (
        opened_for([whole_span, *parts], folder, pool) as opened,
        opened.inference_session(max_length=60) as session,
    ):
        out = generate(opened, ids, session=session, streamer=At({4: whole_span.kill}))
        assert torch.equal(out, expected(ids))
        blocks = [blocks for _, blocks in session.route]
        assert blocks[0][0] == 0 and blocks[-1][1] == NUM_BLOCKS and len(blocks) >= 2
        assert session.recoveries == 1
    for server in parts:
        server.kill()


# --- frozen, and back again


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is held up by a busy machine is not taken for frozen."""
    monkeypatch.setattr(deadlines, "PATIENCE", replace(deadlines.PATIENCE, least=5.0, first_least=15.0))


@pytest.mark.usefixtures("unhurried")
def test_frozen_servers_are_replaced(model: Model, fleet: Fleet, expected: Expected) -> None:
    """They hold their connections and answer nothing: once in the middle of a long prompt, once while decoding."""
    with model.inference_session(max_length=60) as session:
        frozen: list[MemoryServer] = []

        def freeze() -> None:
            frozen.append(fleet.at(session, 1))
            frozen[-1].freeze()

        try:
            out = generate(model, prompt(1, 40), streamer=At({4: freeze}))
            assert session.recoveries == 1
        finally:
            for server in frozen:
                server.thaw()
    assert torch.equal(out, expected(prompt(1, 40)))


@pytest.mark.usefixtures("unhurried")
def test_server_is_frozen_in_a_long_prompt(model: Model, tap: Tap, pool: MemoryPool, expected: Expected) -> None:
    ids = prompt(1, LONG)
    frozen: list[MemoryServer] = []
    with model.inference_session(max_length=LONG + 8) as session:

        def on_answer(peer_id: str, count: int) -> None:
            if not frozen and peer_id == session.route[0][0]:
                frozen.append(pool.of(peer_id))
                frozen[0].freeze()

        try:
            with tap.watching(on_answer):
                out = generate(model, ids)
        finally:
            for server in frozen:
                server.thaw()
        assert frozen and session.recoveries == 1
    assert torch.equal(out, expected(ids))


@pytest.mark.usefixtures("patient")
def test_a_server_comes_back_under_its_name(pool: MemoryPool, fleet: Fleet, folder: Path, expected: Expected) -> None:
    """It has lost its sessions and its port, and is the only one that holds the blocks.

    The client waits for it, which may take longer than the 30 s after which it would give up.
    """
    server = pool.start("0:6", identity="comes back")
    ids = prompt(1, 40)

    def restart() -> None:
        server.kill()
        pool.start("0:6", identity="comes back")

    with (
        opened_for([server], folder, pool, wait=True) as opened,
        opened.inference_session(max_length=60) as session,
    ):
        out = generate(opened, ids, session=session, streamer=At({4: restart}))
        assert session.recoveries == 1
        assert session.route == [(server.peer_id, (0, 6))]
    assert torch.equal(out, expected(ids))
    pool.servers[-1].kill()


# --- liars


@pytest.fixture(scope="module")
def liar(pool: MemoryPool, home: Path) -> tuple[MemoryServer, Path]:
    """A server of 2:4 that everybody believes to be the fastest."""
    control = home / "liar.json"
    order(control)
    return pool.start("2:4", throughput=900000.0, fault=control), control


@pytest.fixture(scope="module")
def honest(pool: MemoryPool) -> list[MemoryServer]:
    """Servers that are to be slower than the liar."""
    return [pool.start(blocks, throughput=1.0) for blocks in POSITIONS]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_that_answers_wrongly_is_replaced(
    fault: str,
    liar: tuple[MemoryServer, Path],
    honest: list[MemoryServer],
    folder: Path,
    pool: MemoryPool,
    expected: Expected,
) -> None:
    server, control = liar
    order(control, fault, at=4)
    ids = prompt(1, 40)
    with (
        opened_for([server, *honest], folder, pool, request_timeout=2.0) as opened,
        opened.inference_session(max_length=60) as session,
    ):
        chain: list[Any] = []
        out = generate(opened, ids, session=session, streamer=At({1: lambda: chain.extend(session.route)}))
        assert chain[1][0] == server.peer_id, f"the test is about this server, which says: {server.errors[-2000:]}"
        assert session.recoveries >= 1
        assert server.peer_id not in [peer_id for peer_id, _ in session.route]
    assert torch.equal(out, expected(ids))


def test_forgetful_lone_server_is_asked_again(pool: MemoryPool, home: Path, folder: Path, expected: Expected) -> None:
    control = home / "forgetful.json"
    order(control, "reset", at=4)
    server = pool.start("0:6", fault=control)
    ids = prompt(1, 40)
    with (
        opened_for([server], folder, pool) as opened,
        opened.inference_session(max_length=60) as session,
    ):
        out = generate(opened, ids, session=session, streamer=At({2: lambda: order(control)}))
        assert session.recoveries == 1
    assert torch.equal(out, expected(ids))
    server.kill()


# --- nobody is left. Last in this file: they began with the first test


def test_unheld_blocks_are_named_in_time(lonely: Lonely) -> None:
    with pytest.raises(NoChainError, match="4:6") as caught:
        lonely.gives_up.result(300)
    assert isinstance(caught.value, SwarmError)
    assert caught.value.missing == (4, 5)


def test_who_waits_goes_on_when_a_server_comes(lonely: Lonely) -> None:
    assert torch.equal(lonely.waits.result(300), lonely.expected)
