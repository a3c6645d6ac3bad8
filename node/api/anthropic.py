"""Anthropic's /v1/messages, translated into a chat of OpenAI's and back."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from .engine.core import Core
from .engine.generation import ChatRequest, Finished, TextPiece, TextRequest
from .engine.preparing import PreparedChat, chat_prompt, prepare_chat
from .errors import MESSAGES_PATH, ApiError, error_object
from .fields import Fields
from .http.answers import AnswersResponse
from .http.bodies import read_asked
from .openai.requests import chat_request
from .openai.writers import ChatWriter, Head, named_event
from .parts import REQUEST_LIMITS, function_tool, parts_of, template_call

Message = dict[str, Any]

_THOUGHTS: Final = ("thinking", "redacted_thinking")
_AS_OPENAI: Final = {"stop": "stop_sequences", "response_format": "output_config.format.schema"}


def parse_messages(fields: Fields, *, counted: bool = False) -> ChatRequest:
    """
    Args:
        counted: only the tokens of the prompt are asked for, and no limit of the answer.

    Raises:
        ApiError: a field is missing, of a wrong type, out of range, or asks for what is not done here.
    """
    fields.refuse(container="there are no containers here", mcp_servers="there are no tools here but the client's")
    thinking = fields.object("thinking")
    if thinking is not None and thinking.text("type") != "disabled":
        raise thinking.wrong("type", "the model cannot be told to think", "unsupported_parameter")
    if fields.integer("max_tokens", 1, REQUEST_LIMITS.largest) is None and not counted:
        raise fields.wrong("max_tokens", "it is missing", "missing_field")
    messages = tuple(_messages(fields))
    if messages[-1]["role"] == "assistant":
        raise fields.wrong("messages", "the last one is the model's own: answers are not gone on with here")
    tools = tuple(_tool(tool) for tool in fields.objects("tools", REQUEST_LIMITS.max_tools))
    translated = fields.translated(
        _AS_OPENAI,
        ("model", "max_tokens", "temperature", "top_p", "stop", "stream", "x_petalnode"),
        top_k=fields.integer("top_k", 0, REQUEST_LIMITS.largest),
        response_format=_response_format(fields),
        **_tool_choice(fields),
    )
    return chat_request(translated, messages, tools)


def _response_format(fields: Fields) -> dict[str, Any] | None:
    config = fields.object("output_config")
    form = config.object("format") if config is not None else None
    if form is None:
        return None
    return {"type": form.one_of("type", ("json_schema",), ""), "json_schema": {"schema": form.needed("schema").data}}


def _messages(fields: Fields) -> Iterable[Message]:
    if fields.get("system") is not None:
        system = "\n\n".join(_texts(_blocks(fields, "system")))
        if system:
            yield {"role": "system", "content": system}
    given = fields.objects("messages", REQUEST_LIMITS.max_messages)
    if not given:
        raise fields.wrong("messages", "at least one message is needed")
    for message in given:
        role = message.one_of("role", ("user", "assistant"), "")
        blocks = _blocks(message, "content")
        if role == "assistant":
            yield _assistant(blocks)
        else:
            yield from _user(blocks)


def _blocks(fields: Fields, name: str) -> list[Fields]:
    value = fields.get(name)
    if isinstance(value, str):
        return [Fields({"type": "text", "text": value}, fields.path(f"{name}."))]
    if value is None:
        raise fields.wrong(name, "it is missing", "missing_field")
    return fields.objects(name, REQUEST_LIMITS.max_messages)


def _texts(blocks: Sequence[Fields]) -> Iterable[str]:
    for block in blocks:
        if block.text("type") != "text":
            raise block.wrong("type", "there is only text here", "unsupported_content")
        yield block.text("text")


def _assistant(blocks: Sequence[Fields]) -> Message:
    calls = [_call(block) for block in blocks if block.get("type") == "tool_use"]
    text = "".join(_texts([block for block in blocks if block.get("type") not in ("tool_use", *_THOUGHTS)]))
    return {"role": "assistant", "content": text or (None if calls else ""), **({"tool_calls": calls} if calls else {})}


def _call(block: Fields) -> dict[str, Any]:
    given = block.object("input")
    return template_call(block.text("name"), dict(given.data) if given is not None else {}, block.text("id"))


def _user(blocks: Sequence[Fields]) -> Iterable[Message]:
    """Results of tools are messages of their own, and stand before what the user says."""
    others = [block for block in blocks if block.get("type") != "tool_result"]
    for block in blocks:
        if block.get("type") == "tool_result":
            content = "" if block.get("content") is None else "".join(_texts(_blocks(block, "content")))
            yield {"role": "tool", "tool_call_id": block.text("tool_use_id"), "content": content}
    if others or not blocks:
        yield {"role": "user", "content": parts_of(others)}


def _tool(tool: Fields) -> dict[str, Any]:
    if tool.text("type", "custom") != "custom":
        raise tool.wrong("type", "there are no tools here but the client's", "unsupported_parameter")
    return function_tool(Fields({**tool.data, "parameters": tool.needed("input_schema").data}, tool.path("")))


def _tool_choice(fields: Fields) -> dict[str, Any]:
    choice = fields.object("tool_choice")
    if choice is None:
        return {}
    kind = choice.one_of("type", ("auto", "any", "tool", "none"), "")
    named = {"function": {"name": choice.text("name")}} if kind == "tool" else None
    return {
        "tool_choice": named or ("required" if kind == "any" else kind),
        "parallel_tool_calls": not choice.flag("disable_parallel_tool_use"),
    }


def _arguments(call: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call as an object; those that are none are in one as `arguments`."""
    found = json.loads(call["function"]["arguments"])
    return found if isinstance(found, dict) else {"arguments": found}


