"""The answer to one request of /v1/messages: a message, or the events in which it comes about. No network."""

from __future__ import annotations

import json
import secrets
from typing import Any

from ...trust.receipt_file import SignedReply
from ..engine.generation import Finished, Piece, provenance
from ..engine.preparing import PreparedChat
from ..engine.requests import TextRequest
from ..engine.tools import ToolCall, ToolText
from ..errors import MESSAGES_PATH, ApiError, error_object
from .requests import arguments_of

Chunk = dict[str, Any]


class MessageWriter:
    """As `Writer` has it. What Anthropic's specification requires, and of which nothing is known here, is null."""

    media_type = "text/event-stream; charset=utf-8"

    def __init__(self, request: TextRequest, chat: PreparedChat, request_id: str) -> None:
        self.streams = request.stream
        self.name = f"msg_{secrets.token_hex(12)}"
        self._request_id = request_id
        self._model = chat.generation.model.name
        self._prompt_tokens = len(chat.generation.prompts[0])
        self._tools = ToolText(chat.form, chat.tools)
        self._text = ""
        self._blocks: list[dict[str, Any]] = []
        self._replies: list[SignedReply] = []
        self._whole: dict[str, Any] = {}

    def replies(self) -> list[SignedReply]:
        return self._replies

    def encoded(self, chunk: Chunk | None) -> bytes:
        if chunk is None:
            return b""
        data = json.dumps(chunk, ensure_ascii=False, separators=(",", ":"))
        return f"event: {chunk['type']}\ndata: {data}\n\n".encode()

    def opening(self) -> list[Chunk]:
        # What the servers hold of the prompt is known at the end only.
        usage = _usage(self._prompt_tokens, None, 0)
        return [{"type": "message_start", "message": self._message(_stop(None, None), usage)}]

    def take(self, piece: Piece) -> list[Chunk]:
        return self._add(self._tools.feed(piece.text))

    def close(self, end: Finished) -> list[Chunk]:
        text, calls = self._tools.end()
        chunks = self._add(text)
        if self._text:
            chunks.append({"type": "content_block_stop", "index": 0})
            self._blocks.append({"type": "text", "text": self._text, "citations": None})
        for call in calls:
            chunks += self._call(call)
        delta = _stop(_reason(end, bool(calls)), end.stopped_by)
        usage = _usage(end.prompt_tokens - end.cached, end.cached, end.tokens)
        self._replies = list(end.receipts)
        more = {"x_petalnode": provenance([end])}
        self._whole = {**self._message(delta, usage), **more}
        return [
            *chunks,
            {"type": "message_delta", "delta": delta, "usage": usage, **more},
            {"type": "message_stop"},
        ]

    def ending(self) -> list[Chunk]:
        return []

    def failed(self, error: ApiError) -> Chunk:
        return error_object(error, MESSAGES_PATH, self._request_id)

    def whole(self) -> dict[str, Any]:
        return self._whole

    def _message(self, stop: dict[str, Any], usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self.name,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": list(self._blocks),
            **stop,
            "usage": {**usage, "cache_creation": None, "inference_geo": None, "service_tier": None},
        }

    def _add(self, text: str) -> list[Chunk]:
        if not text:
            return []
        begun: list[Chunk] = []
        if not self._text:
            block = {"type": "text", "text": "", "citations": None}
            begun.append({"type": "content_block_start", "index": 0, "content_block": block})
        self._text += text
        delta = {"type": "text_delta", "text": text}
        return [*begun, {"type": "content_block_delta", "index": 0, "delta": delta}]

    def _call(self, call: ToolCall) -> list[Chunk]:
        index = len(self._blocks)
        block = {
            "type": "tool_use",
            "id": call.id.replace("call_", "toolu_", 1),
            "name": call.name,
            "caller": {"type": "direct"},  # the model itself, not a program that it wrote
        }
        arguments = arguments_of(call.arguments)
        self._blocks.append({**block, "input": arguments})
        delta = {"type": "input_json_delta", "partial_json": json.dumps(arguments, ensure_ascii=False)}
        return [
            {"type": "content_block_start", "index": index, "content_block": {**block, "input": {}}},
            {"type": "content_block_delta", "index": index, "delta": delta},
            {"type": "content_block_stop", "index": index},
        ]


def _reason(end: Finished, calls: bool) -> str:
    if calls:
        return "tool_use"
    if end.stopped_by is not None:
        return "stop_sequence"
    return "max_tokens" if end.reason == "length" else "end_turn"


def _stop(reason: str | None, sequence: str | None) -> dict[str, Any]:
    """Why a message has ended. Nothing is refused, and nothing runs in a container."""
    return {"stop_reason": reason, "stop_sequence": sequence, "stop_details": None, "container": None}


def _usage(uncached: int, cached: int | None, written: int) -> dict[str, Any]:
    """Tokens as Anthropic counts them: what the servers held already is apart, None while that is not known."""
    return {
        "input_tokens": uncached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": written,
        "output_tokens_details": None,
        "server_tool_use": None,
    }
