"""Sessions and batches whose first and last blocks only trusted servers compute, through everything that can happen."""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from petalnode.crypto.identity import Identity
from petalnode.node.client.api.causal_lm import AutoDistributedModelForCausalLM
from petalnode.node.client.sharing import auditable
from petalnode.node.errors import BadInput, NoChainError, SwarmError
from petalnode.node.swarm.trusted_servers import TrustedServers
from petalnode.node.testing.memory_servers import memory_swarm
from petalnode.protocols.ids import Span
from tests.inspection import client_of, session_of
from tests.swarm.conftest import ServedInMemory
from tests.swarm.virtual_servers import BLOCKS, VirtualServer, VirtualSwarm, talk, virtual_swarm
from tests.tiny_models import load_whole

QUICK, USUAL = 0.001, 0.02
MIDDLE = Span(2, 4)


def trusting(*servers: VirtualServer, blocks: int = 2) -> TrustedServers:
    return TrustedServers(frozenset(server.peer_id for server in servers), blocks)


def check_strangers(swarm: VirtualSwarm, trusted: TrustedServers) -> None:
    """What they were asked for is all in the middle."""
    middle = trusted.middle(BLOCKS)
    for server in swarm.servers:
        if server.peer_id not in trusted.peers:
            assert middle is not None or not server.asked
            assert all(middle.covers(span) for span in server.asked if middle is not None), server.asked


@pytest.mark.virtual_time
async def test_strangers_compute_middle_only_however_quick_they_are() -> None:
    async with virtual_swarm() as swarm:
        first, last = (swarm.start(blocks, announced=50 * USUAL) for blocks in ("0:2", "4:6"))
        stranger = swarm.start("0:6", announced=QUICK)
        async with swarm.client(trusted=trusting(first, last)) as client, talk(client) as talking:
            assert [(hop.peer_id, hop.span) for hop in talking.session.route] == [
                (first.peer_id, Span(0, 2)),
                (stranger.peer_id, MIDDLE),
                (last.peer_id, Span(4, 6)),
            ]
            await talking.step()
            pushed = [link.server.pushed_steps for link in talking.session.links]
            assert pushed[:2] == [0, 0] and pushed[2] > 0  # a stranger pushes to a trusted server, and not back
        check_strangers(swarm, trusting(first, last))


@pytest.mark.virtual_time
@pytest.mark.parametrize("blocks", ["0:2", "2:4", "4:6"])
async def test_lost_server_is_replaced_by_an_allowed_one(blocks: str) -> None:
    async with virtual_swarm() as swarm:
        own = [swarm.start(span, announced=QUICK) for span in ("0:2", "4:6")]
        own += [swarm.start(span, announced=50 * USUAL) for span in ("0:2", "4:6")]
        for _ in range(3):
            swarm.start("0:6", announced=USUAL)
        trusted = trusting(*own)
        async with swarm.client(trusted=trusted) as client, talk(client) as talking:
            lost = next(
                server
                for server in swarm.servers
                for hop in talking.session.route
                if hop.peer_id == server.peer_id and str(hop.span) == blocks
            )
            lost.fall_silent()
            await talking.step()
            assert talking.session.recoveries == 1
            assert lost.peer_id not in {hop.peer_id for hop in talking.session.route}
        check_strangers(swarm, trusted)


@pytest.mark.virtual_time
async def test_step_fails_rather_than_trusts_a_stranger() -> None:
    async with virtual_swarm() as swarm:
        first, last = (swarm.start(span, announced=USUAL) for span in ("0:2", "4:6"))
        for _ in range(4):
            swarm.start("0:6", announced=QUICK)
        trusted = trusting(first, last)
        async with swarm.client(trusted=trusted) as client, talk(client) as talking:
            await first.node.retract()
            first.node.end()
            with pytest.raises(NoChainError) as failure:
                await talking.step()
            assert failure.value.missing == (0, 1)
            assert f"{first.peer_id} is not in this swarm" in str(failure.value)
            assert f"{last.peer_id} holds blocks 4:6" in str(failure.value)
            assert "--blocks 0:2" in str(failure.value)
        check_strangers(swarm, trusted)


