"""The answer to one request of /api/chat or /api/generate: one object, or a line for each piece of it. No network."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from ..engine.generation import ChosenToken, Finished, provenance
from ..engine.preparing import PreparedChat
from ..engine.requests import TextRequest
from ..engine.tools import ToolCall
from ..errors import ApiError, error_object
from ..one_answer import Chunk, OneAnswer

PREFIX: Final = "/api/"


def timestamp() -> str:
    """Now, as Ollama writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


class LineWriter(OneAnswer):
    """
    Args:
        of: the text of a token.
        is_chat: the answer is a message, and not a text by itself.
    """

    media_type = "application/x-ndjson"

    def __init__(self, request: TextRequest, chat: PreparedChat, of: Callable[[int], str], *, is_chat: bool) -> None:
        super().__init__(request, chat, f"ollama-{secrets.token_hex(12)}")
        self.model = request.model
        self._request = request
        self._of = of
        self._is_chat = is_chat
        self._begun = time.perf_counter()
        self._first: float | None = None
        self._text = ""
        self._logprobs: list[dict[str, Any]] = []

    def encoded(self, chunk: Chunk | None) -> bytes:
        return b"" if chunk is None else json.dumps(chunk, ensure_ascii=False).encode() + b"\n"

    def add(self, text: str, tokens: Sequence[ChosenToken]) -> list[Chunk]:
        if tokens:
            self._first = self._first or time.perf_counter()
        logprobs = self._likelihoods(tokens) if self._request.logprobs else []
        return [self._line(text, (), logprobs)] if text or logprobs else []

    def finish(self, end: Finished, calls: Sequence[ToolCall]) -> list[Chunk]:
        chunks = [self._line("", calls, [])] if calls else []
        now = time.perf_counter()
        first = self._first or now
        last = {
            "done": True,
            "done_reason": end.reason,
            "total_duration": _nanoseconds(now - self._begun),
            "load_duration": 0,
            "prompt_eval_count": end.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(first - self._begun),
            "eval_count": end.tokens,
            "eval_duration": _nanoseconds(now - first),
            "x_petalnode": {"id": self.name, **provenance([end])},
        }
        self.complete = {**self._line(self._text, calls, self._logprobs, kept=False), **last}
        return [*chunks, {**self._line("", (), [], kept=False), **last}]

    def failed(self, error: ApiError) -> Chunk:
        return error_object(error, PREFIX)

    def _line(
        self, text: str, calls: Sequence[ToolCall], logprobs: list[dict[str, Any]], *, kept: bool = True
    ) -> Chunk:
        if kept and not self.streams:
            self._text += text
            self._logprobs += logprobs
        line: Chunk = {"model": self.model, "created_at": timestamp(), "done": False}
        if self._is_chat:
            message: dict[str, Any] = {"role": "assistant", "content": text}
            if calls:
                message["tool_calls"] = [_call(call) for call in calls]
            line["message"] = message
        else:
            line["response"] = text
        if logprobs:
            line["logprobs"] = logprobs
        return line

    def _likelihoods(self, tokens: Sequence[ChosenToken]) -> list[dict[str, Any]]:
        return [
            {
                **self._likelihood(chosen.token, chosen.logprob),
                "top_logprobs": [self._likelihood(*likely) for likely in chosen.top],
            }
            for chosen in tokens
        ]

    def _likelihood(self, token: int, logprob: float | None) -> dict[str, Any]:
        return {"token": self._of(token), "logprob": max(logprob or 0.0, -9999.0)}


def _call(call: ToolCall) -> dict[str, Any]:
    return {"function": {"name": call.name, "arguments": json.loads(call.arguments)}}


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
