"""Responses that the next ones go on from: in memory, bounded, each found by its owner only."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Any, Final

MAX_BYTES: Final = 64 << 20
"""Of all conversations, as JSON."""
MAX_RESPONSES: Final = 4096


@dataclass(frozen=True)
class StoredResponse:
    """A response that is over.

    Attributes:
        items: of its input.
        messages: of the conversation with its answer, as chat templates take them, without instructions.
    """

    response: dict[str, Any]
    items: tuple[dict[str, Any], ...]
    messages: tuple[dict[str, Any], ...]

    @property
    def size(self) -> int:
        """Bytes as JSON, those that it shares with the responses before it counted again."""
        return len(json.dumps([self.response, self.items, self.messages]))


class ResponseStore:
    """The newest responses. When there is no room, the oldest of the owner who has the most goes."""

    def __init__(self, max_bytes: int = MAX_BYTES, max_responses: int = MAX_RESPONSES) -> None:
        self._max_bytes = max_bytes
        self._max_responses = max_responses
        self._kept: OrderedDict[tuple[str, str], tuple[StoredResponse, int]] = OrderedDict()
        self._bytes: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, owner: str, name: str, stored: StoredResponse) -> None:
        """One that has no room by itself is not kept."""
        size = stored.size
        if size > self._max_bytes:
            return
        self._kept[owner, name] = stored, size
        self._bytes[owner] += size
        while self._bytes.total() > self._max_bytes or len(self._kept) > self._max_responses:
            most = max(self._bytes, key=lambda owner: self._bytes[owner])
            self.drop(most, next(name for other, name in self._kept if other == most))

    def find(self, owner: str, name: str) -> StoredResponse | None:
        """None if this owner has none of this name (any more)."""
        found = self._kept.get((owner, name))
        return None if found is None else found[0]

    def drop(self, owner: str, name: str) -> bool:
        """Whether there was one."""
        found = self._kept.pop((owner, name), None)
        if found is None:
            return False
        self._bytes[owner] -= found[1]
        if not self._bytes[owner]:
            del self._bytes[owner]
        return True
