"""Evidence among nodes: who hands it out, whom it reaches, and what validators make of what they hear."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
import trio

from petalnode.crypto.identity import Identity
from petalnode.node.models import compute_manifest
from petalnode.node.models.folder import ModelFolder, open_folder
from petalnode.node.swarm.config import SwarmConfig
from petalnode.node.swarm.swarm import Swarm, open_swarm
from petalnode.node.testing import message_streams
from petalnode.node.trust import evidence_gossip
from petalnode.node.trust.bundle import Bundle, session_bundle
from petalnode.node.trust.evidence_gossip import EvidenceGossip, fetch_bundle
from petalnode.node.trust.evidence_message import (
    EvidenceMessage,
    TrustedValidators,
)
from petalnode.node.trust.store import TrustStore
from petalnode.node.validator.endorsing import Endorser
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.evidence import EVIDENCE, send_bundle
from petalnode.protocols.framing import PeerError
from petalnode.protocols.ids import Span
from petalnode.protocols.inference import Refusal
from tests.signing_server import SigningServer, spoiled
from tests.swarm.evidence_messages import (
    BEN,
    LIAR,
    NOW,
    STRANGER,
    dated,
    equivocation,
    node,
    receive,
)
from tests.swarm.processes import LOOPBACK
from tests.tiny_models import HIDDEN, save_tiny

# --- evidence that is fetched


async def fetched(gossip: EvidenceGossip, *ids: bytes) -> list[Bundle | str]:
    """What a node answers to one who asks for these one after the other; the reason where it has not."""
    ours, theirs = message_streams(EVIDENCE, "asking", "asked")
    answers: list[Bundle | str] = []

    async def serve() -> None:
        await gossip.serve(theirs)
        await theirs.reset()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        for evidence_id in ids:
            try:
                answers.append(await fetch_bundle(ours, evidence_id))
            except (PeerError, Refusal) as error:
                answers.append(str(error))
        nursery.cancel_scope.cancel()
    return answers


@pytest.mark.virtual_time
async def test_evidence_is_handed_out_by_id_within_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    gossip, _ = node()
    bundle = equivocation()
    gossip.record_proven(bundle, recomputed=False)
    missing, found = await fetched(gossip, b"x" * 32, bundle.id)
    assert found == bundle and "not here" in str(missing)
    monkeypatch.setattr(evidence_gossip, "HELD", replace(evidence_gossip.HELD, fetches_per_stream=2))
    assert (await fetched(gossip, bundle.id, bundle.id, bundle.id))[2] != bundle


@pytest.mark.virtual_time
async def test_what_comes_with_message_is_handed_out_too() -> None:
    gossip, _ = node()
    bundle = equivocation()
    assert receive(gossip, dated(EvidenceMessage.of(bundle), NOW))
    assert await fetched(gossip, bundle.id) == [bundle]


@pytest.mark.virtual_time
async def test_evidence_stream_that_asks_otherwise_is_over() -> None:
    ours, theirs = message_streams(EVIDENCE, "asking", "asked")
    await ours.send(wire.EvidenceFrame(close=wire.Close()), timeout=1)
    await node()[0].serve(theirs)  # returns


@pytest.mark.virtual_time
async def test_other_evidence_than_asked_for_is_not_taken() -> None:
    ours, theirs = message_streams(EVIDENCE, "asking", "asked")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(send_bundle, theirs, equivocation().to_bytes(), timeout=10))
        with pytest.raises(PeerError, match="other evidence"):
            await fetch_bundle(ours, b"x" * 32)


@pytest.mark.virtual_time
async def test_what_a_node_hands_out_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    bundles = [equivocation(nonce=bytes([number]) * 16) for number in range(4)]
    size = len(bundles[0].to_bytes())
    monkeypatch.setattr(evidence_gossip, "HELD", replace(evidence_gossip.HELD, max_held_bytes=2 * size))
    gossip, _ = node()
    for bundle in bundles[:3]:
        gossip.record_proven(bundle, recomputed=False)
    gossip.record_proven(bundles[1], recomputed=False)  # the last one now
    gossip.record_proven(bundles[3], recomputed=False)
    answers = await fetched(gossip, *(bundle.id for bundle in bundles))
    assert [answer in bundles for answer in answers] == [False, True, False, True]
    less = replace(evidence_gossip.EVIDENCE_SIZES, max_shared=size - 1)
    monkeypatch.setattr(evidence_gossip, "EVIDENCE_SIZES", less)
    gossip, _ = node()
    gossip.record_proven(bundles[0], recomputed=False)
    assert "not here" in str((await fetched(gossip, bundles[0].id))[0])


# --- real nodes


@asynccontextmanager
async def nodes(*stores: TrustStore) -> AsyncIterator[Sequence[Swarm]]:
    """The first is met by all others."""
    async with AsyncExitStack() as stack:
        started: list[Swarm] = []
        for store in stores:
            config = SwarmConfig(
                Identity.generate(),
                listen=(LOOPBACK,),
                peers=tuple(started[0].addrs) if started else (),
                trust=store,
                gossip=True,
            )
            started.append(await stack.enter_async_context(open_swarm(config)))
        yield started


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(600):  # of a test that hangs
        while not condition():  # noqa: ASYNC110  (what it waits for tells nobody)
            await trio.sleep(0.05)


async def test_evidence_reaches_nodes_unconnected_to_its_finder() -> None:
    stores = [TrustStore() for _ in range(3)]
    async with nodes(*stores) as (_, finder, other):
        await until(lambda: bool(finder.gossip.peers()) and bool(other.gossip.peers()))
        bundle = equivocation()
        await finder.publish_evidence(bundle, recomputed=False)
        await until(lambda: all(store.is_banned(LIAR.peer_id) for store in stores))
        fetched = await finder.fetch_evidence(other.peer_id, bundle.id, addrs=other.addrs, timeout=60)
        assert fetched == bundle
        with pytest.raises((PeerError, Refusal)):
            await finder.fetch_evidence(other.peer_id, b"x" * 32, timeout=10)


async def test_node_that_lies_about_server_convinces_nobody() -> None:
    stores = [TrustStore() for _ in range(3)]
    async with nodes(*stores) as (_, liar, other):
        await until(lambda: bool(liar.gossip.peers()) and bool(other.gossip.peers()))
        await liar.publish_evidence(equivocation(real=False), recomputed=True)
        for number in range(20):
            await liar.publish_evidence(equivocation(BEN, bytes([number]) * 16, real=False), recomputed=True)
        true = equivocation(STRANGER)
        await other.publish_evidence(true, recomputed=False)
        await until(lambda: stores[0].is_banned(STRANGER.peer_id))
        await trio.sleep(0.2)
        assert [ban.peer_id for ban in stores[0].bans()] == [STRANGER.peer_id]
        assert [ban.peer_id for ban in stores[2].bans()] == [STRANGER.peer_id]


def test_time_is_what_the_clock_says() -> None:
    assert abs(EvidenceMessage.of(equivocation()).time_ms / 1000 - time.time()) < 60


# --- validators


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    path = tmp_path_factory.mktemp("model")
    save_tiny("llama", path)
    return open_folder(path, "tiny")


def hidden(tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(1, tokens, HIDDEN, generator=torch.Generator().manual_seed(seed))


async def test_validators_recompute_what_they_hear(folder: ModelFolder) -> None:
    """A large bundle is fetched by its id, recomputed and endorsed; a liar's is refuted, and he loses trust."""
    server = SigningServer(folder.path, compute_manifest(folder).version, Span(1, 3))
    honest = SigningServer(folder.path, server.version, server.span)
    steps = [(0, hidden(98), ()), (98, hidden(1, 1), ())]  # 25 KB: too much for gossip
    stores = [TrustStore() for _ in range(4)]
    async with nodes(*stores) as (client, finder, other, liar):
        for participant in (finder, other):
            stores[0].trusted = TrustedValidators(
                {finder.peer_id: "ann", other.peer_id: "ben", liar.peer_id: "carl"}, 2
            )
            await until(lambda participant=participant: bool(participant.gossip.peers()))
        await until(lambda: bool(liar.gossip.peers()))
        endorser = Endorser(other, folder)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(endorser.run)
            found = session_bundle(finder.identity, server.session(steps, spoil=spoiled), 1)
            await finder.publish_evidence(found, recomputed=True)
            await until(lambda: stores[0].is_banned(server.identity.peer_id))
            ban = stores[0].ban_of(server.identity.peer_id)
            assert ban is not None and ban.source == "validators"
            false = session_bundle(liar.identity, honest.session(steps), 1)
            await liar.publish_evidence(false, recomputed=True)
            await until(lambda: endorser.checked.get(false.id) is not None)
            await until(lambda: stores[2].is_banned(liar.peer_id))
            assert not stores[2].is_banned(honest.identity.peer_id)
            assert not stores[0].is_banned(honest.identity.peer_id)
            nursery.cancel_scope.cancel()
        assert client.trust is stores[0]
