"""Answers in the words of OpenAI's /v1/chat/completions and /v1/completions, whole or chunk by chunk. No network."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ...trust.receipt_file import SignedReply
from ..engine.choice import progress_fields
from ..engine.generation import AnswerProgress, ChosenToken, Finished, TextPiece, TextRequest, provenance
from ..engine.preparing import PreparedChat
from ..engine.tools import ToolCall, ToolText
from ..errors import ApiError

EVENT_STREAM: Final = "text/event-stream; charset=utf-8"

TokenText = Callable[[int], str]


@dataclass(frozen=True)
class Head:
    """What all chunks of one response have in common.

    Attributes:
        prefix: of the id.
        fingerprint: changes when the model's files do.
    """

    model: str
    prefix: str
    fingerprint: str
    id: str = field(default="")
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        if not self.id:
            object.__setattr__(self, "id", f"{self.prefix}-{secrets.token_hex(12)}")

    def fields(self, kind: str, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": list(choices),
        }


def usage(ends: Sequence[Finished], per_prompt: int) -> dict[str, Any]:
    """Tokens of all choices; the `per_prompt` choices of one prompt count it once. `cached_tokens`: not sent again."""
    prompt = sum(end.prompt_tokens for end in ends[::per_prompt])
    answer = sum(end.tokens for end in ends)
    cached = sum(end.cached for end in ends[::per_prompt])
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def chat_logprobs(tokens: Sequence[ChosenToken], of: TokenText) -> dict[str, Any]:
    content = [
        {
            **_likely(of, chosen.token, chosen.logprob),
            "top_logprobs": [_likely(of, token, logprob) for token, logprob in chosen.top],
        }
        for chosen in tokens
    ]
    return {"content": content, "refusal": None}


def _likely(of: TokenText, token: int, logprob: float | None) -> dict[str, Any]:
    text = of(token)
    # A part of a character is no text, and which bytes it is the tokenizer does not say.
    known = None if "\ufffd" in text else list(text.encode())
    return {"token": text, "logprob": _finite(logprob), "bytes": known}


def text_logprobs(tokens: Sequence[ChosenToken], of: TokenText, offset: int) -> dict[str, Any]:
    texts = [of(chosen.token) for chosen in tokens]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [_finite(chosen.logprob) for chosen in tokens],
        "top_logprobs": [  # the likeliest last: where two have the same text, it is the one that counts
            None
            if chosen.logprob is None
            else {
                of(token): _finite(value) for token, value in reversed(chosen.top or ((chosen.token, chosen.logprob),))
            }
            for chosen in tokens
        ],
        "text_offset": offsets,
    }


def _finite(value: float | None) -> float | None:
    """JSON has no infinity: what cannot be is very unlikely."""
    return None if value is None else max(value, -9999.0)


# --- chunks


def event(data: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def named_event(data: dict[str, Any]) -> bytes:
    """One server-sent event whose name is its `type`."""
    return f"event: {data['type']}\n".encode() + event(data)


DONE: Final = b"data: [DONE]\n\n"


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

    def _shown(self, piece: TextPiece) -> str:
        """What a client is told of a piece now."""
        return piece.text

    def _delta(self, choice: int, text: str, tokens: Sequence[ChosenToken] | None) -> dict[str, Any]:
        """The choice of a chunk, with the log-probabilities of `tokens` if there are any."""
        raise NotImplementedError

    def _choice(self, end: Finished, text: str, tokens: Sequence[ChosenToken] | None) -> dict[str, Any]:
        """A whole choice, `tokens` None without log-probabilities."""
        raise NotImplementedError

    def opening(self) -> list[dict[str, Any]]:
        return []

    def take(self, piece: TextPiece) -> list[dict[str, Any]]:
        text, likelihoods = self._shown(piece), self._request.logprobs
        self._keep(piece.choice, text, piece.tokens)
        if not self._request.stream or not (text or likelihoods):
            return []
        return [self._chunk(self._delta(piece.choice, text, piece.tokens if likelihoods else None))]

    def _keep(self, choice: int, text: str, tokens: Sequence[ChosenToken] = ()) -> None:
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

    def _last(self, choice: dict[str, Any]) -> dict[str, Any]:
        """The chunk of the end of a choice. The last one also says how the answers came about."""
        ended = len(self._ends) == len(self._texts) and not self._request.include_usage
        return {**self._chunk(choice), **({"x_petalnode": provenance(self._done)} if ended else {})}

    def encoded(self, chunk: dict[str, Any] | None) -> bytes:
        return DONE if chunk is None else event(chunk)

    def progress(self, now: AnswerProgress) -> list[dict[str, Any]]:
        """A chunk without choices, as the one that counts the tokens."""
        return [{**self._chunk(), "x_petalnode": progress_fields(now)}]

    def failed(self, error: ApiError) -> dict[str, Any]:
        return error.fields()

    def ending(self) -> list[dict[str, Any]]:
        return [self._counted(self.chunk_kind, ())] if self._request.include_usage else []

    def whole(self) -> dict[str, Any]:
        logprobs = self._tokens if self._request.logprobs else [None] * len(self._texts)
        return self._counted(self.kind, list(map(self._choice, self._done, self._texts, logprobs)))

    def _counted(self, kind: str, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        counted = usage(self._done, self._request.choices)
        return {**self._head.fields(kind, choices), "usage": counted, "x_petalnode": provenance(self._done)}


class ChatWriter(_OpenAIWriter):
    """Of /v1/chat/completions."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, request: TextRequest, head: Head, of: TokenText, chat: PreparedChat) -> None:
        choices = len(chat.generation.prompts)
        super().__init__(request, head, choices, of)
        self._tools = [ToolText(chat.form, chat.tools) for _ in range(choices)]
        self._calls: list[list[ToolCall]] = [[] for _ in range(choices)]

    def _shown(self, piece: TextPiece) -> str:
        return self._tools[piece.choice].feed(piece.text)

    def _delta(self, choice: int, text: str, tokens: Sequence[ChosenToken] | None) -> dict[str, Any]:
        return {**_delta(choice, {"content": text}), "logprobs": chat_logprobs(tokens, self._of) if tokens else None}

    def opening(self) -> list[dict[str, Any]]:
        role = {"role": "assistant", "content": "", "refusal": None}
        return [self._chunk(_delta(choice, role)) for choice in range(len(self._texts))]

    def close(self, end: Finished) -> list[dict[str, Any]]:
        text, calls = self._tools[end.choice].end()
        self._keep(end.choice, text)
        self._calls[end.choice] = calls
        self._ends[end.choice] = end
        told: list[dict[str, Any]] = [{"content": text}] if text else []
        if calls:
            told.append({"tool_calls": [{"index": index, **call.fields()} for index, call in enumerate(calls)]})
        last = _delta(end.choice, {}, "tool_calls" if calls else end.reason)
        return [*(self._chunk(_delta(end.choice, one)) for one in told), self._last(last)]

    def _choice(self, end: Finished, text: str, tokens: Sequence[ChosenToken] | None) -> dict[str, Any]:
        calls = self._calls[end.choice]
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
        if calls:
            message["tool_calls"] = [call.fields() for call in calls]
        return {
            "index": end.choice,
            "message": message,
            "logprobs": None if tokens is None else chat_logprobs(tokens, self._of),
            "finish_reason": "tool_calls" if calls else end.reason,
        }


