"""What leaves a session: the queue of its outputs while it computes on, and replies that are kept for a client that
comes back."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

import trio

from ....protocols import wire_pb2 as wire


@dataclass(frozen=True)
class ReplyPolicy:
    """What of a session may be under way, and how much of it is kept."""

    credits: int = 8  # Steps at once, so that drafts are checked without waiting for those before them
    kept: int = 4
    """Replies that are kept for a client that comes back, and up to `credits` of them as long as all take no more than
    `bytes_in_flight`. A client has no more under way, so that each reply which it may still need is kept."""
    bytes_in_flight: int = 16 << 20
    """Of outputs that wait until they are sent; also what a client is granted, and so no more than it has asked for."""
    inline: int = 1 << 16  # Bytes of outputs that are sent at once: that takes less than waking another task


REPLIES: Final = ReplyPolicy()


@dataclass(frozen=True)
class SentReply:
    """A reply to a client, kept for when it asks again."""

    sequence: int
    request_hash: bytes
    frame: wire.InferenceFrame
    payloads: list[bytes]

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.payloads))


class SentReplies:
    """The last replies of a session, in order."""

    def __init__(self) -> None:
        self._kept: deque[SentReply] = deque(maxlen=REPLIES.credits)

    def add(self, sent: SentReply) -> None:
        self._kept.append(sent)
        while len(self._kept) > REPLIES.kept and sum(kept.nbytes for kept in self._kept) > REPLIES.bytes_in_flight:
            self._kept.popleft()

    def after(self, answered: int | None) -> list[SentReply]:
        """Those behind the sequence number `answered`; none if that is None."""
        return [sent for sent in self._kept if answered is not None and sent.sequence > answered]

    def find(self, sequence: int, request_hash: bytes) -> SentReply | None:
        """The reply to this very request, if it is kept."""
        same = (sent for sent in self._kept if (sent.sequence, sent.request_hash) == (sequence, request_hash))
        return next(same, None)


class SendQueue:
    """Sends the outputs of one session in their order. Large ones are sent while the next step is computed."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._waiting: deque[tuple[int, Callable[[], Awaitable[None]]]] = deque()
        self._sent = trio.Event()

    async def put(self, nbytes: int, send: Callable[[], Awaitable[None]]) -> None:
        """Calls `send` once those before it are done. Returns before that, but not while too many bytes wait."""
        if nbytes <= REPLIES.inline and not self._waiting:
            await send()
            return
        while self._waiting and sum(size for size, _ in self._waiting) + nbytes > REPLIES.bytes_in_flight:
            await self._sent.wait()
        if self._nursery.cancel_scope.cancel_called:
            return  # the session is over, and nobody waits for its outputs
        self._waiting.append((nbytes, send))
        if len(self._waiting) == 1:
            self._nursery.start_soon(self._send_all)

    async def empty(self) -> None:
        """Returns when nothing waits."""
        while self._waiting:
            await self._sent.wait()

    async def _send_all(self) -> None:
        try:
            while self._waiting:
                await self._waiting[0][1]()
                self._waiting.popleft()
                self._sent.set()
                self._sent = trio.Event()
        except BaseException:  # whoever waits for room shall not wait for ever
            self._waiting.clear()
            self._sent.set()
            raise