class MessageWriter(ChatWriter):
    """What Anthropic's specification requires, and of which nothing is known here, is null."""

    def __init__(self, request: TextRequest, chat: PreparedChat, request_id: str) -> None:
        name = f"msg_{secrets.token_hex(12)}"
        super().__init__(request, Head(chat.generation.model.name, "", "", name), str, chat)
        self._request_id = request_id
        self._prompt_tokens = len(chat.generation.prompts[0])
        self._blocks = 0
        self._text_open = False

    def opening(self) -> list[dict[str, Any]]:
        # What the servers hold of the prompt is known at the end only.
        message = self._message([], _stop(None, None), _usage(self._prompt_tokens, None, 0))
        return [{"type": "message_start", "message": message}]

    def take(self, piece: TextPiece) -> list[dict[str, Any]]:
        return [event for chunk in super().take(piece) for event in self._events(chunk)]

    def close(self, end: Finished) -> list[dict[str, Any]]:
        return [event for chunk in super().close(end) for event in self._events(chunk)]

    def failed(self, error: ApiError) -> dict[str, Any]:
        return error_object(error, MESSAGES_PATH, self._request_id)

    def encoded(self, chunk: dict[str, Any] | None) -> bytes:
        return b"" if chunk is None else named_event(chunk)

    def whole(self) -> dict[str, Any]:
        complete = super().whole()
        (choice,) = complete["choices"]
        text, calls = choice["message"]["content"], choice["message"].get("tool_calls", ())
        content = [{"type": "text", "text": text, "citations": None}] if text else []
        content += [{**_tool_use(call), "input": _arguments(call)} for call in calls]
        message = self._message(content, *self._ended(choice["finish_reason"]))
        return {**message, "x_petalnode": complete["x_petalnode"]}

    def _message(
        self, content: Sequence[dict[str, Any]], stop: dict[str, Any], usage: dict[str, Any]
    ) -> dict[str, Any]:
        return {
            "id": self.name,
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "content": content,
            **stop,
            "usage": {**usage, "cache_creation": None, "inference_geo": None, "service_tier": None},
        }

    def _ended(self, reason: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Why the message has ended, and its tokens."""
        (end,) = self._done
        if reason == "stop" and end.stopped_by is not None:
            reason = "stop_sequence"
        usage = _usage(end.prompt_tokens - end.cached, end.cached, end.tokens)
        return _stop(_REASONS.get(reason, reason), end.stopped_by), usage

    def _events(self, chunk: dict[str, Any]) -> Iterable[dict[str, Any]]:
        (choice,) = chunk["choices"]
        if text := choice["delta"].get("content"):
            if not self._text_open:
                self._text_open, self._blocks = True, 1
                yield _block("start", 0, content_block={"type": "text", "text": "", "citations": None})
            yield _block("delta", 0, delta={"type": "text_delta", "text": text})
            return
        if self._text_open:
            self._text_open = False
            yield _block("stop", 0)
        for index, call in enumerate(choice["delta"].get("tool_calls", ()), self._blocks):
            given = json.dumps(_arguments(call), ensure_ascii=False)
            yield _block("start", index, content_block={**_tool_use(call), "input": {}})
            yield _block("delta", index, delta={"type": "input_json_delta", "partial_json": given})
            yield _block("stop", index)
        if choice["finish_reason"] is not None:
            stop, usage = self._ended(choice["finish_reason"])
            yield {"type": "message_delta", "delta": stop, "usage": usage, "x_petalnode": chunk["x_petalnode"]}
            yield {"type": "message_stop"}


_REASONS: Final = {"tool_calls": "tool_use", "length": "max_tokens", "stop": "end_turn"}


def _block(kind: str, index: int, **fields: Any) -> dict[str, Any]:
    return {"type": f"content_block_{kind}", "index": index, **fields}


def _tool_use(call: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "tool_use",
        "id": call["id"].replace("call_", "toolu_", 1),
        "name": call["function"]["name"],
        "caller": {"type": "direct"},  # the model itself, not a program that it wrote
    }


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


def anthropic_routes(core: Core) -> list[BaseRoute]:
    """The routes of /v1/messages."""
    return [
        Route(MESSAGES_PATH, partial(_create, core), methods=["POST"]),
        Route(f"{MESSAGES_PATH}/count_tokens", partial(_count, core), methods=["POST"]),
    ]


async def _create(core: Core, request: Request) -> Response:
    asked = await read_asked(request, core, parse_messages)
    prepared = await prepare_chat(core, request.state.owner, asked)
    return AnswersResponse(core, prepared.generation, MessageWriter(asked.text, prepared, request.state.request_id))


async def _count(core: Core, request: Request) -> Response:
    """How many tokens the prompt of such a request has."""
    asked = await read_asked(request, core, partial(parse_messages, counted=True))
    prompt = await chat_prompt(core, core.model(asked.text.model), asked)
    return JSONResponse({"input_tokens": len(prompt)})
