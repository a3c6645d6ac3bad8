"""Recomputes the evidence that others publish, and endorses it if it proves the fault.

If it is refuted, its accuser and those who endorsed it have lied: they are banned. Nobody is banned for what others
have made of evidence: tensors that do not belong to it, or the name of another server, are the author's of the message.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import trio

from ...protocols.framing import PeerError
from ...protocols.inference import Refusal
from ..errors import PetalnodeError
from ..models import ModelFolder
from ..network.transport.places import Place
from ..swarm.swarm import Swarm
from ..trust.bundle import BadBundle, Bundle
from ..trust.evidence_message import EvidenceMessage, is_answer_recent
from ..verification.evidence_check import Outcome, check_evidence

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EndorsingLimits:
    """How much evidence of others waits to be recomputed."""

    max_pending: int = 16
    max_pending_of_one: int = 2  # Messages of one author that wait
    max_fetches: int = 8  # Bundles that are fetched side by side, each from another author; one is of at most 64 MiB
    max_remembered: int = 1000
    open_timeout: float = 60.0
    share_pause: float = 5.0
    """Seconds between two fetches that are given up because their address has several, and others wait."""
    longest_fetch: float = 600.0  # Seconds for a whole fetch; `receive_bundle` gives up sooner what comes too slowly


ENDORSING: Final = EndorsingLimits()


@dataclass(frozen=True, eq=False)
class Notice:
    """A message about evidence, its author, whom larger evidence is fetched from, and the address that it came from."""

    message: EvidenceMessage
    author: str
    origin: str = ""

    @property
    def id(self) -> bytes:
        return self.message.evidence_id

    def is_among(self, others: Iterable[Notice]) -> bool:
        """Whether one of `others` is of the same author, about the same evidence."""
        return any((other.id, other.author) == (self.id, self.author) for other in others)


def next_notice(
    waiting: Sequence[Notice],
    busy: Collection[str],
    failures: Mapping[str, int],
    *,
    trusted: Container[str] = (),
    fetches: bool,
) -> Notice | None:
    """What to take up next. `busy` are the authors that evidence is being fetched from: one piece at a time of each.

    What needs no fetch comes first (and alone, without `fetches`), then what the `trusted` authors have. Of the others,
    those from which the fewest fetches have failed come first, then the oldest.
    """
    ready = [
        notice for notice in waiting if notice.message.bundle is not None or (fetches and notice.author not in busy)
    ]
    return min(
        ready,
        key=lambda notice: (
            notice.message.bundle is None,
            failures.get(notice.author, 0),
            notice.author not in trusted,
        ),
        default=None,
    )


def fetch_to_give_up(fetches: Sequence[Place]) -> Place | None:
    """Of the address that has the most fetches under way, the oldest. None if no address has more than one."""
    count = Counter(fetch.origin for fetch in fetches)
    several = [fetch for fetch in fetches if count[fetch.origin] > 1]
    return max(several, key=lambda fetch: (count[fetch.origin], -fetch.since), default=None)


def pending(waiting: Sequence[Notice], new: Notice, failures: Mapping[str, int]) -> tuple[Notice, ...]:
    """What waits after `new` has come. Of too much, the address that sent most loses the newest of the author whose
    fetches failed most.

    What goes is lost to this validator only: others get it, too.
    """
    if new.is_among(waiting) or sum(notice.author == new.author for notice in waiting) >= ENDORSING.max_pending_of_one:
        return tuple(waiting)
    kept = [*waiting, new]
    if len(kept) > ENDORSING.max_pending:
        sent = Counter(notice.origin for notice in kept)
        kept.remove(max(reversed(kept), key=lambda notice: (sent[notice.origin], failures.get(notice.author, 0))))
    return tuple(kept)


class Endorser:
    """Recomputes published evidence, one piece at a time; `run` is its task.

    Evidence is fetched side by side, so that an author that sends slowly holds up its own only.
    `folder` holds the whole of the one model that this validator can judge.

    Attributes:
        checked: the outcome of the last pieces of evidence, by id; None for one that waits.
    """

    def __init__(self, swarm: Swarm, folder: ModelFolder, *, device: str = "cpu") -> None:
        self.checked: OrderedDict[bytes, Outcome | None] = OrderedDict()
        self._swarm = swarm
        self._folder = folder
        self._device = device
        self._waiting: tuple[Notice, ...] = ()
        self._running: dict[Notice, Place] = {}
        self._failures: OrderedDict[str, int] = OrderedDict()  # by author, since the last bundle that came
        self._judging = trio.Lock()
        self._news = trio.Event()
        swarm.evidence.on_evidence.append(self._queue)

    def _queue(self, message: EvidenceMessage, author: str, forwarder: str) -> None:
        notice = Notice(message, author, self._swarm.host.origin_of(forwarder))
        if self.checked.get(notice.id) or self._swarm.trust.is_banned(author) or notice.is_among(self._running):
            return
        self._waiting = pending(self._waiting, notice, self._failures)
        if notice in self._waiting:
            self._note(notice.id, None)
            self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = trio.Event()

    async def run(self) -> None:
        """Runs until it is cancelled. Nothing that a peer sends ends it."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(self._work, fetches=False))
            nursery.start_soon(self._share_fetches)
            for _ in range(ENDORSING.max_fetches):
                nursery.start_soon(partial(self._work, fetches=True))

    async def _share_fetches(self) -> None:
        """Where others wait for a fetch, those of an address that has several are given up one after the other."""
        while True:
            await trio.sleep(ENDORSING.share_pause)
            fetches = [place for notice, place in self._running.items() if notice.message.bundle is None]
            if len(fetches) < ENDORSING.max_fetches or all(
                notice.message.bundle is not None for notice in self._waiting
            ):
                continue
            for fetch in fetches:  # an author's address is known once there is a connection
                fetch.origin = self._swarm.host.origin_of(fetch.peer_id)
            slow = fetch_to_give_up([fetch for fetch in fetches if not fetch.busy])
            if slow is not None:
                slow.scope.cancel()

    async def _work(self, *, fetches: bool) -> None:
        while True:
            busy = {notice.author for notice in self._running if notice.message.bundle is None}
            trusted = self._swarm.trust.trusted.owners
            notice = next_notice(self._waiting, busy, self._failures, trusted=trusted, fetches=fetches)
            if notice is None:
                await self._news.wait()
                continue
            self._waiting = tuple(other for other in self._waiting if other is not notice)
            place = self._running[notice] = Place(notice.author, "", trio.current_time())
            with place.scope:
                await self._check(notice)
            del self._running[notice]
            if self.checked.get(notice.id):
                self._drop(notice.id)
            else:
                self._forget(notice.id)
            self._wake()

    async def _check(self, notice: Notice) -> None:
        message, author = notice.message, notice.author
        try:
            bundle = message.bundle or await self._fetch(notice)
            with self._running[notice].working():
                async with self._judging:
                    await self._judge(message, author, bundle)
        except (PeerError, Refusal, BadBundle, PetalnodeError, trio.TooSlowError) as error:
            log.info("evidence against %s cannot be checked: %s", message.accused, error)
            self._failures[author] = self._failures.pop(author, 0) + 1
            while len(self._failures) > ENDORSING.max_remembered:
                self._failures.popitem(last=False)
        except Exception as error:
            log.warning("evidence against %s cannot be checked here", message.accused, exc_info=error)
            self._note(message.evidence_id, Outcome(False, f"it cannot be checked here: {error}", inconclusive=True))

    async def _fetch(self, notice: Notice) -> Bundle:
        with trio.fail_after(ENDORSING.longest_fetch):
            bundle = await self._swarm.fetch_evidence(
                notice.author, notice.id, addrs=notice.message.addrs, timeout=ENDORSING.open_timeout
            )
        self._failures.pop(notice.author, None)
        return bundle

    async def _judge(self, message: EvidenceMessage, author: str, bundle: Bundle) -> None:
        if bundle.accused != message.accused:
            # The author and the endorsers have signed who is accused; the accuser has signed another name.
            self._distrust(message, {author}, f"evidence {bundle.id.hex()[:12]} is about another server")
            return
        if not is_answer_recent(bundle, time.time()):
            self._note(message.evidence_id, Outcome(False, "it is old", inconclusive=True))
            return
        said = announced_device(self._swarm, bundle.accused)
        outcome = await trio.to_thread.run_sync(
            lambda: check_evidence(bundle, self._folder, device=self._device, server_device=said),
            abandon_on_cancel=True,
        )
        if outcome.exchanged:
            # The accuser has signed none of the tensors, and the endorsers have seen others.
            self._ban(author, f"it exchanged the tensors of evidence {bundle.id.hex()[:12]}: {outcome.reason}")
            return
        self._note(message.evidence_id, outcome)
        if outcome.proven:
            await self._swarm.publish_evidence(bundle, recomputed=True, one_bit=outcome.one_bit)
        elif not outcome.inconclusive:
            self._distrust(message, {bundle.accuser}, outcome.reason)

    def _distrust(self, message: EvidenceMessage, liars: set[str], reason: str) -> None:
        """Bans `liars` and who endorsed the evidence against the server that the message names."""
        for liar in liars | {endorsement.validator for endorsement in message.endorsements}:
            self._ban(liar, f"its evidence against {message.accused} was refuted here: {reason}")

    def _ban(self, peer_id: str, reason: str) -> None:
        if peer_id != self._swarm.peer_id:
            self._swarm.trust.ban(peer_id, reason, "evidence")

    def _drop(self, evidence_id: bytes) -> None:
        """Nobody else has to bring this evidence."""
        self._waiting = tuple(notice for notice in self._waiting if notice.id != evidence_id)
        for notice, place in self._running.items():
            if notice.id == evidence_id:
                place.scope.cancel()

    def _forget(self, evidence_id: bytes) -> None:
        """What came was not the evidence of this id, which another peer may still bring."""
        sources = (*self._waiting, *self._running)
        if self.checked.get(evidence_id, True) is None and not any(notice.id == evidence_id for notice in sources):
            del self.checked[evidence_id]

    def _note(self, evidence_id: bytes, outcome: Outcome | None) -> None:
        self.checked[evidence_id] = outcome
        while len(self.checked) > ENDORSING.max_remembered:
            self.checked.popitem(last=False)


def announced_device(swarm: Swarm, peer_id: str) -> str:
    """The kind of device that a server says it computes on, as far as that is known here; "" if it is not."""
    record = swarm.view.records.get(peer_id)
    return record.content.device if record is not None else ""
