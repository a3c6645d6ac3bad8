"""Evidence that its author hands out a byte at a time, or never: it keeps nobody from checking that of others."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import pytest
import trio

from petalnode.crypto.identity import Identity
from petalnode.node.models.folder import ModelFolder
from petalnode.node.network.transport.places import Place
from petalnode.node.testing import message_streams
from petalnode.node.trust.bundle import Bundle, session_bundle
from petalnode.node.trust.evidence_gossip import fetch_bundle
from petalnode.node.trust.evidence_message import EvidenceMessage, TrustedValidators
from petalnode.node.trust.store import TrustStore
from petalnode.node.validator.endorsing import ENDORSING, Endorser, Notice, fetch_to_give_up, next_notice, pending
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.evidence import EVIDENCE, EVIDENCE_SIZES, PIECE_BYTES, EvidenceStream
from petalnode.protocols.framing import StreamTimeout
from tests.attacks.forger import ATTACKER, HONEST, Listener, hidden
from tests.signing_server import SigningServer, spoiled

pytestmark = pytest.mark.virtual_time

AUTHOR = Identity.generate().peer_id


@pytest.fixture(scope="module")
def genuine(server: SigningServer) -> Bundle:
    return session_bundle(HONEST, server.session([(0, hidden(5), ())], spoil=spoiled), 0)


# --- one fetch


async def fetched_from(sender: Callable[[EvidenceStream], Awaitable[None]]) -> float:
    """Seconds until the fetch from this sender is given up."""
    ours, theirs = message_streams(EVIDENCE, "honest", "attacker")

    async def send() -> None:
        await theirs.receive(timeout=10)
        await sender(theirs)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        begun = trio.current_time()
        with pytest.raises(StreamTimeout):
            await fetch_bundle(ours, bytes(32))
        nursery.cancel_scope.cancel()
    return trio.current_time() - begun


async def send_slowly(stream: EvidenceStream, piece: int, pause: float) -> None:
    await stream.send(wire.EvidenceFrame(sending=wire.Sending(nbytes=EVIDENCE_SIZES.max_shared)), timeout=10)
    while True:
        await trio.sleep(pause)
        frame = wire.EvidenceFrame(piece=wire.Piece(), tensors=[wire.Tensor(nbytes=piece)])
        await stream.send(frame, [bytes(piece)], timeout=1000)


async def test_a_byte_now_and_then_is_no_fetch() -> None:
    """Each piece comes in time; all of them would take 60 years."""
    assert await fetched_from(lambda stream: send_slowly(stream, 1, 29)) <= 60


async def test_rate_below_the_least_is_given_up_soon() -> None:
    """Not at the end: what is too slow at the beginning will not be there in time."""
    assert (
        await fetched_from(lambda stream: send_slowly(stream, PIECE_BYTES, 2 * PIECE_BYTES / EVIDENCE_SIZES.min_rate))
        <= 90
    )


# --- an endorser


class Withholding(Listener):
    """The swarm of an endorser in which some authors never hand out what they have announced."""

    def __init__(self, honest: Sequence[str], **bundles: Bundle) -> None:
        super().__init__(**bundles)
        self.honest = honest
        self.asked: list[str] = []
        self.side_by_side = self.most = 0

    async def fetch_evidence(self, author: str, evidence_id: bytes, **how: object) -> Bundle:
        self.asked.append(author)
        self.side_by_side += 1
        self.most = max(self.most, self.side_by_side)
        try:
            if author not in self.honest:
                await trio.sleep_forever()
            return await super().fetch_evidence(author, evidence_id, **how)
        finally:
            self.side_by_side -= 1


def withheld(number: int) -> EvidenceMessage:
    return EvidenceMessage(bytes([number]) * 32, HONEST.peer_id, 0)


async def hear(swarm: Listener, folder: ModelFolder, heard: Sequence[tuple[EvidenceMessage, str]]) -> None:
    """An endorser hears these messages, and is stopped once it has published evidence."""
    endorser = Endorser(swarm, folder)  # type: ignore[arg-type]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(endorser.run)
        for message, author in heard:
            swarm.hear(message, author)
            await trio.testing.wait_all_tasks_blocked()
        while not swarm.published:  # noqa: ASYNC110  (what it waits for tells nobody)
            await trio.sleep(0.01)
        nursery.cancel_scope.cancel()


async def test_an_author_that_withholds_evidence_costs_one_fetch(folder: ModelFolder, genuine: Bundle) -> None:
    swarm = Withholding([AUTHOR], genuine=genuine)
    real = replace(EvidenceMessage.of(genuine), bundle=None)
    await hear(swarm, folder, [*((withheld(n), ATTACKER.peer_id) for n in range(20)), (real, AUTHOR)])
    assert swarm.asked == [ATTACKER.peer_id, AUTHOR]


async def test_who_announces_anothers_evidence_takes_no_place(folder: ModelFolder, genuine: Bundle) -> None:
    """The attacker's notice has the same id, comes first, and leads to a fetch that never ends."""
    swarm = Withholding([AUTHOR], genuine=genuine)
    real = replace(EvidenceMessage.of(genuine), bundle=None)
    await hear(swarm, folder, [(real, ATTACKER.peer_id), (real, AUTHOR)])
    assert [bundle.id for bundle in swarm.published] == [genuine.id]


