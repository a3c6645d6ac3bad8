"""Answers in the words of OpenAI's /v1/chat/completions and /v1/completions. Pure."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ..engine.generation import ChosenToken, Finished
from ..engine.tools import ToolCall

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


# --- chat


def chat_choice(
    choice: int, text: str, calls: Sequence[ToolCall], tokens: Sequence[ChosenToken] | None, reason: str, of: TokenText
) -> dict[str, Any]:
    """A whole choice of a chat; `tokens` None without log-probabilities."""
    message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
    if calls:
        message["tool_calls"] = [call.fields() for call in calls]
    return {
        "index": choice,
        "message": message,
        "logprobs": None if tokens is None else chat_logprobs(tokens, of),
        "finish_reason": "tool_calls" if calls else reason,
    }


def chat_delta(
    choice: int, delta: dict[str, Any], tokens: Sequence[ChosenToken] | None, reason: str | None, of: TokenText
) -> dict[str, Any]:
    """A choice of a chunk."""
    logprobs = None if not tokens else chat_logprobs(tokens, of)
    return {"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


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


# --- completions


def text_choice(
    choice: int, text: str, tokens: Sequence[ChosenToken] | None, reason: str | None, of: TokenText, offset: int = 0
) -> dict[str, Any]:
    """A choice of a completion, or of a chunk of one; `offset` is the length of the text before."""
    logprobs = None if tokens is None else text_logprobs(tokens, of, offset)
    return {"index": choice, "text": text, "logprobs": logprobs, "finish_reason": reason}


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
