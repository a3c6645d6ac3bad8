"""What this server says of itself: signs its announcement, sends it out, repeats it, retracts it."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Final

import trio
from multiaddr import Multiaddr

from ...protocols.announcement import (
    ANNOUNCEMENT,
    Announcement,
    RelayOffer,
    ServerState,
    SignedAnnouncement,
    freshened,
    sign_announcement,
)
from ...protocols.framing import PeerError
from ..network.addresses import without_peer
from ..network.dht import Dht
from ..network.host import Host, keep_up
from .config import SwarmConfig
from .directory import ASKING, Directory

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PushPolicy:
    """To how many peers an announcement goes."""

    peers: int = 16  # get the own announcement in every round, and
    peers_for_news: int = 32  # when something in it changed
    pause: float = 0.5  # seconds between two announcements that changed quickly


PUSHING: Final = PushPolicy()


def lasting(announcement: Announcement) -> Announcement:
    """What of it holds for as long as nothing happens: all but load, free cache, round trips and places at a relay."""
    relay = None if announcement.relay is None else RelayOffer(0, 0)
    return replace(announcement, cache_tokens_free=0, queue_depth=0, rtts={}, relay=relay)


class Announcer:
    """Announces one node, as long as it is a server. What it signs is merged into `directory`, which sends it."""

    def __init__(self, config: SwarmConfig, host: Host, dht: Dht, directory: Directory) -> None:
        self._identity = config.identity
        self._ttl = config.announcement_ttl
        self._host = host
        self._dht = dht
        self._directory = directory
        self._own: Announcement | None = None  # as it was given: without addresses, it follows the host's
        self._sequence = 0  # of the last announcement signed
        self._expires = 0.0  # the same one
        self._changed = trio.Event()

    async def run(self) -> None:
        """Repeats the announcement until it is cancelled."""
        async with trio.open_nursery() as nursery:
            for part in (self._publish_forever, self._put_forever):
                nursery.start_soon(keep_up, part)

    def announce(self, announcement: Announcement) -> None:
        """As `Swarm.announce`."""
        self._own = announcement
        self._sign()
        self._wake()

    def addrs_changed(self) -> None:
        """Announces anew at once, if the host's addresses or what it offers as a relay are other than announced."""
        if self._own is not None and self._directory.own is not None:
            announced, now = self._directory.own.content, self._completed(self._own)
            if announced.addrs != now.addrs or (announced.relay is None) != (now.relay is None):
                self._own = replace(self._own)  # another object, hence news
                self._wake()

    async def retract(self) -> None:
        """As `Swarm.retract`, without its deadline."""
        if self._own is None:
            return
        self._own = replace(self._own, state=ServerState.OFFLINE)
        record = self._sign()
        self._own = self._directory.own = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._push, record, PUSHING.peers_for_news)
            nursery.start_soon(self._put, record)

    async def exchange(self, peers: Collection[str], *, model_version: bytes, timeout: float) -> frozenset[str]:
        """Sends these peers, and some others, the own announcement, and merges what they know of a model.

        Returns those that have answered within `timeout` seconds. They had the own announcement before they answered:
        of two peers that change what they announce and then exchange, at least one knows of the other's change.
        """
        answered: set[str] = set()
        async with trio.open_nursery() as nursery:
            for peer_id in {*peers, *self._directory.peers_to_ask(ASKING.asked_at_start)} - {self._identity.peer_id}:
                nursery.start_soon(self._exchange_with, peer_id, model_version, timeout, answered)
        return frozenset(answered)

    async def _exchange_with(self, peer_id: str, model_version: bytes, timeout: float, answered: set[str]) -> None:
        try:
            await self._directory.pull(peer_id, model_version=model_version, publish=True, timeout=timeout)
            answered.add(peer_id)
        except PeerError as error:
            log.debug("nothing exchanged with %s: %s", peer_id, error)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    def _completed(self, own: Announcement) -> Announcement:
        addrs = (
            own.addrs
            or tuple(str(without_peer(Multiaddr(addr))) for addr in self._host.addrs())[: ANNOUNCEMENT.max_addrs]
        )
        return replace(own, addrs=addrs, relay=self._directory.about().relay)

    def _sign(self) -> SignedAnnouncement:
        assert self._own is not None
        now = time.time()
        # None expires before an older one: that would count again, and with it what this server has left. One that
        # lasts for longer than any may was made by a clock that was ahead, and counts nowhere.
        left = self._expires - now
        lifetime = max(self._directory.refresh_rate().lifetime, left if left <= ANNOUNCEMENT.max_lifetime else 0.0)
        fresh = freshened(self._completed(self._own), now=now, lifetime=lifetime, after=self._sequence)
        record = sign_announcement(self._identity, fresh)
        self._sequence, self._expires = fresh.sequence, fresh.expires
        self._directory.own = record
        self._directory.merge([record])
        return record

    async def _put(self, record: SignedAnnouncement) -> None:
        await self._dht.put_announcement(record, timeout=ASKING.table_deadline)

    async def _push(self, record: SignedAnnouncement, count: int) -> None:
        """Sends the announcement to many peers, side by side."""
        async with trio.open_nursery() as nursery:
            for peer_id in self._directory.peers_to_ask(count):
                nursery.start_soon(self._directory.push, peer_id, record)

    async def _publish_forever(self) -> None:
        published: Announcement | None = None
        told: Announcement | None = None  # what the last one that was sent says, as far as it lasts
        due = 0.0
        async with trio.open_nursery() as nursery:
            while True:
                changed, own, pace = self._changed, self._own, self._directory.refresh_rate()
                pause = self._ttl / 3
                if own is not None:
                    # In a large swarm, what changes all the time is left to those who ask this server itself.
                    now = lasting(self._completed(own))
                    news = own is not published and (pace.quick or now != told)
                    if news or trio.current_time() >= due:
                        nursery.start_soon(self._push, self._sign(), PUSHING.peers_for_news if news else PUSHING.peers)
                        told, due = now, trio.current_time() + pace.renewal * random.uniform(0.9, 1.0)
                    published = own
                    await trio.sleep(PUSHING.pause)
                    pause = due - trio.current_time()
                with trio.move_on_after(max(pause, 0)):
                    await changed.wait()

    async def _put_forever(self) -> None:
        """Keeps the own announcement, and now and then the list of models, in Kademlia.

        The directory is the quick way, and a swarm that starts has enough to do: Kademlia can wait. In a large swarm,
        what has not changed waits for longer.
        """
        await trio.sleep(self._ttl * random.uniform(0.15, 0.35))
        told: Announcement | None = None
        due = 0.0
        while True:
            own, record = self._own, self._directory.own
            if own is not None and record is not None:
                now = lasting(self._completed(own))
                if now != told or trio.current_time() >= due:
                    await self._put(record)
                    # About two servers of the swarm put the list of models in every round.
                    view = self._directory.view
                    if random.random() * len(view.servers(now=time.time())) <= 2:
                        await self._dht.put_models(view.records.values(), timeout=ASKING.table_deadline)
                    told, due = now, trio.current_time() + self._directory.refresh_rate().lifetime * 0.4
            await trio.sleep(self._ttl / 2 * random.uniform(0.9, 1.0))
