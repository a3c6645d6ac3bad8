"""The answer to one request of /v1/responses: a response object, or the events in which it comes about. No network."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from ...trust.receipt_file import SignedReply
from ..engine.generation import AnswerProgress, ChosenToken, Finished, Piece, provenance
from ..engine.preparing import PreparedChat
from ..engine.tools import ToolCall, ToolText
from ..errors import ApiError
from ..parts import template_call
from .objects import EVENT_STREAM, TokenText, chat_logprobs, named_event
from .response_requests import ResponseRequest

Chunk = dict[str, Any]


class ResponseWriter:
    """As `AnswerWriter` has it.

    Args:
        keep: is called with the whole response, and the message that is its answer, when both are complete.
    """

    media_type = EVENT_STREAM

    def __init__(
        self,
        asked: ResponseRequest,
        chat: PreparedChat,
        of: TokenText,
        keep: Callable[[dict[str, Any], dict[str, Any]], None],
    ) -> None:
        self.streams = asked.text.stream
        self.name = f"resp_{secrets.token_hex(16)}"
        self._model = chat.generation.model.name
        self._complete: dict[str, Any] = {}
        self._tools = ToolText(chat.form, chat.tools)
        self._replies: list[SignedReply] = []
        self._asked = asked
        self._created = int(time.time())
        self._of = of
        self._keep = keep
        self._number = 0
        self._message = f"msg_{secrets.token_hex(16)}"
        self._text = ""
        self._tokens: list[ChosenToken] = []
        self._is_open = False
        self._output: list[dict[str, Any]] = []

    def opening(self) -> list[Chunk]:
        begun = self._response("in_progress")
        return [self._event("response.created", response=begun), self._event("response.in_progress", response=begun)]

    def take(self, piece: Piece) -> list[Chunk]:
        return self._add(self._tools.feed(piece.text), piece.tokens)

    def close(self, end: Finished) -> list[Chunk]:
        self._replies = list(end.receipts)
        text, calls = self._tools.end()
        chunks = self._add(text, ())
        if self._is_open or not calls:
            chunks += self._end_message(end)
        for call in calls:
            chunks += self._call(call)
        cut = end.reason == "length" and not calls
        self._complete = {
            **self._response("incomplete" if cut else "completed"),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "usage": _usage(end),
            "x_petalnode": provenance([end]),
        }
        message: dict[str, Any] = {"role": "assistant", "content": self._text}
        if calls:
            message["tool_calls"] = [template_call(call.name, json.loads(call.arguments), call.id) for call in calls]
        self._keep(self._complete, message)
        return [*chunks, self._event(f"response.{self._complete['status']}", response=self._complete)]

    def ending(self) -> list[Chunk]:
        return []

    def whole(self) -> dict[str, Any]:
        return self._complete

    def replies(self) -> list[SignedReply]:
        return self._replies

    def encoded(self, chunk: Chunk | None) -> bytes:
        return b"" if chunk is None else named_event(chunk)

    def progress(self, now: AnswerProgress) -> list[Chunk]:
        return []

    def failed(self, error: ApiError) -> Chunk:
        failed = {**self._response("failed"), "error": {"code": "server_error", "message": str(error)}}
        return self._event("response.failed", response=failed)

    def _event(self, kind: str, **fields: Any) -> Chunk:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}

    def _response(self, status: str) -> dict[str, Any]:
        return {
            "id": self.name,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": self._model,
            "output": list(self._output),
            "store": self._asked.store,
            **self._asked.echoed,
        }

    # --- the message

    def _add(self, text: str, tokens: Sequence[ChosenToken]) -> list[Chunk]:
        chosen = tokens if self._asked.text.logprobs else ()
        if not text and not chosen:
            return []
        chunks = [] if self._is_open else self._begin_message()
        self._text += text
        self._tokens.extend(chosen)
        return [*chunks, self._part("response.output_text.delta", delta=text, logprobs=self._logprobs(chosen))]

    def _begin_message(self) -> list[Chunk]:
        self._is_open = True
        return [
            self._item_event("response.output_item.added", {**self._message_item("in_progress"), "content": []}),
            self._part("response.content_part.added", part=_text_part("", [])),
        ]

    def _end_message(self, end: Finished) -> list[Chunk]:
        chunks = [] if self._is_open else self._begin_message()
        logprobs = self._logprobs(self._tokens)
        item = self._message_item("incomplete" if end.reason == "length" else "completed")
        chunks += [
            self._part("response.output_text.done", text=self._text, logprobs=logprobs),
            self._part("response.content_part.done", part=_text_part(self._text, logprobs)),
            self._item_event("response.output_item.done", item),
        ]
        self._output.append(item)
        return chunks

    def _message_item(self, status: str) -> dict[str, Any]:
        content = [_text_part(self._text, self._logprobs(self._tokens))]
        return {"id": self._message, "type": "message", "role": "assistant", "status": status, "content": content}

    def _part(self, kind: str, **fields: Any) -> Chunk:
        return self._event(kind, item_id=self._message, output_index=len(self._output), content_index=0, **fields)

    def _item_event(self, kind: str, item: dict[str, Any]) -> Chunk:
        return self._event(kind, output_index=len(self._output), item=item)

    def _logprobs(self, tokens: Sequence[ChosenToken]) -> list[dict[str, Any]]:
        content = chat_logprobs(tokens, self._of)["content"] if tokens else []
        return [_with_bytes(entry) for entry in content]

    # --- calls

    def _call(self, call: ToolCall) -> list[Chunk]:
        item = {
            "id": f"fc_{secrets.token_hex(16)}",
            "type": "function_call",
            "status": "completed",
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
        }
        where = {"item_id": item["id"], "output_index": len(self._output)}
        chunks = [
            self._item_event("response.output_item.added", {**item, "status": "in_progress", "arguments": ""}),
            self._event("response.function_call_arguments.delta", delta=call.arguments, **where),
            self._event("response.function_call_arguments.done", name=call.name, arguments=call.arguments, **where),
            self._item_event("response.output_item.done", item),
        ]
        self._output.append(item)
        return chunks


def _text_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _with_bytes(entry: dict[str, Any]) -> dict[str, Any]:
    """As this endpoint has it: bytes are never null, and those of U+FFFD where they are not known."""
    known = {**entry, "bytes": entry["bytes"] or list(entry["token"].encode())}
    if "top_logprobs" in entry:
        known["top_logprobs"] = [_with_bytes(likely) for likely in entry["top_logprobs"]]
    return known


def _usage(end: Finished) -> dict[str, Any]:
    return {
        "input_tokens": end.prompt_tokens,
        "input_tokens_details": {"cached_tokens": end.cached, "cache_write_tokens": 0},
        "output_tokens": end.tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": end.prompt_tokens + end.tokens,
    }