def _delta(choice: int, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    """The choice of a chat's chunk."""
    return {"index": choice, "delta": delta, "logprobs": None, "finish_reason": reason}


class TextWriter(_OpenAIWriter):
    """Of /v1/completions."""

    kind = chunk_kind = "text_completion"

    def __init__(self, request: TextRequest, head: Head, choices: int, of: TokenText) -> None:
        super().__init__(request, head, choices, of)
        self._offsets = [0] * choices

    def _delta(self, choice: int, text: str, tokens: Sequence[ChosenToken] | None) -> dict[str, Any]:
        part = self._part(choice, text, tokens, None, self._offsets[choice])
        self._offsets[choice] += sum(map(len, part["logprobs"]["tokens"])) if tokens else 0
        return part

    def close(self, end: Finished) -> list[dict[str, Any]]:
        self._ends[end.choice] = end
        return [self._last(self._part(end.choice, "", None, end.reason))]

    def _choice(self, end: Finished, text: str, tokens: Sequence[ChosenToken] | None) -> dict[str, Any]:
        return self._part(end.choice, text, tokens, end.reason)

    def _part(
        self, choice: int, text: str, tokens: Sequence[ChosenToken] | None, reason: str | None, offset: int = 0
    ) -> dict[str, Any]:
        """A choice, or of a chunk; `offset` is the length of the text before."""
        logprobs = None if tokens is None else text_logprobs(tokens, self._of, offset)
        return {"index": choice, "text": text, "logprobs": logprobs, "finish_reason": reason}
