"""Clients show an auditor what servers did for them, and the auditor finds out who was at fault, after the fact."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
import trio

from petalnode.crypto.identity import Identity
from petalnode.crypto.receipts import countersign
from petalnode.node.client.core import ClientOptions, open_client
from petalnode.node.client.request import WireTensor
from petalnode.node.client.session.stream import SessionSpec
from petalnode.node.client.sharing import auditable
from petalnode.node.client.swarm_model import SwarmModel, identify_model
from petalnode.node.errors import NoChainError
from petalnode.node.models.folder import open_folder
from petalnode.node.models.manifest import compute_manifest
from petalnode.node.swarm.config import SwarmConfig
from petalnode.node.swarm.swarm import Swarm, open_swarm
from petalnode.node.trust.receipt_log import ReceiptArchive
from petalnode.node.validator.auditing import AUDITS, ReceiptAuditService
from petalnode.node.verification.evidence_check import check_evidence
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.evidence import RECEIPTS
from petalnode.protocols.framing import PeerError
from petalnode.protocols.ids import Span
from petalnode.protocols.inference import receipt_to_wire
from petalnode.protocols.tensors import encode
from tests.signing_server import SigningServer
from tests.swarm.conftest import SharedSwarm
from tests.swarm.processes import LOOPBACK
from tests.tiny_models import HIDDEN


@asynccontextmanager
async def auditor_here(version: bytes) -> AsyncIterator[tuple[ReceiptAuditService, str]]:
    config = SwarmConfig(Identity.generate(), listen=(LOOPBACK,))
    async with open_swarm(config) as swarm:
        yield ReceiptAuditService(swarm, version), swarm.addrs[0]


def run(main: Callable[[], object]) -> None:
    async def bounded() -> None:
        with trio.fail_after(600):  # of a test that hangs
            await main()  # type: ignore[misc]

    trio.run(bounded)


def chunk(tokens: int, seed: int) -> WireTensor:
    return WireTensor(*encode(torch.randn(1, tokens, HIDDEN, generator=torch.Generator().manual_seed(seed)), "none"))


async def test_a_client_s_answers_are_recomputed_afterwards(shared_swarm: SharedSwarm) -> None:
    folder = open_folder(shared_swarm.folder, "tiny-llama")
    async with auditor_here(compute_manifest(folder).version) as (desk, address):
        config = SwarmConfig(Identity.generate(), peers=(shared_swarm.peer,), serve_dht=False)
        async with open_swarm(config) as swarm:
            model: SwarmModel = await identify_model(swarm, folder)
            async with open_client(swarm, model, ClientOptions(share_receipts=[address])) as client:
                spec = SessionSpec(model.version, Span(0, 6), batch=1, max_length=30)
                async with client.session(spec) as session:
                    await session.step([chunk(5, 0)])
                    session.position = 3
                    await session.step([chunk(1, 1)])
                    servers = {hop.peer_id for hop in session.route}
            # It was shown when the client ended.
            audits = [await desk.next() for _ in range(2)]
        assert len({audit.receipt.signature for audit in audits}) == 2
        for audit in audits:
            assert audit.client == config.identity.peer_id and audit.bundle.accused in servers
            outcome = await trio.to_thread.run_sync(check_evidence, audit.bundle, folder)
            assert not outcome.proven and 0 <= outcome.error <= outcome.tolerance, outcome


async def test_who_does_not_share_keeps_nothing(shared_swarm: SharedSwarm) -> None:
    folder = open_folder(shared_swarm.folder, "tiny-llama")
    config = SwarmConfig(Identity.generate(), peers=(shared_swarm.peer,), serve_dht=False)
    async with open_swarm(config) as swarm:
        model = await identify_model(swarm, folder)
        async with open_client(swarm, model) as client:
            spec = SessionSpec(model.version, Span(0, 6), batch=1, max_length=30)
            async with client.session(spec) as session:
                await session.step([chunk(5, 0)])
                assert auditable(client.receipts) == []
            assert not client.receipts.sessions


async def test_banned_or_little_pledged_servers_are_not_used(shared_swarm: SharedSwarm) -> None:
    folder = open_folder(shared_swarm.folder, "tiny-llama")
    config = SwarmConfig(Identity.generate(), peers=(shared_swarm.peer,), serve_dht=False)
    async with open_swarm(config) as swarm:
        model = await identify_model(swarm, folder)
        spec = SessionSpec(model.version, Span(0, 6), batch=1, max_length=30)
        async with (
            open_client(swarm, model, ClientOptions(require_pledge=0)) as client,
            client.session(spec) as session,
        ):
            await session.step([chunk(5, 0)])
            (first, *_) = (hop.peer_id for hop in session.route)
            assert 0 < swarm.trust.reputation(first) < 0.01
        async with open_client(swarm, model, ClientOptions(require_pledge=1)) as client:
            with pytest.raises(NoChainError, match="pledges less than 1 points"):
                await client.route(spec)
        async with open_client(swarm, model) as client:
            client.accuse(first, "its receipt is forged")
            with pytest.raises(NoChainError, match="its receipt is forged") as caught:
                await client.route(spec)
            assert caught.value.missing == (0, 1)


@pytest.fixture(scope="module")
def signing_server(models: Path) -> SigningServer:
    return SigningServer(models / "tiny-llama", os.urandom(32), Span(0, 1))


async def offer(swarm: Swarm, address: str, message: wire.Offer) -> wire.EvidenceFrame:
    auditor, addr = address.rsplit("/p2p/", 1)[1], address.rsplit("/p2p/", 1)[0]
    swarm.host.remember(auditor, [addr])
    async with swarm.open_stream(auditor, RECEIPTS, timeout=60) as stream:
        await stream.send(wire.EvidenceFrame(offer=message), timeout=60)
        frame, _ = await stream.receive(timeout=60)
        return frame


async def test_auditor_takes_no_others_receipt_and_no_flood(signing_server: SigningServer) -> None:
    log = signing_server.session([(0, torch.randn(1, 2, HIDDEN), ())])
    receipt = log.entries[0].receipt
    async with auditor_here(signing_server.version) as (_, address):
        stranger = Identity.generate()
        async with open_swarm(SwarmConfig(stranger, peers=(address,), serve_dht=False)) as swarm:
            wrong = wire.Offer(receipts=[receipt_to_wire(receipt)], countersignatures=[countersign(stranger, receipt)])
            with pytest.raises(PeerError):
                await offer(swarm, address, wrong)
        async with open_swarm(SwarmConfig(signing_server.client, peers=(address,), serve_dht=False)) as swarm:
            with pytest.raises(PeerError):
                await offer(swarm, address, wire.Offer(receipts=[receipt_to_wire(receipt)]))
            right = wire.Offer(
                receipts=[receipt_to_wire(receipt)],
                countersignatures=[countersign(signing_server.client, receipt)],
            )
            bodies = [
                (await offer(swarm, address, right)).WhichOneof("body") for _ in range(AUDITS.calls_per_minute + 2)
            ]
            assert bodies[0] == "pick" and bodies[-1] == "close"


def test_incomplete_session_is_not_offered(signing_server: SigningServer) -> None:
    archive = ReceiptArchive(shared_bytes=1 << 20)
    log = archive.session(signing_server.identity.peer_id)
    assert auditable(archive) == []
    whole = archive.session(signing_server.identity.peer_id)
    signing_server.session([(0, torch.randn(1, 2, HIDDEN), ()), (2, torch.randn(1, 1, HIDDEN), ())], log=whole)
    assert [shown.index for shown in auditable(archive)] == [0, 1]
    whole.forget_tensors()
    assert auditable(archive) == [] and not log.entries