@pytest.mark.virtual_time
async def test_failing_trusted_server_is_named_and_kept() -> None:
    async with virtual_swarm() as swarm:
        own, stranger = swarm.start("0:6", announced=USUAL), swarm.start("0:6", announced=QUICK)
        trusted = trusting(own)
        async with swarm.client(trusted=trusted) as client, talk(client) as talking:
            own.fall_silent()  # and announces itself as before
            swarm.unreachable.add(own.peer_id)
            with pytest.raises(NoChainError) as failure:
                await talking.step()
            text = str(failure.value)
            assert "can be used now" in text and f"{own.peer_id} holds blocks 0:6" in text
            assert "no server of the swarm" not in text  # there is one
            assert stranger.asked <= {MIDDLE}


@pytest.mark.virtual_time
@pytest.mark.parametrize("held", ["0:1", "1:2", "0:5", None])
async def test_session_that_lacks_trusted_server_is_not_opened(held: str | None) -> None:
    async with virtual_swarm() as swarm:
        swarm.start("0:6", announced=QUICK)
        swarm.start("0:6", announced=USUAL)
        own = Identity.generate().peer_id if held is None else swarm.start(held).peer_id
        trusted = TrustedServers(frozenset({own}), 2)
        async with swarm.client(trusted=trusted) as client:
            with pytest.raises(NoChainError, match="only trusted servers compute the first and the last 2 blocks"):
                async with talk(client):
                    pass
        check_strangers(swarm, trusted)
        assert all(not server.opened for server in swarm.servers[:2])


@pytest.mark.virtual_time
@pytest.mark.parametrize("seed", range(12))
async def test_random_swarms_join_leave_drain_and_fall_silent(seed: int) -> None:
    """Recovery, standbys, pushes and searches beside silent servers; strangers seem the better ones all the time."""
    rng = random.Random(seed)
    async with virtual_swarm() as swarm:

        def start(own: bool) -> VirtualServer:
            begin = rng.randrange(BLOCKS)
            end = rng.randint(begin + 1, BLOCKS)
            whole = rng.random() < 0.4
            return swarm.start("0:6" if whole else f"{begin}:{end}", announced=5 * USUAL if own else QUICK)

        own = [swarm.start("0:6", announced=5 * USUAL)] + [start(own=True) for _ in range(3)]
        trusted = trusting(*own, blocks=rng.choice([1, 2, 2, 3]))
        for _ in range(5):
            start(own=False)
        async with swarm.client(trusted=trusted) as client:
            with suppress(SwarmError):  # too many are gone; then it must have failed
                async with talk(client, push=rng.random() < 0.7) as talking:
                    for _ in range(10):
                        match rng.randrange(5):
                            case 0:
                                swarm.of(talking.session, rng.randrange(len(talking.session.route))).fall_silent()
                            case 1:
                                swarm.of(talking.session, rng.randrange(len(talking.session.route))).draining = True
                            case 2:
                                start(own=False)
                            case 3:
                                swarm.of(talking.session, rng.randrange(len(talking.session.route))).seconds = 3.0
                            case _:
                                pass
                        await talking.step(rng.choice([1, 1, 7]))
        check_strangers(swarm, trusted)
        assert any(server.asked for server in own)


@pytest.mark.virtual_time
async def test_another_processs_session_is_not_given_to_strangers() -> None:
    """It was opened when strangers still served all blocks, and is kept in a file. It must be filled anew elsewhere."""
    async with virtual_swarm() as swarm:
        stranger = swarm.start("0:6", announced=QUICK)
        first, last = (swarm.start(span) for span in ("0:2", "4:6"))
        async with swarm.client() as client, talk(client) as talking:
            saved = talking.session.saved()
            assert saved is not None and [link.peer_id for link in saved.links] == [stranger.peer_id]
            stranger.asked.clear()
            streams = len(swarm.network.link(client.peer_id, stranger.peer_id).streams)
            client.trusted = trusting(first, last)
            assert not await talking.session.resume(saved)
            assert len(swarm.network.link(client.peer_id, stranger.peer_id).streams) == streams  # it was not even asked


