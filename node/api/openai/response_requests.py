"""What /v1/responses takes, read and checked. Pure: no model, no network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from ..engine.generation import ChatRequest, Grammar, TextRequest
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
)
from .requests import MAX_TOP_LOGPROBS, sampling, tool_mode

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
