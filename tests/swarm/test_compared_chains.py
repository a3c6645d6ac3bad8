"""A request runs through chains that share no server, and one of the servers answers wrong numbers with good receipts.

The chains are `one`, `two` and the pairs `left` and `right`, `first` and `second`; `right` does what its control file
says. They are in memory, but for those that the command talks to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import trio

from petalnode.crypto.identity import Identity
from petalnode.node.blocks.client_part import ClientModel, load_client
from petalnode.node.client.api.causal_lm import AutoDistributedModelForCausalLM
from petalnode.node.client.core import SwarmClient
from petalnode.node.client.generation.conversation import Conversation, Sampling
from petalnode.node.client.session.compared_session import ComparedSession
from petalnode.node.client.session.session import ClientSession
from petalnode.node.client.session.stream import SessionSpec
from petalnode.node.errors import BadInput, NoChainError, SwarmError
from petalnode.node.testing.memory_servers import MemoryServer
from petalnode.protocols.ids import Span
from tests.inspection import call, client_of, session_of
from tests.swarm.compared_answers import PROMPT, answer, banned, set_back, without_blocks
from tests.swarm.false_blocks import load_now
from tests.swarm.faulty_server import order
from tests.swarm.fleet import CACHE, opened_for
from tests.swarm.memory_pool import MemoryPool, memory_pool
from tests.swarm.processes import Nodes, petalnode
from tests.swarm.server_pool import server_pool
from tests.tiny_models import load_whole

PEER = f"/ip4/127.0.0.1/tcp/1/p2p/{Identity.generate().peer_id}"


@dataclass(frozen=True)
class Chains:
    """`folder` holds the whole model, `part` one block of it. `coarse` make two more chains, in bfloat16."""

    one: MemoryServer
    two: MemoryServer
    left: MemoryServer
    right: MemoryServer
    first: MemoryServer
    second: MemoryServer
    coarse: tuple[MemoryServer, MemoryServer, MemoryServer]
    pool: MemoryPool
    control: Path
    folder: Path
    part: Path

    @property
    def exact(self) -> tuple[MemoryServer, ...]:
        return self.one, self.two, self.left, self.right


@pytest.fixture(scope="module")
def started(home: Path, models: Path) -> Iterator[Chains]:
    control = home / "compared.json"
    folder = models / "tiny-llama"
    with memory_pool(folder) as pool:

        def start(blocks: str, **options: Any) -> MemoryServer:
            server = pool.start(blocks, **options)
            server.ready  # noqa: B018  (one after another: see `load_now`)
            return server

        one, two, left, first, second = (start(blocks) for blocks in ("0:6", "0:6", "0:3", "0:3", "3:6"))
        right = start("3:6", fault=control)
        coarse = (
            start("0:6", dtype="bfloat16"),
            start("0:2", dtype="bfloat16"),
            start("2:6", dtype="bfloat16"),
        )
        part = without_blocks(folder, home / "part" / "tiny-llama")
        yield Chains(one, two, left, right, first, second, coarse, pool, control, folder, part)


@pytest.fixture
def chains(started: Chains) -> Iterator[Chains]:
    order(started.control)
    yield started
    order(started.control)


def compared(chains: Chains, servers: Sequence[MemoryServer], count: int, folder: Path | None = None) -> Any:
    return opened_for(servers, folder or chains.folder, chains.pool, compare_chains=count)


def test_honest_chains_agree(chains: Chains) -> None:
    with compared(chains, chains.exact, 3) as model:
        with model.inference_session(max_length=40) as session:
            assert answer(model) == answer(load_whole(chains.folder))
            routes = session_of(session).routes
            used = [hop.peer_id for route in routes for hop in route]
            assert len(routes) == 3 and sorted(used) == sorted(server.peer_id for server in chains.exact)
            assert session.position == 16
        assert model.disagreements == () and not banned(model)
        beams = model.generate(PROMPT, num_beams=3, max_new_tokens=6, do_sample=False)
        whole = load_whole(chains.folder).generate(PROMPT, num_beams=3, max_new_tokens=6, do_sample=False)
        assert torch.equal(beams, whole) and model.disagreements == ()
        padded = torch.cat([PROMPT, torch.cat([torch.zeros(1, 4, dtype=torch.int64), PROMPT[:, :5]], dim=1)])
        options = {"attention_mask": (padded > 0).long(), "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(model.generate(padded, **options), load_whole(chains.folder).generate(padded, **options))
        assert model.disagreements == ()


def test_honest_bfloat16_chains_agree_unmixed(chains: Chains) -> None:
    everybody = [*chains.exact, *chains.coarse]
    with compared(chains, chains.coarse, 2) as model:
        assert len(answer(model)) == 17
        assert model.disagreements == ()
    with compared(chains, everybody, 4) as model, pytest.raises(NoChainError, match="in float32 make 3"):
        answer(model)


def test_most_chains_go_on_and_ban_the_liar(chains: Chains) -> None:
    order(chains.control, blocks="noise", amount=0.1)
    servers = [chains.one, chains.left, chains.right, chains.first, chains.second]
    with compared(chains, servers, 3, chains.part) as model:
        assert answer(model) == answer(load_whole(chains.folder))
        (told,) = model.disagreements
        assert told.settled == "majority" and told.position == 0 and (told.chains, told.left) == (3, 2)
        assert told.liars == (chains.right.peer_id,) and told.suspects == ()
        assert banned(model) == {chains.right.peer_id} and told.error > told.tolerance


def test_one_of_two_liars_bans_nobody(chains: Chains) -> None:
    """No other chain has a junction between them, and there are no weights."""
    order(chains.control, blocks="noise", amount=0.1)
    with compared(chains, chains.exact, 3, chains.part) as model:
        assert answer(model) == answer(load_whole(chains.folder))
        (told,) = model.disagreements
        assert told.settled == "majority" and told.liars == () and not banned(model)
        assert set(told.suspects) == {chains.left.peer_id, chains.right.peer_id}


def test_own_weights_decide_between_two_chains(chains: Chains) -> None:
    order(chains.control, blocks="skipped")
    load_now(chains.control, "skipped")
    with compared(chains, chains.exact, 2) as model:
        # So that the pair is one of the chains, and `two` is left for later.
        set_back(model, chains.two, chains.first, chains.second)
        assert answer(model) == answer(load_whole(chains.folder))
        (told,) = model.disagreements
        assert told.settled == "weights" and (told.chains, told.left) == (2, 2)
        assert banned(model) == {chains.right.peer_id} == set(told.liars)


def test_a_lie_in_the_middle_of_an_answer(chains: Chains) -> None:
    order(chains.control, blocks="stale")
    with compared(chains, [chains.one, chains.left, chains.right], 2) as model:
        assert answer(model, 12) == answer(load_whole(chains.folder), 12)
        (told,) = model.disagreements
        assert told.position > PROMPT.shape[1] and told.liars == (chains.right.peer_id,) and told.left == 1
        assert "not compared" in str(told)


@pytest.mark.usefixtures("patient")
def test_dead_server_is_replaced_by_an_unused_one(chains: Chains) -> None:
    mortal = chains.pool.start("0:6")
    mortal.ready  # noqa: B018
    with compared(chains, [chains.one, chains.two, mortal], 2) as model:
        set_back(model, chains.two)
        with model.inference_session(max_length=40) as session:
            first = answer(model, 4)
            mortal.kill()
            assert answer(model, 12) == answer(load_whole(chains.folder), 12) and first == answer(model, 12)[:13]
            used = sorted(hop.peer_id for route in session_of(session).routes for hop in route)
            assert used == sorted([chains.one.peer_id, chains.two.peer_id]) and session.recoveries == 1
        assert model.disagreements == ()


def test_two_chains_without_weights_stop(chains: Chains) -> None:
    order(chains.control, blocks="noise", amount=0.1)
    with compared(chains, [chains.one, chains.left, chains.right], 2, chains.part) as model:
        with pytest.raises(SwarmError, match=r"2 chains disagree at token 0.*cannot be told.*Compare 3"):
            answer(model)
        assert model.disagreements[0].settled == "no" and not banned(model)


def test_too_few_chains(chains: Chains) -> None:
    with compared(chains, chains.exact, 4) as model:
        with pytest.raises(NoChainError, match=r"4 chains of tiny-llama .* in float32 make 3") as caught:
            answer(model)
        assert caught.value.missing == tuple(range(6))
    with pytest.raises(BadInput, match="compare_chains=0"):
        AutoDistributedModelForCausalLM.from_pretrained(chains.folder, initial_peers=[PEER], compare_chains=0)


def test_chat_says_who_disagreed(home: Path, models: Path, node_starter: Nodes) -> None:
    folder, control = models / "tiny-llama", home / "compared-by-command.json"
    order(control, blocks="noise", amount=0.1)
    part = without_blocks(folder, home / "part-for-command" / "tiny-llama")
    peer = node_starter.meeting_point().event("ready")["addrs"][0]
    with server_pool(home / "compared", folder, peer) as pool:
        servers = [pool.start(blocks, *CACHE) for blocks in ("0:6", "0:6", "0:3")]
        left, right = servers[-1], pool.start("3:6", *CACHE, fault=control)
        chat = ("chat", str(part), "--prompt", "hi", "--max-new-tokens", "4", "--json", "--peer", peer)
        allowed = [option for server in (*servers, right) for option in ("--allow", server.ready["peer_id"])]
        outcome = petalnode(*chat, *allowed, "--compare-chains", "3", "--no-remember", env=node_starter.env)
        assert outcome.code == 0, outcome
        assert outcome.objects[0]["compared"]
        (told,) = outcome.objects[0]["disagreements"]
        assert told["suspects"] == sorted([left.peer_id, right.peer_id]) and told["settled"] == "majority"
        assert "3 chains disagree" in outcome.err and right.peer_id in outcome.err
        outcome = petalnode(*chat, *allowed, "--compare-chains", "4", "--no-remember", env=node_starter.env)
        assert outcome.code == 3 and "make 3" in outcome.err, outcome


def test_opened_chains_are_closed_where_the_caller_leaves(chains: Chains, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is open, and another one is not yet."""
    opened: list[ClientSession] = []
    scope, whole = trio.CancelScope(), ClientSession.open

    async def open_one(session: ClientSession) -> None:
        opened.append(session)
        if len(opened) == 2:
            await trio.sleep_forever()
        await whole(session)
        assert session.links
        scope.cancel()

    async def leave(client: SwarmClient) -> None:
        with scope:
            async with client.session(SessionSpec(b"", Span(0, 6), 1, 32)):
                pass

    monkeypatch.setattr(ClientSession, "open", open_one)
    with compared(chains, [chains.one, chains.two], 2) as model:
        call(model, leave, client_of(model))
    assert len(opened) == 2 and not opened[0].links


