"""Points on real processes: earned by serving, handed on, cleared once, spent on priority, kept for a pledge."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import trio

from petalnode.crypto.credits import Clearing, Credit
from petalnode.crypto.identity import Identity, peer_id_to_bytes
from petalnode.crypto.receipts import NO_RECEIPT, Receipt
from petalnode.node.credits.ledger import LEDGER, Ledger
from petalnode.node.credits.wallet import Wallet
from petalnode.node.errors import SwarmError
from petalnode.node.network.addresses import parse_peer
from petalnode.node.swarm.config import SwarmConfig
from petalnode.node.swarm.swarm import Swarm, open_swarm
from petalnode.node.trust.bundle import Bundle, equivocation_bundle
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.credits import CREDITS, clearing_to_wire, price
from tests.connections import free_port
from tests.swarm.processes import Node, Nodes, Outcome, petalnode
from tests.swarm.raw import RawSession

CACHE = 200
ENOUGH = 6 * CACHE
"""Points that the server has earned when the tests begin: as many as all of them together spend."""
ISSUER = Identity.from_seed(b"v" * 32)
ACCUSER = Identity.from_seed(b"a" * 32)


@dataclass
class PointsSwarm:
    """tiny-llama on one server, which trusts the one validator; both have met at the server.

    The server has `earned` points; from then on the validator probes nobody. Each test spends what it has been given
    by `funded`, and leaves the two as it found them.
    """

    nodes: Nodes
    folder: Path
    server: Node
    validator: Node
    earned: int = 0

    @property
    def validator_address(self) -> str:
        return self.validator.address

    @property
    def earner(self) -> Identity:
        """The server's."""
        return Identity.load(self.nodes.home / "earner.key")

    @property
    def ledger(self) -> Path:
        return Path(self.nodes.env["XDG_DATA_HOME"]) / "petalnode" / "validator" / f"ledger-{ISSUER.peer_id}.sqlite"

    def restart_validator(self, interval: str) -> None:
        """Where it was, so that it is found there again."""
        port = int(self.validator.address.split("/tcp/")[1].split("/")[0])
        self.validator.kill()
        self.validator = start_validator(self.nodes, self.folder, self.server.address, interval, port)
        self.validator.ready  # noqa: B018  (waits)


def start_validator(nodes: Nodes, folder: Path, peer: str, interval: str, port: int) -> Node:
    key = nodes.home / "issuer.key"
    ISSUER.save(key)
    options = ("--json", "--issue-points", "--gossip", "--interval", interval, "--identity", str(key), "--peer", peer)
    node = Node("validate", str(folder), *options, "--listen", f"/ip4/127.0.0.1/tcp/{port}", env=nodes.env)
    nodes.running.append(node)
    return node


@pytest.fixture(scope="module")
def points(node_starter: Nodes, home: Path, models: Path) -> Iterator[PointsSwarm]:
    folder = models / "tiny-llama"
    server = node_starter.server(
        folder,
        "0:6",
        *("--cache-tokens", str(CACHE), "--identity", str(home / "earner.key")),
        *("--trust-validator", ISSUER.peer_id),
    )
    validator = start_validator(node_starter, folder, server.address, "0.3", free_port())
    made = PointsSwarm(node_starter, folder, server, validator)

    async def until_earned() -> None:
        async with client(made) as swarm:
            wallet = Wallet(swarm, made.earner, made.validator_address)
            await until(wallet, lambda points: points >= ENOUGH)
            made.earned = (await wallet.credit()).points

    trio.run(until_earned)
    made.restart_validator("100000")
    yield made
    made.validator.kill()
    server.stop()


@asynccontextmanager
async def client(points: PointsSwarm, identity: Identity | None = None) -> AsyncIterator[Swarm]:
    config = SwarmConfig(identity or Identity.generate(), peers=(points.server.address,), serve_dht=False)
    with trio.fail_after(600):  # of a test that hangs
        async with open_swarm(config) as swarm:
            yield swarm


async def until(wallet: Wallet, enough: Callable[[int], bool]) -> None:
    """Asks for the points again and again until they are enough."""
    while not enough((await wallet.credit()).points):  # noqa: ASYNC110  (of another process)
        await trio.sleep(0.2)


async def funded(swarm: Swarm, points: PointsSwarm, amount: int) -> Identity:
    """Somebody new whom the server has given some of its points."""
    payer = Identity.generate()
    await Wallet(swarm, points.earner, points.validator_address).transfer(payer.peer_id, amount)
    return payer


async def credit_of(points: PointsSwarm, holder: Identity) -> Credit:
    async with client(points) as swarm:
        return await Wallet(swarm, holder, points.validator_address).credit()


def credits(points: PointsSwarm, *arguments: str) -> Outcome:
    command, *rest = arguments
    key = ("--key", str(points.nodes.home / "earner.key"))
    return petalnode("credits", command, points.validator_address, *rest, *key, "--json", env=points.nodes.env)


