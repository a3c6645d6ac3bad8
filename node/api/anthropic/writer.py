"""The answer to one request of /v1/messages: a message, or the events in which it comes about. No network."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Any

from ..engine.generation import ChosenToken, Finished, provenance
from ..engine.preparing import PreparedChat
from ..engine.requests import TextRequest
from ..engine.tools import ToolCall
from ..errors import MESSAGES_PATH, ApiError, error_object
from ..one_answer import Chunk, OneAnswer
from .requests import arguments_of


class MessageWriter(OneAnswer):
    """What Anthropic's specification requires, and of which nothing is known here, is null."""

    def __init__(self, request: TextRequest, chat: PreparedChat, request_id: str) -> None:
        super().__init__(request, chat, f"msg_{secrets.token_hex(12)}")
        self._request_id = request_id
        self._prompt_tokens = len(chat.generation.prompts[0])
        self._text = ""
        self._blocks: list[dict[str, Any]] = []

    def opening(self) -> list[Chunk]:
        # What the servers hold of the prompt is known at the end only.
        usage = _usage(self._prompt_tokens, None, 0)
        return [{"type": "message_start", "message": self._message(_stop(None, None), usage)}]

    def finish(self, end: Finished, calls: Sequence[ToolCall]) -> list[Chunk]:
        chunks: list[Chunk] = []
        if self._text:
            chunks.append({"type": "content_block_stop", "index": 0})
            self._blocks.append({"type": "text", "text": self._text, "citations": None})
        for call in calls:
            chunks += self._call(call)
        delta = _stop(_reason(end, bool(calls)), end.stopped_by)
        usage = _usage(end.prompt_tokens - end.cached, end.cached, end.tokens)
        more = {"x_petalnode": provenance([end])}
        self.complete = {**self._message(delta, usage), **more}
        return [
            *chunks,
            {"type": "message_delta", "delta": delta, "usage": usage, **more},
            {"type": "message_stop"},
        ]

    def failed(self, error: ApiError) -> Chunk:
        return error_object(error, MESSAGES_PATH, self._request_id)

    def _message(self, stop: dict[str, Any], usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self.name,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": list(self._blocks),
            **stop,
            "usage": {**usage, "cache_creation": None, "inference_geo": None, "service_tier": None},
        }

    def add(self, text: str, tokens: Sequence[ChosenToken]) -> list[Chunk]:
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