def test_conversation_goes_on_after_all_chains_were_lost(chains: Chains, monkeypatch: pytest.MonkeyPatch) -> None:
    async def lose(*_: object, **__: object) -> None:
        raise SwarmError("its servers are gone")

    async def talk(client: SwarmClient, local: ClientModel) -> None:
        prompt, sampling = PROMPT[0].tolist(), Sampling(4)
        async with aclosing(Conversation(client, local, max_length=32, stop_tokens=[])) as conversation:
            said = await conversation.answer(prompt, sampling, lambda _: None)
            monkeypatch.setattr(ClientSession, "step", lose)
            with pytest.raises(SwarmError, match="no two chains left"):
                await conversation.answer(prompt, sampling, lambda _: None)
            monkeypatch.undo()
            assert await conversation.answer(prompt, sampling, lambda _: None) == said
            assert len(conversation.compared_routes) == 2

    with compared(chains, [chains.one, chains.two], 2) as model:
        call(model, talk, client_of(model), load_client(chains.folder))


def test_dismissed_standby_is_free_for_other_chains(chains: Chains) -> None:
    async def dismiss(client: SwarmClient) -> None:
        async with client.session(SessionSpec(b"", Span(0, 6), 1, 32)) as session:
            assert isinstance(session, ComparedSession)
            one, other = session._chains
            chain = one.session._chain
            (link,) = chain.links
            chain.prepare_standby(link)
            while not link.standby_ready:  # noqa: ASYNC110
                await trio.sleep(0.05)
            standby = one.session.coming
            assert standby and standby <= session.forbidden(other)
            chain.dismiss_standby(link)
            assert not standby & session.forbidden(other)

    with compared(chains, chains.exact, 2) as model:
        call(model, dismiss, client_of(model))