# --- real servers: what they compute, batches, gradients, compared chains


def test_tokens_gradients_and_what_auditors_see(served_in_memory: ServedInMemory) -> None:
    swarm, folder = served_in_memory.swarm, served_in_memory.folder
    own = [swarm.start(folder, blocks) for blocks in ("0:2", "4:6")]
    trusted = [server.ready["peer_id"] for server in own]
    auditor = f"/ip4/127.0.0.1/tcp/1/p2p/{Identity.generate().peer_id}"  # who is not there
    options: dict[str, Any] = {"trusted_servers": trusted, "share_receipts": [auditor], "dtype": "float32"}
    try:
        with served_in_memory.open(AutoDistributedModelForCausalLM, **options) as model:
            client = client_of(model)
            prompt = torch.tensor([[5, 6, 7, 8]])
            wanted: dict[str, Any] = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
            with model.inference_session(32) as session:
                output = model.generate(prompt, session=session, **wanted)
                assert [peer for peer, _ in session.route][::2] == trusted
            assert torch.equal(output, load_whole(folder).generate(prompt, **wanted))
            inputs = model.transformers_model.get_input_embeddings()(prompt).detach().requires_grad_()
            model.remote_blocks(inputs).sum().backward()
            assert inputs.grad is not None
            hops = {hop for _, hop, _ in client.batches._slots}
            assert {hop.span for hop in hops if hop.peer_id in trusted} == {Span(0, 2), Span(4, 6)}
            assert {hop.span for hop in hops if hop.peer_id not in trusted} == {MIDDLE}
            kept = {answer.receipt.span for answer in auditable(client.receipts)}
            assert kept == {(0, 2), (2, 4), (4, 6)}
            assert {answer.receipt.span for answer in auditable(client.receipts, client.trusted.middle(6))} == {(2, 4)}
    finally:
        for server in own:
            server.kill()


def test_compared_chains_share_no_server_and_stay_trusted(models: Path) -> None:
    folder = models / "tiny-llama"
    with memory_swarm() as swarm:
        own = [swarm.start(folder, "0:6") for _ in range(2)]
        others = [swarm.start(folder, "0:6") for _ in range(2)]
        trusted = [server.ready["peer_id"] for server in own]
        assert all(server.ready for server in others)
        options: dict[str, Any] = {"dtype": "float32", "trusted_servers": trusted, "trusted_blocks": 1}
        with swarm.open_model(AutoDistributedModelForCausalLM, folder, compare_chains=2, **options) as model:
            prompt = torch.tensor([[5, 6, 7, 8]])
            with model.inference_session(32) as session:
                model.generate(prompt, session=session, max_new_tokens=3, do_sample=False)
                for route in session_of(session).routes:
                    for hop in route:
                        assert hop.peer_id in trusted or Span(1, 5).covers(hop.span), hop
        with (
            swarm.open_model(AutoDistributedModelForCausalLM, folder, compare_chains=3, **options) as model,
            pytest.raises(SwarmError, match="only trusted servers compute"),
            model.inference_session(32) as session,
        ):
            model.generate(prompt, session=session, max_new_tokens=3, do_sample=False)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"trusted_servers": "12D3KooW"}, "not one string"),
        ({"trusted_servers": ["me"]}, "no peer id"),
        ({"trusted_blocks": 2}, "need trusted servers"),
        ({"trusted_servers": [Identity.generate().peer_id], "trusted_blocks": 0}, "1 or more"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], said: str, models: Path) -> None:
    address = f"/ip4/127.0.0.1/tcp/1/p2p/{Identity.generate().peer_id}"
    with pytest.raises(BadInput, match=said):
        AutoDistributedModelForCausalLM.from_pretrained(f"{models}/tiny-llama", initial_peers=[address], **options)