async def test_evidence_that_needs_no_fetch_waits_for_none(folder: ModelFolder, genuine: Bundle) -> None:
    """However many keys the attacker has: fetches are bounded, and small evidence comes in the message itself."""
    swarm = Withholding([], genuine=genuine)
    keys = [f"key {number}" for number in range(2 * ENDORSING.max_fetches)]
    small = EvidenceMessage.of(genuine)
    await hear(swarm, folder, [*((withheld(n), key) for n, key in enumerate(keys)), (small, AUTHOR)])
    assert swarm.most == ENDORSING.max_fetches


async def test_one_addresss_keys_yield_fetches_others_wait_for(folder: ModelFolder) -> None:
    """Before, 8 keys that send as slowly as is borne kept all fetches for 540 s, and those that waited after them."""
    asked: list[float] = []
    given_up: list[str] = []

    class AtOneAddress(Withholding):
        def origin_of(self, peer_id: str) -> str:
            return "10.0.0.1" if peer_id.startswith("key") and peer_id in self.asked else peer_id

        async def fetch_evidence(self, author: str, evidence_id: bytes, **how: object) -> Bundle:
            if author == AUTHOR:
                asked.append(trio.current_time())
            try:
                return await super().fetch_evidence(author, evidence_id, **how)
            except trio.Cancelled:
                given_up.append(author)
                raise

    swarm = AtOneAddress([])
    endorser = Endorser(swarm, folder)  # type: ignore[arg-type]
    begun = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(endorser.run)
        await trio.testing.wait_all_tasks_blocked()
        for number, author in enumerate(["alone", *(f"key {number}" for number in range(ENDORSING.max_fetches + 3))]):
            swarm.hear(withheld(number), author)
            await trio.testing.wait_all_tasks_blocked()
        swarm.hear(withheld(99), AUTHOR)
        await trio.sleep(60)
        assert "key 0" in given_up and "alone" not in given_up, "who has one of its own address keeps it"
        nursery.cancel_scope.cancel()
    assert asked and asked[0] - begun <= 5 * ENDORSING.share_pause
    assert len(asked) == 1


# --- whose turn it is


def test_oldest_fetch_of_the_fullest_address_is_dropped() -> None:
    one, two, three = Place("a", "one", 1), Place("b", "one", 0), Place("c", "two", 0)
    assert fetch_to_give_up([one, three]) is None
    assert fetch_to_give_up([one, two, three]) is two
    more = [Place("d", "three", 5), Place("e", "three", 4), Place("f", "three", 6)]
    assert fetch_to_give_up([one, two, three, *more]) is more[1]


def notice(author: str, number: int = 1, *, bundle: Bundle | None = None, origin: str = "") -> Notice:
    return Notice(replace(withheld(number), bundle=bundle), author, origin)


def test_authors_that_failed_least_come_first_once_each(genuine: Bundle) -> None:
    waiting = [notice("slow"), notice("new", 2), notice("new", 3), notice("inline", 4, bundle=genuine)]
    failures = {"slow": 3}
    assert next_notice(waiting, set(), failures, fetches=True) == waiting[3]
    assert next_notice(waiting[:3], set(), failures, fetches=True) == waiting[1]
    assert next_notice(waiting[:3], {"new"}, failures, fetches=True) == waiting[0]
    assert next_notice(waiting[:3], {"new", "slow"}, failures, fetches=True) is None
    assert next_notice(waiting[:3], set(), failures, fetches=False) is None


def test_authors_that_are_trusted_come_first() -> None:
    store = TrustStore(trusted=TrustedValidators({"ann": "ann"}))
    waiting = [notice("stranger"), notice("ann", 2)]
    assert next_notice(waiting, set(), {}, trusted=store.trusted.owners, fetches=True) == waiting[1]


def test_many_authors_at_one_address_leave_places() -> None:
    waiting: tuple[Notice, ...] = ()
    for number in range(100):
        waiting = pending(waiting, notice(f"key {number}", number, origin="one"), {})
    assert len(waiting) == ENDORSING.max_pending
    honest = [notice(f"author {number}", 200 + number, origin=f"address {number}") for number in range(4)]
    for new in honest:
        waiting = pending(waiting, new, {})
    waiting = pending(waiting, notice("key 101", 101, origin="one"), {})
    assert len(waiting) == ENDORSING.max_pending and set(honest) < set(waiting)
    assert waiting[0].author == "key 0", "the oldest stay"


def test_waiting_evidence_is_bounded_and_failed_authors_yield() -> None:
    waiting: tuple[Notice, ...] = ()
    for number in range(100):
        waiting = pending(waiting, notice("one", number), {})
    assert len(waiting) == ENDORSING.max_pending_of_one
    for number in range(100):
        waiting = pending(waiting, notice(f"author {number}", number), {"one": 1})
    assert len(waiting) == ENDORSING.max_pending
    assert "one" not in {entry.author for entry in waiting}
