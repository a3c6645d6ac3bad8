"""Brings parts of a model version from several peers at once into a folder."""

from __future__ import annotations

import logging
import random
import time
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field
from typing import Final

import trio

from ...protocols.framing import PeerError, ProtocolError
from ...protocols.weights import (
    PIECE_BYTES,
    WEIGHTS,
    Offer,
    WeightsStream,
    ask_offer,
    ask_piece,
    receive_piece,
)
from ..errors import MachineError, PetalnodeError, SwarmError, unwrapped
from ..models.cache_dir import require_space
from ..models.parts import describe
from ..models.progress import Progress
from ..swarm.swarm import Swarm
from .plan import FetchPlace, Piece, PiecePlan, place_to_free
from .store import PeerFolder, part_of_number

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FetchPolicy:
    """How many peers are asked, and how long they are waited for."""

    peers: int = 16
    """Asked at once; others take the places of those that fail."""
    in_flight: int = 8
    """Pieces that a peer is asked for at once: two, and one more for each that it has brought, up to a limit."""
    open: float = 10.0
    refresh: float = 5.0
    """Seconds for the swarm to say who serves a model."""
    piece: float = 120.0
    """Seconds in which the next piece of a peer has to come: peers hand on little while they serve sessions."""
    look_again: float = 0.7
    """Seconds until peers are asked anew what they hold: who fetches itself has more by then."""
    lonely: float = 300.0
    """Seconds for which nobody holds what is missing, or nothing comes, before it is an error."""
    looked_at: int = 64
    """Peers that are asked at once what they hold."""
    patience: float = 15.0
    """Seconds without a piece, times its failures and one, after which a peer's place goes to one that waits."""
    trial: float = 5.0
    """Seconds after which the slowest peer's place may go to one that was not asked yet."""
    rest: float = 2.0
    """Seconds for which a peer is left alone after a failure, times their number."""
    most_rest: float = 30.0
    other_process: float = 1.0


FETCHING: Final = FetchPolicy()


def open_weights(swarm: Swarm, peer_id: str) -> AbstractAsyncContextManager[WeightsStream]:
    """A stream of questions to a peer, closed at the end of the block."""
    return swarm.open_stream(peer_id, WEIGHTS, timeout=FETCHING.open)


async def offer_of(swarm: Swarm, peer_id: str, version: bytes, num_blocks: int) -> Offer | None:
    """What a peer holds; None if nothing, or if it does not answer."""
    try:
        async with open_weights(swarm, peer_id) as stream:
            return await ask_offer(stream, version, num_blocks, timeout=FETCHING.open)
    except PeerError as error:
        log.debug("no weights: %s", error)
        return None


def ranked(swarm: Swarm, version: bytes) -> list[str]:
    """The servers of a version, those of whom most is known first, and those that load among them."""
    servers = [one.peer_id for one in swarm.view.servers(version, now=time.time()) if one.peer_id != swarm.peer_id]
    proven, connected = swarm.trust.is_proven, swarm.connected()
    return sorted(servers, key=lambda peer: (not proven(peer), peer not in swarm.named, peer not in connected))


@dataclass(eq=False)
class _AskedPeer:
    """A peer that is asked for pieces; `since` it brought one, or was first asked."""

    begun: float = field(default_factory=trio.current_time)
    since: float = field(default_factory=trio.current_time)
    unasked: float = 0.0
    """Seconds in which there was nothing to ask it for."""
    nbytes: int = 0
    """Of its pieces that were checked and written."""
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)

    def rate(self, now: float) -> float:
        return self.nbytes / max(1.0, now - self.begun - self.unasked)


