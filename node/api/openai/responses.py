"""/v1/responses: what it takes, read and checked, and its answer, an object or events. Pure: no model, no network."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ...trust.receipt_file import SignedReply
from ..engine.generation import (
    AnswerProgress,
    ChatRequest,
    ChosenToken,
    Finished,
    Grammar,
    TextPiece,
    TextRequest,
    provenance,
)
from ..engine.preparing import PreparedChat
from ..engine.tools import ToolCall, ToolText
from ..errors import ApiError
from ..fields import Fields
from ..parts import (
    JSON_OBJECT,
    REQUEST_LIMITS,
    bounded,
    content_text,
    function_call,
    function_tool,
    known_tool,
    metadata,
    schema_grammar,
    session_options,
    template_call,
)
from .requests import MAX_TOP_LOGPROBS, sampling, tool_mode
from .writers import EVENT_STREAM, TokenText, chat_logprobs, named_event

_LOGPROBS: Final = "message.output_text.logprobs"
_PARTS: Final = ("input_text", "output_text", "text")

Message = dict[str, Any]


@dataclass(frozen=True)
class ResponseRequest:
    """Of /v1/responses, before what was said before is known.

    Attributes:
        new: the messages of `input`, as chat templates take them.
        items: of `input`, as they are listed again.
        instructions: stand before all messages, and are not carried on to the next response.
        echoed: fields of the request that the response repeats.
    """

    text: TextRequest
    new: tuple[Message, ...]
    items: tuple[dict[str, Any], ...]
    instructions: str
    previous: str | None
    store: bool
    tools: tuple[dict[str, Any], ...]
    tool: str
    named: bool
    parallel: bool
    echoed: dict[str, Any]

    def chat(self, before: Sequence[Message]) -> ChatRequest:
        """The whole conversation, of which `before` was said already."""
        messages = [*before, *self.new]
        if self.instructions and messages and messages[0]["role"] == "system":
            messages[0] = {"role": "system", "content": f"{self.instructions}\n\n{messages[0]['content']}"}
        elif self.instructions:
            messages.insert(0, {"role": "system", "content": self.instructions})
        return ChatRequest(self.text, tuple(messages), self.tools, self.tool, self.named, self.parallel)


def parse_response(fields: Fields) -> ResponseRequest:
    """
    Raises:
        ApiError: a field is missing, of a wrong type, out of range, or asks for what is not done here.
    """
    fields.refuse(
        background="answers are made while their clients wait",
        conversation="conversations are kept by previous_response_id only",
        prompt="there are no prompt templates here",
        context_management="nothing is compacted here: send less",
    )
    reasoning = fields.object("reasoning")
    if reasoning is not None and any(value not in (None, "none") for value in reasoning.data.values()):
        raise fields.wrong("reasoning", "the model cannot be told how much to reason", "unsupported_parameter")
    fields.one_of("truncation", ("disabled",), "disabled")
    include = fields.texts("include", 16)
    top = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS) or 0
    format_fields, grammar = _format(fields)
    text = TextRequest(
        model=fields.text("model", ""),
        sampling=sampling(fields),
        max_tokens=fields.integer("max_output_tokens", 1, REQUEST_LIMITS.largest),
        logprobs=_LOGPROBS in include or top > 0,
        top_logprobs=top,
        stream=fields.flag("stream"),
        grammar=grammar,
        options=session_options(fields),
    )
    items = _items(fields)
    tools = tuple(_tool(tool) for tool in fields.objects("tools", REQUEST_LIMITS.max_tools))
    tool, named = _tool_choice(fields, tools)
    parallel = fields.get("parallel_tool_calls") is not False
    return ResponseRequest(
        text=text,
        new=tuple(_messages(items)),
        items=tuple(dict(item.data) for item in items),
        instructions=fields.text("instructions", ""),
        previous=None if fields.get("previous_response_id") is None else fields.text("previous_response_id"),
        store=fields.get("store") is None or fields.flag("store"),
        tools=tools,
        tool=tool,
        named=named,
        parallel=parallel,
        echoed={
            "instructions": fields.get("instructions"),
            "max_output_tokens": text.max_tokens,
            "metadata": metadata(fields),
            "parallel_tool_calls": parallel,
            "previous_response_id": fields.get("previous_response_id"),
            "temperature": text.sampling.temperature,
            "text": {"format": format_fields},
            "tool_choice": fields.get("tool_choice") or ("auto" if not tools else tool),
            "tools": _echoed_tools(fields, tools),
            "top_logprobs": top,
            "top_p": text.sampling.top_p,
            "truncation": "disabled",
        },
    )


def _format(fields: Fields) -> tuple[dict[str, Any], Grammar | None]:
    """`text.format` as the response repeats it, and what it binds the answer to."""
    config = fields.object("text")
    given = config.object("format") if config is not None else None
    if given is None:
        return {"type": "text"}, None
    kind = given.one_of("type", ("text", "json_object", "json_schema"), "text")
    if kind == "text":
        return {"type": "text"}, None
    if kind == "json_object":
        return {"type": kind}, JSON_OBJECT
    schema = given.needed("schema")
    found = {
        "type": kind,
        "name": given.text("name", "schema"),
        "schema": schema.data,
        "strict": given.get("strict") is not False,
    }
    if given.get("description") is not None:
        found["description"] = given.text("description")
    return found, bounded(given, schema_grammar(schema), "schema")


# --- input


def _items(fields: Fields) -> list[Fields]:
    given = fields.get("input")
    if isinstance(given, str):
        return [Fields({"type": "message", "role": "user", "content": given}, fields.path("input."))]
    found = fields.objects("input", REQUEST_LIMITS.max_messages)
    if not found:
        raise fields.wrong("input", "a text or a list of items is expected", "missing_field")
    return found


def _messages(items: Sequence[Fields]) -> list[Message]:
    found: list[Message] = []
    for item in items:
        kind = item.text("type", "message")
        if kind == "message":
            found.append(_message(item))
        elif kind == "function_call":
            call = function_call(item, item.text("call_id"))
            if found and found[-1]["role"] == "assistant":
                found[-1] = {**found[-1], "tool_calls": [*found[-1].get("tool_calls", ()), call]}
            else:
                found.append({"role": "assistant", "content": None, "tool_calls": [call]})
        elif kind == "function_call_output":
            output = content_text(item, "output", _PARTS)
            found.append({"role": "tool", "tool_call_id": item.text("call_id"), "content": output or ""})
        elif kind != "reasoning":  # which the model has no use for
            raise item.wrong("type", "messages, function calls and their outputs are known here", "unsupported_content")
    return found


def _message(item: Fields) -> Message:
    role = item.one_of("role", ("system", "developer", "user", "assistant"), "")
    content = content_text(item, "content", _PARTS)
    if content is None:
        raise item.wrong("content", "it is missing", "missing_field")
    return {"role": "system" if role == "developer" else role, "content": content}


# --- tools


def _tool(tool: Fields) -> dict[str, Any]:
    if tool.text("type") != "function":
        raise tool.wrong("type", "there are no tools here but functions of the client", "unsupported_parameter")
    return function_tool(tool)


def _echoed_tools(fields: Fields, tools: tuple[dict[str, Any], ...]) -> list[dict[str, Any]]:
    given = zip(tools, fields.objects("tools", REQUEST_LIMITS.max_tools), strict=True)
    return [
        {"type": "function", "strict": asked.get("strict") is not False, **tool["function"]} for tool, asked in given
    ]


def _tool_choice(fields: Fields, tools: tuple[dict[str, Any], ...]) -> tuple[str, bool]:
    if isinstance(fields.get("tool_choice"), str | None):
        return tool_mode(fields, tools), False
    given = fields.object("tool_choice")
    assert given is not None
    if given.text("type") != "function":
        raise given.wrong("type", "a function can be chosen", "unsupported_parameter")
    return known_tool(fields, tools, given.text("name")), True


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

    def take(self, piece: TextPiece) -> list[Chunk]:
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
