"""What a directory answers to any peer, and how much of that on one stream."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Protocol

from ...protocols import directory as protocol
from ...protocols import wire_pb2 as wire
from ...protocols.announcement import BadAnnouncement, SignedAnnouncement, open_signed
from ...protocols.directory import NodeInfo
from ...protocols.framing import MessageStream, ProtocolError
from ..network.shares import TokenBucket
from .sample import sampled
from .view import SwarmView

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AnswerLimits:
    """What one stream may ask of a directory: a token bucket of frames, and how long it may be silent."""

    send_deadline: float = 4.0
    idle_stream: float = 60.0  # seconds
    max_logged: int = 1000
    burst: int = 300  # frames at once on one stream, and
    frames_per_second: float = 20.0
    page_cost: int = 10  # frames: a page of records costs far more than a ping to make and to send


ANSWERS: Final = AnswerLimits()


class AnsweringDirectory(Protocol):
    """The directory whose answers these are."""

    view: SwarmView
    own: SignedAnnouncement | None
    about: Callable[[], NodeInfo]

    def merge(self, records: Iterable[SignedAnnouncement], *, source: str = "", met: bool = False) -> None: ...

    def address_of(self, peer_id: str, /) -> str: ...

    def is_unreached(self, peer_id: str) -> bool: ...


class DirectoryAnswers:
    """Answers the streams of `/petalnode/directory/1`."""

    def __init__(self, directory: AnsweringDirectory) -> None:
        self._directory = directory
        self._logged: set[str] = set()  # whose bad announcements were logged

    async def serve(self, stream: MessageStream[wire.DirectoryFrame]) -> None:
        """Answers one peer's stream until it ends (raises PeerError then)."""
        frames = TokenBucket(ANSWERS.frames_per_second, ANSWERS.burst)
        while True:
            frame, _ = await stream.receive(timeout=ANSWERS.idle_stream)
            cost = ANSWERS.page_cost if frame.HasField("query") else 1
            if frames.delay(cost) > 0:
                error = wire.Error(code=wire.ERROR_BUSY, message="too many questions; ask more slowly")
                await stream.send(wire.DirectoryFrame(error=error), timeout=ANSWERS.send_deadline)
                return
            frames.take_ahead(cost)
            reply = self._answer(frame, stream.peer_id)
            if reply is not None:
                await stream.send(reply, timeout=ANSWERS.send_deadline)

    def _answer(self, frame: wire.DirectoryFrame, peer_id: str) -> wire.DirectoryFrame | None:
        kind = frame.WhichOneof("body")
        if kind == "ping" and len(frame.ping.payload) <= protocol.DIRECTORY_LIMITS.max_ping:
            return wire.DirectoryFrame(ping=frame.ping)
        if kind == "query":
            self._directory.merge(())  # drops the expired ones
            return self._page(frame.query)
        if kind == "publish":
            try:
                record = open_signed(frame.publish, now=time.time())
            except BadAnnouncement as error:
                if peer_id not in self._logged and len(self._logged) < ANSWERS.max_logged:
                    self._logged.add(peer_id)
                    log.warning("%s announces what cannot be, which is ignored: %s", peer_id, error)
                raise ProtocolError(f"{peer_id} published a bad announcement: {error}", peer_id) from error
            # Anyone may hand records on when asked, but only a server itself may push its own to us.
            if record.content.peer_id != peer_id:
                raise ProtocolError(f"{peer_id} published the announcement of another peer", peer_id)
            self._directory.merge([record], source=self._directory.address_of(peer_id), met=True)
            return None
        if kind == "node_query":
            return self._directory.about().to_frame()
        refusal = wire.Error(
            code=wire.ERROR_BAD_REQUEST, message="a directory answers query, ping, publish, node_query"
        )
        return wire.DirectoryFrame(error=refusal)

    def _page(self, query: wire.DirectoryQuery) -> wire.DirectoryFrame:
        view, own = self._directory.view, self._directory.own
        records = view.page(query.model_version, query.after)
        if query.sample and query.limit:
            records = list(records)
            peers = (record.content.peer_id for record in records)
            records = sampled(
                records,
                view.origins,
                query.limit,
                time.time(),
                max_bytes=min(
                    query.max_bytes or protocol.DIRECTORY_LIMITS.max_page, protocol.DIRECTORY_LIMITS.max_page
                ),
                unreached=set(filter(self._directory.is_unreached, peers)),
            )
            # Of two that ask each other, at least one knows what the other has announced last.
            if own is not None and own not in records and query.model_version in (b"", own.content.model_version):
                records = [own, *records[: query.limit - 1]]
        return protocol.records_page(records, after=query.after, limit=query.limit)
