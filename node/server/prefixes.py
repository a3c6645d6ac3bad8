"""Keys and values that sessions have left for later ones of the same owner, in blocks of 32 tokens.

A block is kept under its name, apart for each owner. The server makes the name of the inputs that it was sent
(`protocols/prefix.py`). Who asks learns nothing of what others have asked, not by the time that an answer takes either.
A session that begins with kept blocks gets copies of them: kernels and attention want a session's keys in one piece. So
nobody changes what another one reads. Copying 1,024 tokens takes a hundredth of computing them. Where blocks of the
model keep states, some kept blocks have those at their end. A session begins behind one of these.

All of it is within the room of the cache that no session has reserved. It gives way as soon as one wants it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from ...protocols.prefix import BLOCK_TOKENS, PrefixNames
from ..blocks.cache import SpanCache
from ..blocks.caches.states import HeldTokens

SHARE: Final = 0.5
"""Of the cache, that kept blocks may have at most."""


@dataclass(frozen=True)
class KeptBlock:
    """`digests` of its tokens, of which its name is made; what is `held` of them, as `SpanCache.read` gives it;
    `tokens` of all rows, and as how many the states at its end count, if kept."""

    digests: tuple[bytes, ...]
    held: Sequence[HeldTokens]
    tokens: int

    @classmethod
    def of(cls, digests: tuple[bytes, ...], cache: SpanCache, end: int) -> KeptBlock:
        """What `cache` holds of the `BLOCK_TOKENS` tokens before `end`."""
        held = cache.read(end - BLOCK_TOKENS, end)
        return cls(digests, held, max(part.counted(BLOCK_TOKENS * cache.batch) for part in held))

    @property
    def may_be_last(self) -> bool:
        """Whether a session may begin behind it."""
        return all(part.states is not None for part in self.held)


@dataclass
class PrefixUse:
    """What a session shares with others of the same `scope`, as far as `names` go. `keeps`: it leaves blocks too."""

    scope: str
    names: PrefixNames
    keeps: bool
    _offered: int = field(default=0, repr=False)

    def rollback(self, tokens: int) -> None:
        self.names.rollback(tokens)
        self._offered = min(self._offered, len(self.names.names))

    def take_offered(self) -> range:
        """The numbers of the whole blocks that were not offered to the store before."""
        first, self._offered = self._offered, len(self.names.names)
        return range(first, self._offered)


class PrefixStore:
    """Blocks by owner and name, the least recently used first. Not thread-safe: the compute thread owns it.

    When room is wanted, the owner with the most tokens loses its least recently used block: nobody's blocks go for
    somebody who keeps more. Of one text, later blocks go before earlier ones.
    """

    def __init__(self) -> None:
        self._room = 0
        self._used = 0
        self._scopes: dict[str, OrderedDict[bytes, KeptBlock]] = {}
        self._tokens: dict[str, int] = {}

    @property
    def tokens(self) -> int:
        """Cache tokens that are kept, all rows of all owners."""
        return self._used

    def limit(self, room: int) -> None:
        """From now on at most `room` cache tokens are kept."""
        self._room = room
        self._make_room(0)

    def begin(self, use: PrefixUse, wanted: Sequence[bytes], cache: SpanCache) -> None:
        """Fills an empty cache with the longest part of the prefix `wanted` that is kept.

        The names are made again of the tokens. Blocks that do not follow each other, or have other terms, are not
        joined, whatever their names.
        """
        kept = self._of(use.scope)
        found: list[KeptBlock] = []
        for name in wanted[: cache.max_length // BLOCK_TOKENS]:
            block = kept.get(name)
            if block is None:
                break
            use.names.append(block.digests)
            if use.names.names[-1] != name:
                use.names.rollback(len(found) * BLOCK_TOKENS)
                break
            found.append(block)
        while found and not found[-1].may_be_last:
            found.pop()
        use.names.rollback(len(found) * BLOCK_TOKENS)
        cache.restore([block.held for block in found], BLOCK_TOKENS)
        use.take_offered()
        self._touch(use.scope, wanted[: len(found)])

    def offer(self, use: PrefixUse, cache: SpanCache) -> None:
        """Keeps the whole blocks that the session has computed since the last time, as far as there is room."""
        fresh = use.take_offered()
        if not use.keeps or not fresh or not cache.settled:
            return
        names = use.names.names
        for number in fresh:
            if names[number] in self._of(use.scope):
                continue
            block = KeptBlock.of(use.names.digests_of(number), cache, (number + 1) * BLOCK_TOKENS)
            if not self._make_room(block.tokens) or (number and names[number - 1] not in self._of(use.scope)):
                break
            self._scopes.setdefault(use.scope, OrderedDict())[names[number]] = block
            self._tokens[use.scope] = self._tokens.get(use.scope, 0) + block.tokens
            self._used += block.tokens
        self._touch(use.scope, names)

    def _of(self, scope: str) -> OrderedDict[bytes, KeptBlock]:
        return self._scopes.get(scope, OrderedDict())

    def _touch(self, scope: str, names: Sequence[bytes]) -> None:
        kept = self._of(scope)
        for name in reversed(names):  # so that the first block, without which the others are of no use, goes last
            if name in kept:
                kept.move_to_end(name)

    def _make_room(self, tokens: int) -> bool:
        """Whether there is room for `tokens` more; gives blocks up for it."""
        if tokens > self._room:
            return False
        while self._used + tokens > self._room:
            scope = max(self._tokens, key=self._tokens.__getitem__)
            _, block = self._scopes[scope].popitem(last=False)
            self._tokens[scope] -= block.tokens
            self._used -= block.tokens
            if not self._tokens[scope]:
                del self._tokens[scope], self._scopes[scope]
        return True
