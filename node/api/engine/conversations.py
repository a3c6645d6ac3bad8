"""Sessions that stay between requests, so that a longer conversation sends only what is new."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import trio

from .generation import PLAIN, SessionOptions

if TYPE_CHECKING:
    from ...client.generation.conversation import Conversation


@dataclass(frozen=True)
class KeptConversations:
    """When a conversation that nobody uses is closed."""

    least: int = 256
    look: float = 5.0
    close_seconds: float = 2.0


CONVERSATIONS: Final = KeptConversations()


@dataclass(frozen=True)
class CacheScope:
    """Whose conversations may go on with each other's tokens: those of one key, with one model, at servers of which the
    same is asked.

    What the servers hold of one owner's words must not be found, or timed, by another.
    """

    owner: str
    model: str
    options: SessionOptions = PLAIN


@dataclass
class _Idle:
    scope: CacheScope
    conversation: Conversation
    since: float


def reserved(needed: int, context: int) -> int:
    """Tokens that a session is opened for, of which a request uses `needed`: room for what follows.

    A power of two, so that a conversation that grows is sent anew once for each doubling.
    """
    return max(needed, min(context, max(CONVERSATIONS.least, 1 << math.ceil(math.log2(max(1, needed))))))


def suits(held: int, shared: int) -> bool:
    """Whether a request goes on with a conversation of which it has `shared` of `held` tokens in common.

    Half is enough: an answer made anew has that. Less is another conversation with the same beginning, whose own next
    turn would have to be sent again.
    """
    return shared > 0 and 2 * shared >= held


class Conversations:
    """Lends conversations to requests, and keeps some of them for a while.

    Args:
        make: a new conversation, for a number of tokens.
        keep: idle ones at most.
        seconds: after which an idle one gives the servers their caches back.
    """

    def __init__(self, make: Callable[[CacheScope, int], Conversation], keep: int, seconds: float) -> None:
        self._make = make
        self._keep = keep
        self._seconds = seconds
        self._idle: list[_Idle] = []
        self._lent: set[Conversation] = set()

    @property
    def idle(self) -> int:
        """How many no request uses."""
        return len(self._idle)

    @property
    def open_count(self) -> int:
        """How many have sessions at servers."""
        return sum(found.is_open for found in (*self._lent, *(kept.conversation for kept in self._idle)))

    async def run(self) -> None:
        """Ends idle conversations in time, and all of them when cancelled."""
        try:
            while True:
                await trio.sleep(CONVERSATIONS.look)
                now = trio.current_time()
                await self._end([kept for kept in self._idle if now - kept.since > self._seconds])
        finally:
            with trio.CancelScope(shield=True):
                await self._end(list(self._idle))

    async def drop_idle(self) -> None:
        """Gives the servers all caches back that no request uses."""
        await self._end(list(self._idle))

    @asynccontextmanager
    async def lent(
        self, scope: CacheScope, prompt: Sequence[int], needed: int, context: int
    ) -> AsyncIterator[Conversation]:
        """A conversation for `needed` tokens that begin with `prompt`, the one that shares most of it.

        It is kept if the block ends well. An error or a cancellation gives it up.
        """
        conversation = self._found(scope, prompt, needed) or self._make(scope, reserved(needed, context))
        self._lent.add(conversation)
        try:
            yield conversation
        except BaseException:
            with trio.CancelScope(shield=True):
                await _close(conversation)
            raise
        finally:
            self._lent.discard(conversation)
        if not conversation.is_open or not self._keep:
            await _close(conversation)
            return
        self._idle.append(_Idle(scope, conversation, trio.current_time()))
        await self._end(self._idle[: max(0, len(self._idle) - self._keep)])

    def _found(self, scope: CacheScope, prompt: Sequence[int], needed: int) -> Conversation | None:
        best, most = None, 0
        for kept in self._idle:
            if kept.scope != scope or kept.conversation.max_length < needed:
                continue
            held, shared = kept.conversation.shared_with(prompt)
            if suits(held, shared) and shared > most:
                best, most = kept, shared
        if best is None:
            return None
        self._idle.remove(best)
        return best.conversation

    async def _end(self, ending: Sequence[_Idle]) -> None:
        self._idle = [kept for kept in self._idle if not any(kept is other for other in ending)]
        async with trio.open_nursery() as nursery:
            for kept in ending:
                nursery.start_soon(_close, kept.conversation)


async def _close(conversation: Conversation) -> None:
    with trio.move_on_after(CONVERSATIONS.close_seconds):
        await conversation.aclose()