async def test_server_earns_and_its_owner_gets_the_points(points: PointsSwarm) -> None:
    owner = Identity.generate()
    assert points.earned >= ENOUGH
    held = await credit_of(points, points.earner)
    outcome = credits(points, "balance")
    assert outcome.code == 0, outcome
    (credit,) = outcome.objects
    assert (credit["peer_id"], credit["issuer"]) == (points.server.peer_id, ISSUER.peer_id)
    assert credit["points"] == held.points and credit["deposit"] == 0

    outcome = credits(points, "transfer", owner.peer_id, str(2 * CACHE))
    assert outcome.code == 0, outcome
    (cleared,) = outcome.objects
    assert (cleared["to"], cleared["points"], cleared["sequence"]) == (owner.peer_id, 2 * CACHE, held.sequence + 1)
    assert (await credit_of(points, owner)).points == 2 * CACHE
    assert (await credit_of(points, points.earner)).points == held.points - 2 * CACHE
    too_much = credits(points, "transfer", owner.peer_id, str(1 << 40))
    assert too_much.code == 3, too_much
    assert "points are wanted" in too_much.err and "Traceback" not in too_much.err


async def test_earnings_remain_when_the_validator_comes_back(points: PointsSwarm) -> None:
    before = await credit_of(points, points.earner)
    points.restart_validator("100000")
    after = await credit_of(points, points.earner)
    assert (after.points, after.sequence) == (before.points, before.sequence)