class Fetch:
    """Brings parts into `folder`.

    A peer that sends a false piece is asked for nothing more; what it sent before was checked, and stays. One that is
    busy or gone is tried again. A slow one makes room for others, which are asked for what it owes.
    """

    def __init__(self, swarm: Swarm, folder: PeerFolder, progress: Progress) -> None:
        self._swarm = swarm
        self._folder = folder
        self._progress = progress
        self._plan = PiecePlan({}, random.Random())
        self._changed = trio.Event()
        self._working: dict[str, _AskedPeer] = {}
        self._looks: Counter[str] = Counter()
        self._strikes: Counter[str] = Counter()
        self._rates: dict[str, float] = {}  # what those that were asked brought
        self._liars: set[str] = set()
        self._rest_until: dict[str, float] = {}
        self._writing: set[Piece] = set()
        self._unfinished: set[int] = set()  # parts that have no file yet
        self._complete: list[int] = []  # those of them of which all pieces are written
        self._reasons: dict[str, str] = {}
        self._last = 0.0  # when something came
        self._done = self._total = 0

    async def run(self, numbers: Sequence[int]) -> None:
        """Returns when the parts of these numbers are in the folder.

        Raises:
            SwarmError: nobody hands on what is missing.
            MachineError: the disk is full or cannot be written; another process that fetches makes no progress.
        """
        seen, since = self._folder.written(), trio.current_time()
        while lacking := [number for number in numbers if not self._folder.has(number)]:
            with self._folder.locked() as alone:
                if alone:
                    await self._run(lacking)
                    return
            who = self._folder.writer()
            self._progress(f"Waiting for {who}, which fetches {self._folder.name}", 0, None)
            await trio.sleep(FETCHING.other_process)
            if (now := self._folder.written()) != seen:
                seen, since = now, trio.current_time()
            elif trio.current_time() - since > FETCHING.lonely:
                raise MachineError(
                    f"{who} fetches {self._folder.name}, too, and has written nothing for {FETCHING.lonely / 60:.0f} "
                    "minutes: end it, and run this again; what has come is kept"
                )

    async def _run(self, numbers: Sequence[int]) -> None:
        missing = {}
        for number in numbers:
            missing[number] = await trio.to_thread.run_sync(self._folder.missing, number)
            if not missing[number]:
                await trio.to_thread.run_sync(self._folder.finish, number)
        self._total = sum(self._folder.trees[number].nbytes for number in numbers)
        self._done = self._total - sum(
            self._folder.trees[number].size_of(piece) for number, pieces in missing.items() for piece in pieces
        )
        require_space(self._folder.path, self._total - self._done, f"Fetching {self._folder.name}")
        self._plan = PiecePlan(missing, random.Random(self._swarm.peer_id))
        self._unfinished = self._plan.parts
        self._last = trio.current_time()
        with unwrapped(PetalnodeError):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._look_for_peers, nursery)
                while self._unfinished:
                    await self._finish_or_wait()
                    if trio.current_time() - self._last > FETCHING.lonely:
                        raise SwarmError(self._why_not())
                nursery.cancel_scope.cancel()

    async def _finish_or_wait(self) -> None:
        """Gives a part that is complete its file, while peers bring other parts: a disk takes a while to be sure of it.
        Waits for a moment if there is none."""
        if not self._complete:
            await self._change(1.0)
            return
        number = self._complete.pop()
        await trio.to_thread.run_sync(self._folder.finish, number)
        self._unfinished.discard(number)
        self._last = trio.current_time()

    def _why_not(self) -> str:
        num_blocks = self._folder.num_blocks
        lacking = sorted(self._plan.unheld() or self._plan.parts)
        named = ", ".join(describe(part_of_number(number, num_blocks)) for number in lacking[:4])
        more = f" and {len(lacking) - 4} more parts" if len(lacking) > 4 else ""
        reasons = "; ".join(list(self._reasons.values())[-3:])
        return (
            f"no peer hands on {named}{more} of {self._folder.name}{f' ({reasons})' if reasons else ''}. What has come "
            "is kept: run it again when somebody serves these parts (`serve --share-weights on`), or give a folder"
        )

    async def _change(self, timeout: float) -> None:
        with trio.move_on_after(timeout):
            await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def _look_for_peers(self, nursery: trio.Nursery) -> None:
        while True:
            version = self._folder.manifest.version
            with suppress(SwarmError):  # nobody answers just now
                await self._swarm.refresh(model_version=version, timeout=FETCHING.refresh)
            peers = ranked(self._swarm, version)
            async with trio.open_nursery() as asking:
                # In turn: those that answer and hold nothing keep nobody else from being asked.
                there = sorted(filter(self._may_ask, peers), key=lambda peer: self._looks[peer])
                for peer in there[: FETCHING.looked_at]:
                    self._looks[peer] += 1
                    asking.start_soon(self._look_at, peer, nursery)
            await trio.sleep(FETCHING.look_again)
            await self._change(FETCHING.look_again)

    def _may_ask(self, peer: str) -> bool:
        return (
            peer != self._swarm.peer_id
            and peer not in self._liars
            and self._rest_until.get(peer, 0.0) <= trio.current_time()
            and not (peer in self._working and self._plan.holds_all(peer))
        )

    async def _look_at(self, peer: str, nursery: trio.Nursery) -> None:
        offer = await offer_of(self._swarm, peer, self._folder.manifest.version, self._folder.num_blocks)
        if offer is None:
            self._rest(peer, "does not answer, or hands nothing on")
            return
        self._plan.set_holder(peer, offer.parts)
        if peer not in self._working and offer.parts & self._plan.parts and self._has_place(peer):
            self._working[peer] = asked = _AskedPeer()
            nursery.start_soon(self._fetch_from, peer, asked)
        self._notify()

    def _has_place(self, peer: str) -> bool:
        """Whether the peer may be asked for pieces, too. If need be, another makes room."""
        if len(self._working) < FETCHING.peers:
            return True
        now = trio.current_time()
        places = [self._place(other, asked.rate(now), asked, now) for other, asked in self._working.items()]
        wanting = self._place(peer, self._rates.get(peer))
        freed = place_to_free(places, wanting, patience=FETCHING.patience, trial=FETCHING.trial)
        if freed is None:
            return False
        if freed.idle > FETCHING.patience:
            self._rest(freed.peer, "brings nothing")
        self._note_rate(freed.peer, self._working[freed.peer], now)
        self._working.pop(freed.peer).scope.cancel()
        return True

    def _note_rate(self, peer: str, asked: _AskedPeer, now: float) -> None:
        """Of one that had its trial: who was busy when it was asked is as one that was not."""
        if now - asked.begun >= FETCHING.trial:
            self._rates[peer] = asked.rate(now)

    def _place(self, peer: str, rate: float | None, asked: _AskedPeer | None = None, now: float = 0.0) -> FetchPlace:
        held, idle = (now - asked.begun, now - asked.since) if asked else (0.0, 0.0)
        return FetchPlace(peer, self._swarm.host.origin_of(peer), self._strikes[peer], rate, held, idle)

    def _rest(self, peer: str, why: str) -> None:
        self._strikes[peer] += 1
        self._rest_until[peer] = trio.current_time() + min(FETCHING.rest * self._strikes[peer], FETCHING.most_rest)
        self._reasons[peer] = f"{peer}: {why}"

    async def _fetch_from(self, peer: str, asked: _AskedPeer) -> None:
        try:
            with asked.scope:
                async with open_weights(self._swarm, peer) as stream:
                    stream.grant()  # what comes was asked for: with a stranger's window a long or fast line stays idle
                    await self._ask(peer, asked, stream)
        except ProtocolError as error:
            self._liars.add(peer)
            self._reasons[peer] = str(error)
            log.warning("%s: it is asked for nothing more", error)
        except PeerError as error:
            self._rest(peer, str(error))
        finally:
            if self._working.get(peer) is asked:
                del self._working[peer]
                self._note_rate(peer, asked, trio.current_time())
            self._plan.drop(peer)
            self._notify()

    async def _ask(self, peer: str, own: _AskedPeer, stream: WeightsStream) -> None:
        """Has questions under way as long as there is something to ask for."""
        version = self._folder.manifest.version
        asked: deque[Piece] = deque()
        while self._plan.parts:
            while len(asked) < min(FETCHING.in_flight, 2 + own.nbytes // PIECE_BYTES):
                piece = self._plan.take(peer, idle=not asked)
                if piece is None:
                    break
                asked.append(piece)
                await ask_piece(stream, version, *piece, timeout=FETCHING.piece)
            if not asked:
                since = trio.current_time()
                await self._changed.wait()
                own.unasked += trio.current_time() - since
                continue
            data = await receive_piece(stream, timeout=FETCHING.piece)
            piece = asked.popleft()
            if data is None:
                self._plan.lacks(peer, piece[0])
                self._plan.give_up(peer, piece)
                self._notify()
            elif not await self._take(peer, own, piece, data):
                raise ProtocolError(f"{peer} sent a false piece of {self._folder.name}", peer)
            else:
                self._strikes[peer] = max(0, self._strikes[peer] - 1)
                own.since = trio.current_time()

    async def _take(self, peer: str, own: _AskedPeer, piece: Piece, data: bytes) -> bool:
        """Whether it is that piece. Writes it, if no other peer has sent it."""
        if not self._plan.is_missing(piece):
            return True
        if piece in self._writing:  # what the other sent may be false: then this is asked for again
            self._plan.give_up(peer, piece)
            return True
        self._writing.add(piece)
        try:
            if not await trio.to_thread.run_sync(self._folder.put, *piece, data):
                return False
            if self._plan.got(piece):
                self._complete.append(piece[0])
                self._notify()
        finally:
            self._writing.discard(piece)
        self._last = trio.current_time()
        self._done += len(data)
        own.nbytes += len(data)
        peers = "1 peer" if len(self._working) == 1 else f"{len(self._working)} peers"
        self._progress(f"Fetching {self._folder.name} from {peers}", self._done, self._total)
        return True
