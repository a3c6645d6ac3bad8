"""The one answer to a chat: what the writers of all interfaces but that of chat completions have in common."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ..trust.receipt_file import SignedReply
from .engine.generation import ChosenToken, Finished, Piece, TextRequest
from .engine.preparing import PreparedChat
from .engine.tools import ToolCall, ToolText
from .openai.objects import EVENT_STREAM

Chunk = dict[str, Any]


class SingleAnswerWriter:
    """As `Writer` has it. An interface writes the text as it comes (`add`), and the end with the calls (`finish`)."""

    media_type = EVENT_STREAM

    def __init__(self, request: TextRequest, chat: PreparedChat, name: str) -> None:
        self.streams = request.stream
        self.name = name
        self.model = chat.generation.model.name
        self.complete: dict[str, Any] = {}
        self._tools = ToolText(chat.form, chat.tools)
        self._replies: list[SignedReply] = []

    def add(self, text: str, tokens: Sequence[ChosenToken]) -> list[Chunk]:
        raise NotImplementedError

    def finish(self, end: Finished, calls: Sequence[ToolCall]) -> list[Chunk]:
        """The last chunks. `complete` is the response of a request without a stream from then on."""
        raise NotImplementedError

    def replies(self) -> list[SignedReply]:
        return self._replies

    def encoded(self, chunk: Chunk | None) -> bytes:
        if chunk is None:
            return b""
        data = json.dumps(chunk, ensure_ascii=False, separators=(",", ":"))
        return f"event: {chunk['type']}\ndata: {data}\n\n".encode()

    def opening(self) -> list[Chunk]:
        return []

    def take(self, piece: Piece) -> list[Chunk]:
        return self.add(self._tools.feed(piece.text), piece.tokens)

    def close(self, end: Finished) -> list[Chunk]:
        self._replies = list(end.receipts)
        text, calls = self._tools.end()
        return [*self.add(text, ()), *self.finish(end, calls)]

    def ending(self) -> list[Chunk]:
        return []

    def whole(self) -> dict[str, Any]:
        return self.complete