async def test_only_the_holder_is_told_what_it_has(points: PointsSwarm) -> None:
    issuer, holder = peer_id_to_bytes(ISSUER.peer_id), peer_id_to_bytes(Identity.generate().peer_id)
    forged = wire.CreditQuery(issuer=issuer, holder=holder, time_ms=time.time_ns() // 1_000_000, signature=bytes(64))
    bad = {wire.ERROR_BAD_REQUEST: wire.CreditsFrame(query=wire.CreditQuery(issuer=b"x"))}
    bad[wire.ERROR_NOT_ALLOWED] = wire.CreditsFrame(query=forged)
    async with client(points) as swarm:
        peer, addr = parse_peer(points.validator_address)
        swarm.host.remember(peer, [addr])
        async with swarm.open_stream(peer, CREDITS, timeout=60) as stream:
            for code, frame in bad.items():
                await stream.send(frame, timeout=60)
                answer, _ = await stream.receive(timeout=60)
                assert answer.error.code == code
        stranger = Wallet(swarm, Identity.generate(), points.validator_address)
        assert (await stranger.credit()).points == 0
        with pytest.raises(SwarmError, match="0 are there"):
            await stranger.transfer(ISSUER.peer_id, 1)
        with pytest.raises(SwarmError, match=r"keeps no points: it is no validator.*--issue-points"):
            await Wallet(swarm, Identity.generate(), points.server.address).credit()


async def opening(swarm: Swarm, points: PointsSwarm, tokens: int, clearing: Clearing | None = None) -> RawSession:
    """A session whose Open was sent, and that waits for cache as long as it takes."""
    session = await RawSession.connect(swarm, points.server.ready)
    paid = {} if clearing is None else {"clearing": clearing_to_wire(clearing)}
    await session.send_open(max_length=tokens, wait_ms=60_000, **paid)
    return session


async def granted(session: RawSession) -> wire.Granted:
    frame, _ = await session.receive()
    assert frame.WhichOneof("body") == "granted", frame
    return frame.granted


async def in_line(swarm: Swarm, points: PointsSwarm) -> None:
    """Returns once the server has read what this node sent to it before."""
    for _ in range(3):
        refused = await RawSession.connect(swarm, points.server.ready)
        assert (await refused.open(max_length=1)).error.code == wire.ERROR_CACHE_FULL


async def test_who_has_paid_is_admitted_first(points: PointsSwarm) -> None:
    order: list[str] = []

    async def scenario(owner: Swarm, stranger: Swarm, payer: Identity) -> None:
        clearing = await Wallet(owner, payer, points.validator_address).transfer(points.server.peer_id, price(1, CACHE))
        holder = await opening(stranger, points, CACHE)
        assert not (await granted(holder)).priority
        first = await opening(stranger, points, CACHE)
        await in_line(stranger, points)
        second = await opening(owner, points, CACHE, clearing)
        await in_line(owner, points)
        again = await opening(owner, points, CACHE, clearing)
        await in_line(owner, points)

        async def take(name: str, session: RawSession, priority: bool) -> None:
            assert (await granted(session)).priority is priority, name
            order.append(name)
            await session.close()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(take, "first, for nothing", first, False)
            nursery.start_soon(take, "second, paid", second, True)
            nursery.start_soon(take, "the same payment again", again, False)
            await holder.close()

    async with client(points) as stranger:
        payer = await funded(stranger, points, price(1, CACHE))
        async with client(points, payer) as owner:
            await scenario(owner, stranger, payer)
    assert order == ["second, paid", "first, for nothing", "the same payment again"]


async def test_chat_pays_a_busy_server_and_no_other(points: PointsSwarm) -> None:
    key = points.nodes.home / "payer.key"
    chat = ("chat", str(points.folder), "--peer", points.server.address, "--prompt", "hi", "--max-new-tokens", "3")
    paying = (*chat, "--json", "--identity", str(key), "--credits", points.validator_address)
    refused = petalnode(*chat, "--credits", points.validator_address, env=points.nodes.env)
    assert refused.code == 2 and "--identity FILE" in refused.err
    async with client(points) as stranger:
        payer = await funded(stranger, points, CACHE)
        payer.save(key)
        wallet = Wallet(stranger, payer, points.validator_address)
        before = (await wallet.credit()).points
        assert before == CACHE

        async def until_announced(free: int) -> None:
            while True:
                view = await stranger.refresh(timeout=60)
                (found,) = [
                    server for server in view.servers(now=time.time()) if server.peer_id == points.server.peer_id
                ]
                if found.cache_tokens_free == free:
                    break
                await trio.sleep(0.1)
            assert found.credits_of == (ISSUER.peer_id,)

        async def run_chat() -> None:
            outcome = await trio.to_thread.run_sync(lambda: petalnode(*paying, env=points.nodes.env))
            assert outcome.code == 0, outcome

        await until_announced(CACHE)  # the sessions of before have gone
        await run_chat()
        assert (await wallet.credit()).points == before, "nothing is paid where there is room"
        holder = await opening(stranger, points, CACHE)
        await granted(holder)
        await until_announced(0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run_chat)
            await until(wallet, lambda points: points < before)
            await holder.close()
        assert 0 < (await wallet.credit()).points < before


async def test_a_killed_validator_has_cleared_once(points: PointsSwarm) -> None:
    """Killed while it clears, and started again: every transfer that was sent again is cleared, and only once."""
    recipient = Identity.generate()
    async with client(points) as swarm:
        wallet = Wallet(swarm, await funded(swarm, points, CACHE), points.validator_address)
        before = await wallet.credit()
        cleared = 0
        killed, seventh = False, trio.Event()

        async def spend(count: int) -> None:
            nonlocal cleared
            for _ in range(count):
                try:
                    await wallet.transfer(recipient.peer_id, 1)
                except SwarmError:
                    assert killed
                    return
                cleared += 1
                if cleared == 7:
                    seventh.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(spend, before.points)
            await seventh.wait()
            killed = True
            points.validator.process.kill()
        await trio.to_thread.run_sync(points.restart_validator, "100000")
        await spend(3)  # the first of them is what was not answered, once more
        credit = await wallet.credit()
        assert cleared >= 10
        assert before.points - credit.points == credit.sequence - before.sequence == cleared
        assert (await Wallet(swarm, recipient, points.validator_address).credit()).points == cleared
    with Ledger(points.ledger, ISSUER) as ledger:
        issued, held, void = ledger.totals()
    assert issued == held + void


def equivocation(server: Identity) -> Bundle:
    """What would prove that the server has signed two answers to one request."""
    now = time.time_ns() // 1_000_000
    session = (Identity.generate().peer_id, bytes(16), bytes(16), 1)
    first = Receipt(1, bytes(32), (0, 6), "float32", "none", *session, bytes(32), b"1" * 32, NO_RECEIPT, b"", now)
    second = replace(first, reply_hash=b"2" * 32)
    return equivocation_bundle(ACCUSER, server.peer_id, first.signed(server), second.signed(server))


async def test_pledge_is_backed_by_earnings_and_lost(points: PointsSwarm, home: Path) -> None:
    """A server that holds points, with a pledge; then a fault of it is proved."""
    deposit = 50

    async with client(points) as swarm:
        pledger = await funded(swarm, points, 2 * deposit)
    pledger.save(home / "pledger.key")
    pledging = points.nodes.server(
        points.folder,
        "0:6",
        *("--identity", str(home / "pledger.key"), "--pledge", str(deposit), "--deposit-at", points.validator_address),
        peer=points.validator_address,
    )
    pledging.ready  # noqa: B018  (waits)
    config = SwarmConfig(ACCUSER, peers=(points.validator_address,), serve_dht=False, gossip=True)
    with trio.fail_after(600):
        async with open_swarm(config) as swarm:
            while True:
                view = await swarm.refresh(timeout=60)
                found = [server for server in view.servers(now=time.time()) if server.peer_id == pledging.peer_id]
                pledge = found[0].pledge if found else None
                if pledge is not None and pledge.holder:
                    break
                await trio.sleep(0.2)
            assert pledge.is_signed and pledge.backed([ISSUER.peer_id]) == deposit
            assert pledge.backed([ACCUSER.peer_id]) == 0
            credit = await Wallet(swarm, pledger, points.validator_address).credit()
            assert credit.deposit == deposit

            accuser = Wallet(swarm, ACCUSER, points.validator_address)
            assert (await accuser.credit()).points == 0
            while ISSUER.peer_id not in swarm.gossip.peers():  # noqa: ASYNC110  (told by no event)
                await trio.sleep(0.1)
            await swarm.publish_evidence(equivocation(pledger), recomputed=False)
            await until(accuser, lambda points: points > 0)
            assert (await accuser.credit()).points == deposit // LEDGER.forfeit_share
            after = await Wallet(swarm, pledger, points.validator_address).credit()
            assert (after.deposit, after.points) == (0, credit.points)
    pledging.stop()
