"""The answers of one request, written as OpenAI's objects: whole, or chunk by chunk. No network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...trust.receipt_file import SignedReply
from ..engine.generation import AnswerProgress, ChosenToken, Finished, Piece, TextRequest, provenance
from ..engine.preparing import PreparedChat
from ..engine.progress import progress_fields
from ..engine.tools import ToolCall, ToolText
from ..errors import ApiError
from .objects import (
    DONE,
    EVENT_STREAM,
    Head,
    TokenText,
    chat_choice,
    chat_delta,
    event,
    text_choice,
    usage,
)


class _OpenAIWriter:
    """What chats and completions have in common, as `Writer` has it."""

    media_type = EVENT_STREAM

    kind = ""
    chunk_kind = ""

    def __init__(self, request: TextRequest, head: Head, choices: int, of: TokenText) -> None:
        self.streams = request.stream
        self._request = request
        self._head = head
        self._of = of
        self._texts = [""] * choices
        self._tokens: list[list[ChosenToken]] = [[] for _ in range(choices)]
        self._ends: dict[int, Finished] = {}

    def _keep(self, choice: int, text: str, tokens: Sequence[ChosenToken]) -> None:
        if not self._request.stream:
            self._texts[choice] += text
            if self._request.logprobs:
                self._tokens[choice].extend(tokens)

    def _chunk(self, *choices: dict[str, Any]) -> dict[str, Any]:
        chunk = self._head.fields(self.chunk_kind, choices)
        return {**chunk, "usage": None} if self._request.include_usage else chunk

    @property
    def name(self) -> str:
        return self._head.id

    def replies(self) -> list[SignedReply]:
        return [reply for end in self._done for reply in end.receipts]

    @property
    def _done(self) -> list[Finished]:
        return [self._ends[choice] for choice in sorted(self._ends)]

    def _last(self, chunk: dict[str, Any]) -> dict[str, Any]:
        """The chunk, which also says how the answers came about if it is the last one."""
        ended = len(self._ends) == len(self._texts) and not self._request.include_usage
        return {**chunk, "x_petalnode": provenance(self._done)} if ended else chunk

    def encoded(self, chunk: dict[str, Any] | None) -> bytes:
        return DONE if chunk is None else event(chunk)

    def progress(self, now: AnswerProgress) -> list[dict[str, Any]]:
        """A chunk without choices, as the one that counts the tokens."""
        return [{**self._chunk(), "x_petalnode": progress_fields(now)}]

    def failed(self, error: ApiError) -> dict[str, Any]:
        return error.fields()

    def ending(self) -> list[dict[str, Any]]:
        if not self._request.include_usage:
            return []
        chunk = self._head.fields(self.chunk_kind, ())
        return [{**chunk, "usage": usage(self._done, self._request.choices), "x_petalnode": provenance(self._done)}]

    def _whole(self, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {
            **self._head.fields(self.kind, choices),
            "usage": usage(self._done, self._request.choices),
            "x_petalnode": provenance(self._done),
        }


class ChatWriter(_OpenAIWriter):
    """Of /v1/chat/completions."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, request: TextRequest, head: Head, of: TokenText, chat: PreparedChat) -> None:
        choices = len(chat.generation.prompts)
        super().__init__(request, head, choices, of)
        self._tools = [ToolText(chat.form, chat.tools) for _ in range(choices)]
        self._calls: list[list[ToolCall]] = [[] for _ in range(choices)]

    def opening(self) -> list[dict[str, Any]]:
        role = {"role": "assistant", "content": "", "refusal": None}
        return [self._chunk(chat_delta(choice, role, None, None, self._of)) for choice in range(len(self._texts))]

    def take(self, piece: Piece) -> list[dict[str, Any]]:
        text = self._tools[piece.choice].feed(piece.text)
        self._keep(piece.choice, text, piece.tokens)
        if not self._request.stream or not (text or self._request.logprobs):
            return []
        tokens = piece.tokens if self._request.logprobs else None
        return [self._chunk(chat_delta(piece.choice, {"content": text}, tokens, None, self._of))]

    def close(self, end: Finished) -> list[dict[str, Any]]:
        text, calls = self._tools[end.choice].end()
        self._keep(end.choice, text, ())
        self._calls[end.choice] = calls
        self._ends[end.choice] = end
        chunks = []
        if text:
            chunks.append(self._chunk(chat_delta(end.choice, {"content": text}, None, None, self._of)))
        if calls:
            listed = [{"index": index, **call.fields()} for index, call in enumerate(calls)]
            chunks.append(self._chunk(chat_delta(end.choice, {"tool_calls": listed}, None, None, self._of)))
        reason = "tool_calls" if calls else end.reason
        chunks.append(self._last(self._chunk(chat_delta(end.choice, {}, None, reason, self._of))))
        return chunks

    def whole(self) -> dict[str, Any]:
        logprobs = self._tokens if self._request.logprobs else [None] * len(self._texts)
        choices = zip(self._texts, self._calls, logprobs, self._done, strict=True)
        return self._whole(
            [chat_choice(end.choice, text, calls, tokens, end.reason, self._of) for text, calls, tokens, end in choices]
        )


class TextWriter(_OpenAIWriter):
    """Of /v1/completions."""

    kind = chunk_kind = "text_completion"

    def __init__(self, request: TextRequest, head: Head, choices: int, of: TokenText) -> None:
        super().__init__(request, head, choices, of)
        self._offsets = [0] * choices

    def opening(self) -> list[dict[str, Any]]:
        return []

    def take(self, piece: Piece) -> list[dict[str, Any]]:
        self._keep(piece.choice, piece.text, piece.tokens)
        if not self._request.stream or not (piece.text or self._request.logprobs):
            return []
        tokens = piece.tokens if self._request.logprobs else None
        offset = self._offsets[piece.choice]
        self._offsets[piece.choice] += len(piece.text)
        return [self._chunk(text_choice(piece.choice, piece.text, tokens, None, self._of, offset))]

    def close(self, end: Finished) -> list[dict[str, Any]]:
        self._ends[end.choice] = end
        return [self._last(self._chunk(text_choice(end.choice, "", None, end.reason, self._of)))]

    def whole(self) -> dict[str, Any]:
        logprobs = self._tokens if self._request.logprobs else [None] * len(self._texts)
        return self._whole(
            [
                text_choice(end.choice, text, tokens, end.reason, self._of)
                for text, tokens, end in zip(self._texts, logprobs, self._done, strict=True)
            ]
        )
